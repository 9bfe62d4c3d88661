"""Follows the trace: every use of a unit starts the fetches of the next units, and waits for this
unit only."""

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
    """Starts fetches and waits for units. The thread that runs the model calls it when a forward, a
    use of a unit, or a step begins."""

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
        """The uses so far and the predicted uses. The store reads it too."""
        self.accumulation = 0
        """Training cycles of the last optimizer step; 0 before the first step."""
        self.stale = True
        """Whether a step came since the last `begin`. Then the next forward of any module starts a
        new cycle."""
        self.waited = 0.0
        """Seconds that `enter` has waited since the start."""
        self.forward_seconds = 0.0
        """Seconds of the forwards since the last `forward_since`, without the waits for units. The
        hooks add them."""
        self.held: set[Unit] = set()
        """Units that stay in use until their turn in the backward ends. The trace records no more
        uses of them."""
        self._reach = Reach(lambda: store.resident.lost)
        self._cycles = 0

    def training(self) -> bool:
        """Whether a training cycle has begun since the last step."""
        return self._cycles > 0

    def forward_since(self) -> float:
        """The mean seconds of a forward since the last call, without waits. Called once a step."""
        seconds, self.forward_seconds = self.forward_seconds, 0.0
        return seconds / max(self.accumulation, 1)

    def prepare(self) -> None:
        """Call this before training forwards, so that a resume can restore random states."""
        self._store.latch.check_usable()
        self._before_forward()

    def begin(self, training: bool) -> None:
        """Start a cycle with a forward of the model."""
        if training:
            self.prepare()
        else:
            self._store.latch.check_usable()
        self.stale = False
        self._cycles += training
        self.trace.begin("train" if training else "eval")
        self.look_ahead()

    def stepped(self) -> None:
        """Note the start of an optimizer step, and take places for the first units of the next
        forward. Their updates fill the places."""
        self.accumulation, self._cycles, self.stale = self._cycles, 0, True
        self.trace.expect_again()
        self._renew()
        self.look_ahead()

    def _renew(self) -> None:
        """Gather the units that stay whole, in the order of the units, which is equal on all ranks.
        Ranks may have used the units in different orders, or left some out."""
        for unit in self._units:
            unit.on_device.renew()

    def enter(self, unit: Unit) -> torch.Tensor:
        """Put `unit` into use until `OnDevice.release`. Starts the fetches of this unit and of the
        next units, then waits for this unit.

        Returns its flat buffer. If this raises, the unit is released.
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
        """Record a wait of `enter` for `unit`, with its block in `state` at the start: first for
        the block, then for the all-gather."""
        posted = unit.on_device.posted
        arrived = end if posted is None else min(max(posted.arrived, start), end)
        if state is not CopyState.READY:
            self._recorder.add(_lane(state), unit.name, start, arrived)
        if arrived < end:
            self._recorder.add("wait collective", unit.name, arrived, end)
        self.waited += end - start

    def locate(self, address: int) -> tuple[Unit, int] | None:
        """The unit with the byte `address` in its copy on the compute device, and the byte offset
        in the copy. None if no copy contains it."""
        found = self._store.resident.block_at(address)
        return None if found is None else (self._units[found[0].unit], found[1])

    def look_ahead(self) -> None:
        """Start to fetch the units that will be used next, until there is no room, and gather them
        in this order."""
        look_ahead(self.trace, self._has_copy, self._bring, self._reach)
        if self._units[0].facts.shared:
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        """Gather the next units that have copies, except units that an optimizer step will update
        before their next use. These are gathered after the step."""
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
    """The name of a wait for a unit with its block in `state`. With several ranks, the second part
    of the wait is "wait collective"."""
    lanes = {CopyState.UPDATING: "wait adam", CopyState.READY: "wait collective"}
    return lanes.get(state, "wait nvme")
