"""Placement arithmetic of an arena: runs of consecutive slots, and which of them to give up for a
new one. Imports no torch."""

from __future__ import annotations

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
        self.runs: dict[Owner, SlotRun] = {}

    @property
    def used(self) -> int:
        """Slots in use."""
        return sum(run.length for run in self.runs.values())

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
        runs = sorted(self.runs.items(), key=lambda item: item[1].start)
        edges = {0, self.count - length}
        for _, run in runs:
            edges |= {run.start, run.end, run.start - length, run.end - length}
        best: tuple[float, int, int] | None = None
        answer: SlotWindow[Owner] | None = None
        for start in sorted(edge for edge in edges if 0 <= edge <= self.count - length):
            evicted = [
                owner for owner, run in runs if run.start < start + length and start < run.end
            ]
            uses = [next_use(owner) for owner in evicted]
            if any(use is None or use <= beyond for use in uses):
                continue
            soonest = min((use for use in uses if use is not None), default=math.inf)
            lost = sum(self.runs[owner].length for owner in evicted)
            rank = (soonest if evicted else math.inf, -lost, -start)
            if best is None or rank > best:
                best, answer = rank, SlotWindow(start, tuple(evicted))
        return answer

    def take(self, owner: Owner, start: int, length: int) -> SlotRun:
        """Give `owner` the free run of `length` slots from `start`."""
        run = SlotRun(start, length)
        if owner in self.runs or start < 0 or run.end > self.count:
            raise ValueError(
                f"slots {start}..{run.end} of {self.count} cannot be given to {owner!r}"
            )
        if any(other.start < run.end and start < other.end for other in self.runs.values()):
            raise ValueError(f"slots {start}..{run.end} are not free")
        self.runs[owner] = run
        return run

    def give_back(self, owner: Owner) -> None:
        """Free the run of `owner`."""
        del self.runs[owner]
