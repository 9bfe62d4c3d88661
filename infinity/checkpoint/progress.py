"""Reports the progress of a save or a load to the caller and to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from infinity.quantities import format_bytes

log = logging.getLogger("infinity")

Told = Callable[[int, int], object]
"""A callback: `told(done, total)`, in bytes."""
EVERY = 10.0  # seconds between two lines of the log


class CheckpointProgress:
    """Counts the bytes of one save or load on this rank. `doing` and `done` are its names in the
    log. They are "" on ranks that do not log."""

    def __init__(self, doing: str, done: str, told: Told | None = None) -> None:
        self._doing, self._done, self._told = doing, done, told
        self._begin = self._said = time.monotonic()
        self._moved = self._total = 0

    def expect(self, nbytes: int) -> None:
        """Set the total to `nbytes`."""
        self._total = nbytes
        self._tell()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self._moved += nbytes
        self._tell()
        now = time.monotonic()
        if self._doing and now - self._said >= EVERY:
            self._said = now
            log.info("%s: %s of %s", self._doing, format_bytes(self._moved), self._of())

    def end(self) -> None:
        """Log the total and the rate."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        if self._done:
            rate = self._moved / seconds / 1e9
            log.info("%s: %s in %.1f s, %.2f GB/s", self._done, self._of(), seconds, rate)

    def _of(self) -> str:
        return format_bytes(self._total)

    def _tell(self) -> None:
        if self._told is not None:
            self._told(self._moved, self._total)
