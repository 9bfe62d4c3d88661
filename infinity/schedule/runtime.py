"""Walks the trace: at every use of a unit it starts what comes next and waits for this one, and
for nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from infinity.observe import Recorder
from infinity.placement.spec import Kind
from infinity.schedule.planner import Reach, look_ahead
from infinity.schedule.trace import Trace
from infinity.sharding.unit import Unit
from infinity.tiers.block import CopyState
from infinity.tiers.store import Store


class Runtime:
    """Called by the thread that runs the model, at the points where units come into and go out of
    use."""

    def __init__(
        self,
        store: Store,
        units: Sequence[Unit],
        trace: Trace,
        recorder: Recorder,
        before_forward: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_forward` is called before each training forward."""
        self._store = store
        self._units = units
        self._recorder = recorder
        self._before_forward = before_forward
        self.trace = trace
        """The uses so far, and those to come; the store asks it, too."""
        self.accumulation = 0
        """Training cycles per optimizer step, as the last step had them; 0 before the first."""
        self.stale = True
        """Whether a step has been since the last `begin`: the next forward, of whatever module,
        starts a new cycle."""
        self.waited = 0.0
        """Seconds that `enter` waited since the start."""
        self.forward_seconds = 0.0
        """Seconds of all forwards since the start, without the waits for units; counted by the
        hooks."""
        self.held: set[Unit] = set()
        """Units that stay in use until a turn in the backward ends; the trace counts no further
        uses."""
        self._forward_before = 0.0
        self._reach = Reach(lambda: store.resident.lost)
        self._cycles = 0

    def training(self) -> bool:
        """Whether a training cycle has begun since the last step."""
        return self._cycles > 0

    def forward_since(self) -> float:
        """Seconds that a forward took, without waits, on average over those since this was asked
        last, at the last step."""
        before, self._forward_before = self._forward_before, self.forward_seconds
        return (self._forward_before - before) / max(self.accumulation, 1)

    def prepare(self) -> None:
        """Training forwards are about to start, of which somebody sets the random states."""
        self._store.latch.check_usable()
        self._before_forward()

    def begin(self, training: bool) -> None:
        """A forward of the model starts."""
        if training:
            self.prepare()
        else:
            self._store.latch.check_usable()
        self.stale = False
        self._cycles += training
        self.trace.begin("train" if training else "eval")
        self.look_ahead()

    def stepped(self) -> None:
        """An optimizer step was started: take the places of what comes first, for its updates to
        fill."""
        self.accumulation, self._cycles, self.stale = self._cycles, 0, True
        self.trace.expect_again()
        self._renew()
        self.look_ahead()

    def _renew(self) -> None:
        """Have what stays whole gathered in the order of the units, which is that of all ranks.
        Their forwards and backwards may have used units in other orders, or left some out."""
        for unit in self._units:
            unit.on_device.renew()

    def enter(self, unit: Unit) -> torch.Tensor:
        """`unit` is in use until `OnDevice.release`: start bringing it and what comes next, then
        wait for it.

        Returns its flat buffer.
        """
        new = self.trace.current != unit.index and unit not in self.held
        if new:
            self.trace.use(unit.index, self._store.resident.pinned())
        unit.on_device.start()
        try:
            if new:
                self.look_ahead()
            state = unit.blocks[Kind.PARAM].copy.state
            gathered = unit.on_device.is_gathered
            start = time.perf_counter()
            with (
                self._recorder.range(_lane(state), unit.name)
                if self._waits(state, gathered)
                else nullcontext()
            ):
                flat = unit.on_device.wait()
        except BaseException:
            unit.on_device.release()
            raise
        if self._waits(state, gathered):
            self._count_wait(unit, state, start, time.perf_counter())
        return flat

    @staticmethod
    def _waits(state: CopyState, gathered: bool) -> bool:
        return state is not CopyState.READY or not gathered

    def _count_wait(self, unit: Unit, state: CopyState, start: float, end: float) -> None:
        """`enter` waited for `unit`, whose block was in `state`: until it was there, and then until
        it was gathered."""
        posted = unit.on_device.posted
        arrived = end if posted is None else min(max(posted.arrived, start), end)
        if state is not CopyState.READY:
            self._recorder.add(_lane(state), unit.name, start, arrived)
        if arrived < end:
            self._recorder.add("wait collective", unit.name, arrived, end)
        self.waited += end - start

    def locate(self, address: int) -> tuple[Unit, int] | None:
        """The unit whose copy on the compute device holds `address`, and the byte offset in it."""
        found = self._store.resident.block_at(address)
        return None if found is None else (self._units[found[0].unit], found[1])

    def look_ahead(self) -> None:
        """Start bringing what will be used next, as far as there is room, and have it gathered in
        this order."""
        look_ahead(self.trace, self._has_copy, self._bring, self._reach)
        if self._units[0].facts.shared:
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        """Not what an optimizer step will update before its next use: that will be gathered
        then."""
        left = math.inf if self._cycles < max(self.accumulation, 1) else self.trace.left
        for index, distance in self.trace.upcoming():
            unit = self._units[index]
            if not self._has_copy(index):
                return
            if distance < left or not unit.trainable:
                unit.on_device.gather_ahead()

    def _has_copy(self, unit: int) -> bool:
        return self._store.resident.has_copy(self._units[unit].blocks[Kind.PARAM])

    def _bring(self, unit: int, beyond: float) -> bool:
        return self._store.resident.prefetch(self._units[unit].blocks[Kind.PARAM], beyond)


def _lane(state: CopyState) -> str:
    """What a wait for a unit whose block is in `state` is called; with several ranks its second
    part is "wait collective"."""
    lanes = {CopyState.UPDATING: "wait adam", CopyState.READY: "wait collective"}
    return lanes.get(state, "wait nvme")
