"""One chunk of one unit in the update pipeline: its phase, its check-outs, and its update."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.device import Copy, copy_alone
from infinity.optim.job import Job, JobState, UnitUpdate
from infinity.optim.kernels import Kernels, Segment, StateTensors
from infinity.placement.spec import Kind
from infinity.sharding import codec
from infinity.tiers.access import Checkout, PlaceCopy
from infinity.tiers.resident import Residency


class Phase(enum.Enum):
    """The phase of a chunk. A chunk holds one set of staging slots, except in RUNNING and PLACING.

    HELD: its states are read or being read. Its gradients or its step are still to come.
    READING: its states are read or being read, and it may be updated.
    RUNNING: the compute device updates it in its home.
    PLACING: it was updated in host memory. The result is copied to the place of the next forward.
    WRITING: it was updated. The result is written, after reads.
    URGENT: like WRITING, but the next forward waits for the write.
    """

    HELD = enum.auto()
    READING = enum.auto()
    RUNNING = enum.auto()
    PLACING = enum.auto()
    WRITING = enum.auto()
    URGENT = enum.auto()


UPDATED = (Phase.RUNNING, Phase.PLACING, Phase.WRITING, Phase.URGENT)
"""The phases that follow the update."""


@dataclass(eq=False)
class Chunk:
    """The elements from `begin` on of a job, with `outs`, the check-outs of all their blocks. Used
    by one thread.

    `running` is an update by the compute device, `placing` the copy of its result.
    """

    job: Job
    begin: int
    outs: dict[Kind, Checkout]
    phase: Phase = Phase.HELD
    running: Copy | None = None
    placing: PlaceCopy | None = None

    @property
    def writes(self) -> bool:
        """Whether any block of it is written, or a part in memory that a commit needs."""
        return any(out.writes for kind, out in self.outs.items() if kind is not Kind.GRAD)

    def may_go_on(self) -> bool:
        """Whether the update may run, or never will."""
        return self.job.state is JobState.ENDED or self.job.may_update(self.begin)

    def arrived(self) -> bool:
        """Whether `wait` would not wait."""
        return all(out.arrived() for out in self.outs.values())

    def wait(self) -> None:
        """Block until the states are there."""
        for out in self.outs.values():
            out.wait()

    @property
    def is_awaited(self) -> bool:
        """Whether the next forward waits for the writes: if it has to read the chunk, or another
        chunk of the unit, again."""
        return self.job.state is JobState.CONFIRMED and (
            self.placing is None or not self.job.placed
        )

    def place(self, resident: Residency) -> None:
        """Put the result of the update where the next forward looks for it, if its unit has a place
        there by now that may be written: the place is not in use, and the update is not delayed."""
        seen = self.job.state in (JobState.SPECULATIVE, JobState.CONFIRMED)
        if seen and self.phase in UPDATED and self.placing is None and self.ran():
            block = self.job.unit.blocks[Kind.PARAM]
            self.placing = resident.renew(block, self.begin, self.outs[Kind.PARAM].tensor)

    def ran(self) -> bool:
        """Whether the compute device has made the update."""
        return self.running is None or self.running.done()

    def device_is_done(self) -> bool:
        """Whether `await_device` would not wait."""
        return self.ran() and (self.placing is None or self.placing.done())

    def await_device(self) -> None:
        """Block until the update and the copy on the compute device have ended."""
        try:
            if self.running is not None:
                self.running.wait()
        finally:
            if self.placing is not None:
                self.placing.wait()

    def committed(self) -> bool:
        """Whether update, copy and writes have ended, so that the slots are free."""
        return self.device_is_done() and all(out.committed() for out in self.outs.values())

    def release(self) -> None:
        """Release the slots, when all transfers have ended."""
        for out in self.outs.values():
            out.release()

    def abandon(self) -> None:
        """After an error: release the slots without further writes."""
        with contextlib.ExitStack() as stack:
            for out in self.outs.values():
                stack.callback(_release, out)
            stack.callback(self.await_device)

    def apply(self, update: UnitUpdate, kernels: Kernels) -> None:
        """Run `update` on this chunk, or queue it on the compute device."""
        unit, at = update.unit, self.begin
        length = self.outs[Kind.GRAD].tensor.nbytes // unit.gradient_dtype.itemsize
        # Padding is zeros in both homes. Other elements outside all segments are copied.
        if not _covers(update.segments, at, min(at + length, unit.facts.end_in_shard)):
            for out in self.outs.values():
                out.fill(kernels.copy)
        states = self._states()
        param = states.tensors[Kind.PARAM]
        if unit.states.is_rounded:
            master = states.tensors[Kind.MASTER].view(torch.float32)
            if not unit.blocks[Kind.MASTER].written:
                copy_alone(master, param)
            elif not _covers(update.segments, at, at + length):
                codec.round_to(param, master)
        for segment in update.segments:
            begin, end = max(segment.begin - at, 0), min(segment.end - at, length)
            if begin < end:
                kernels.update(states, begin, end, segment.hyper, segment.factor)

    def _states(self) -> StateTensors:
        unit, outs = self.job.unit, self.outs
        dtypes = {Kind.PARAM: unit.dtype, Kind.GRAD: unit.gradient_dtype}
        old = {kind: out.tensor if out.source is None else out.source for kind, out in outs.items()}
        tensors = {kind: tensor.view(dtypes.get(kind, torch.uint8)) for kind, tensor in old.items()}
        formats = {kind: block.format for kind, block in unit.blocks.items()}
        targets = {kind: out.tensor for kind, out in outs.items() if out.source is not None}
        position = unit.rank * unit.layout.shard_numel + self.begin
        return StateTensors(tensors, formats, unit.index, position, targets)


class ChunksByPhase:
    """The chunks in the pipeline by phase, in the order in which they entered it."""

    def __init__(self) -> None:
        self._of: dict[Phase, list[Chunk]] = {phase: [] for phase in Phase}

    def of(self, *phases: Phase) -> list[Chunk]:
        """The chunks in these phases."""
        return [chunk for phase in phases for chunk in self._of[phase]]

    def all(self) -> list[Chunk]:
        """All chunks."""
        return self.of(*Phase)

    def add(self, chunk: Chunk) -> None:
        """A chunk was checked out; it is in its phase."""
        self._of[chunk.phase].append(chunk)

    def move(self, chunk: Chunk, phase: Phase) -> None:
        """Any phase -> `phase`."""
        self.remove(chunk)
        chunk.phase = phase
        self.add(chunk)

    def remove(self, chunk: Chunk) -> None:
        """A chunk has left the pipeline."""
        self._of[chunk.phase].remove(chunk)


def _release(out: Checkout) -> None:
    with contextlib.suppress(OSError):  # the updater has reported this error, or a like one
        out.release()


def _covers(segments: Sequence[Segment], begin: int, end: int) -> bool:
    for segment in segments:
        if segment.begin <= begin < segment.end:
            begin = segment.end
    return begin >= end
