"""The updater: fixes steps, and has their updates run by the pipeline.

[Note: exact although late]
`Updater.post` takes a `Step`: final gradients, the clip factor and the hyper-parameters of this
step. It returns at once. The pipeline then updates unit after unit, in the order in which the next
forward needs them. That forward waits for its unit only. No value is stale: a unit's content is
replaced between its last use in one step and its first use in the next.

[Note: one step late]
With `Tuning.update="delayed"` a step is fixed like any other. The model sees its new values when
the next step is fixed: a forward and a backward later. Evaluation, `state_dict` and checkpoints
before the next forward see them at once. The updates first read the gradients that the backward
will overwrite first. The backward waits for one that was not read yet.

Updates that begin before their step are in `infinity.optim.speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from infinity.errors import ConfigError
from infinity.optim.compared import ComparedStep
from infinity.optim.job import Job
from infinity.optim.norm import GradientNorm
from infinity.optim.owners import Owner, Owners
from infinity.optim.pipeline import Pipeline, UpdateServices
from infinity.optim.scaler import Scales
from infinity.optim.speculation import Policy, Speculation, UnitOrder
from infinity.optim.step import Step, StepRun, UnitShare
from infinity.placement.spec import MOMENTS, Kind
from infinity.schedule.runtime import Runtime
from infinity.sharding.alike import Facts, check_alike
from infinity.sharding.collectives import Group
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_ledger import GradientState
from infinity.sharding.listeners import Updates
from infinity.sharding.ranks import Ranks
from infinity.sharding.unit import Unit
from infinity.sharding.watch import OF_A_STEP
from infinity.tiers.block import Block


class StepListeners(NamedTuple):
    """Listeners of steps, called on the thread that runs the model."""

    before_settling: Callable[[], None]
    """Called before gradients become final, to end a backward that an exception cut off."""
    stepped: Callable[[StepRun], None]
    """Called when a step has been fixed, before its updates start, with the last step's result."""
    before_step: Callable[[Sequence[Unit]], None] = lambda units: None
    """Called before these units are updated, when no update is under way."""
    made: Callable[[Any], None] = lambda optimizer: None
    """Called with a new optimizer, when it has its parameters."""
    stepped_by: Callable[[Any], None] = lambda optimizer: None
    """Called with an optimizer whose step has been fixed or skipped."""
    before_write: Callable[[Sequence[Block]], None] = lambda blocks: None
    """Called before blocks are rewritten outside of a step. Returns when that is allowed."""


