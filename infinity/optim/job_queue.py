"""The two sides of the jobs: the updater posts jobs and waits for them, and the pipeline takes
their chunks. See `infinity.optim.job_table` for the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infinity.optim.job import Job, JobState, UnitUpdate
from infinity.optim.job_table import JobTable, QueueState
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
from infinity.tiers.store import Store


class JobQueue:
    """Where the updater posts jobs, and the updater and the committer wait for them. Any thread may
    call it. No method waits for a thread that has ended. It is made before the store is open, which
    pokes it."""

    def __init__(self, store: Store) -> None:
        self._table = JobTable(store)
        self.changed = self._table.changed
        """The lock; notified when a job changes."""
        self.jobs = self._table.jobs
        """The jobs that are not ENDED."""
        self.chunks = ChunkQueue(self._table)
        """The pipeline's side."""

    def expect(self, job: Job) -> None:
        """Start reading for `job`, AWAITED. Its gradients must need no staging, because bytes of
        them that are read now are not final."""
        with self.changed:
            if self._table.state is QueueState.OPEN:
                self._table.add(job)
            else:
                self._table.give_up(job)

    def speculate(self, job: Job, update: UnitUpdate) -> None:
        """AWAITED -> SPECULATIVE."""
        with self.changed:
            if self._table.state is QueueState.OPEN:
                self._table.set(job, update, JobState.SPECULATIVE)
            else:  # closed on another thread, which waits for no job that may be rolled back
                self._table.give_up(job)

    def fix(self, jobs: Sequence[Job], updates: Sequence[UnitUpdate], delayed: bool) -> None:
        """A step is fixed: its jobs make these updates. AWAITED or SPECULATIVE -> CONFIRMED, or
        with `delayed` AWAITED -> DELAYED.

        The parameter blocks of jobs that are CONFIRMED are UPDATING until all is written. Those of
        jobs that are DELAYED have a shadow copy each (see `Tuning.update`).
        """
        with self.changed:
            for job, update in zip(jobs, updates, strict=True):
                self._table.set(job, update, JobState.DELAYED if delayed else JobState.CONFIRMED)
                self._table.end_if_written(job)

    def land(self, jobs: Sequence[Job]) -> None:
        """DELAYED -> CONFIRMED: their parameter blocks are UPDATING now, until all is written."""
        with self.changed:
            for job in jobs:
                job.state = JobState.CONFIRMED
                self._table.end_if_written(job)
            self._table.look_again()
            self.changed.notify_all()

    def rollback(self, job: Job) -> None:
        """AWAITED or SPECULATIVE -> ENDED, and block until nothing of it is in flight: then its
        blocks may be written."""
        with self.changed:
            self._table.give_up(job)
            self.changed.notify_all()
            self._table.block_until(lambda: job.in_flight == 0)

    def await_written(self, job: Job) -> None:
        """Block until a DELAYED job has read its gradients and written its result, or failed, which
        the store then knows."""
        with self.changed:
            self._table.block_until(lambda: job.written or job.state is JobState.ENDED)

    def await_update(self, unit: Unit) -> None:
        """Block until the update of `unit` that is CONFIRMED, if any, has ended, well or not; it
        waits for no place."""
        with self.changed:
            going = [job for job in self._going() if job.unit is unit]
            for job in going:
                job.hurried = True
                self._table.look_again(job.unit.facts.index)
            self.changed.notify_all()
            self._table.block_until(lambda: all(job.state is JobState.ENDED for job in going))

    def drain(self) -> None:
        """Block until no job is CONFIRMED; also returns when one failed, which the store then
        knows."""
        with self.hurry(), self.changed:
            self._table.block_until(lambda: next(self._going(), None) is None)

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Inside, updates run without a place, because the caller waits for all of them."""
        with self.changed:
            self._table.hurries += 1
            self._table.look_again()
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._table.hurries -= 1

    def going(self) -> tuple[list[Job], dict[Block, int]]:
        """The jobs that are CONFIRMED, and `Job.left` by the blocks that they renew (under the
        lock)."""
        going = list(self._going())
        return going, {block: job.left for job in going for block in job.unit.blocks.values()}

    def _going(self) -> Iterator[Job]:
        return (job for job in self.jobs if job.state is JobState.CONFIRMED)

    def await_ended(self, jobs: Sequence[Job], timeout: float | None = None) -> bool:
        """Block until these have ended, well or not, which the store knows; False after `timeout`
        seconds."""
        with self.changed:
            return self._table.block_until(
                lambda: all(job.state is JobState.ENDED for job in jobs), timeout
            )

    def first(self, units: Sequence[Unit]) -> Unit:
        """The one of `units`, which are pinned, for which an update waits and that is needed first;
        the first unit where no update waits yet."""
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
            self._table.look_again(unit)
            self.changed.notify_all()

    # How it ends

    def close(self) -> None:
        """Release all that is not final, and take nothing new."""
        with self.changed:
            self._table.state = max(self._table.state, QueueState.CLOSED)
            self._table.look_again()
            for job in [job for job in self.jobs if not job.is_final]:
                self._table.give_up(job)
            self.changed.notify_all()

    def refuse(self) -> None:
        """The pipeline failed: nothing more is checked out, and no unit flips."""
        with self.changed:
            self._table.state = max(self._table.state, QueueState.FAILED)
            for job in self.jobs:
                job.drop()
            self._table.unlist()

    def end_jobs(self) -> None:
        """All jobs have ended, and their waiters wake."""
        with self.changed:
            for job in self.jobs:
                job.state = JobState.ENDED
            self.jobs.clear()
            self._table.unlist()
            self.changed.notify_all()

    def end(self) -> None:
        """The pipeline's thread ends."""
        with self.changed:
            self._table.state = QueueState.ENDED
            self.changed.notify_all()


