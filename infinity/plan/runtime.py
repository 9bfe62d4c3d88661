"""Walks the plan: at every use of a unit it starts what comes next and waits for this one, and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from infinity.observe import Recorder
from infinity.plan.planner import look_ahead
from infinity.plan.trace import Trace
from infinity.sharding.unit import Unit
from infinity.tiers.block import BlockState, Kind
from infinity.tiers.store import Store


class Runtime:
    """Called by the thread that runs the model, at the points where units come into and go out of use."""

    def __init__(self, store: Store, units: Sequence[Unit], recorder: Recorder) -> None:
        self._store, self._units, self._recorder = store, units, recorder
        self.trace = Trace()
        self.accumulation = 0
        """Training cycles per optimizer step, as the last step had them; 0 before the first."""
        self.stale = True
        """Whether a step has been since the last `begin`: the next forward, of whatever module, starts a new cycle."""
        self.before_evaluation: Callable[[], None] = lambda: None
        """Called before a forward that trains nothing starts a cycle."""
        self.waited = 0.0
        """Seconds that `enter` waited since the start."""
        self._cycles = 0
        store.next_use = self.trace.next_use

    def training(self) -> bool:
        """Whether a training cycle has begun since the last step."""
        return self._cycles > 0

    def begin(self, training: bool) -> None:
        """A forward of the model starts."""
        if not training:
            self.before_evaluation()
        self.stale = False
        self._cycles += training
        self.trace.begin("train" if training else "eval")
        self.look_ahead()

    def stepped(self) -> None:
        """An optimizer step was started: take the places of what comes first, for its updates to fill."""
        self.accumulation, self._cycles, self.stale = self._cycles, 0, True
        self.look_ahead()

    def enter(self, unit: Unit) -> torch.Tensor:
        """`unit` is in use until `leave`: start bringing it and what comes next, then wait for it; returns its flat buffer."""
        new = self.trace.current != unit.index
        if new:
            self.trace.use(unit.index, frozenset(u.index for u in self._units if u.blocks[Kind.PARAM].pins))
        unit.start()
        try:
            if new:
                self.look_ahead()
            state, start = unit.blocks[Kind.PARAM].state, time.perf_counter()
            flat = unit.wait()
        except BaseException:
            unit.release()
            raise
        if state is not BlockState.RESIDENT:
            lane, end = "wait adam" if state is BlockState.UPDATING else "wait nvme", time.perf_counter()
            self._recorder.add(lane, unit.name, start, end)
            self.waited += end - start
        return flat

    def leave(self, unit: Unit) -> None:
        """End one `enter`."""
        unit.release()

    def look_ahead(self) -> None:
        """Start bringing what will be used next, as far as there is room."""
        look_ahead(self.trace, self._has_copy, self._bring)

    def _has_copy(self, unit: int) -> bool:
        return self._store.has_copy(self._units[unit].blocks[Kind.PARAM])

    def _bring(self, unit: int, beyond: float) -> bool:
        return self._store.prefetch(self._units[unit].blocks[Kind.PARAM], beyond)
