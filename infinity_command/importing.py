"""Says on stderr that torch is imported, which takes seconds, before it is. Imports nothing that
takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LINE = "infinity: importing torch and transformers\n"
PATIENCE_SECONDS = 0.8
"""Where stderr is no terminal, shorter imports are not worth a line."""


@contextmanager
def announced() -> Iterator[None]:
    """Write `LINE` to stderr: at once if it is a terminal, else if the block takes longer than
    `PATIENCE_SECONDS`."""
    if sys.stderr.isatty():
        _write()
        yield
        return
    timer = threading.Timer(PATIENCE_SECONDS, _write)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write() -> None:
    sys.stderr.write(LINE)
    sys.stderr.flush()
