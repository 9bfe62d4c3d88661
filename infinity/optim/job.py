"""The update of one unit on its way through the pipeline.

[Note: an update that may be rolled back]
A SPECULATIVE job starts before its step and guesses that this step clips nothing. It reads the
states and writes the new ones into the other extents of copy-on-write blocks, and touches nothing
else. Every reader sees the old content until the step is fixed, and after `rollback` for ever. So a
wrong guess costs I/O and never a number (invariant I8). Units in host memory that have shadow
copies behave alike. It holds chunk by chunk: a part of a block on NVMe may be in host memory, and
that part is rewritten in place. A chunk with any of it is not updated before its job is final.
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
    """How much of a job's update is known.

    AWAITED: nothing. Its gradients are still to come, and its old states are read if there is room.
    SPECULATIVE: a guess. No reader sees its result. DELAYED: all. Readers see its result later,
    because the parameters are in use. CONFIRMED: all. Its result is the unit's content when all is
    written. ENDED: its result is the content, or never will be.
    """

    AWAITED = enum.auto()
    SPECULATIVE = enum.auto()
    DELAYED = enum.auto()
    CONFIRMED = enum.auto()
    ENDED = enum.auto()


class Job:
    """The update of `unit` on its way through the pipeline. `JobTable` and `ChunkQueue` change it,
    under their lock. The thread of the pipeline clears `placed`. One class, because that lock
    protects all of the rest.

    `place` is the unit's position in the next forward, `number` the number of its step. `meter`
    counts the bytes that the job moves.
    """

    def __init__(self, unit: Unit, place: int, number: int) -> None:
        self.unit = unit
        self.place = place
        self.number = number
        self.left = unit.store.steps_left(number)
        """The number of steps from this step to the next committed step."""
        self.state = JobState.AWAITED
        self.update: UnitUpdate | None = None
        """None while AWAITED."""
        starts = unit.update_blocks.chunks()
        staged = bisect_left(starts, unit.update_blocks.staged_from)
        self.in_place_until = unit.update_blocks.rewritten_in_place_until
        """The element from which on an update may be rolled back."""
        beside = bisect_left(starts, self.in_place_until, lo=staged)
        self.in_memory = deque(starts[:staged])
        """First elements of the chunks that need neither staging nor I/O and are not checked
        out."""
        self.chunks = deque((*starts[beside:], *starts[staged:beside]))
        """First elements of the other chunks that are not checked out, chunks that may be
        SPECULATIVE first."""
        self.in_flight = 0
        """Chunks that are checked out."""
        self.meter = Meter()
        self.hurried = False
        """Whether it runs without a place, because a thread waits for it that brings no place."""
        self.ran_ahead = False
        """Whether a part of it ran without a place, because a thread waited for it."""
        self.turn = 0
        """The order of jobs with one place: lower ones came to the queue first."""
        self.placed = True
        """Whether all chunks that were updated so far are where the next forward looks for them."""

    @property
    def is_final(self) -> bool:
        """Whether its update is never rolled back."""
        return self.state in (JobState.CONFIRMED, JobState.DELAYED)

    @property
    def is_rolled_back(self) -> bool:
        """Whether it ended before its update was final. Chunks of it may be in flight."""
        return self.state is JobState.ENDED

    def may_update(self, begin: int) -> bool:
        """Whether the chunk from `begin` on may be updated now."""
        may_begin = self.is_final or (
            self.state is JobState.SPECULATIVE and begin >= self.in_place_until
        )
        return may_begin and (
            not self.unit.store.is_durable
            or (self.unit.update_blocks.is_free(self.left) and not self.is_pinned)
        )

    @property
    def is_pinned(self) -> bool:
        """Whether it would overwrite states that a snapshot has yet to read."""
        return self.unit.update_blocks.is_pinned(self.left)

    @property
    def writes_through(self) -> bool:
        """Whether it writes cached bytes, too, because its step is committed."""
        return self.unit.store.is_durable and self.left == 0

    @property
    def read_again(self) -> int:
        """NVMe bytes of the parameter that the next forward has to read, because the update ran
        ahead of its place."""
        again = self.ran_ahead and not self.placed
        return self.unit.blocks[Kind.PARAM].moved_bytes if again else 0

    @property
    def written(self) -> bool:
        """Whether every chunk has left the pipeline."""
        return not self.chunks and not self.in_memory and self.in_flight == 0

    def drop(self) -> None:
        """Take no more chunks of it."""
        self.chunks.clear()
        self.in_memory.clear()


def reads(unit: Unit, kind: Kind) -> bool:
    """Whether the update reads the old content of `kind`. A master that was never written is the
    widened parameter."""
    if unit.update_blocks.is_rounded and kind in (Kind.PARAM, Kind.MASTER):
        return unit.blocks[Kind.MASTER].written is (kind is Kind.MASTER)
    return True
