"""The update pipeline: one thread that takes chunk after chunk of units through fetch i+1 | update i | flush i-1.

[Note: an update that may be taken back]
A job that is AHEAD was begun before the step it belongs to, on the guess that this step clips nothing. It reads the states and
writes the new ones into the other extents of copy-on-write blocks, and touches nothing else: until `confirm` every reader sees
the old content, and after `cancel` it always will. So a wrong guess costs I/O and never a number (invariant I8). The same goes
for units in host memory that have second homes. That is so chunk by chunk: what else is in host memory, as a part of a block on
NVMe may be, is rewritten in place, so a chunk with any of that is not updated before the job is CONFIRMED.

[Note: which chunk is next]
The next chunk is always one of the unit that the next forward needs first, even if another unit is half done. In backward that
is the unit whose gradients came last, for it is the first in forward; what is left over when the step comes is then spread
evenly over the units, and the forward meets a little of it at each unit instead of a whole update at the first ones. With I/O
as long as compute, a step whose forward takes f of it: unit p (0 first, 1 last) is ready at (1-p)(1-f) and needed at 1-f+pf.
The window [0, q] of units has q of time for q of I/O, so this order, earliest need first, just fits. A chunk that lies in memory
as a whole takes part in this order, and fills the time in which I/O is waited for.

[Note: an update waits for its place]
Once a step is fixed, a unit's update runs when the unit has its place on the compute device: when it is used next but few. What
it makes is put there (see the store), where an update that ran sooner would have it read back. As many units as have a place
are enough ahead of the forward to hide behind it. Whoever waits for an update without bringing that place must hurry it, or
both would wait for ever: `drain` hurries all updates, `await_update` that of one unit. What is made AHEAD is put into the copy
that the backward has just left.

[Note: nobody waits for writes]
The forward needs a unit's copy and not what is written of it, so writes go behind reads, and the forward goes on while they are
under way. It waits for them only where it has to read the unit again, for there was no place for what was made AHEAD.

[Note: how it fails]
Whatever is raised on the thread ends it, in this order: the store learns why, so that nobody begins to wait; what is in flight
lands, and its slots go back; every job ends; all waiters wake. Each of these happens whatever the others meet, and what they meet
is logged. No method waits for a thread that has ended.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.device import Copy, copy_alone
from infinity.observe import Meter, Recorder, Stopwatch
from infinity.optim.kernels import Kernels, Segment, States
from infinity.placement.budget import STAGED_SETS
from infinity.placement.spec import Kind
from infinity.sharding import codec
from infinity.sharding.unit import Unit
from infinity.tiers.access import Checkout, Placing
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

READING, WRITING = 2, STAGED_SETS - 2
"""Chunks in flight each way: more would only make what comes after them wait longer."""
PLACING = 4
"""Chunks of states in memory of which what an update made is on its way to a compute device with memory of its own."""


@dataclass(frozen=True)
class UnitUpdate:
    """The update of one unit in one step; elements outside all segments keep their values."""

    unit: Unit
    segments: tuple[Segment, ...]


class JobState(enum.Enum):
    """What is known of a job's update.

    AWAITED: nothing; its gradients are still to come, and its old states are read as far as there is room.
    AHEAD: what it will be if the guess is right; nobody sees what it writes.
    DELAYED: all, but nobody shall see yet what it writes: the parameters are in use as they are.
    CONFIRMED: all; what it writes is the unit's content once all is written.
    ENDED: that is so, or never will be.
    """

    AWAITED = enum.auto()
    AHEAD = enum.auto()
    DELAYED = enum.auto()
    CONFIRMED = enum.auto()
    ENDED = enum.auto()


class Job:
    """The update of `unit` on its way through the pipeline, which alone changes it, under its lock.

    `place` is the unit's position in the next forward; `meter` counts what the job moves, in bytes.
    """

    def __init__(self, unit: Unit, place: int) -> None:
        self.unit, self.place = unit, place
        self.state = JobState.AWAITED
        self.update: UnitUpdate | None = None
        """None while AWAITED."""
        starts = unit.update_chunks()
        staged = bisect_left(starts, unit.in_memory_until)
        self.in_place_until = unit.rewritten_in_place_until
        """The element from which on an update may be taken back."""
        revocable = bisect_left(starts, self.in_place_until, lo=staged)
        self.in_memory = deque(starts[:staged])
        """First elements of the chunks that need neither staging nor I/O, and were not checked out."""
        self.chunks = deque((*starts[revocable:], *starts[staged:revocable]))
        """First elements of the other chunks that were not checked out, those first that may be updated AHEAD."""
        self.in_flight = 0
        """Chunks that are checked out."""
        self.meter = Meter()
        self.hurried = False
        """Whether somebody waits for it who does not bring the unit's place: it runs without one."""
        self.placed = True
        """Whether all that went through and was updated is where the next forward looks for it."""

    @property
    def is_final(self) -> bool:
        """Whether its update will not be taken back."""
        return self.state in (JobState.CONFIRMED, JobState.DELAYED)

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended before its update was final; something of it may be in flight."""
        return self.state is JobState.ENDED

    def may_update(self, begin: int) -> bool:
        """Whether the chunk from `begin` on may be updated now, as far as is known what the update is."""
        return self.is_final or (self.state is JobState.AHEAD and begin >= self.in_place_until)

    @property
    def written(self) -> bool:
        """Whether every chunk has been through."""
        return not self.chunks and not self.in_memory and self.in_flight == 0

    def drop(self) -> None:
        """Nothing more is checked out."""
        self.chunks.clear()
        self.in_memory.clear()


@dataclass(eq=False)
class _Chunk:
    """One chunk of one unit in the pipeline: `updated`, maybe `running` on the compute device still, `placing` what came of it
    for the next forward, and `awaited` by that."""

    job: Job
    begin: int
    outs: dict[Kind, Checkout]
    updated: bool = False
    running: Copy | None = None
    placing: Placing | None = None
    awaited: bool = False

    def may_go_on(self) -> bool:
        """Whether the update may be made, or never will be."""
        return self.job.state is JobState.ENDED or self.job.may_update(self.begin)

    def arrived(self) -> bool:
        return all(out.arrived() for out in self.outs.values())

    def wait(self) -> None:
        for out in self.outs.values():
            out.wait()

    def ran(self) -> bool:
        return self.running is None or self.running.done()

    def settled(self) -> bool:
        """Whether `settle` would not wait."""
        return self.ran() and (self.placing is None or self.placing.ended())

    def settle(self) -> None:
        """Block until what is under way on the compute device and to it has ended."""
        try:
            if self.running is not None:
                self.running.wait()
        finally:
            if self.placing is not None:
                self.placing.finish()

    def committed(self) -> bool:
        return self.settled() and all(out.committed() for out in self.outs.values())

    def states(self) -> States:
        unit, outs = self.job.unit, self.outs
        dtypes = {Kind.PARAM: unit.dtype, Kind.GRAD: unit.gradient_dtype}
        old = {kind: out.tensor if out.source is None else out.source for kind, out in outs.items()}
        tensors = {kind: tensor.view(dtypes.get(kind, torch.uint8)) for kind, tensor in old.items()}
        formats = {kind: block.format for kind, block in unit.blocks.items()}
        targets = {kind: out.tensor for kind, out in outs.items() if out.source is not None}
        return States(tensors, formats, unit.index, unit.rank * unit.layout.shard_numel + self.begin, targets)


@dataclass
class _Going:
    """The chunks in the pipeline: `held` may not go on yet, `placing` need no I/O, the compute device updates `running`."""

    reading: list[_Chunk] = field(default_factory=list)
    writing: list[_Chunk] = field(default_factory=list)
    held: list[_Chunk] = field(default_factory=list)
    placing: list[_Chunk] = field(default_factory=list)
    running: list[_Chunk] = field(default_factory=list)

    def all(self) -> list[_Chunk]:
        return [*self.reading, *self.writing, *self.held, *self.placing, *self.running]


class Pipeline:
    """Runs jobs on a thread of its own. Methods may be called by any thread."""

    def __init__(self, store: Store, kernels: Kernels, recorder: Recorder) -> None:
        self._store, self._kernels, self._recorder = store, kernels, recorder
        self._changed = threading.Condition()
        self._jobs: list[Job] = []  # that are not ENDED
        self._closed = self._failed = False
        self._ended = False  # the thread has, and nothing changes any more
        self._hurries = 0  # how many wait for all that is CONFIRMED
        store.resident.on_place = self.poke
        self._busy = Stopwatch()
        self._thread = threading.Thread(target=self._run, name="infinity-updater", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """How long it has had something to do so far."""
        return self._busy.seconds

    def expect(self, job: Job) -> None:
        """Start reading for `job`, AWAITED. Its gradients need no staging, or else what is read of them is not final."""
        with self._changed:
            if self._closed:
                self._give_up(job)
            else:
                self._add(job)

    def begin(self, job: Job, update: UnitUpdate) -> None:
        """AWAITED -> AHEAD."""
        with self._changed:
            if self._closed:  # on another thread: who waits for the end waits for nothing that may be taken back
                self._give_up(job)
            else:
                self._set(job, update, JobState.AHEAD)

    def delay(self, jobs: Sequence[tuple[Job, UnitUpdate]]) -> None:
        """AWAITED -> DELAYED, until they are confirmed. The parameters have a second place each (see `Tuning.update`)."""
        with self._changed:
            for job, update in jobs:
                self._set(job, update, JobState.DELAYED)

    def await_written(self, job: Job) -> None:
        """Block until a DELAYED job has read its gradients and written what it makes, or failed, which the store then knows."""
        with self._changed:
            self._wait_for(lambda: job.written or job.state is JobState.ENDED)

    def confirm(self, jobs: Sequence[tuple[Job, UnitUpdate]]) -> None:
        """Any state but ENDED -> CONFIRMED. Their parameter blocks are UPDATING until all is written."""
        with self._changed:
            for job, update in jobs:
                self._set(job, update, JobState.CONFIRMED)
                self._end_if_written(job)

    def _set(self, job: Job, update: UnitUpdate, state: JobState) -> None:
        self._add(job)
        job.update, job.state = update, state

    def _add(self, job: Job) -> None:
        if job not in self._jobs and not self._failed:
            self._jobs.append(job)
        self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """AWAITED or AHEAD -> ENDED, and block until nothing of it is in flight: then its blocks may be written by others."""
        with self._changed:
            self._give_up(job)
            self._changed.notify_all()
            self._wait_for(lambda: job.in_flight == 0)

    def await_update(self, unit: Unit) -> None:
        """Block until the update of `unit` that is CONFIRMED, if any, has ended, well or not; it waits for no place."""
        with self._changed:
            going = [job for job in self._jobs if job.unit is unit and job.state is JobState.CONFIRMED]
            for job in going:
                job.hurried = True
            self._changed.notify_all()
            self._wait_for(lambda: all(job.state is JobState.ENDED for job in going))

    def drain(self) -> None:
        """Block until no job is CONFIRMED; also returns when one failed, which the store then knows."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()
            try:
                self._wait_for(lambda: all(job.state is not JobState.CONFIRMED for job in self._jobs))
            finally:
                self._hurries -= 1

    def poke(self) -> None:
        """A unit got its place, or its copy, on the compute device."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Finish what is fixed, let go of the rest, and end the thread. May be called twice."""
        with self._changed:
            self._closed = True
            for job in [job for job in self._jobs if not job.is_final]:
                self._give_up(job)
            self._changed.notify_all()
        self._thread.join()

    def _wait_for(self, over: Callable[[], bool]) -> None:
        """Block, under the lock, until `over`, or until the thread has ended."""
        self._changed.wait_for(lambda: self._ended or over())

    def _give_up(self, job: Job) -> None:
        """AWAITED or AHEAD -> ENDED (under the lock)."""
        job.state = JobState.ENDED
        job.drop()
        if job in self._jobs:
            self._jobs.remove(job)

    def _run(self) -> None:
        going = _Going()
        try:
            while self._await_work():
                self._busy.start()
                self._work(going)
                self._busy.stop()
        except BaseException as error:
            self._fail(error, going.all())
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _await_work(self) -> bool:
        """Block until there is something to do; False when it was closed and there is nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_work(()))
            return self._has_work(())

    def _fail(self, error: BaseException, chunks: Sequence[_Chunk]) -> None:
        """See [Note: how it fails]. The store tells the user's next call of `error`."""
        try:
            with contextlib.ExitStack() as stack:  # each of these happens; the last one first
                stack.callback(self._end_jobs)
                for chunk in chunks:
                    stack.callback(self._let_go, chunk)
                stack.callback(self._refuse_jobs)
                stack.callback(self._store.latch.fail, error)
        except BaseException as later:
            log.error("an update failed (%s), and so did what its end takes: %s", error, later, exc_info=later)

    def _refuse_jobs(self) -> None:
        with self._changed:
            self._failed = True
            for job in self._jobs:
                job.drop()

    def _end_jobs(self) -> None:
        with self._changed:
            for job in self._jobs:
                job.state = JobState.ENDED
            self._jobs.clear()
            self._changed.notify_all()

    def _let_go(self, chunk: _Chunk) -> None:
        """After an error: its slots go back, and what is not written yet never will be."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave, chunk.job)
            for out in chunk.outs.values():
                stack.callback(_release, out)
            stack.callback(chunk.settle)

    def _work(self, going: _Going) -> None:
        """Take chunks through until there are none."""
        reading, writing, held, placing, running = going.reading, going.writing, going.held, going.placing, going.running
        while True:
            for chunk in writing:
                self._look_after(chunk)
            for chunks in (writing, placing, running):
                for chunk in [chunk for chunk in chunks if chunk.committed()]:
                    self._retire(chunk)
                    chunks.remove(chunk)
            for chunk in [chunk for chunk in held if chunk.may_go_on()]:
                held.remove(chunk)
                reading.append(chunk)
            coming = [chunk for chunk in (*reading, *held) if not chunk.arrived()]
            may_write = len(writing) < WRITING
            found = self._check_out(held, may_write and len(reading) < READING, wait=False) if len(coming) < READING else None
            first = _needed_first(reading)
            arrived = first is not None and first.arrived()
            if found is not None:
                (reading if found.may_go_on() else held).append(found)
            elif len(placing) == PLACING:
                placing[0].settle()
            elif (here := self._take_in_memory(before=first.job.place if first and arrived else math.inf)) is not None:
                (running if here.job.unit.near else placing).append(here)
                self._update(here)
            elif not arrived and self._settle_one((*running, *writing, *placing)):
                continue
            elif first is not None and (arrived or may_write):
                reading.remove(first)
                writing.append(first)
                self._update(first)
            elif (needed_first := _needed_first(writing)) is not None:
                self._retire(needed_first)
                writing.remove(needed_first)
            elif placing or running:
                continue  # the last of them has ended just now
            elif coming:
                coming[0].wait()
            elif (found := self._check_out(held, True, wait=True)) is not None:  # another thread held the slots it needs
                held.append(found)
            elif held:
                self._await_change(held)
            else:
                return

    def _settle_one(self, chunks: Iterable[_Chunk]) -> bool:
        """Before anything else is waited for: the forward may wait for these, and they take no time. False: none are there."""
        going = next((chunk for chunk in chunks if not chunk.settled()), None)
        if going is not None:
            going.settle()
        return going is not None

    def _next(self, held: Sequence[_Chunk], ready: bool = True) -> Job | None:
        """The job whose chunk is read next (under the lock); without `ready` only one that is AWAITED."""
        may_hold = len(held) < self._store.staged_sets - STAGED_SETS

        def able(job: Job) -> bool:
            if job.state is JobState.AWAITED:
                return may_hold and self._is_at_hand(job)
            return ready and job.may_update(job.chunks[0]) and self._has_place(job)

        return min((job for job in self._jobs if job.chunks and able(job)), key=lambda job: job.place, default=None)

    def _is_at_hand(self, job: Job) -> bool:
        """Whether all that the update reads exists, and what it reads of the parameter is not on NVMe: in backward it is on the
        compute device."""
        block = job.unit.blocks[Kind.PARAM]
        if self._store.resident.is_updating(block):
            return False
        return not block.moved_bytes or not _needed(job.unit, Kind.PARAM) or self._store.resident.is_ready(block)

    def _has_place(self, job: Job) -> bool:
        """Whether what the update of `job` makes can be put where it is used, or need not wait for that."""
        block = job.unit.blocks[Kind.PARAM]
        hurried = job.hurried or self._hurries or self._closed
        waits = job.state is JobState.CONFIRMED and block.moved_bytes and not hurried
        return not waits or self._store.resident.has_copy(block)

    def _next_in_memory(self) -> Job | None:
        able = (job for job in self._jobs if job.in_memory and job.may_update(job.in_memory[0]))
        return min(able, key=lambda job: job.place, default=None)

    def _has_work(self, held: Sequence[_Chunk]) -> bool:
        return self._next(held) is not None or self._next_in_memory() is not None

    def _await_change(self, held: Sequence[_Chunk]) -> None:
        """Block until a chunk of those that are held may go on, or there is another one."""
        self._busy.stop()
        with self._changed:
            self._changed.wait_for(lambda: any(chunk.may_go_on() for chunk in held) or self._has_work(held))
        self._busy.start()

    def _check_out(self, held: Sequence[_Chunk], ready: bool, wait: bool) -> _Chunk | None:
        """The next chunk to read, or None: there is none, or (without `wait`) no slots for it.

        The slots of what is `held` are never all there are, so waiting for others ends.
        """
        with self._changed:
            job = self._next(held, ready)
            if job is None:
                return None
            begin = job.chunks.popleft()
            job.in_flight += 1
        return self._open(job, job.chunks, begin, wait)

    def _take_in_memory(self, before: float) -> _Chunk | None:
        """The next chunk that needs no I/O, of a unit that is needed `before` that place, or None."""
        with self._changed:
            job = self._next_in_memory()
            if job is None or job.place >= before:
                return None
            begin = job.in_memory.popleft()
            job.in_flight += 1
        return self._open(job, job.in_memory, begin, wait=False)

    def _open(self, job: Job, queue: deque[int], begin: int, wait: bool) -> _Chunk | None:
        """Check out the chunk from `begin` on, or put it back into its `queue`."""
        blocks, outs = job.unit.blocks, None
        try:
            staging = self._store.staging
            load = [block for kind, block in blocks.items() if _needed(job.unit, kind)]
            request = ChunkRequest(list(blocks.values()), begin, load, updates=True, on_device=job.unit.near, meter=job.meter)
            outs = staging.check_out(request) if wait else staging.try_check_out(request)
        finally:
            if outs is None:
                with self._changed:
                    if job in self._jobs:
                        queue.appendleft(begin)
                self._leave(job)
        return None if outs is None else _Chunk(job, begin, dict(zip(blocks, outs, strict=True)))

    def _update(self, chunk: _Chunk) -> None:
        chunk.wait()
        update = chunk.job.update
        if update is None or chunk.job.state is JobState.ENDED:
            return
        start, unit = time.perf_counter(), update.unit
        near = self._store.resident.updating(unit.blocks[Kind.PARAM]) if unit.near else contextlib.nullcontext()
        with self._recorder.range("adam", unit.name), near as chunk.running:
            self._apply(update, chunk)
        self._recorder.add("adam", unit.name, start, time.perf_counter())
        chunk.updated = True
        self._place(chunk)
        chunk.awaited = self._is_awaited(chunk)
        for kind, out in chunk.outs.items():
            if kind is not Kind.GRAD:
                out.commit(background=not chunk.awaited)

    def _apply(self, update: UnitUpdate, chunk: _Chunk) -> None:
        """Do what `update` does to a chunk."""
        unit, at, length = update.unit, chunk.begin, chunk.outs[Kind.GRAD].tensor.nbytes // update.unit.gradient_dtype.itemsize
        # Padding is zeros in both homes. What else no segment has goes from one to the other as it is.
        if not _covers(update.segments, at, min(at + length, unit.end_in_shard)):
            for out in chunk.outs.values():
                out.fill(self._kernels.copy)
        states = chunk.states()
        param = states.tensors[Kind.PARAM]
        if unit.is_rounded:
            master = states.tensors[Kind.MASTER].view(torch.float32)
            if not unit.blocks[Kind.MASTER].written:
                copy_alone(master, param)
            elif not _covers(update.segments, at, at + length):
                codec.round_to(param, master)
        for segment in update.segments:
            begin, end = max(segment.begin - at, 0), min(segment.end - at, length)
            if begin < end:
                self._kernels.update(states, begin, end, segment.hyper, segment.factor)

    def _place(self, chunk: _Chunk) -> None:
        """Put what an update made where the next forward looks for it, if its unit has a place there by now."""
        fixed = chunk.job.state in (JobState.AHEAD, JobState.CONFIRMED)
        if chunk.updated and chunk.placing is None and fixed and chunk.ran():
            block, new = chunk.job.unit.blocks[Kind.PARAM], chunk.outs[Kind.PARAM].tensor
            chunk.placing = self._store.resident.renew(block, chunk.begin, new)

    def _is_awaited(self, chunk: _Chunk) -> bool:
        """Whether the next forward waits for what is written: when it has to read it, or another chunk of the unit, again."""
        return chunk.job.state is JobState.CONFIRMED and (chunk.placing is None or not chunk.job.placed)

    def _look_after(self, chunk: _Chunk) -> None:
        """Do what could not be done when a chunk in `writing` was updated: its place was in use, or its step was not fixed."""
        self._place(chunk)
        if chunk.updated and not chunk.awaited and self._is_awaited(chunk):
            chunk.awaited = True
            for out in chunk.outs.values():
                out.promote()

    def _retire(self, chunk: _Chunk) -> None:
        self._place(chunk)
        chunk.settle()
        chunk.job.placed &= chunk.placing is not None
        for out in chunk.outs.values():
            out.release()
        self._leave(chunk.job)

    def _leave(self, job: Job) -> None:
        """A chunk of `job` is out of the pipeline."""
        with self._changed:
            job.in_flight -= 1
            self._end_if_written(job)
            self._changed.notify_all()

    def _end_if_written(self, job: Job) -> None:
        if job in self._jobs and job.state is JobState.CONFIRMED and job.written and not self._failed:
            job.state = JobState.ENDED
            self._jobs.remove(job)
            self._store.resident.end_update([block for kind, block in job.unit.blocks.items() if kind is not Kind.GRAD])
            self._changed.notify_all()


def _release(out: Checkout) -> None:
    with contextlib.suppress(OSError):  # it is the error that was told, or one of its kind
        out.release()


def _needed_first(chunks: Iterable[_Chunk]) -> _Chunk | None:
    return min(chunks, key=lambda chunk: chunk.job.place, default=None)


def _needed(unit: Unit, kind: Kind) -> bool:
    """Whether the old content of `kind` goes into the update: a master that was never written is the parameter, widened."""
    if unit.is_rounded and kind in (Kind.PARAM, Kind.MASTER):
        return unit.blocks[Kind.MASTER].written is (kind is Kind.MASTER)
    return True


def _covers(segments: Sequence[Segment], begin: int, end: int) -> bool:
    for segment in segments:
        if segment.begin <= begin < segment.end:
            begin = segment.end
    return begin >= end
