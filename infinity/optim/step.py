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
With `Tuning.update="delayed"` a step is fixed like any other, but what its updates make is seen only when the next step is
fixed, or when something else than training looks before the next forward: evaluation, `state_dict`, a checkpoint. By then a
forward and a backward have passed. The updates read the gradients first that the backward will overwrite first; one that was
not read yet is waited for.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, NamedTuple, Protocol

from infinity.errors import ConfigError, EngineClosedError, NonFiniteError
from infinity.observe import Meter, Recorder
from infinity.optim.kernels import Kernels, Segment, nonfinite_gradients, squared_gradient_norm
from infinity.optim.pipeline import Job, Pipeline, UnitUpdate
from infinity.optim.scaler import Scales
from infinity.placement.spec import Kind
from infinity.plan.planner import Foresight
from infinity.sharding.gradients import GradientState
from infinity.sharding.unit import MOMENTS, Unit
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

UNITS_AHEAD = 2  # whose gradients are still to come, and whose states are read already


class Optimizer(Protocol):
    """Who decides on hyper-parameters."""

    by_kernels: ClassVar[bool]
    """Whether `segments` says all that is done, so that it may begin at any time."""

    def segments(self, unit: Unit, factor: float = 1.0) -> tuple[Segment, ...]:
        """What the next step does to this rank's shard of `unit`, with the gradients that it has now, clipped by `factor`."""