class Updater(Updates):
    """Fixes steps, and has the pipeline run them. The thread that runs the model calls all methods.
    One class, because each method keeps one order: what began before a step, the step, and the
    waits for its updates."""

    def __init__(
        self,
        services: UpdateServices,
        units: Sequence[Unit],
        runtime: Runtime,
        policy: Policy,
        listeners: StepListeners,
    ) -> None:
        store = self._store = services.store
        self._units = list(units)
        self._runtime = runtime
        self.listeners = listeners
        """The listeners of steps and optimizers."""
        self._recorder = services.recorder
        self._kernels = services.kernels
        self._jobs = services.jobs
        self._delayed: dict[Unit, Job] = {}  # of the last step, and not seen yet
        self.speculation = Speculation(store, self._jobs, policy)
        """The jobs that began before their step."""
        self.owners = Owners(store)
        """The optimizer of each parameter."""
        self.norm = GradientNorm(store, self._units, self._kernels)
        """Measures gradients."""
        self.scales = Scales()
        """The factors on the losses of the backward passes under way."""
        self._order = UnitOrder(runtime.trace, self._units)
        self.posted_steps = 0
        """The number of steps started."""
        self.skipped_steps = 0
        """The number of steps skipped because of gradients that were not finite."""
        self.last = StepRun()
        """The result of the last step."""
        # Last, because it begins a thread.
        self._pipeline = Pipeline(services)

    @property
    def next_number(self) -> int:
        """The number of the next step; skipped steps count."""
        return self.posted_steps + self.skipped_steps + 1

    def adopt(self, share: UnitShare, optimizer: Owner) -> None:
        """`optimizer` updates these parameters from now on, with new states; see
        `Owners.check_free`."""
        self.speculation.rollback(share.unit)
        if self.owners.have_left(share):
            self.drain()
            self.owners.forget_states(share, MOMENTS[share.unit.facts.algorithm])
        self.owners.assign(share, optimizer)
        self.norm.want_by_unit(share.unit, optimizer.clips_by_unit and optimizer.by_kernels)

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten outside of a step."""
        self.listeners.before_write(blocks)

    # Before a step

    def gradients_came(self, facts: UnitFacts) -> None:
        """`unit` has as many gradients as in the last step: begin its update, if the policy
        speculates and the update can be rolled back."""
        unit = self._units[facts.index]
        owner = self._may_begin(unit)
        if owner is not None:
            self.speculation.begin(unit, owner, self._order.places(), self.next_number)

    def pass_forward(self, unit: Unit) -> None:
        """A training forward has used `unit`. If its gradients will be among the first, read ahead
        for it."""
        if self.speculation.comes_first(unit) and self._may_begin(unit) is not None:
            self.speculation.read_ahead(unit, self._order.places(), self.next_number)

    def _may_begin(self, unit: Unit) -> Owner | None:
        """The optimizer of `unit`, if its update may begin before the step. None if several
        optimizers update the unit."""
        owner = self.owners.only(unit)
        return owner if owner is not None and owner.by_kernels and not self._delayed else None

    def rollback(self, facts: UnitFacts) -> None:
        """Roll back the update of `unit` that began before its step. Returns when none of its
        chunks is in flight."""
        self.speculation.rollback(self._units[facts.index])

    def square_ahead(self, facts: UnitFacts, all_came: bool) -> float | None:
        """The sum of squares of the gradients of `unit`, or None: see `GradientNorm.square_ahead`.
        Called by the thread that brings them home."""
        return self.norm.square_ahead(self._units[facts.index], all_came)

    def add_gradients(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.add_(source)` for contiguous tensors (n,) of one dtype, by the threads of the
        kernels. Called by the thread that brings gradients home."""
        self._kernels.add(target, source)

    def await_readers(self, facts: UnitFacts) -> None:
        """Return when no update reads the gradients of `unit` any more. The update runs without a
        place, because the caller brings none. Raises `EngineClosedError` if the update failed."""
        unit = self._units[facts.index]
        if self._store.resident.is_updating(unit.blocks[Kind.PARAM]):
            self._jobs.await_update(unit)
            self._store.latch.check()
        if unit in self._delayed:
            self._jobs.await_written(self._delayed[unit])
            self._store.latch.check()

    # A step

    def compare_parts(self, group: Group, facts: Facts) -> None:
        """Raise one `ConfigError` on all ranks of `group`, such as the stages of a pipeline, unless
        their optimizers have the same `facts`."""
        way_out = "give the optimizers of all ranks of norm_group the same settings"
        check_alike(Ranks(tensor=group), self._store.patience, facts, way_out)

    def settle(self, units: Sequence[Unit], step: ComparedStep | None = None) -> None:
        """Make the gradients of these units final on all ranks. Raises one `ConfigError` on all
        ranks, before anything is changed, if their `step` is by different optimizers.

        After a backward, all clip factors from before it are multiplied into the gradients. torch
        does that when it clips, and a unit whose gradients the backward changed did it then. So the
        division into units changes no number.
        """
        self._await_updates()
        self._store.latch.check_usable()
        self.listeners.before_settling()
        added = any(unit.gradients.ledger.state is GradientState.COLLECTING for unit in self._units)
        exchange = self._units[0].exchange
        if exchange is not None and units:
            mine = [unit.gradients.ledger.summary() for unit in units]
            values = [float(added), *(value for summary in mine for value in summary)]
            digest = 0 if step is None else step.digest
            found = exchange.sum_alike(values, OF_A_STEP, digest)
            if found is None:
                way_out = "give the optimizers of all ranks the same settings and parameters"
                facts = [] if step is None else step.facts()
                check_alike(exchange.ranks, self._store.patience, facts, way_out)
                raise ConfigError(f"the optimizers of the ranks differ; {way_out}")
            agreed = iter(found)
            added = next(agreed) > 0
            for unit, summary in zip(units, mine, strict=True):
                unit.gradients.settle([next(agreed) for _ in summary])
        else:
            for unit in units:
                unit.gradients.settle()
        for unit in units if added else ():
            if present := unit.gradients.ledger.present():
                unit.gradients.apply_clips(present)
        for unit in units:
            unit.listeners.grads.settled(unit.facts)

    def forget(self, shares: Sequence[UnitShare], set_to_none: bool = True) -> None:
        """Forget the gradients of `shares`. Without `set_to_none` they become zeros, which the next
        step uses. All ranks must call it."""
        if not set_to_none:
            self.settle([share.unit for share in shares])
        for unit, positions in shares:
            for position in positions:
                unit.data.drop_uncollected(position)
            (unit.gradients.forget if set_to_none else unit.gradients.zero)(positions)

    def skip(self, shares: Sequence[UnitShare]) -> None:
        """End a step without an update: roll back updates that began for it, and spend the
        gradients."""
        self._begin_step(())
        for unit, positions in shares:
            if any(map(unit.gradients.ledger.has, positions)):
                self.speculation.rollback(unit)
                unit.gradients.spend(positions)
        self._announce()
        self._end_step(as_guessed=False)
        self.skipped_steps += 1

    def post(self, step: Step) -> None:
        """Start the updates of `step`; returns at once. Its gradients are spent. The model sees
        delayed updates from now on.

        Updates that began before are kept or rolled back: see `Speculation.claim`. Raises
        `RuntimeError` before anything is changed if the parameters of one of its units are in use.
        """
        self._begin_step(step.shares)
        delayed = self.speculation.policy.delays(self.posted_steps)
        places = self._order.places(backwards=delayed)
        updates = sorted(step.updates, key=lambda update: places[update.unit])
        jobs = [self.speculation.claim(u, places[u.unit], step.number) for u in updates]
        kept = sum(job.update is not None for job in jobs)
        replaced = [] if delayed else [update.unit for update in updates]
        self._await_copies(replaced)
        with self._fixing():
            for unit in replaced:
                self._store.resident.begin_update(unit.blocks[Kind.PARAM], keep=True)
            step.spend()
            self._announce()
            if delayed:
                self._delayed = {job.unit: job for job in jobs}
            self._jobs.fix(jobs, updates, delayed)
        self._end_step(step.foreseen or step.unclipped, step.foreseen, jobs, kept)
        self.posted_steps += 1
        if self.speculation.policy.waits:
            self.drain()

    def run(self, step: Step, update: Callable[[Unit], None]) -> None:
        """Call `update` for each unit of `step`. It replaces the content of the unit.

        Raises `RuntimeError` before anything is changed if the parameters of one of them are in
        use. If `update` fails after the first unit, the content belongs to no step, and the engine
        cannot continue.
        """
        self._begin_step(step.shares)
        for number, (unit, _) in enumerate(step.shares):
            self.speculation.rollback(unit)
            try:
                update(unit)
            except BaseException as error:
                if number > 0:
                    self._store.latch.fail(error)
                raise
        step.spend()
        self._announce()
        self._end_step(as_guessed=True)
        self.posted_steps += 1

    def _begin_step(self, shares: Iterable[UnitShare]) -> None:
        """Refuse units that are in use, and land delayed updates."""
        units = [*(share.unit for share in shares), *self._delayed]
        used = [unit.facts.name for unit in units if unit.blocks[Kind.PARAM].copy.pins]
        if used:
            raise RuntimeError(
                f"{', '.join(used)} cannot be updated inside of a forward or of infinity.gathered"
            )
        self.land()
        self.listeners.before_step(units)

    def _announce(self) -> None:
        """A step has been fixed, and its updates have not started."""
        self.listeners.stepped(self.last)
        if self._store.activations is not None:
            self._store.activations.stepped()
        self._runtime.stepped()

    def _end_step(
        self,
        as_guessed: bool,
        foreseen: bool = False,
        jobs: Iterable[Job] = (),
        kept: int = 0,
    ) -> None:
        """A step has been fixed: report it, and learn from it."""
        self.last = StepRun(tuple(jobs), self.speculation.end_step(), kept)
        self._recorder.count("updates kept", self.last.kept)
        self._recorder.count("updates rolled back", self.last.rollbacks)
        held = as_guessed and not self.last.rollbacks
        self.speculation.policy.learn(
            self._pipeline.busy_since(), self._runtime.forward_since(), held, foreseen
        )
        self.norm.end_step()

    def _await_copies(self, units: Iterable[Unit]) -> None:
        """Return when no transfer to the places of `units` is under way. An interrupt here has
        changed nothing."""
        for unit in units:
            self._store.resident.await_idle(unit.blocks[Kind.PARAM])

    @contextmanager
    def _fixing(self) -> Iterator[None]:
        """Inside, updates are announced and then posted. After an exception in between, such as an
        interrupt, the next forward would wait for updates that never run. So the engine cannot
        continue."""
        try:
            yield
        except BaseException as error:
            self._store.latch.fail(error, "a step")
            raise

    # Waiting for updates

    def land(self) -> None:
        """Delayed updates become the content of their units, except of units in use. Returns when
        they are."""
        units = [unit for unit in self._delayed if not unit.blocks[Kind.PARAM].copy.pins]
        self._await_copies(units)
        with self._fixing():
            jobs = [self._delayed.pop(unit) for unit in units]
            for job in jobs:
                self._store.resident.begin_update(job.unit.blocks[Kind.PARAM], keep=True)
                job.unit.outdate()
            self._jobs.land(jobs)
        if jobs:
            self._await_updates()

    def drain(self) -> None:
        """Block until no update is under way, and roll back updates that began before their step.
        Then states may be read and written. Delayed updates become the content of every unit that
        is not in use.

        Raises `EngineClosedError` if an update failed, and while the engine sleeps.
        """
        self._store.latch.check_awake()
        self.rest()
        self.land()

    def rest(self) -> None:
        """Like `drain`, for a caller that reads nothing: delayed updates are written, but the model
        does not see them yet."""
        for unit in list(self.speculation.jobs):
            self.speculation.rollback(unit)
        for job in self._delayed.values():
            self._jobs.await_written(job)
        self._await_updates()

    def look(self) -> None:
        """Like `drain`, for a caller that reads parameters only. In a cycle it reads the values
        that the model uses until the next step, because the backward still needs them."""
        self._store.latch.check_awake()
        if self._runtime.training():
            self.rest()
        else:
            self.drain()

    def before_evaluation(self) -> None:
        """Like `look`, before an evaluation forward starts a cycle, if steps may be delayed."""
        if self.speculation.policy.ever_delays:
            # A forked child would wait for a thread that does not exist in it.
            self._store.latch.check_usable()
            self.look()

    def _await_updates(self) -> None:
        self._jobs.drain()
        self._store.latch.check()

    def close(self) -> None:
        """Finish posted updates and end the thread. May be called twice."""
        with ExitStack() as stack:  # each of these happens, even if another one fails
            stack.callback(self._pipeline.close)
            for unit in list(self.speculation.jobs):
                stack.callback(self.speculation.rollback, unit)