class ChunkQueue:
    """Where the pipeline's thread takes chunks of jobs, in their order."""

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self._changed = table.changed

    def await_work(self, may_hold: bool) -> bool:
        """Block until there was a chunk to take; False when it was closed and there is none.

        While it is OPEN the answer is True, although the chunk may be gone: the thread that runs
        the model gives places to units and takes them away under another lock.
        """

        def is_open() -> bool:
            return self._table.state is QueueState.OPEN

        with self._changed:
            self._changed.wait_for(lambda: not is_open() or self._table.has_next(may_hold))
            return is_open() or self._table.has_next(may_hold)

    def await_change(self, resumed: Callable[[], bool], may_hold: bool) -> None:
        """Block until `resumed`, which is called under the lock, or until there is a chunk to
        take."""
        with self._changed:
            self._changed.wait_for(lambda: resumed() or self._table.has_next(may_hold))

    def take(self, may_hold: bool, ready: bool) -> tuple[Job, int] | None:
        """The job whose chunk is read next (see `JobTable.next`), and the first element of the
        chunk; `leave` it in the end."""
        with self._changed:
            job = self._table.next(may_hold, ready)
            return None if job is None else (job, self._table.begin_read(job))

    def take_in_memory(self, before: float, may_write: bool) -> tuple[Job, int] | None:
        """Like `take`, a chunk that is not read, of a unit that is needed `before` that place. With
        `may_write` it may be one that a commit needs on the drive."""
        with self._changed:
            job = self._table.next_in_memory()
            if job is None or job.place >= before or (job.writes_through and not may_write):
                return None
            return job, self._table.begin_in_memory(job)

    def put_back(self, job: Job, queue: deque[int], begin: int) -> None:
        """The chunk from `begin` on, taken from that `queue` of the job, could not be checked
        out."""
        with self._changed:
            if job in self._table.jobs:
                queue.appendleft(begin)
                self._table.enlist(job)
        self.leave(job)

    def leave(self, job: Job) -> None:
        """A chunk of `job` is out of the pipeline; after the last one the unit flips to its new
        content, if that is final."""
        with self._changed:
            job.in_flight -= 1
            self._table.end_if_written(job)
            self._changed.notify_all()
