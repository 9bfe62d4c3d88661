"""Placement arithmetic of an arena: runs of consecutive slots, and the runs to evict for a new run.
Imports no torch.

[Note: runs of one length]
Mostly all units have one length. Then each run is a window, and the best window belongs to the
owner whose next use is farthest away. `_Farthest` keeps the owners in this order, so a choice among
a thousand runs takes as long as among ten. It needs a `Clock`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
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


class Clock(NamedTuple):
    """A time in a known future. While `version` stays the same, each next use is one use nearer
    when `time` is one more. Only an owner that was used in between has a new next use. No two
    owners have their next use at the same time."""

    version: int
    time: int


class _Farthest(Generic[Owner]):
    """Owners by their next use, the farthest first. See [Note: runs of one length]."""

    def __init__(self) -> None:
        self._clock = Clock(-1, 0)
        self._when: dict[Owner, float] = {}  # the time of the next use
        self._at: dict[float, Owner] = {}  # the inverse of `_when`, without infinite times
        # Owners with an unknown time: new, used since, or not to be evicted.
        self._unknown: dict[Owner, None] = {}
        # (-time, start, number, owner): among equal times the lowest start, as in `SlotMap.place`.
        # An entry counts while `_when` says the same.
        self._heap: list[tuple[float, int, int, Owner]] = []
        self._numbers = itertools.count()

    def add(self, owner: Owner) -> None:
        """`owner` got a run."""
        self._unknown[owner] = None

    def remove(self, owner: Owner) -> None:
        """`owner` lost its run."""
        self._unknown.pop(owner, None)
        self._when.pop(owner, None)

    def first(
        self,
        clock: Clock,
        runs: dict[Owner, SlotRun],
        next_use: Callable[[Owner], float | None],
        beyond: float,
    ) -> Owner | None:
        """The owner to evict; see `SlotMap.place`. `runs` has the runs of all owners."""
        self._advance(clock, runs)
        for owner in list(self._unknown):
            distance = next_use(owner)
            if distance is not None:
                self._put(owner, clock.time + distance, runs[owner].start)
        while self._heap:
            time, start, _, owner = self._heap[0]
            if self._when.get(owner) == -time and runs[owner].start == start:
                distance = next_use(owner)
                if distance is not None:
                    return owner if distance > beyond else None
                self._unknown[owner] = None
                del self._when[owner]
            heapq.heappop(self._heap)
        return None

    def _advance(self, clock: Clock, owners: Iterable[Owner]) -> None:
        """Advance to `clock`. The owners that were used since get an unknown time."""
        if clock.version != self._clock.version:
            self._unknown = dict.fromkeys(owners)
            self._when.clear()
            self._at.clear()
            self._heap.clear()
        else:
            for time in range(self._clock.time, clock.time):
                owner = self._at.pop(time, None)
                if owner is not None and self._when.get(owner) == time:
                    del self._when[owner]
                    self._unknown[owner] = None
        self._clock = clock
        if len(self._heap) > 4 * len(self._when) + 64:  # mostly entries that do not count
            self._heap = [entry for entry in self._heap if self._when.get(entry[3]) == -entry[0]]
            heapq.heapify(self._heap)

    def _put(self, owner: Owner, time: float, start: int) -> None:
        del self._unknown[owner]
        self._when[owner] = time
        if time < math.inf:
            self._at[time] = owner
        heapq.heappush(self._heap, (-time, start, next(self._numbers), owner))


class SlotMap(Generic[Owner]):
    """The runs of an arena of `count` equal slots, and their owners. Not thread-safe: its owner
    locks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        """Slots in use."""
        self.runs: dict[Owner, SlotRun] = {}
        self._starts: list[int] = []  # of the runs, sorted
        self._owners: list[Owner] = []  # in the same order
        self._gaps = 0  # how many runs do not begin where the one before them ends
        self._lengths: Counter[int] = Counter()
        self._farthest: _Farthest[Owner] = _Farthest()

    def place(
        self,
        length: int,
        next_use: Callable[[Owner], float | None],
        beyond: float = -math.inf,
        clock: Clock | None = None,
    ) -> SlotWindow[Owner] | None:
        """The best window of `length` slots; None if there is none. Changes nothing.

        `next_use(owner)` is the distance of that owner's next use, or None if its run may not be
        evicted. Only owners whose next use is farther away than `beyond` may be evicted. Belady's
        rule for runs: take the window whose soonest next use is farthest away (free slots are never
        used), then the window that evicts least, then the lowest.

        Example: slots AAB.., next uses A=9, B=2, length 3. [2, 5) evicts B (soonest 2). [0, 3)
        evicts A and B (soonest 2). So with beyond=1 the answer is start 2, evicted (B,).

        `clock` is the time of this call. It changes no answer, and makes the call faster if all
        runs have one length.
        """
        free = self._first_free(length)
        if free is not None:
            return SlotWindow(free, ())
        if clock is not None and not self._gaps and self._lengths.keys() == {length}:
            owner = self._farthest.first(clock, self.runs, next_use, beyond)
            return None if owner is None else SlotWindow(self.runs[owner].start, (owner,))
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
        if not self._gaps:
            end = self.runs[self._owners[-1]].end if self._owners else 0
            return end if self.count - end >= length else None
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
        self._gaps -= self._gap_before(at)
        self.runs[owner] = run
        self._starts.insert(at, start)
        self._owners.insert(at, owner)
        self._gaps += self._gap_before(at) + self._gap_before(at + 1)
        self._lengths[length] += 1
        self._farthest.add(owner)
        self.used += length
        return run

    def give_back(self, owner: Owner) -> None:
        """Free the run of `owner`."""
        run = self.runs[owner]
        at = bisect.bisect_left(self._starts, run.start)
        self._gaps -= self._gap_before(at) + self._gap_before(at + 1)
        del self._starts[at], self._owners[at], self.runs[owner]
        self._gaps += self._gap_before(at)
        self._lengths[run.length] -= 1
        if not self._lengths[run.length]:
            del self._lengths[run.length]
        self._farthest.remove(owner)
        self.used -= run.length

    def owner_at(self, slot: int) -> Owner | None:
        """The owner of the run that contains `slot`; None if it is free."""
        at = bisect.bisect(self._starts, slot) - 1
        return self._owners[at] if at >= 0 and slot < self.runs[self._owners[at]].end else None

    def _gap_before(self, at: int) -> bool:
        """Whether run number `at` exists, and free slots lie right before it."""
        if at >= len(self._starts):
            return False
        return self._starts[at] != (self.runs[self._owners[at - 1]].end if at else 0)
