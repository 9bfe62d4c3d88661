"""The optimizer step: what it takes in, when it is fixed, and when its updates run.

[Note: exact although late]
`Updater.post` takes final gradients, the clip factor and the hyper-parameters of this step, and returns. The pipeline then
updates unit after unit, in the order in which the next forward needs them; that forward waits for its unit alone. Nothing is
stale: a unit's content is replaced between its last use in one step and its first in the next.

[Note: exact although early]
As soon as a unit has as many gradients as in the last step, its update may begin, on the guess that these are all, that nothing
will be clipped and that the hyper-parameters stay. `post` keeps it if it is, term for term, the update that the step asks for,
and begins anew if not. So the update hides behind the backward, too, and the numbers are those of an update that waited.

[Note: one step late]
With `Config.update="delayed"` a step is fixed like any other, but what its updates make is seen only when the next step is
fixed, or when something else than training looks before the next forward: evaluation, `state_dict`, a checkpoint. By then a
forward and a backward have passed. The updates read the gradients first that the backward will overwrite first; one that was
not read yet is waited for.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from infinity.errors import ConfigError, EngineClosedError
from infinity.observe import Meter, Recorder
from infinity.optim.kernels import Kernels, Segment, nonfinite_gradients, squared_gradient_norm
from infinity.optim.pipeline import Job, Pipeline, UnitUpdate
from infinity.plan.planner import Foresight
from infinity.sharding.unit import MOMENTS, Unit
from infinity.tiers.block import Kind
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

UNITS_AHEAD = 2  # whose gradients are still to come, and whose states are read already


class Optimizer(Protocol):
    """Who decides on hyper-parameters."""

    by_kernels: ClassVar[bool]
    """Whether `segments` says all that is done, so that it may begin at any time."""

    def segments(self, unit: Unit) -> tuple[Segment, ...]:
        """What the next step does to this rank's shard of `unit`, with the gradients that it has now."""


class Surroundings(NamedTuple):
    """What an updater asks and tells those who run the model.

    `order` gives the units in the order in which the next forward uses them, as far as is known; `settled` is called before a
    step is fixed, to end a backward that an exception cut off; `stepped` when it has been, before its updates start;
    `training` says whether a forward with gradients has begun since then; `forward_seconds` how long a forward took since it was
    asked last, without waits.
    """

    order: Callable[[], Sequence[int]]
    settled: Callable[[], None]
    stepped: Callable[[], None]
    training: Callable[[], bool]
    forward_seconds: Callable[[], float]


