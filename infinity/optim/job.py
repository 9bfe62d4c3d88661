"""The update of one unit on its way through the pipeline.

[Note: an update that may be rolled back]
A SPECULATIVE job starts before its step and guesses that this step clips nothing. It reads the
states and writes the new ones into the other extents of copy-on-write blocks, and touches nothing
else. Until the step is fixed every reader sees the old content, and after `rollback` it always
will. So a wrong guess costs I/O and never a number (invariant I8). The same goes for units in host
memory that have shadow copies. It holds chunk by chunk: a block on NVMe may be in host memory in
part, and that part is rewritten in place. A chunk with any of that is not updated before its job is
final.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from infinity.observe import Meter
from infinity.optim.kernels import Segment
from infinity.placement.spec import Kind
from infinity.sharding.unit import Unit


@dataclass(frozen=True)
class UnitUpdate:
    """The update of one unit in one step; elements outside all segments keep their values."""

    unit: Unit
    segments: tuple[Segment, ...]


class JobState(enum.Enum):
    """What is known of a job's update.

    AWAITED: nothing; its gradients are still to come, and its old states are read as far as there
    is room. SPECULATIVE: what it will be if the guess is right; nobody sees what it writes.
    DELAYED: all, but nobody shall see yet what it writes: the parameters are in use as they are.
    CONFIRMED: all; what it writes is the unit's content once all is written. ENDED: that is so, or
    never will be.
    """

    AWAITED = enum.auto()
    SPECULATIVE = enum.auto()
    DELAYED = enum.auto()
    CONFIRMED = enum.auto()
    ENDED = enum.auto()


class Job:
    """The update of `unit` on its way through the pipeline. `JobQueue` alone changes it, under its
    lock. One class, because that lock protects all of it.

    `place` is the unit's position in the next forward, `number` that of the step that it is for;
    `meter` counts what the job moves, in bytes.
    """

    def __init__(self, unit: Unit, place: int, number: int) -> None:
        self.unit = unit
        self.place = place
        self.number = number
        self.left = unit.store.steps_left(number)
        """How many steps lie between this one and the one that is committed next."""
        self.state = JobState.AWAITED
        self.update: UnitUpdate | None = None
        """None while AWAITED."""
        starts = unit.states.update_chunks()
        staged = bisect_left(starts, unit.states.staged_from)
        self.in_place_until = unit.states.rewritten_in_place_until
        """The element from which on an update may be rolled back."""
        beside = bisect_left(starts, self.in_place_until, lo=staged)
        self.in_memory = deque(starts[:staged])
        """First elements of the chunks that need neither staging nor I/O, and were not checked
        out."""
        self.chunks = deque((*starts[beside:], *starts[staged:beside]))
        """First elements of the other chunks that were not checked out, those first that may be
        SPECULATIVE."""
        self.in_flight = 0
        """Chunks that are checked out."""
        self.meter = Meter()
        self.hurried = False
        """Whether a thread waits for it that does not bring the unit's place: it runs without
        one."""
        self.ran_ahead = False
        """Whether a part of it ran without a place, because a thread waited for it."""
        self.turn = 0
        """Among jobs of one place, which the queue got first."""
        self.placed = True
        """Whether all that went through and was updated is where the next forward looks for it."""

    @property
    def is_final(self) -> bool:
        """Whether its update will not be rolled back."""
        return self.state in (JobState.CONFIRMED, JobState.DELAYED)

    @property
    def is_rolled_back(self) -> bool:
        """Whether it ended before its update was final; something of it may be in flight."""
        return self.state is JobState.ENDED

    def may_update(self, begin: int) -> bool:
        """Whether the chunk from `begin` on may be updated now, as far as is known what the update
        is."""
        may_begin = self.is_final or (
            self.state is JobState.SPECULATIVE and begin >= self.in_place_until
        )
        return may_begin and (
            not self.unit.store.is_durable
            or (self.unit.states.is_free(self.left) and not self.is_pinned)
        )

    @property
    def is_pinned(self) -> bool:
        """Whether it would overwrite what a snapshot has yet to read."""
        return self.unit.states.is_pinned(self.left)

    @property
    def writes_through(self) -> bool:
        """Whether it writes what is cached, too, because its step is committed."""
        return self.unit.store.is_durable and self.left == 0

    @property
    def read_again(self) -> int:
        """NVMe bytes of the parameter that the next forward has to read, because the update ran
        ahead of its place."""
        again = self.ran_ahead and not self.placed
        return self.unit.blocks[Kind.PARAM].moved_bytes if again else 0

    @property
    def written(self) -> bool:
        """Whether every chunk has been through."""
        return not self.chunks and not self.in_memory and self.in_flight == 0

    def drop(self) -> None:
        """Nothing more is checked out."""
        self.chunks.clear()
        self.in_memory.clear()


def reads(unit: Unit, kind: Kind) -> bool:
    """Whether the old content of `kind` goes into the update: a master that was never written is
    the parameter, widened."""
    if unit.states.is_rounded and kind in (Kind.PARAM, Kind.MASTER):
        return unit.blocks[Kind.MASTER].written is (kind is Kind.MASTER)
    return True
