"""The jobs of the updater under one lock, and which chunk the pipeline takes next.

[Note: which chunk is next]
The next chunk always belongs to the unit that the next forward needs first, even if another unit is
half done. In backward that is the unit whose gradients came last, because it is the first in
forward. What is left over when the step comes is then spread evenly over the units: the forward
meets a little of it at each unit instead of a whole update at the first ones. With I/O as long as
compute, take a step whose forward takes f of it: unit p (0 first, 1 last) is ready at (1-p)(1-f)
and needed at 1-f+pf. The window [0, q] of units has q of time for q of I/O, so this order, earliest
need first, just fits. A chunk that lies in memory as a whole takes part in this order, and fills
the time in which I/O is waited for.

[Note: an update waits for its place]
Once a step is fixed, a unit's update runs when the unit has its place on the compute device: when
it is used next but few. What it makes is put there (see the store), where an update that ran sooner
would have it read back. As many units as have a place are enough ahead of the forward to hide
behind it. A thread that waits for an update without bringing that place must hurry it, or both
would wait for ever: `drain` hurries all updates, `await_update` that of one unit. What a
SPECULATIVE job makes is put into the copy that the backward has just left.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infinity.optim.job import Job, JobState, UnitUpdate, reads
from infinity.placement.spec import Kind
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
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
    """The life of a `JobQueue`, in this order.

    OPEN: it takes jobs. CLOSED: it finishes what is final. FAILED: the pipeline does nothing more.
    ENDED: its thread has ended, and nothing changes any more.
    """

    OPEN = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()
    ENDED = enum.auto()


class JobQueue:
    """The jobs that are not ENDED, under one lock. The updater posts and waits for them; the
    pipeline's thread takes their chunks. Any thread may call it. No method waits for a thread that
    has ended. It is made before the store is open, which pokes it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.changed = threading.Condition()
        """The lock; notified when anything here changes."""
        self.jobs = JobsByPlace()
        """All of them."""
        # Those with a chunk to read, but for those that waited for a place when they were looked
        # at; those by the number of their unit; those with a chunk that is not read; and of the
        # first ones those that are AWAITED.
        self._reading, self._in_memory = JobsByPlace(), JobsByPlace()
        self._awaited = JobsByPlace()
        self._placeless: defaultdict[int, list[Job]] = defaultdict(list)
        self._turns = 0
        self._state = QueueState.OPEN
        self._hurries = 0  # how many wait for all that is CONFIRMED

    # For the updater: how far a job is

    def expect(self, job: Job) -> None:
        """Start reading for `job`, AWAITED. Its gradients need no staging, or else what is read of
        them is not final."""
        with self.changed:
            if self._state is QueueState.OPEN:
                self._add(job)
            else:
                self._give_up(job)

    def speculate(self, job: Job, update: UnitUpdate) -> None:
        """AWAITED -> SPECULATIVE."""
        with self.changed:
            if self._state is QueueState.OPEN:
                self._set(job, update, JobState.SPECULATIVE)
            else:  # closed on another thread: nobody waits there for what may be rolled back
                self._give_up(job)

    def fix(self, jobs: Sequence[Job], updates: Sequence[UnitUpdate], delayed: bool) -> None:
        """A step is fixed: its jobs make these updates. AWAITED or SPECULATIVE -> CONFIRMED, or
        with `delayed` AWAITED -> DELAYED.

        The parameter blocks of jobs that are CONFIRMED are UPDATING until all is written. Those of
        jobs that are DELAYED have a shadow copy each (see `Tuning.update`).
        """
        with self.changed:
            for job, update in zip(jobs, updates, strict=True):
                self._set(job, update, JobState.DELAYED if delayed else JobState.CONFIRMED)
                self._end_if_written(job)

    def land(self, jobs: Sequence[Job]) -> None:
        """DELAYED -> CONFIRMED: their parameter blocks are UPDATING now, until all is written."""
        with self.changed:
            for job in jobs:
                job.state = JobState.CONFIRMED
                self._end_if_written(job)
            self._look_again()
            self.changed.notify_all()

    def rollback(self, job: Job) -> None:
        """AWAITED or SPECULATIVE -> ENDED, and block until nothing of it is in flight: then others
        may write its blocks."""
        with self.changed:
            self._give_up(job)
            self.changed.notify_all()
            self._wait_for(lambda: job.in_flight == 0)

    def await_written(self, job: Job) -> None:
        """Block until a DELAYED job has read its gradients and written what it makes, or failed,
        which the store then knows."""
        with self.changed:
            self._wait_for(lambda: job.written or job.state is JobState.ENDED)

    def await_update(self, unit: Unit) -> None:
        """Block until the update of `unit` that is CONFIRMED, if any, has ended, well or not; it
        waits for no place."""
        with self.changed:
            going = [
                job for job in self.jobs if job.unit is unit and job.state is JobState.CONFIRMED
            ]
            for job in going:
                job.hurried = True
                self._look_again(job.unit.index)
            self.changed.notify_all()
            self._wait_for(lambda: all(job.state is JobState.ENDED for job in going))

    def drain(self) -> None:
        """Block until no job is CONFIRMED; also returns when one failed, which the store then
        knows."""
        with self.hurry(), self.changed:
            self._wait_for(lambda: all(job.state is not JobState.CONFIRMED for job in self.jobs))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Inside, updates run without a place: somebody waits for all of them."""
        with self.changed:
            self._hurries += 1
            self._look_again()
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._hurries -= 1

    def going(self) -> tuple[list[Job], dict[Block, int]]:
        """The jobs that are CONFIRMED, and `Job.left` by the blocks that they renew (under the
        lock)."""
        going = [job for job in self.jobs if job.state is JobState.CONFIRMED]
        return going, {block: job.left for job in going for block in job.unit.blocks.values()}

    def await_ended(self, jobs: Sequence[Job], timeout: float | None = None) -> bool:
        """Block until these have ended, well or not, which the store knows; False after `timeout`
        seconds."""
        with self.changed:
            return self._wait_for(lambda: all(job.state is JobState.ENDED for job in jobs), timeout)

    def first(self, units: Sequence[Unit]) -> Unit:
        """Which of `units`, which are pinned, an update waits for and is needed first; the first
        one where none waits yet."""
        among = set(units)
        with self.changed:
            waiting = (j for j in self.jobs if j.unit in among and j.is_pinned)
            first = min(waiting, key=lambda job: job.place, default=None)
            return units[0] if first is None else first.unit

    def poke(self) -> None:
        """More may be overwritten."""
        with self.changed:
            self.changed.notify_all()

    def placed(self, unit: int) -> None:
        """The unit of this number got its place, or its copy, on the compute device."""
        with self.changed:
            self._look_again(unit)
            self.changed.notify_all()

    def close(self) -> None:
        """Let go of all that is not final, and take nothing new."""
        with self.changed:
            self._state = max(self._state, QueueState.CLOSED)
            self._look_again()
            for job in [job for job in self.jobs if not job.is_final]:
                self._give_up(job)
            self.changed.notify_all()

    # For the pipeline: which chunk is next

    def await_work(self, may_hold: bool) -> bool:
        """Block until there was a chunk to take; False when it was closed and there is none.

        While it is OPEN the answer is True, although the chunk may be gone: the thread that runs
        the model gives places to units and takes them away under another lock.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._state is not QueueState.OPEN or self.has_work(may_hold)
            )
            return self._state is QueueState.OPEN or self.has_work(may_hold)

    def await_change(self, resumed: Callable[[], bool], may_hold: bool) -> None:
        """Block until `resumed`, which is looked at under the lock, or until there is a chunk to
        take."""
        with self.changed:
            self.changed.wait_for(lambda: resumed() or self.has_work(may_hold))

    def has_work(self, may_hold: bool) -> bool:
        """Whether there is a chunk to take (under the lock)."""
        return self._next(may_hold, True) is not None or self._next_in_memory() is not None

    def take(self, may_hold: bool, ready: bool) -> tuple[Job, int] | None:
        """The job whose chunk is read next, and the first element of that; `leave` it in the end.

        Without `may_hold` none that is AWAITED, and without `ready` only one that is.
        """
        with self.changed:
            job = self._next(may_hold, ready)
            if job is None:
                return None
            job.in_flight += 1
            job.ran_ahead |= job.state is JobState.CONFIRMED and self._lacks_place(job)
            begin = job.chunks.popleft()
            if not job.chunks:
                self._reading.discard(job)
                self._awaited.discard(job)
            return job, begin

    def take_in_memory(self, before: float, may_write: bool) -> tuple[Job, int] | None:
        """Like `take`, a chunk that is not read, of a unit that is needed `before` that place. With
        `may_write` it may be one that a commit needs on the drive."""
        with self.changed:
            job = self._next_in_memory()
            if job is None or job.place >= before or (job.writes_through and not may_write):
                return None
            job.in_flight += 1
            begin = job.in_memory.popleft()
            if not job.in_memory:
                self._in_memory.discard(job)
            return job, begin

    def put_back(self, job: Job, queue: deque[int], begin: int) -> None:
        """The chunk from `begin` on, taken from that `queue` of the job, could not be checked
        out."""
        with self.changed:
            if job in self.jobs:
                queue.appendleft(begin)
                self._list(job)
        self.leave(job)

    def leave(self, job: Job) -> None:
        """A chunk of `job` is out of the pipeline; after the last one the unit flips to its new
        content, if that is final."""
        with self.changed:
            job.in_flight -= 1
            self._end_if_written(job)
            self.changed.notify_all()

    def refuse(self) -> None:
        """The pipeline failed: nothing more is checked out, and no unit flips."""
        with self.changed:
            self._state = max(self._state, QueueState.FAILED)
            for job in self.jobs:
                job.drop()
            self._unlist()

    def end_jobs(self) -> None:
        """No job goes on."""
        with self.changed:
            for job in self.jobs:
                job.state = JobState.ENDED
            self.jobs.clear()
            self._unlist()
            self.changed.notify_all()

    def end(self) -> None:
        """The pipeline's thread ends."""
        with self.changed:
            self._state = QueueState.ENDED
            self.changed.notify_all()

    # Under the lock

    def _wait_for(self, over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until `over`, or until the thread has ended; False after `timeout` seconds."""
        return self.changed.wait_for(lambda: self._state is QueueState.ENDED or over(), timeout)

    def _set(self, job: Job, update: UnitUpdate, state: JobState) -> None:
        self._add(job)
        job.update = update
        job.state = state
        self._awaited.discard(job)

    def _add(self, job: Job) -> None:
        if job not in self.jobs and self._state < QueueState.FAILED:
            self._turns += 1
            job.turn = self._turns
            self.jobs.add(job)
            self._list(job)
        self.changed.notify_all()

    def _give_up(self, job: Job) -> None:
        """AWAITED or SPECULATIVE -> ENDED."""
        job.state = JobState.ENDED
        job.drop()
        self._remove(job)

    def _list(self, job: Job) -> None:
        """`job` may have chunks to take."""
        if job.chunks:
            self._reading.add(job)
            if job.state is JobState.AWAITED:
                self._awaited.add(job)
        if job.in_memory:
            self._in_memory.add(job)

    def _remove(self, job: Job) -> None:
        for jobs in (self.jobs, self._reading, self._awaited, self._in_memory):
            jobs.discard(job)

    def _unlist(self) -> None:
        """There are no chunks to take."""
        self._reading.clear()
        self._awaited.clear()
        self._in_memory.clear()
        self._placeless.clear()

    def _look_again(self, unit: int | None = None) -> None:
        """Who waited for a place of `unit`, or of any unit, may have it, or need none now."""
        waiting = list(self._placeless) if unit is None else [unit]
        for job in (job for each in waiting for job in self._placeless.pop(each, ())):
            if job in self.jobs:
                self._list(job)

    def _end_if_written(self, job: Job) -> None:
        fixed = job in self.jobs and job.state is JobState.CONFIRMED
        if fixed and job.written and self._state < QueueState.FAILED:
            job.state = JobState.ENDED
            self._remove(job)
            self._store.resident.end_update(
                [block for kind, block in job.unit.blocks.items() if kind is not Kind.GRAD],
                job.left,
            )
            self.changed.notify_all()

    def _next(self, may_hold: bool, ready: bool) -> Job | None:
        """See `take`."""
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
            self._look_again()
            return next((j for j in self._reading if self._may_take(j, may_hold, True)), None)
        return found

    def _may_take(self, job: Job, may_hold: bool, ready: bool) -> bool:
        """Whether a chunk of `job` may be read, if its unit has a place or needs none."""
        if job.state is JobState.AWAITED:
            return may_hold and self._is_at_hand(job)
        return ready and job.may_update(job.chunks[0])

    def _is_waited_for(self) -> bool:
        """Whether an update waits for a commit, which waits for those that have no place."""
        return self._store.is_durable and any(
            not job.unit.states.is_free(job.left) for job in self.jobs
        )

    def _next_in_memory(self) -> Job | None:
        return next((job for job in self._in_memory if job.may_update(job.in_memory[0])), None)

    def _is_at_hand(self, job: Job) -> bool:
        """Whether all that the update reads exists, and what it reads of the parameter is not on
        NVMe: in backward it is on the compute device."""
        block = job.unit.blocks[Kind.PARAM]
        if self._store.resident.is_updating(block):
            return False
        return (
            not block.moved_bytes
            or not reads(job.unit, Kind.PARAM)
            or self._store.resident.is_ready(block)
        )

    def _has_place(self, job: Job) -> bool:
        """Whether what the update of `job` makes can be put where it is used, or need not wait for
        that."""
        hurried = job.hurried or self._hurries or self._state is not QueueState.OPEN
        waits = job.state is JobState.CONFIRMED and not hurried
        return not waits or not self._lacks_place(job)

    def _lacks_place(self, job: Job) -> bool:
        """Whether what the update of `job` makes would have to be read back."""
        block = job.unit.blocks[Kind.PARAM]
        return bool(block.moved_bytes) and not self._store.resident.has_copy(block)
