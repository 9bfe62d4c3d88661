"""The jobs that have not ended, and which of them has the next chunk.

[Note: which chunk is next]
The next chunk always belongs to the unit that the next forward needs first, even if another unit is
half done. In backward that is the unit whose gradients came last, because it is the first in
forward. The updates that remain at the step are then spread evenly over the units: the forward
meets a little of them at each unit instead of a whole update at the first units. With I/O as long
as compute, take a step whose forward takes f of it: unit p (0 first, 1 last) is ready at (1-p)(1-f)
and needed at 1-f+pf. The window [0, q] of units has q of time for q of I/O, so this order, earliest
need first, just fits. A chunk in memory takes part in this order, and fills waits for I/O.

[Note: an update waits for its place]
Once a step is fixed, a unit's update runs when the unit has its place on the compute device: when
it is used next but few. Its result is put there (see the store); the result of an update that ran
sooner would have to be read back. As many units as have a place are enough ahead of the forward to
hide behind it. A thread that waits for an update without bringing that place must hurry it, or both
would wait for ever: `drain` hurries all updates, `await_update` that of one unit. The result of a
SPECULATIVE job is put into the copy that the backward has just left.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator

from infinity.optim.job import Job, JobState, UnitUpdate, reads
from infinity.placement.spec import Kind
from infinity.tiers.store import Store


class JobsByPlace:
    """Jobs, that of the unit which the next forward needs first ahead of the others. Not
    thread-safe."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._known: set[Job] = set()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._known

    def add(self, job: Job) -> None:
        """Add `job`, if it is not there."""
        if job not in self._known:
            self._known.add(job)
            insort(self._jobs, job, key=_order)

    def discard(self, job: Job) -> None:
        """Remove `job`, if it is there."""
        if job in self._known:
            self._known.remove(job)
            del self._jobs[bisect_left(self._jobs, _order(job), key=_order)]

    def clear(self) -> None:
        """Remove all."""
        self._jobs.clear()
        self._known.clear()


def _order(job: Job) -> tuple[int, int]:
    return job.place, job.turn


class QueueState(enum.IntEnum):
    """The life of a `JobTable`, in this order.

    OPEN: it takes jobs. CLOSED: jobs that are final continue. FAILED: the pipeline does nothing
    more. ENDED: the pipeline's thread has ended, and nothing changes any more.
    """

    OPEN = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()
    ENDED = enum.auto()


