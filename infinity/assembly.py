"""The last steps of `wrap`: an engine is put together from units that have a home. Each tells
`undo` how to undo it; see [Note: all or nothing] in `infinity.build`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.activations.first_batch import FirstBatch
from infinity.activations.gauge import ForwardClock, Gauge
from infinity.activations.partitions import Partitions, RankParts
from infinity.activations.recompute import Recomputation
from infinity.activations.saved_tensors import SavedTensorOffloader
from infinity.activations.treatments import Treatments
from infinity.closing import Shutdown, end_with
from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.engine import Engine, Parts
from infinity.free_memory import Choice
from infinity.measure.rates import DTYPES
from infinity.modules.execution import Executions
from infinity.modules.facade import move_buffers
from infinity.modules.given import GivenTensors
from infinity.modules.hooks import ActivationParts, HookedModel, Hooks, RunningParts
from infinity.modules.spans import Spans
from infinity.observe import Recorder
from infinity.optim.job_queue import JobQueue
from infinity.optim.kernels import Kernels
from infinity.optim.lazy_gradient import LazyGradients
from infinity.optim.pipeline import UpdateServices
from infinity.optim.speculation import Policy
from infinity.optim.updater import StepListeners, Updater
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Layout
from infinity.placement.spec import Kind
from infinity.placement.treatment import ActivationRoom
from infinity.report import Reporter, StepMeter
from infinity.schedule.runtime import Runtime
from infinity.schedule.trace import Trace
from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.listeners import UnitListeners
from infinity.sharding.ranks import Ranks
from infinity.sharding.services import UnitServices
from infinity.sharding.unit import Unit
from infinity.sharding.watch import together
from infinity.tier import TIERS
from infinity.tiers.block import Block
from infinity.tiers.store import Store
from infinity.tiles.tiling import InTiles, refuse_retained, relink
from infinity.unit_search import FoundUnits
from infinity.unwrapping import forget_kept
from infinity.weights.load import FirstValues, fill_units, persistent_buffers
from infinity.weights.snapshot import Snapshot
from infinity.weights.taped import give_up

if TYPE_CHECKING:
    from infinity.durable.resumption import Resumption
    from infinity.durable.session import Session


@dataclass(frozen=True)
class Basis:
    """The results of the first steps of `wrap`, which check, decide and allocate."""

    model: nn.Module
    config: Config
    undo: ExitStack
    snapshot: Snapshot
    ranks: Ranks
    device: ComputeDevice
    recorder: Recorder
    kernels: Kernels
    store: Store
    found: FoundUnits
    declared: Sequence[Mapping[Kind, Block]]
    """The blocks of each unit."""
    choice: Choice
    rates: Rates | None
    """The rates of the slowest rank; None if nothing depends on them."""
    layout: Layout
    trace: Trace
    jobs: JobQueue
    buffer: GradientBuffer | None

    def together(self) -> AbstractContextManager[list[float]]:
        """A block that ends well on all ranks or on none."""
        return together(self.ranks, self.config.tuning.collective_timeout)


class Occasion:
    """Calls its listeners, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[Callable[..., None]] = []

    def add(self, listener: Callable[..., None]) -> None:
        """Call `listener` from now on."""
        self._listeners.append(listener)

    def __call__(self, *values: Any) -> None:
        for listener in self._listeners:
            listener(*values)


