"""The update pipeline: one thread that takes chunk after chunk of units through read i+1 | update i
| write i-1.

Which chunk is next is said in `infinity.optim.job`; what an update does to one, in
`infinity.optim.chunk`.

[Note: nobody waits for writes]
The forward needs a unit's copy, not its writes. So writes go behind reads, and the forward
continues while they are under way. It waits for them only if it has to read the unit again, because
a speculative update had no place for its result.

[Note: how it fails]
Whatever is raised on the thread ends it, in this order: the store learns why, so that nobody begins
to wait; what is in flight lands, and its slots go back; every job ends; all waiters wake. Each of
these happens whatever the others meet, and what they meet is logged. No method waits for a thread
that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from infinity.observe import Recorder, Stopwatch
from infinity.optim.chunk import UPDATED, Chunk, ChunksByPhase, Phase
from infinity.optim.job import Job, JobQueue, JobState, reads
from infinity.optim.kernels import Kernels
from infinity.placement.budget import STAGED_SETS
from infinity.placement.spec import Kind
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

READING, WRITING = 2, STAGED_SETS - 2
"""ChunksByPhase in flight each way: more would only make what comes after them wait longer."""
PLACING = 4
"""ChunksByPhase of states in memory of which what an update made is on its way to a compute device
with memory of its own."""


class _Turn(NamedTuple):
    """What one turn of the loop goes by, as it was at its beginning."""

    first: Chunk | None  # of those that may be updated, the one that is needed first
    arrived: bool  # whether its states are there
    coming: list[Chunk]  # of which states are on their way
    may_write: bool


class Pipeline:
    """Runs the jobs of its queue on a thread of its own, from construction to `close`. Other
    threads call `close` alone."""

    def __init__(self, store: Store, jobs: JobQueue, kernels: Kernels, recorder: Recorder) -> None:
        self._store = store
        self._kernels = kernels
        self._recorder = recorder
        self.jobs = jobs
        """What it is to do; any thread may post and wait there."""
        self._chunks = ChunksByPhase()
        self._busy = Stopwatch()
        self._busy_before = 0.0
        self._thread = threading.Thread(target=self._run, name="infinity-updater", daemon=True)
        self._thread.start()

    def busy_since(self) -> float:
        """Seconds that it had something to do since this was asked last. For the thread that fixes
        steps."""
        before, self._busy_before = self._busy_before, self._busy.seconds
        return self._busy_before - before

    def close(self) -> None:
        """Finish what is final, let go of the rest, and end this thread and those of the kernels.
        May be called twice."""
        # Each of these happens, whatever the others meet; the last one first.
        with contextlib.ExitStack() as stack:
            stack.callback(self._kernels.close)
            stack.callback(self._thread.join)
            stack.callback(self.jobs.close)

    # The thread

    def _run(self) -> None:
        try:
            self._store.device.begin_thread()
            while self.jobs.await_work(self._may_hold()):
                self._busy.start()
                while self._work():
                    pass
                self._busy.stop()
        except BaseException as error:
            self._fail(error)
        finally:
            self.jobs.end()

    def _fail(self, error: BaseException) -> None:
        """See [Note: how it fails]. The store tells the user's next call of `error`."""
        try:
            with contextlib.ExitStack() as stack:  # each of these happens; the last one first
                stack.callback(self.jobs.end_jobs)
                for chunk in self._chunks.all():
                    stack.callback(self.jobs.leave, chunk.job)
                    stack.callback(chunk.abandon)
                stack.callback(self.jobs.refuse)
                stack.callback(self._store.latch.fail, error)
        except BaseException as later:
            log.error(
                "an update failed (%s), and so did what its end takes: %s",
                error,
                later,
                exc_info=later,
            )

    def _work(self) -> bool:
        """One turn; False when there is nothing left to do. A chunk goes through these phases:

        1. It is read: its old states are on their way (HELD or READING).
        2. It waits for the gradients of its unit, or for its step (HELD).
        3. It is updated.
        4. What came of it is placed for the next forward, and written (RUNNING, PLACING, WRITING or
           URGENT).
        5. It is retired: its slots go back. After the last chunk the unit flips, and whoever waits
           for the job is told.

        A turn ends and resumes what it can without a wait. Then it does the first thing on its list
        that can be done: work comes before waits, and what the next forward needs sooner comes
        first.
        """
        self._retire_committed()
        self._resume_held()
        turn = self._look()
        return (
            self._read_next(turn)
            or self._free_a_place()
            or self._update_in_memory(turn)
            or self._await_device(turn)
            or self._update_first(turn)
            or self._retire_first()
            or self._await_states(turn)
            or self._await_slots()
            or self._await_gradients()
        )

    def _look(self) -> _Turn:
        reading, held = self._chunks.of(Phase.READING), self._chunks.of(Phase.HELD)
        first = _needed_first(reading)
        arrived = first is not None and first.arrived()
        coming = [chunk for chunk in (*reading, *held) if not chunk.arrived()]
        return _Turn(first, arrived, coming, len(self._writing()) < WRITING)

    # What needs no wait

    def _retire_committed(self) -> None:
        """Retire what has ended. First do what could not be done when it was updated: see `_place`
        and `_is_awaited`."""
        for chunk in self._writing():
            self._place(chunk)
            if chunk.phase is Phase.WRITING and self._is_awaited(chunk):
                self._chunks.move(chunk, Phase.URGENT)
                for out in chunk.outs.values():
                    out.promote()
        for chunk in self._chunks.of(*UPDATED):
            if chunk.committed():
                self._retire(chunk)

    def _resume_held(self) -> None:
        for chunk in self._chunks.of(Phase.HELD):
            if chunk.may_go_on():
                self._chunks.move(chunk, Phase.READING)

    # One thing each: False where that cannot be done now

    def _read_next(self, turn: _Turn) -> bool:
        """Start to read the chunk that is needed first, where slots are free."""
        if len(turn.coming) >= READING:
            return False
        ready = turn.may_write and len(self._chunks.of(Phase.READING)) < READING
        return self._check_out(ready, wait=False)

    def _free_a_place(self) -> bool:
        """Wait for the oldest copy to the compute device, where enough are under way."""
        placing = self._chunks.of(Phase.PLACING)
        if len(placing) == PLACING:
            placing[0].await_device()
        return len(placing) == PLACING

    def _update_in_memory(self, turn: _Turn) -> bool:
        """Update a chunk that needs no I/O, where none that has been read is needed sooner."""
        before = turn.first.job.place if turn.first is not None and turn.arrived else math.inf
        taken = self.jobs.take_in_memory(before, turn.may_write)
        chunk = None if taken is None else self._open(*taken, taken[0].in_memory, wait=False)
        if chunk is None:
            return False
        in_memory = Phase.RUNNING if chunk.job.unit.states.gpu_resident else Phase.PLACING
        self._update(chunk, Phase.WRITING if chunk.writes else in_memory)
        return True

    def _await_device(self, turn: _Turn) -> bool:
        """Wait for the compute device before anything else is waited for: it takes no time, and the
        forward may wait for it."""
        if turn.arrived:
            return False
        moving = (
            *self._chunks.of(Phase.RUNNING),
            *self._writing(),
            *self._chunks.of(Phase.PLACING),
        )
        chunk = next((chunk for chunk in moving if not chunk.device_is_done()), None)
        if chunk is not None:
            chunk.await_device()
        return chunk is not None

    def _update_first(self, turn: _Turn) -> bool:
        """Update the chunk that is needed first, and start to write it; wait for its states where
        writes are not too many."""
        if turn.first is None or not (turn.arrived or turn.may_write):
            return False
        self._update(turn.first, Phase.WRITING)
        return True

    def _retire_first(self) -> bool:
        """Wait for the write that is needed first."""
        first = _needed_first(self._writing())
        if first is not None:
            self._retire(first)
        # A chunk that runs or is placed has just ended, so there may be more to do.
        return first is not None or bool(self._chunks.of(Phase.RUNNING, Phase.PLACING))

    def _await_states(self, turn: _Turn) -> bool:
        """Wait for the states of a chunk that is held."""
        if turn.coming:
            turn.coming[0].wait()
        return bool(turn.coming)

    def _await_slots(self) -> bool:
        """Wait until another thread gives back the slots that the next chunk needs.

        The slots of what is HELD are never all there are, so this wait ends.
        """
        return self._check_out(ready=True, wait=True)

    def _await_gradients(self) -> bool:
        """Wait until a chunk that is held may go on, or there is another one."""
        held = self._chunks.of(Phase.HELD)
        if held:
            self._busy.stop()
            self.jobs.await_change(
                lambda: any(chunk.may_go_on() for chunk in held), self._may_hold()
            )
            self._busy.start()
        return bool(held)

    # A chunk

    def _may_hold(self) -> bool:
        ahead = self._store.layout.rooms.host.staged_sets - STAGED_SETS
        return len(self._chunks.of(Phase.HELD)) < ahead

    def _writing(self) -> list[Chunk]:
        return self._chunks.of(Phase.URGENT, Phase.WRITING)

    def _check_out(self, ready: bool, wait: bool) -> bool:
        """Start to read the next chunk; False when there is none, or (without `wait`) no slots for
        it."""
        taken = self.jobs.take(self._may_hold(), ready)
        return taken is not None and self._open(*taken, taken[0].chunks, wait) is not None

    def _open(self, job: Job, begin: int, queue: deque[int], wait: bool) -> Chunk | None:
        """Check out the chunk from `begin` on, or put it back into its `queue`."""
        unit, outs = job.unit, None
        try:
            blocks = list(unit.blocks.values())
            load = [block for kind, block in unit.blocks.items() if reads(unit, kind)]
            request = ChunkRequest(
                blocks,
                begin,
                load,
                updates=True,
                on_device=unit.states.gpu_resident,
                meter=job.meter,
                left=job.left,
            )
            staging = self._store.staging
            outs = staging.check_out(request) if wait else staging.try_check_out(request)
        finally:
            if outs is None:
                self.jobs.put_back(job, queue, begin)
        if outs is None:
            return None
        chunk = Chunk(job, begin, dict(zip(unit.blocks, outs, strict=True)))
        if chunk.may_go_on():
            chunk.phase = Phase.READING
        self._chunks.add(chunk)
        return chunk

    def _update(self, chunk: Chunk, phase: Phase) -> None:
        """Make the update of a chunk, whose next phase is `phase`, and start to place and write
        what comes of it."""
        chunk.wait()
        update, unit = chunk.job.update, chunk.job.unit
        if update is None or chunk.job.state is JobState.ENDED:  # rolled back
            self._retire(chunk)
            return
        start = time.perf_counter()
        running = (
            self._store.resident.updating(unit.blocks[Kind.PARAM])
            if unit.states.gpu_resident
            else contextlib.nullcontext()
        )
        with self._recorder.range("adam", unit.name), running as chunk.running:
            chunk.apply(update, self._kernels)
        self._recorder.add("adam", unit.name, start, time.perf_counter())
        self._chunks.move(chunk, phase)
        self._place(chunk)
        if phase is Phase.WRITING and self._is_awaited(chunk):
            self._chunks.move(chunk, Phase.URGENT)
        for kind, out in chunk.outs.items():
            if kind is not Kind.GRAD:
                out.commit(background=chunk.phase is not Phase.URGENT)

    def _place(self, chunk: Chunk) -> None:
        """Put what an update made where the next forward looks for it, if its unit has a place
        there by now that may be written: nobody uses it, and the update is not delayed."""
        seen = chunk.job.state in (JobState.SPECULATIVE, JobState.CONFIRMED)
        if seen and chunk.phase in UPDATED and chunk.placing is None and chunk.ran():
            block = chunk.job.unit.blocks[Kind.PARAM]
            chunk.placing = self._store.resident.renew(
                block, chunk.begin, chunk.outs[Kind.PARAM].tensor
            )

    def _is_awaited(self, chunk: Chunk) -> bool:
        """Whether the next forward waits for what is written: when it has to read it, or another
        chunk of the unit, again."""
        return chunk.job.state is JobState.CONFIRMED and (
            chunk.placing is None or not chunk.job.placed
        )

    def _retire(self, chunk: Chunk) -> None:
        """Wait for what is in flight, give the slots back, and report that the chunk has been
        through."""
        self._place(chunk)
        chunk.await_device()
        chunk.job.placed &= chunk.placing is not None
        chunk.release()
        self.jobs.leave(chunk.job)
        self._chunks.remove(chunk)


def _needed_first(chunks: Iterable[Chunk]) -> Chunk | None:
    return min(chunks, key=lambda chunk: chunk.job.place, default=None)