class JobTable:
    """The jobs that are not ENDED, under the lock `changed`: the caller of a method has the lock.
    It neither waits nor calls back, except `block_until`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.changed = threading.Condition()
        """The lock; notified when anything here changes."""
        self.jobs = JobsByPlace()
        """All of them."""
        self.state = QueueState.OPEN
        self.hurries = 0
        """How many threads wait for all that is CONFIRMED."""
        # Those with a chunk to read, except those that lacked a place when they were looked at;
        # these, by the number of their unit; those with a chunk that is in memory; and the AWAITED
        # ones of the first.
        self._reading, self._in_memory = JobsByPlace(), JobsByPlace()
        self._awaited = JobsByPlace()
        self._placeless: defaultdict[int, list[Job]] = defaultdict(list)
        self._turns = 0

    def block_until(self, over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until `over`, or until the pipeline's thread has ended; False after `timeout`
        seconds."""
        return self.changed.wait_for(lambda: self.state is QueueState.ENDED or over(), timeout)

    # How far a job is

    def set(self, job: Job, update: UnitUpdate, state: JobState) -> None:
        """Add `job`, if it is new; it makes `update` and is in `state` from now on."""
        self.add(job)
        job.update = update
        job.state = state
        self._awaited.discard(job)

    def add(self, job: Job) -> None:
        """Add `job`, if it is new and the pipeline has not failed."""
        if job not in self.jobs and self.state < QueueState.FAILED:
            self._turns += 1
            job.turn = self._turns
            self.jobs.add(job)
            self.enlist(job)
        self.changed.notify_all()

    def give_up(self, job: Job) -> None:
        """AWAITED or SPECULATIVE -> ENDED."""
        job.state = JobState.ENDED
        job.drop()
        self._remove(job)

    def end_if_written(self, job: Job) -> None:
        """CONFIRMED -> ENDED after the last chunk: the unit flips to its new content."""
        fixed = job in self.jobs and job.state is JobState.CONFIRMED
        if fixed and job.written and self.state < QueueState.FAILED:
            job.state = JobState.ENDED
            self._remove(job)
            self._store.resident.end_update(
                [block for kind, block in job.unit.blocks.items() if kind is not Kind.GRAD],
                job.left,
            )
            self.changed.notify_all()

    def _remove(self, job: Job) -> None:
        for jobs in (self.jobs, self._reading, self._awaited, self._in_memory):
            jobs.discard(job)

    # Which chunk is next

    def enlist(self, job: Job) -> None:
        """`job` may have chunks to take."""
        if job.chunks:
            self._reading.add(job)
            if job.state is JobState.AWAITED:
                self._awaited.add(job)
        if job.in_memory:
            self._in_memory.add(job)

    def unlist(self) -> None:
        """No job has chunks to take."""
        self._reading.clear()
        self._awaited.clear()
        self._in_memory.clear()
        self._placeless.clear()

    def look_again(self, unit: int | None = None) -> None:
        """Jobs that lacked a place for `unit`, or for any unit, may have one or need none now."""
        waiting = list(self._placeless) if unit is None else [unit]
        for job in (job for each in waiting for job in self._placeless.pop(each, ())):
            if job in self.jobs:
                self.enlist(job)

    def begin_read(self, job: Job) -> int:
        """Take the next chunk of `job` that is read; returns its first element."""
        job.in_flight += 1
        job.ran_ahead |= job.state is JobState.CONFIRMED and self._lacks_place(job)
        begin = job.chunks.popleft()
        if not job.chunks:
            self._reading.discard(job)
            self._awaited.discard(job)
        return begin

    def begin_in_memory(self, job: Job) -> int:
        """Take the next chunk of `job` that is in memory; returns its first element."""
        job.in_flight += 1
        begin = job.in_memory.popleft()
        if not job.in_memory:
            self._in_memory.discard(job)
        return begin

    def has_next(self, may_hold: bool) -> bool:
        """Whether there is a chunk to take."""
        return self.next(may_hold, True) is not None or self.next_in_memory() is not None

    def next(self, may_hold: bool, ready: bool) -> Job | None:
        """The job whose chunk is read next: without `may_hold` none that is AWAITED, and without
        `ready` only one that is."""
        if not ready:
            return next(
                (job for job in self._awaited if self._may_take(job, may_hold, False)), None
            )
        found, placeless = None, []
        for job in self._reading:
            if job.state is not JobState.AWAITED and not self._has_place(job):
                placeless.append(job)
            elif self._may_take(job, may_hold, True):
                found = job
                break
        for job in placeless:
            self._reading.discard(job)
            self._placeless[job.unit.index].append(job)
        if self._placeless and self._is_waited_for():
            self.look_again()
            return next((j for j in self._reading if self._may_take(j, may_hold, True)), None)
        return found

    def next_in_memory(self) -> Job | None:
        """The job whose chunk in memory is updated next."""
        return next((job for job in self._in_memory if job.may_update(job.in_memory[0])), None)

    def _may_take(self, job: Job, may_hold: bool, ready: bool) -> bool:
        """Whether a chunk of `job` may be read, if its unit has a place or needs none."""
        if job.state is JobState.AWAITED:
            return may_hold and self._is_at_hand(job)
        return ready and job.may_update(job.chunks[0])

    def _is_waited_for(self) -> bool:
        """Whether an update waits for a commit, which waits for updates without a place."""
        return self._store.is_durable and any(
            not job.unit.states.is_free(job.left) for job in self.jobs
        )

    def _is_at_hand(self, job: Job) -> bool:
        """Whether all that the update reads exists, and its part of the parameter is not on NVMe:
        in backward it is on the compute device."""
        block = job.unit.blocks[Kind.PARAM]
        if self._store.resident.is_updating(block):
            return False
        return (
            not block.moved_bytes
            or not reads(job.unit, Kind.PARAM)
            or self._store.resident.is_ready(block)
        )

    def _has_place(self, job: Job) -> bool:
        """Whether the result of `job` can be put where it is used, or need not wait for that."""
        hurried = job.hurried or self.hurries or self.state is not QueueState.OPEN
        waits = job.state is JobState.CONFIRMED and not hurried
        return not waits or not self._lacks_place(job)

    def _lacks_place(self, job: Job) -> bool:
        """Whether the result of `job` would have to be read back."""
        block = job.unit.blocks[Kind.PARAM]
        return bool(block.moved_bytes) and not self._store.resident.has_copy(block)
