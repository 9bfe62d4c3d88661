"""An end for what a test runs on its main thread and may never end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Hang(BaseException):
    """It does not end."""


@contextmanager
def ending(seconds: int) -> Iterator[None]:
    """Raise `Hang` inside, on the main thread, when that has lasted for so many seconds."""

    def give_up(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
