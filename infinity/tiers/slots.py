"""Placement arithmetic of an arena: runs of consecutive slots, and which of them to give up for a
new one. Imports no torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class SlotRun(NamedTuple):
    """`length` consecutive slots from `start` on."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class SlotWindow(NamedTuple, Generic[Owner]):
    """Where a new run goes, and the owners whose runs must go first."""

    start: int
    evicted: tuple[Owner, ...]


class SlotMap(Generic[Owner]):
    """Who holds which run of an arena of `count` equal slots. Not thread-safe: its owner locks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        """Slots in use."""
        self.runs: dict[Owner, SlotRun] = {}
        self._starts: list[int] = []  # of the runs, sorted
        self._owners: list[Owner] = []  # in the same order

    def place(
        self, length: int, next_use: Callable[[Owner], float | None], beyond: float = -math.inf
    ) -> SlotWindow[Owner] | None:
        """The best window of `length` slots, or None when there is none; nothing is changed.

        `next_use(owner)` is how far away that owner's next use is, or None when its run may not be
        evicted; only owners whose next use is farther away than `beyond` may be. Belady's rule for
        runs: take the window whose soonest next use is farthest away (free slots are never used),
        then the one that evicts least, then the lowest.

        Example: slots AAB.., next uses A=9, B=2, length 3: [2, 5) would evict B (soonest 2) and [0,
        3) A and B (soonest 2), so with beyond=1 the answer is start 2, evicted (B,).
        """
        free = self._first_free(length)
        if free is not None:
            return SlotWindow(free, ())
        runs = [self.runs[owner] for owner in self._owners]
        uses = [next_use(owner) for owner in self._owners]
        edges = {0, self.count - length}
        for run in runs:
            edges |= {run.start, run.end, run.start - length, run.end - length}
        best: tuple[float, int, int] | None = None
        answer: SlotWindow[Owner] | None = None
        first = end = 0  # of the runs that lie in the window
        for start in sorted(edge for edge in edges if 0 <= edge <= self.count - length):
            while runs[first].end <= start:
                first += 1
            while end < len(runs) and runs[end].start < start + length:
                end += 1
            soonest = math.inf
            for use in uses[first:end]:
                if use is None or use <= beyond:
                    break
                soonest = min(soonest, use)
            else:
                lost = sum(run.length for run in runs[first:end])
                rank = (soonest, -lost, -start)
                if best is None or rank > best:
                    best, answer = rank, SlotWindow(start, tuple(self._owners[first:end]))
        return answer

    def _first_free(self, length: int) -> int | None:
        """The lowest start of `length` free slots."""
        end = 0
        for start, owner in zip(self._starts, self._owners, strict=True):
            if start - end >= length:
                return end
            end = self.runs[owner].end
        return end if self.count - end >= length else None

    def take(self, owner: Owner, start: int, length: int) -> SlotRun:
        """Give `owner` the free run of `length` slots from `start`."""
        run = SlotRun(start, length)
        if owner in self.runs or start < 0 or run.end > self.count:
            raise ValueError(
                f"slots {start}..{run.end} of {self.count} cannot be given to {owner!r}"
            )
        at = bisect.bisect(self._starts, start)
        is_free = at == 0 or self.runs[self._owners[at - 1]].end <= start
        if not is_free or (at < len(self._starts) and self._starts[at] < run.end):
            raise ValueError(f"slots {start}..{run.end} are not free")
        self.runs[owner] = run
        self._starts.insert(at, start)
        self._owners.insert(at, owner)
        self.used += length
        return run

    def give_back(self, owner: Owner) -> None:
        """Free the run of `owner`."""
        run = self.runs.pop(owner)
        at = bisect.bisect_left(self._starts, run.start)
        del self._starts[at], self._owners[at]
        self.used -= run.length