class Share(NamedTuple):
    """What one optimizer has of a unit: parameters, by their index, in rising order."""

    unit: Unit
    positions: tuple[int, ...]

    def present(self) -> list[int]:
        """Those that have a gradient."""
        return [index for index in self.positions if self.unit.gradients.has(index)]


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
        self.scales = Scales()
        """What the losses of the backward passes under way were multiplied by."""
        self._surroundings = surroundings
        self._owners: dict[Unit, dict[int, weakref.ref[Optimizer]]] = {}  # of parameters, by their index
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

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied by of the backward pass that runs; 1 outside of any."""
        return self.scales.current

    def check_free(self, share: Share, optimizer: Optimizer) -> None:
        """Raise `ConfigError` when another optimizer updates one of these parameters."""
        self._store.latch.check()
        for index, owner in self._owners.get(share.unit, {}).items():
            if index in share.positions and owner() not in (None, optimizer):
                raise ConfigError(
                    f"{share.unit.names[index]} already has an optimizer, {type(owner()).__name__}; a parameter has states for "
                    "one: use one optimizer with several parameter groups, or let go of the other one first"
                )

    def adopt(self, share: Share, optimizer: Optimizer) -> None:
        """`optimizer` updates these parameters from now on, beginning with fresh states; see `check_free`."""
        unit, owners = share.unit, self._owners.setdefault(share.unit, {})
        self.withdraw(unit)
        if any(index in owners and owners[index]() is None for index in share.positions):
            self.drain()
            self.forget_states(share, MOMENTS[unit.algorithm])
        owners.update((index, weakref.ref(optimizer)) for index in share.positions)

    def shared(self, units: Iterable[Unit], optimizers: Sequence[Optimizer]) -> list[tuple[Share, list[str]]]:
        """What `units`, if they have moments, have beside the parameters of `optimizers`; and those names of it that another
        optimizer updates."""
        found = []
        for unit in units:
            if not any(kind in unit.blocks for kind in MOMENTS[unit.algorithm]):
                continue
            owners = {index: owner() for index, owner in self._owners[unit].items()}
            rest = [index for index in range(len(unit.parameters)) if owners.get(index) not in optimizers]
            if rest:
                found.append((Share(unit, tuple(rest)), [unit.names[i] for i in rest if owners.get(i) is not None]))
        return found

    def forget_states(self, share: Share, kinds: Iterable[Kind]) -> None:
        """These states of these parameters begin anew. Those that the unit has of other optimizers' parameters stay."""
        owners = self._owners.get(share.unit, {})
        alone = not any(owner() is not None and index not in share.positions for index, owner in owners.items())
        has_all = len(share.positions) == len(share.unit.parameters)  # masters may say more than parameters that nobody updates
        for kind in kinds:
            if has_all or (alone and kind is not Kind.MASTER):
                self._store.forget(share.unit.blocks[kind])
            else:
                share.unit.restart(kind, share.positions)

    def begin_early(self, unit: Unit) -> None:
        """Begin the update that the next step will ask for if it clips nothing, where that is worth it and can be taken back;
        and read ahead for the units that come next."""
        optimizer = self._may_begin(unit)
        if optimizer is None:
            return
        places = self._places()
        if unit in self._early and self._early[unit].is_cancelled:
            self.withdraw(unit)
        if self._foresight.early and unit.copy_on_write:
            job = self._early.setdefault(unit, Job(unit, places[unit]))
            self._pipeline.begin(job, UnitUpdate(unit, optimizer.segments(unit)))
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
        """Who updates `unit`, if anything of that may happen before its step: not where several optimizers do."""
        found = {id(owner): owner for ref in self._owners.get(unit, {}).values() if (owner := ref()) is not None}
        optimizer = next(iter(found.values()), None)
        return optimizer if len(found) == 1 and optimizer is not None and optimizer.by_kernels and not self._delayed else None

    def _expect(self, unit: Unit, place: int) -> None:
        in_place = not self._store.staging.is_needed(unit.blocks[Kind.GRAD])
        is_spent = unit.gradients.state is GradientState.SPENT
        if in_place and unit not in self._early and unit not in self._final and not is_spent:
            job = self._early[unit] = Job(unit, place)
            self._pipeline.expect(job)

    def await_delayed(self, unit: Unit) -> None:
        """Return when no delayed update reads the gradients of `unit` any more; raises `EngineClosedError` when one failed."""
        if unit in self._delayed:
            self._pipeline.await_written(self._delayed[unit][0])
            self._store.latch.check()

    def await_update(self, unit: Unit) -> None:
        """Return when no update of `unit` is under way, for whoever does not bring its place: the update waits for none then.
        Raises `EngineClosedError` when it failed."""
        if self._store.resident.is_updating(unit.blocks[Kind.PARAM]):
            self._pipeline.await_update(unit)
            self._store.latch.check()

    def land(self) -> None:
        """What was delayed becomes the content of its units, except of those that are in use; returns when it is."""
        units = [unit for unit in self._delayed if not unit.blocks[Kind.PARAM].copy.pins]
        self._await_copies(units)
        with self._fixing():
            jobs = [self._delayed.pop(unit) for unit in units]
            for job, _ in jobs:
                self._store.resident.begin_update(job.unit.blocks[Kind.PARAM], keep=True)
                job.unit.outdate()
            self._pipeline.confirm(jobs)
        if jobs:
            self._await_updates()

    def withdraw(self, unit: Unit) -> None:
        """Take back what was begun early for `unit`, if anything was; returns when nothing of it is in flight."""
        job = self._early.get(unit)
        if job is not None:
            self._pipeline.cancel(job)  # an interrupt leaves it where it is, to be waited for again
            self._store.resident.take_back(unit.blocks[Kind.PARAM])
            if self._early.pop(unit, None) is not None:  # else `close` did, on another thread
                self._withdrawn.append(job)

    def settle(self, units: Sequence[Unit]) -> None:
        """Make the gradients of these units final, as all ranks agree.

        After a backward, all clip factors from before it are multiplied into the gradients: torch does that when it clips, and
        a unit that the backward added to did it then. So which parameters share a unit changes no number.
        """
        self._await_updates()
        self._surroundings.settled()
        added = any(unit.gradients.state is GradientState.COLLECTING for unit in self._units)
        exchange = self._units[0].exchange
        if exchange is not None and units:
            mine = [unit.gradients.summary() for unit in units]
            values = [float(added), *(value for summary in mine for value in summary)]
            agreed = iter(exchange.sum(values, "of gradients that there are"))
            added = next(agreed) > 0
            for unit, summary in zip(units, mine, strict=True):
                unit.gradients.settle([next(agreed) for _ in summary])
        else:
            for unit in units:
                unit.gradients.settle()
        for unit in units if added else ():
            if present := unit.gradients.present():
                unit.gradients.apply_clips(present)

    def norm(self, shares: Sequence[Share], further: float = 1.0) -> float:
        """The common L2 norm of the settled gradients of `shares` as an update would take them: unscaled, as far as they are
        clipped, and times `further`. Summed in double precision over the units and the ranks, of which all get the same bits;
        infinite or NaN if and only if a gradient is.
        """
        self._norms_now += 1
        total = sum(self._squared_norm(share.unit, share.present(), further) for share in shares)
        return math.sqrt(self._sum_over_shards([total], "of squared gradients")[0])

    def _squared_norm(self, unit: Unit, positions: Sequence[int], further: float) -> float:
        alike: dict[float, list[int]] = {}  # parameters whose gradients have one factor
        for index in positions:
            alike.setdefault(unit.gradients.factor(index, further), []).append(index)
        return sum(factor**2 * self._squares(unit, same) for factor, same in alike.items())

    def _squares(self, unit: Unit, positions: Sequence[int]) -> float:
        found = unit.gradients.measured() if positions == unit.gradients.present() else None
        return squared_gradient_norm(unit, self._store, self._kernels, positions) if found is None else found

    def measure(self, unit: Unit) -> float | None:
        """What `norm` will ask of `unit`: read on the thread that brings gradients from a device with memory of its own, else the
        step would wait until all of host memory was read. None where the last step asked nothing, or that would move bytes."""
        gradient = unit.blocks[Kind.GRAD]
        staged = self._store.staging.in_memory_until(gradient, on_device=True) < gradient.elements
        if not self.norms or self._store.unified_memory or staged:
            return None
        try:
            return squared_gradient_norm(unit, self._store, self._kernels, unit.gradients.present())
        except EngineClosedError:
            return None

    def forget(self, shares: Sequence[Share], set_to_none: bool = True) -> None:
        """Forget the gradients of `shares`; without `set_to_none` they become zeros, which an update still takes. All ranks must
        call it."""
        if not set_to_none:
            self.settle([share.unit for share in shares])
        for unit, positions in shares:
            (unit.gradients.forget if set_to_none else unit.gradients.zero)(positions)

    def clip(self, shares: Sequence[Share], factor: float) -> None:
        """Multiply the settled gradients of `shares` by `factor`."""
        self.apply_clips(shares, factor)
        for share in shares:
            if present := share.present():
                share.unit.gradients.scale(present, factor)

    def apply_clips(self, shares: Sequence[Share], factor: float) -> None:
        """The settled gradients of `shares` are about to be multiplied by `factor`: as they are clipped already, so they are."""
        for share in shares if factor != 1.0 else ():
            if present := share.present():
                share.unit.gradients.apply_clips(present)

    def first_nonfinite(self, shares: Sequence[Share]) -> str:
        """The name of the first parameter with a settled gradient that is not finite; "" when all are. All ranks must ask."""
        names = [share.unit.names[index] for share in shares for index in share.positions]
        bad = [float(flag) for share in shares for flag in nonfinite_gradients(share.unit, share.positions)]
        everywhere = self._sum_over_shards(bad, "of gradients that are not finite")
        return next((name for name, flag in zip(names, everywhere, strict=True) if flag), "")

    def _sum_over_shards(self, values: list[float], what: str) -> list[float]:
        """The sums of `values` over the ranks among which units and tensors are cut up; replicas would add the same again."""
        exchange = self._units[0].exchange
        return values if exchange is None else exchange.sum(values, what, everywhere=False)

    def take_nonfinite(self, norm: float, shares: Sequence[Share], raises: bool) -> None:
        """The settled gradients of `shares` have the norm `norm`, which is not finite: log whose fault that is, or raise
        `NonFiniteError`, before anything is changed. All ranks must call it."""
        number, name = self.posted_steps + self.skipped_steps + 1, self.first_nonfinite(shares)
        text = f"the gradient norm of step {number} is {norm}; the gradient of {name} is not finite"
        if raises:
            raise NonFiniteError(f"{text}, and error_if_nonfinite=True; nothing was changed", name)
        log.warning("%s", text)

    def skip(self, shares: Sequence[Share]) -> None:
        """End a step without an update: what was begun early is taken back, and the gradients are spent."""
        _refuse_used(self._delayed)
        self.land()
        for unit, positions in shares:
            if any(map(unit.gradients.has, positions)):
                self.withdraw(unit)
                unit.gradients.spend(positions)
        self._surroundings.stepped()
        self._end_step([], kept=0, unclipped=False)
        self.skipped_steps += 1

    def post(self, updates: Sequence[tuple[Share, tuple[Segment, ...]]], factor: float = 1.0) -> None:
        """Start updating the units; returns at once. The gradients of the shares are spent, clipped by `factor`, which is in the
        segments already; and what was delayed is seen from now on.

        Raises `RuntimeError` before anything is changed when the parameters of one of them are in use.
        """
        _refuse_used([*(share.unit for share, _ in updates), *self._delayed])
        self.land()
        delayed = self.posted_steps >= self._delay_after
        places = self._places(backwards=delayed)
        wanted = [UnitUpdate(share.unit, segments) for share, segments in updates]
        wanted.sort(key=lambda update: places[update.unit])
        jobs, kept = [], 0
        for update in wanted:
            begun = self._early.get(update.unit)
            if begun is not None and (begun.is_cancelled or begun.update not in (None, update)):
                self.withdraw(update.unit)
            elif begun is not None:
                kept += begun.update is not None
            jobs.append(self._early.pop(update.unit, Job(update.unit, places[update.unit])))
        posted = list(zip(jobs, wanted, strict=True))
        self._await_copies([] if delayed else [update.unit for update in wanted])
        with self._fixing():
            for update in wanted:
                if not delayed:
                    self._store.resident.begin_update(update.unit.blocks[Kind.PARAM], keep=True)
            _spend([share for share, _ in updates], factor)
            self._surroundings.stepped()
            if delayed:
                self._delayed = {update.unit: (job, update) for job, update in posted}
                self._pipeline.delay(posted)
            else:
                self._pipeline.confirm(posted)
        unclipped = all(share.unit.gradients.clip_of(index) == 1.0 for share, _ in updates for index in share.positions)
        self._end_step(jobs, kept, unclipped)
        self.posted_steps += 1
        if self._foresight.waits:
            self.drain()

    def _await_copies(self, units: Iterable[Unit]) -> None:
        """Return when nothing is on its way to the places of `units`; an interrupt here has changed nothing."""
        for unit in units:
            self._store.resident.settle(unit.blocks[Kind.PARAM])

    @contextmanager
    def _fixing(self) -> Iterator[None]:
        """Inside, updates are announced and then posted. What ends that half-way, an interrupt included, leaves updates that
        nobody makes and the next forward would wait for, so the engine cannot go on."""
        try:
            yield
        except BaseException as error:
            self._store.latch.fail(error, "a step")
            raise

    def run(self, shares: Sequence[Share], update: Callable[[Unit], None], factor: float = 1.0) -> None:
        """Have `update` replace the content of the units, one after the other; returns when it has. The gradients of the shares
        are spent, clipped by `factor`.

        Raises `RuntimeError` before anything is changed when the parameters of one of them are in use. When `update` fails after
        the first unit, what is there belongs to no step, and the engine cannot go on.
        """
        _refuse_used([*(share.unit for share in shares), *self._delayed])
        self.land()
        for number, (unit, _) in enumerate(shares):
            self.withdraw(unit)
            try:
                update(unit)
            except BaseException as error:
                if number > 0:
                    self._store.latch.fail(error)
                raise
        _spend(shares, factor)
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
        self._store.latch.check()

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
        with ExitStack() as stack:  # each of these happens, whatever the others meet
            stack.callback(self._kernels.close)
            stack.callback(self._pipeline.close)
            for unit in list(self._early):
                stack.callback(self.withdraw, unit)


def _refuse_used(units: Iterable[Unit]) -> None:
    used = [unit.name for unit in units if unit.blocks[Kind.PARAM].copy.pins]
    if used:
        raise RuntimeError(f"{', '.join(used)} cannot be updated inside of a forward or of infinity.gathered (invariant I7)")


def _spend(shares: Sequence[Share], factor: float) -> None:
    for unit, positions in shares:
        unit.gradients.spend(positions, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What brings gradients of the L2 norm `norm` to at most `max_norm`, as in `torch.nn.utils.clip_grad_norm_`:
    min(1, max_norm / (norm + 1e-6)), 0 for an infinite norm, and NaN for NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
