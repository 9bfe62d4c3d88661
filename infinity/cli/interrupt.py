"""Ctrl-C and its like: as a request, where a run ends after the current step, and as an exception that clean-up survives."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Between enter and exit, notes the first SIGINT or SIGTERM in `signal`; the second raises `KeyboardInterrupt`.

    Main thread only; the previous handlers come back on exit.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP raises `KeyboardInterrupt` with its number; later ones are ignored.

    So a second Ctrl-C cannot cut off what the first one made the program clean up. Main thread only.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def raise_once(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    previous = {number: signal.signal(number, raise_once) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