class Assembly:
    """Units that have memory, on their way to an engine. The steps are called once, in the order in
    which they stand."""

    def __init__(self, basis: Basis) -> None:
        """Make groups of our own with the other ranks, and the units, which have all that they need
        now but listeners."""
        self.basis = basis
        ranks, store, found = basis.ranks, basis.store, basis.found
        self._exchange: Exchange | None = None
        if found.demand.exchanges or ranks.groups():
            timeout = basis.config.tuning.collective_timeout
            self._exchange = Exchange(ranks, basis.device, store, basis.recorder, timeout)
            basis.undo.callback(self._exchange.close)
        self._listeners = UnitListeners()
        buffer = basis.buffer
        services = UnitServices(store, ranks, self._listeners, buffer, self._exchange)
        self._units = [
            Unit(facts, blocks, services)
            for facts, blocks in zip(found.facts, basis.declared, strict=True)
        ]
        self._users = {
            module: [self._units[number] for number in numbers]
            for module, numbers in found.users.items()
        }
        for block in self._recomputed:  # hooked, also where its modules have the units
            self._users.setdefault(block, [])
        self._durability: Session | None = None

    def take_over(self, resumption: Resumption | None) -> None:
        """Begin what commits, and check that the states of `resumption` fit."""
        if resumption is not None:
            basis = self.basis
            session = resumption.session(basis.jobs, basis.device, basis.recorder)
            self._durability = session
            basis.undo.callback(session.give_up)
            session.check(basis.model)

    def fill(self, values: FirstValues | None, seed: int | None) -> None:
        """Give the units their first values: from `values`, from the model, or from the modules'
        own initialization."""
        model, snapshot, empty = self.basis.model, self.basis.snapshot, self.basis.found.empty
        if values is not None:
            snapshot.keep_contents(
                buffer for name, buffer in persistent_buffers(model) if name in values
            )
        elif empty:
            snapshot.keep_contents(model.buffers())
            self.basis.undo.callback(torch.set_rng_state, torch.get_rng_state())
        kept = self._durability is not None and self._durability.restore_blocks()
        fill_units(model, self._units, empty, values, seed, kept)

    def move_buffers(self) -> None:
        """Bring all buffers to the compute device."""
        config, device = self.basis.config, self.basis.device
        move_buffers(self.basis.model, device.torch, DTYPES.get(config.precision))

    def hook(self) -> None:
        """Tie the model to its units, when all host memory is pinned for a GPU: the code that runs
        the model, the updater, the hooks, and the engine."""
        self.basis.device.await_pinned()
        forwards, steps, given = Occasion(), Occasion(), GivenTensors()
        tiled = weakref.WeakSet(m for m in self.basis.model.modules() if isinstance(m, InTiles))
        executions, runtime = self._run(forwards, tiled, given)
        divided, partitions = self._divided_storages(), None
        if divided is not None:
            names = {module: name for name, module in self.basis.model.named_modules()}
            partitions = Partitions(
                divided, names, executions.running, lambda: executions.backwards
            )
        meter = StepMeter(self.basis.store, self.basis.device, divided)
        steps.add(meter.stepped)
        updater = self._update(runtime, executions, steps)
        offloader = SavedTensorOffloader(
            self.basis.store.activations, self.basis.model, self.basis.device.torch, partitions
        )
        treatments = self._treatments(offloader, executions, runtime)
        if treatments is not None:
            forwards.add(treatments.before_forward)
            steps.add(lambda _: treatments.step_ended())
        recomputation = Recomputation(self._recomputed, treatments)
        hooks = self._hooks(runtime, executions, updater, offloader, recomputation)
        grads = LazyGradients(self._units, updater, self.basis.device.torch)
        self._listeners.connect(updater, hooks, grads)
        relink(tiled)
        shutdown = Shutdown(
            durability=self._durability,
            hooks=hooks,
            updater=updater,
            buffer=self.basis.buffer,
            store=self.basis.store,
            units=self._units,
        )
        finalizer = end_with(self.basis.model, shutdown)
        self.basis.undo.callback(finalizer.detach)
        reporter = Reporter(
            config=self.basis.config,
            choice=self.basis.choice,
            store=self.basis.store,
            units=self._units,
            runtime=runtime,
            updater=updater,
            exchange=self._exchange,
            meter=meter,
            recorder=self.basis.recorder,
            recomputation=recomputation,
            tiled=tuple(self.basis.found.tiled),
        )
        parts = Parts(
            recorder=self.basis.recorder,
            device=self.basis.device,
            store=self.basis.store,
            units=self._units,
            exchange=self._exchange,
            runtime=runtime,
            executions=executions,
            updater=updater,
            hooks=hooks,
            given=given,
            grads=grads,
            reporter=reporter,
            durability=self._durability,
            finalizer=finalizer,
            tiled=self.basis.found.tiled,
        )
        Engine(self.basis.model, self.basis.config, parts).attach(self.basis.model)

    def keep(self) -> None:
        """The last step: nothing is undone any more."""
        basis = self.basis
        for unit in self._units:
            unit.on_device.renew()
        if basis.config.deterministic:
            basis.device.compute_deterministically()
        if not basis.config.inference:  # which changes no master
            forget_kept(basis.model, basis.undo)
        give_up(basis.snapshot.parameters, basis.undo)
        basis.undo.pop_all()
        if self._durability is not None:
            self._durability.begin()

    # The parts of `hook`

    def _run(
        self, forwards: Occasion, tiled: weakref.WeakSet[InTiles], given: GivenTensors
    ) -> tuple[Executions, Runtime]:
        """The code that runs the model; `forwards` is called before each training forward."""
        basis, trace, buffer = self.basis, self.basis.trace, self.basis.buffer
        if self._durability is not None:
            forwards.add(self._durability.before_forward)
        runtime = Runtime(basis.store, self._units, trace, basis.recorder, forwards)
        if basis.config.inference:  # the first forward, too, has units read ahead
            trace.expect("eval", [unit.facts.index for unit in self._units])

        def check() -> None:
            refuse_retained(tiled)
            given.check()

        spans = None
        if basis.ranks.number > 1 and not basis.config.inference:
            spans = Spans(self._users, runtime, buffer)
        return Executions(runtime, basis.recorder, buffer, check, spans), runtime

    def _divided_storages(self) -> RankParts | None:
        """This rank's parts of saved tensors that tensor parallel ranks divide, if they do."""
        basis, exchange = self.basis, self._exchange
        wanted = basis.config.tuning.partition_activations and basis.ranks.tensor is not None
        if not wanted or exchange is None:
            return None
        store = basis.store
        return RankParts(exchange, store.activations, store.latch, basis.recorder)

    def _update(self, runtime: Runtime, executions: Executions, steps: Occasion) -> Updater:
        """The updater; `steps` is called when a step has been fixed."""
        basis, tuning = self.basis, self.basis.config.tuning
        # No I/O, and one set of CPUs for all: then nothing can hide an update.
        alone = not basis.store.nvme.engines and basis.device.unified_memory
        mode = "plain" if tuning.update == "auto" and alone else tuning.update
        listeners = StepListeners(executions.end_interrupted, steps)
        if self._durability is not None:
            listeners = self._durability.listeners(listeners)
        services = UpdateServices(basis.store, basis.jobs, basis.kernels, basis.recorder)
        policy = Policy(mode, tuning.delayed_after)
        updater = Updater(services, self._units, runtime, policy, listeners)
        basis.undo.callback(updater.close)
        if self._durability is not None:
            self._durability.connect(basis.model, updater)
        return updater

    @property
    def _recomputed(self) -> dict[nn.Module, str]:
        """The blocks that may be recomputed, with their names."""
        return {} if self.basis.config.recompute == "off" else self.basis.found.blocks

    def _treatments(
        self, offloader: SavedTensorOffloader, executions: Executions, runtime: Runtime
    ) -> Treatments | None:
        """The treatments of blocks with `recompute="auto"`."""
        config = self.basis.config
        if config.recompute != "auto" or config.inference:
            return None
        clock = ForwardClock(self.basis.device, lambda: runtime.waited)
        gauge = Gauge(clock, offloader, lambda: executions.backwards)
        names = [*self._recomputed.values()]
        return Treatments(names, gauge, self._activation_room, self._exchange)

    def _hooks(
        self,
        runtime: Runtime,
        executions: Executions,
        updater: Updater,
        offloader: SavedTensorOffloader,
        recomputation: Recomputation,
    ) -> Hooks:
        basis = self.basis
        first_batch = FirstBatch(
            basis.model, basis.found.blocks, basis.config, self._away, basis.device
        )
        hooks = Hooks(
            HookedModel(basis.model, self._users, self._units, basis.config.inference),
            RunningParts(runtime, executions, updater, basis.recorder),
            ActivationParts(offloader, recomputation, first_batch),
        )
        basis.undo.callback(hooks.close)
        return hooks

    @property
    def _away(self) -> float:
        """Bytes of saved activations that may leave the compute device."""
        if self.basis.store.activations is None:
            return 0.0
        if TIERS[self.basis.config.activations].is_drive:
            return math.inf
        return float(self.basis.layout.rooms.saved)

    @property
    def _activation_room(self) -> ActivationRoom:
        """The room for the tensors that blocks save: the rest of `gpu_memory`, and the bytes that
        "auto" leaves beside it; and the tier of activations, at the rate of its slowest link."""
        rates = self.basis.rates
        device = self.basis.layout.left_bytes + self.basis.choice.for_activations
        if rates is None or self.basis.store.activations is None:
            return ActivationRoom(device)
        slowest = rates.nvme if TIERS[self.basis.config.activations].is_drive else math.inf
        up, down = min(rates.upload, slowest), min(rates.download, slowest)
        return ActivationRoom(device, self._away, down, up)
