"""The free ranges of an address space."""

from __future__ import annotations

from bisect import bisect_left


class Gaps:
    """The free ranges of an address space: first fit, by address. Not thread-safe."""

    def __init__(self, nbytes: int = 0) -> None:
        self._starts = [0] if nbytes else []
        self._ends = [nbytes] if nbytes else []
        self.free = nbytes
        """Bytes that are free."""

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` (more than 0) and return their start; None if no range is long enough."""
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                self._starts[at] += nbytes
                self.free -= nbytes
                if self._starts[at] == end:
                    del self._starts[at], self._ends[at]
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Free `nbytes` from `start`, taken before or new. Raises `ValueError` if some are free
        already."""
        at, end = bisect_left(self._starts, start), start + nbytes
        if (at and self._ends[at - 1] > start) or (
            at < len(self._starts) and self._starts[at] < end
        ):
            raise ValueError(f"bytes {start}..{end} are free already")
        self.free += nbytes
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