class Updater:
    """Fixes what a step is, and has it run by the pipeline. All methods are for the thread that runs the model."""

    def __init__(
        self,
        store: Store,
        units: Sequence[Unit],
        kernels: Kernels,
        foresight: Foresight,
        surroundings: Surroundings,
        recorder: Recorder,
        delay_after: float = math.inf,
    ) -> None:
        """From step number `delay_after` on, counted from 0, what a step makes is seen one step late."""
        self._store, self._units, self._kernels, self._recorder = store, list(units), kernels, recorder
        self.loss_scale = 1.0
        """What the loss was multiplied by of the backward that runs; 1 outside of any."""
        self._surroundings = surroundings
        self._owners: dict[Unit, weakref.ref[Optimizer]] = {}
        self.posted_steps = 0
        """Steps started since the beginning."""
        self.skipped_steps = 0
        """Steps that were asked for and left out, for their gradients were not finite."""
        self.norms = 0
        """How often the gradients were read for their norm in the last step."""
        self.meters: list[Meter] = []
        """What the updates of the last step moved, those included that were begun for it in vain."""
        self._norms_now = 0
        self._foresight = foresight
        self._early: dict[Unit, Job] = {}
        self._withdrawn: list[Job] = []
        self._order: list[Unit] = []  # in which gradients became final, in the last step
        self._final: dict[Unit, None] = {}  # whose gradients are, in this step; in order
        self._pipeline = Pipeline(store, kernels, recorder)
        self._seconds_before = 0.0
        self._delay_after = delay_after
        self._delayed: dict[Unit, tuple[Job, UnitUpdate]] = {}
        for unit in units:
            unit.updater = self

    def adopt(self, unit: Unit, optimizer: Optimizer) -> None:
        """`optimizer` updates `unit` from now on, beginning with fresh states; raises `ConfigError` when another one does."""
        self._store.check()
        owner = self._owners.get(unit)
        if owner is not None and owner() not in (None, optimizer):
            who = type(optimizer).__name__
            raise ConfigError(f"unit {unit.name} already has an optimizer; use one {who} with several parameter groups")
        if owner is not None and owner() is None:
            self.drain()
            for kind in MOMENTS[unit.algorithm]:
                self._store.forget(unit.blocks[kind])
        self._owners[unit] = weakref.ref(optimizer)

    def begin_early(self, unit: Unit) -> None:
        """Begin the update that the next step will ask for if it clips nothing, where that is worth it and can be taken back;
        and read ahead for the units that come next."""
        optimizer = self._may_begin(unit)
        if optimizer is None:
            return
        places = self._places()
        if self._foresight.early and unit.copy_on_write:
            job = self._early.setdefault(unit, Job(unit, places[unit]))
            self._pipeline.begin(job, UnitUpdate(unit, optimizer.segments(unit), unit.gradients.factor))
        self._final[unit] = None
        turn = self._order.index(unit) + 1 if unit in self._order else len(self._order)
        for following in self._order[turn : turn + UNITS_AHEAD]:
            # An exact step updates what the next forward needs first when all gradients are there, and reads that ahead alone.
            if self._foresight.early or places[following] == 0:
                self._expect(following, places[following])

    def pass_forward(self, unit: Unit) -> None:
        """A training forward has used `unit`: if its gradients will be among the first to come, read ahead for it."""
        if unit in self._order[:UNITS_AHEAD] and self._foresight.early and self._may_begin(unit) is not None:
            self._expect(unit, self._places()[unit])

    def _may_begin(self, unit: Unit) -> Optimizer | None:
        """Who updates `unit`, if anything of that may happen before its step."""
        owner = self._owners.get(unit)
        optimizer = None if owner is None else owner()
        return optimizer if optimizer is not None and optimizer.by_kernels and not self._delayed else None

    def _expect(self, unit: Unit, place: int) -> None:
        in_place = not self._store.needs_staging(unit.blocks[Kind.GRAD])
        if in_place and unit not in self._early and unit not in self._final and not unit.gradients.spent:
            job = self._early[unit] = Job(unit, place)
            self._pipeline.expect(job)

    def await_delayed(self, unit: Unit) -> None:
        """Return when no delayed update reads the gradients of `unit` any more; raises `EngineClosedError` when one failed."""
        if unit in self._delayed:
            self._pipeline.await_written(self._delayed[unit][0])
            self._store.check()

    def await_update(self, unit: Unit) -> None:
        """Return when no update of `unit` is under way, for whoever does not bring its place: the update waits for none then.
        Raises `EngineClosedError` when it failed."""
        if self._store.is_updating(unit.blocks[Kind.PARAM]):
            self._pipeline.await_update(unit)
            self._store.check()

    def land(self) -> None:
        """What was delayed becomes the content of its units, except of those that are in use; returns when it is."""
        jobs = [self._delayed.pop(unit) for unit in list(self._delayed) if not unit.blocks[Kind.PARAM].pins]
        for job, _ in jobs:
            self._store.begin_update(job.unit.blocks[Kind.PARAM], keep=True)
            job.unit.outdate()
        self._pipeline.confirm(jobs)
        if jobs:
            self._await_updates()

    def withdraw(self, unit: Unit) -> None:
        """Take back what was begun early for `unit`, if anything was; returns when nothing of it is in flight."""
        job = self._early.pop(unit, None)
        if job is not None:
            self._pipeline.cancel(job)
            self._store.take_back(unit.blocks[Kind.PARAM])
            self._withdrawn.append(job)

    def settle(self, units: Sequence[Unit]) -> None:
        """Make the gradients of this step final: agreed on by all ranks, zeros where there are none."""
        self._await_updates()
        self._surroundings.settled()
        exchange = self._units[0].exchange
        if exchange is not None and units:
            mine = [float(flag) for unit in units for flag in unit.gradients.accumulated]
            flags = exchange.sum(mine, "of gradients that there are")
            for unit in units:
                unit.gradients.accumulated = [flag > 0 for flag in flags[: len(unit.gradients.accumulated)]]
                del flags[: len(unit.gradients.accumulated)]
        for unit in units:
            if not unit.gradients.spent:
                unit.gradients.settle()

    def norm(self, units: Sequence[Unit]) -> float:
        """The common L2 norm of the settled gradients of `units` as an update would take them: unscaled, and as far as they are
        clipped. Summed in double precision over the units and the ranks, of which all get the same bits; infinite or NaN if and
        only if a gradient is.
        """
        self._norms_now += 1
        total = sum(unit.gradients.factor**2 * self._squared_norm(unit) for unit in _having(units))
        return math.sqrt(self._sum_over_shards([total], "of squared gradients")[0])

    def _squared_norm(self, unit: Unit) -> float:
        collected, squares = unit.gradients.measured
        if squares is not None and collected == unit.gradients.collected:
            return squares
        return squared_gradient_norm(unit, self._store, self._kernels)

    def measure(self, unit: Unit) -> float | None:
        """What `norm` will ask of `unit`: read on the thread that brings gradients from a device with memory of its own, else the
        step would wait until all of host memory was read. None where the last step asked nothing, or that would move bytes."""
        gradient = unit.blocks[Kind.GRAD]
        if not self.norms or not self._store.is_far or self._store.in_memory_until(gradient, near=True) < gradient.elements:
            return None
        try:
            return squared_gradient_norm(unit, self._store, self._kernels)
        except EngineClosedError:
            return None

    def clip(self, max_norm: float, units: Sequence[Unit]) -> float:
        """Scale the settled gradients of `units` so that their common L2 norm is at most `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`: the factor is min(1, max_norm / (norm + 1e-6)).
        """
        norm = self.norm(units)
        for unit in _having(units):
            unit.gradients.grad_scale *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def first_nonfinite(self, units: Sequence[Unit]) -> str:
        """The name of the first parameter with a settled gradient that is not finite; "" when all are. All ranks must ask."""
        names = [name for unit in units for name in unit.names]
        bad = [float(flag) for unit in units for flag in nonfinite_gradients(unit)]
        everywhere = self._sum_over_shards(bad, "of gradients that are not finite")
        return next((name for name, flag in zip(names, everywhere, strict=True) if flag), "")

    def _sum_over_shards(self, values: list[float], what: str) -> list[float]:
        """The sums of `values` over the ranks among which units and tensors are cut up; replicas would add the same again."""
        exchange = self._units[0].exchange
        return values if exchange is None else exchange.sum(values, what, everywhere=False)

    def warn_nonfinite(self, norm: float, units: Sequence[Unit]) -> None:
        """Log that the settled gradients of `units` have the norm `norm`, and whose fault that is. All ranks must call it."""
        number, name = self.posted_steps + self.skipped_steps + 1, self.first_nonfinite(units)
        log.warning("the gradient norm of step %d is %s; the gradient of %s is not finite", number, norm, name)

    def skip(self, units: Sequence[Unit]) -> None:
        """End a step without an update: what was begun early is taken back, and the gradients are spent."""
        _refuse_used(self._delayed)
        self.land()
        for unit in _having(units):
            self.withdraw(unit)
            unit.gradients.spend()
        self._surroundings.stepped()
        self._end_step([], kept=0, unclipped=False)
        self.skipped_steps += 1

    def post(self, updates: Sequence[tuple[Unit, tuple[Segment, ...]]]) -> None:
        """Start updating the units; returns at once. Their gradients are spent, and what was delayed is seen from now on.

        Raises `RuntimeError` before anything is changed when the parameters of one of them are in use.
        """
        _refuse_used([*(unit for unit, _ in updates), *self._delayed])
        self.land()
        delayed = self.posted_steps >= self._delay_after
        places = self._places(backwards=delayed)
        wanted = [UnitUpdate(unit, segments, unit.gradients.factor) for unit, segments in updates]
        wanted.sort(key=lambda update: places[update.unit])
        jobs, kept = [], 0
        for update in wanted:
            begun = self._early.get(update.unit)
            if begun is not None and begun.update not in (None, update):
                self.withdraw(update.unit)
            elif begun is not None:
                kept += begun.update is not None
            jobs.append(self._early.pop(update.unit, Job(update.unit, places[update.unit])))
        posted = list(zip(jobs, wanted, strict=True))
        for update in wanted:
            if not delayed:
                self._store.begin_update(update.unit.blocks[Kind.PARAM], keep=True)
            update.unit.gradients.spend()
        self._surroundings.stepped()
        if delayed:
            self._delayed = {update.unit: (job, update) for job, update in posted}
            self._pipeline.delay(posted)
        else:
            self._pipeline.confirm(posted)
        self._end_step(jobs, kept, unclipped=all(update.unit.gradients.grad_scale == 1.0 for update in wanted))
        self.posted_steps += 1
        if self._foresight.waits:
            self.drain()

    def run(self, units: Sequence[Unit], update: Callable[[Unit], None]) -> None:
        """Have `update` replace the content of the units, one after the other; returns when it has. Their gradients are spent.

        Raises `RuntimeError` before anything is changed when the parameters of one of them are in use. When `update` fails after
        the first unit, what is there belongs to no step, and the engine cannot go on.
        """
        _refuse_used([*units, *self._delayed])
        self.land()
        for number, unit in enumerate(units):
            self.withdraw(unit)
            try:
                update(unit)
            except BaseException as error:
                if number > 0:
                    self._store.fail(error)
                raise
        for unit in units:
            unit.gradients.spend()
        self._surroundings.stepped()
        self._end_step([], kept=0, unclipped=True)
        self.posted_steps += 1

    def _end_step(self, jobs: Sequence[Job], kept: int, unclipped: bool) -> None:
        replayed = sum(job.update is not None for job in self._withdrawn)
        self._recorder.count("updates kept", kept)
        self._recorder.count("updates replayed", replayed)
        busy, self._seconds_before = self._pipeline.seconds - self._seconds_before, self._pipeline.seconds
        self._foresight.learn(busy, self._surroundings.forward_seconds(), held=unclipped and not replayed)
        self.meters = [job.meter for job in (*jobs, *self._withdrawn)]
        self._withdrawn.clear()
        self._order, self._final = list(self._final), {}
        self.norms, self._norms_now = self._norms_now, 0

    def _places(self, backwards: bool = False) -> dict[Unit, int]:
        """Where each unit comes in the next forward, or in the next backward; those of which that is not known come last."""
        order = self._surroundings.order()
        place = {index: position for position, index in enumerate(reversed(order) if backwards else order)}
        return {unit: place.get(unit.index, len(place) + unit.index) for unit in self._units}

    def _await_updates(self) -> None:
        self._pipeline.drain()
        self._store.check()

    def drain(self) -> None:
        """Block until no update is under way, and take back what was begun early: then states may be read and written. What was
        delayed becomes the content of every unit that is not in use.

        Raises `EngineClosedError` when an update failed.
        """
        self.rest()
        self.land()

    def rest(self) -> None:
        """Like `drain`, for who reads nothing: what was delayed has been written, and is not seen yet."""
        for unit in list(self._early):
            self.withdraw(unit)
        for job, _ in self._delayed.values():
            self._pipeline.await_written(job)
        self._await_updates()

    def look(self) -> None:
        """Like `drain`, for who reads parameters only: from the next forward on until the next step these are what the model
        uses, for its backward still needs them."""
        if self._surroundings.training():
            self.rest()
        else:
            self.drain()

    def close(self) -> None:
        """Finish what was posted and end the thread. May be called twice."""
        for unit in list(self._early):
            self.withdraw(unit)
        self._pipeline.close()
        self._kernels.close()


def _refuse_used(units: Iterable[Unit]) -> None:
    used = [unit.name for unit in units if unit.blocks[Kind.PARAM].pins]
    if used:
        raise RuntimeError(f"{', '.join(used)} cannot be updated inside of a forward or of infinity.gathered (invariant I7)")


def _having(units: Sequence[Unit]) -> list[Unit]:
    """Those with gradients that no update was given."""
    return [unit for unit in units if any(unit.gradients.accumulated) and not unit.gradients.spent]
