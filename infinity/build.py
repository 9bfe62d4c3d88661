"""Building an engine: `wrap`, and the steps that it takes.

[Note: all or nothing]
The first steps refuse what cannot work, and change nothing. Every later step adds its undoing to
one `ExitStack`, before the next step begins. That includes the last line of the last step. So after
a failure, however late (exhausted device memory, Ctrl-C), the model, the process and the
directories are unchanged. The data of the parameters stays alive until the end: see
`infinity.weights.snapshot`.

Several ranks meet after each step that may fail on one of them alone, so that all of them continue
or none (`together`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from infinity.activations.partitions import check_partitions
from infinity.assembly import Assembly, Basis
from infinity.config import Config
from infinity.device import ComputeDevice, profiler_ranges
from infinity.engine import ATTRIBUTE, Engine
from infinity.errors import ConfigError
from infinity.free_memory import Available, choose, most_of_device, read_host
from infinity.measure.rates import DTYPES, copies, formats_of, updates
from infinity.modules.check import check_arguments, check_model
from infinity.modules.grouping import Units
from infinity.observe import Recorder
from infinity.optim.family import typical_update
from infinity.optim.job_queue import JobQueue
from infinity.optim.kernels import Kernels
from infinity.own_engines import beside_own_engines
from infinity.placement.calibrate import Rates
from infinity.placement.decide import describe_choice
from infinity.placement.demand import Demand, in_one_pool
from infinity.schedule.trace import Trace
from infinity.sharding.alike import Fact, Facts, check_alike, facts_of, settings_of
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.ranks import GivenGroup, check_reach, find_ranks
from infinity.sharding.tensor_parallel import with_tensor_parallel
from infinity.sharding.unit import declare
from infinity.sharding.views import GatheredParameter
from infinity.sharding.watch import announce, ranks_of_this_node, together
from infinity.tiers.resident import CopyListeners
from infinity.tiers.store import Store
from infinity.unit_search import UnitSearch
from infinity.unwrapping import KeptValues, unwrap
from infinity.version import __version__
from infinity.weights.init import replace_meta
from infinity.weights.load import FirstValues, Weights, open_weights
from infinity.weights.matching import all_adapters
from infinity.weights.snapshot import Snapshot
from infinity.weights.taped import as_built
from infinity.weights.tensors import Source

if TYPE_CHECKING:
    from infinity.durable.resumption import Resumption
    from infinity.durable.store import DurableStore

log = logging.getLogger("infinity")

Model = TypeVar("Model", bound=nn.Module)

PROBE_BYTES = 64 << 20
"""Bytes that are copied to measure this machine: more than caches hold."""
PROBE_PARAMETERS = 16 << 20
"""The most parameters that are updated to measure this machine."""
PROBE_ROUNDS = 3


def wrap(
    model: Model,
    config: Config | None = None,
    *,
    weights: Source | Weights | None = None,
    units: Units = None,
    group: GivenGroup = "auto",
    seed: int | None = None,
    resume: bool = False,
) -> Model:
    """Move the states of `model` to the tiers of `config`, which train it from then on; returns the
    same module.

    Without `config` the states are at home in host memory, with budgets that depend on the free
    memory.

    Parameters get their values from `weights`: a file of safetensors or `torch.save`, an index or a
    directory with such files, the id of a model in the cache of the Hugging Face hub, or a state
    dict. Names and layouts are converted as in transformers, without the parts of names that PEFT
    adds. A parameter without a tensor there keeps its values. A warning lists these parameters, and
    tensors that the model does not use.

    Without `weights`, parameters built inside `infinity.init()` get the values that their
    constructors wrote; with `seed`, the values of constructors after `torch.manual_seed(seed)`.
    `units` chooses classes or modules whose parameters move together (default: the repeated blocks,
    small ones with their neighbors).

    `group` contains the ranks that train one model together. "auto" takes all ranks if
    `torch.distributed` is initialized, as DDP and FSDP2 do, and otherwise one rank. None is one
    rank. A process group shards over its ranks. A `DeviceMesh` has one dimension, or two
    (replicate, shard): shards lie along the second, and replicas along the first. Parameters may be
    DTensors on another dimension of the mesh (`parallelize_module`), placed as `Shard` or
    `Replicate`: each rank then shards its part of them. Plain parameters and their gradients must
    be equal on all tensor parallel ranks, which they are if these ranks get the same activations.

    A wrapped model that got parameters, such as adapters of PEFT, is wrapped once more, or a model
    around it. The default of `config` is then the config of the engine before, and
    `infinity.engine(model)` is a new engine. Make new optimizers. If this fails, parameters are
    plain ones, mapped from files.

    With `resume` and `Config(durability="step")` training continues from the last step that an
    earlier run committed in the `nvme` directories: with its parameters, optimizer states and
    buffers. Optimizers that are made in the same way continue, too (`Engine.committed_step` has the
    step). Without a committed step it begins as without `resume`. Several ranks continue from the
    last step that all of them have. If there is none, all ranks raise `CheckpointError` or
    `ConfigError`.

    Several ranks may have one `Config(nvme=...)`: each has files in `rank<N>` below it.

    `wrap` is atomic: after a failure, also by Ctrl-C, the model is unchanged, and there is no
    thread or file. Raises `ConfigError` for a model, a configuration or weights that cannot work,
    `BudgetError`, `PathInUseError`, `NvmeError`, and `InfinityError` if another rank fails, which
    it names. The old data of parameters is freed at the end, so wrapping needs host memory for the
    model beside `cpu_memory`. A model that was built inside `infinity.init()` has no such data.
    """
    request = Request(model, config, weights, units, group, seed, resume)
    with beside_own_engines(config), ExitStack() as undo:
        _assembled(request, undo).keep()
    return model


@contextmanager
def wrapping(model: Model, config: Config | None = None, units: Units = None) -> Iterator[Model]:
    """`wrap`, and a block that belongs to it: a failure in the block, on any rank, undoes all."""
    with beside_own_engines(config), ExitStack() as undo:
        assembly = _assembled(Request(model, config, units=units), undo)
        with assembly.basis.together():
            yield model
        assembly.keep()


@dataclass(frozen=True)
class Request:
    """The arguments of `wrap`."""

    model: nn.Module
    config: Config | None = None
    weights: Source | Weights | None = None
    units: Units = None
    group: GivenGroup = "auto"
    seed: int | None = None
    resume: bool = False


def _assembled(request: Request, undo: ExitStack) -> Assembly:
    """All steps of `wrap` but the last, which `undo` undoes."""
    model, weights, seed = request.model, request.weights, request.seed
    check_arguments(model, request.config, request.units, seed)
    values: FirstValues | None = weights if isinstance(weights, Weights) else None
    before = _outgrown(model)
    if before is not None:
        if request.config is None:
            request = replace(request, config=before.config)
        _take_apart(before)
        values = KeptValues.of(model, are_fresh=True)
    elif weights is None and not request.resume:
        values = KeptValues.of(model)
    build = Build(request, undo)
    origin = [("weights", "none" if values is weights is None else "given"), ("seed", seed)]
    with as_built(), nullcontext() if build.config.inference else all_adapters(model):
        with build.together() as room:
            build.check()
            room += build.room()
        with build.together():  # before steps that depend on the arguments
            build.compare(origin)
        with build.together():
            if weights is not None and not isinstance(weights, Weights):
                values = open_weights(weights, model)
            build.group(values, room[0])
            build.size()
        with build.together() as least:
            build.find()
            least += build.look()
        with build.together() as numbers:
            build.agree()
            build.budget(least)
            numbers += build.measure()
        with build.together():  # no rank waits in collectives for one that has no room
            build.place(numbers)
        with build.together():  # before the first collective
            build.compare_places()
        with build.together():
            basis = build.allocate()
        with build.together():
            assembly = Assembly(basis)
            assembly.take_over(build.resumption)
        with build.together():  # no rank drops data that another rank's failure restores
            assembly.fill(values, seed)
            assembly.move_buffers()
            assembly.hook()
    return assembly


def _outgrown(model: nn.Module) -> Engine | None:
    """The only engine in `model`, if its model got parameters after `wrap`."""
    engines = [vars(m)[ATTRIBUTE] for m in model.modules() if ATTRIBUTE in vars(m)]
    managed = (ShardedParameter, GatheredParameter)
    if len(engines) != 1:
        return None
    has_others = any(not isinstance(p, managed) for p in engines[0].model.parameters())
    return engines[0] if has_others else None


def _take_apart(engine: Engine) -> None:
    """`unwrap` an engine whose model got parameters. See [Note: adapters after wrap] in
    `unwrapping`."""
    if engine.config.durability != "off":
        raise ConfigError(
            "the model got parameters after wrap, and the states that are committed are those of "
            "before; with durability add adapters before wrap"
        )
    engine.drain()
    unwrap(engine.model, engine.units, engine.close, "infinity.wrap")


class Build:
    """The first steps of `wrap`: they check, decide and allocate. The steps are called once, in the
    order in which they stand. One class, because each of them needs results of those before."""

    def __init__(self, request: Request, undo: ExitStack) -> None:
        self.config = Config() if request.config is None else request.config
        """The settings; `room` may change the budgets."""
        self.resumption: Resumption | None = None
        """The committed states, with durability."""
        self._durable: DurableStore | None = None  # the store, with durability
        self._request = request
        self._model = request.model
        self._undo = undo  # undoes all that was done so far, the last first
        self._ranks = find_ranks(request.group, self.config.stage)
        self._recorder = Recorder(profiler_ranges())

    def together(self) -> AbstractContextManager[list[float]]:
        """A block that ends well on all ranks or on none."""
        return together(self._ranks, self.config.tuning.collective_timeout)

    def check(self) -> None:
        """Refuse a model or configuration that cannot be wrapped."""
        announce(self._ranks)
        self._device = ComputeDevice(self.config.tuning.device)
        self._undo.callback(self._device.close)
        if self.config.deterministic and (problem := self._device.nondeterminism()):
            raise ConfigError(f"deterministic=True: {problem}")
        check_reach(self._ranks, self._device.torch.type)
        for name, module in self._model.named_modules():
            if ATTRIBUTE in vars(module):
                raise ConfigError(
                    (
                        f"{name} is wrapped already, on its own: call "
                        "infinity.engine(...).unwrap() of it, and wrap the model that holds it "
                        "alone"
                    )
                    if name
                    else (
                        "the model is wrapped already: use it as it is, or call "
                        "infinity.engine(model).unwrap() before"
                    )
                )
        dtype = DTYPES.get(self.config.precision)
        check_model(self._model, dtype, trains=not self.config.inference)
        _check_durability(self._model, self.config, self._request.resume)

    def compare(self, origin: Sequence[tuple[str, object]]) -> None:
        """Raise one `ConfigError` on all ranks unless these were given the same: versions,
        settings, parameters, and the `origin` of their values."""
        names = [("infinity", __version__), ("torch", torch.__version__)]
        self._given = [
            *facts_of([*names, ("the kind of device", self._device.torch.type)]),
            *facts_of([*origin, ("resume", self._request.resume)]),
            *settings_of(self.config),
            *_parameter_facts(self._model, trains=not self.config.inference),
        ]
        self._check_alike(self._given)

    def compare_places(self) -> None:
        """Like `compare`, of units and the homes of their blocks; among tensor parallel ranks,
        too."""
        facts = list(self._given)
        for unit in self._found.facts:
            kind = str(unit.dtype).removeprefix("torch.")
            facts.append(Fact(f"unit {unit.name}", f"{unit.layout.numel} elements of {kind}"))
            facts += [Fact(f"the unit of {name}", unit.name) for name in unit.names]
        for block in self._layout.blocks:
            spec = block.spec
            facts.append(Fact(f"the place of {spec.name}", f"{spec.tier}, {spec.format.name}"))
        facts += facts_of([("bytes on the device", self._layout.rooms.device)])
        self._check_alike(facts)

    def _check_alike(self, facts: Facts) -> None:
        timeout = self.config.tuning.collective_timeout
        way_out = (
            "give infinity.wrap the same model and Config on all ranks of `group`, or "
            "group=None where each rank trains a model of its own"
        )
        check_alike(self._ranks, timeout, facts, way_out)

    def room(self) -> Sequence[float]:
        """The bytes of the compute device that the engine may take at most."""
        config, ranks = self.config, ranks_of_this_node(self._ranks)
        self._available = Available(read_host(), self._device.memory(), ranks)
        self.config = in_one_pool(config, self._available)
        return [most_of_device(config.gpu_memory, config.cpu_memory, self._available)]

    def group(self, values: FirstValues | None, room: float) -> None:
        """Find the units, and the modules that use each, within `room` bytes of the compute device.
        Meta parameters get a placeholder."""
        model = self._model
        self._snapshot = Snapshot(model)
        self._undo.callback(self._snapshot.restore)
        empty = replace_meta(model)
        self._ranks = with_tensor_parallel(self._ranks, model, self._device.torch)
        if self.config.tuning.partition_activations:
            check_partitions(model)
        search = UnitSearch(model, self.config, self._device, self._ranks, self._snapshot, empty)
        self._found = search.find(self._request.units, values, room)

    def size(self) -> None:
        """Declare what every unit needs on which tier."""
        config = self.config
        self._kernels = Kernels(config.tuning.instruction_set, config.tuning.threads)
        self._undo.callback(self._kernels.close)
        self._store = self._new_store()
        self._undo.callback(self._store.close)
        self._declared = [declare(facts, self._store, config) for facts in self._found.facts]

    def _new_store(self) -> Store:
        parts = self.config, self._device, self._recorder, self._ranks.own
        if self.config.durability == "off":
            return Store(*parts)
        from infinity.durable.states import DurableStates  # not at the top: others need none of it
        from infinity.durable.store import DurableStore

        self._durable = DurableStore(
            *parts, DurableStates(self._request.resume, self._ranks.member)
        )
        return self._durable

    @property
    def _demand(self) -> Demand:
        """The memory that the units ask for, within the budgets that are known so far."""
        return self._found.demand.within(self._store.budgets)

    def find(self) -> None:
        """Find the states of an earlier run in the directories, which are locked from now on."""
        if self._durable is not None:
            from infinity.durable.resumption import Resumption  # not at the top: see `_new_store`

            timeout = self.config.tuning.collective_timeout
            self.resumption = Resumption(self._durable, self._ranks, timeout)

    def agree(self) -> None:
        """Have all ranks continue from one committed step, or begin one run."""
        if self.resumption is not None:
            self.resumption.agree()

    def look(self) -> Sequence[float]:
        """Choose the budgets that the configuration leaves open, by the free memory."""
        config, ranks = self.config, ranks_of_this_node(self._ranks)  # the ranks have met by now
        self._available = self._available._replace(ranks=ranks)
        budgets, least = (config.gpu_memory, config.cpu_memory), self._demand.least()
        self._choice = choose(*budgets, self._available, least, keeps=config.inference)
        return self._choice.budgets

    def budget(self, least: Sequence[float]) -> None:
        """Take the budgets that the ranks agree on, the `least` of theirs."""
        self._choice = self._choice.at_most(least)
        self._store.budgets = self._choice.budgets
        if not self._choice.is_given:
            log.info("%s", self._choice.describe())

    def measure(self) -> Sequence[float]:
        """`Rates` of this machine, in the format of most parameters, if placement depends on them;
        else nothing.

        Nothing, too, if no parameter has a kernel.
        """
        config, elements = self.config, Counter[torch.dtype]()
        if not self._demand.needs_rates():  # but activations may be offloaded or recomputed
            moves = config.recompute == "auto" and self._store.placement.moves_activations()
            return self._links() if moves else ()
        for unit in self._found.facts:
            if unit.trainable:
                elements[unit.dtype] += unit.layout.shard_numel
        if not elements:
            return ()
        dtype, count = elements.most_common(1)[0]
        links = self._links()
        few = min(PROBE_PARAMETERS, count)
        update = updates(
            formats_of(config, dtype),
            few,
            self._kernels.threads,
            PROBE_ROUNDS,
            update=typical_update(config.algorithm),
            isa=self._kernels.isa,
        )
        return links._replace(updates=median(update))

    def _links(self) -> Rates:
        """`Rates` without updates."""
        links = copies(
            ComputeDevice(self.config.tuning.device),
            min(PROBE_BYTES, self._store.budgets.gpu),
            PROBE_ROUNDS,
        )
        both_ways = median(links["host_to_device"]), median(links["device_to_host"])
        return Rates(*both_ways, self._store.measure_drives(), math.inf)

    def place(self, numbers: Sequence[float]) -> None:
        """Decide the home of every block, by the rates of the slowest rank.

        Raises `BudgetError` if a budget cannot work (I10).
        """
        demand, rates = self._demand, Rates(*numbers) if numbers else None
        self._rates = rates
        placement = demand.resident(rates if demand.needs_rates() else None)
        if rates is not None and demand.needs_rates():
            log.info(describe_choice(placement, rates))
        self._layout, self._buffers = demand.layout(placement)
        self._check_directories()

    def _check_directories(self) -> None:
        """Raise `ConfigError` if a block must be stored on NVMe and there is no directory."""
        stored = [block.spec for block in self._layout.blocks if block.reserved_bytes]
        if stored and not self.config.nvme:
            raise ConfigError(
                f"{stored[0].name} lies in no safetensors file as it is used, and has to be "
                "stored: set nvme=[...], or parameters='cpu'"
            )

    def allocate(self) -> Basis:
        """Take all memory and disk space."""
        trace, jobs, buffer = Trace(), JobQueue(self._store), None
        listeners = CopyListeners(trace.next_use, jobs.placed, lambda: trace.clock)
        self._store.open(self._layout, listeners)
        if self._layout.reserve:
            reserved = self._store.reserve("gpu", self._layout.reserve)
            buffer = GradientBuffer(reserved.tensor, self._buffers)
        return Basis(
            model=self._model,
            config=self.config,
            undo=self._undo,
            snapshot=self._snapshot,
            ranks=self._ranks,
            device=self._device,
            recorder=self._recorder,
            kernels=self._kernels,
            store=self._store,
            found=self._found,
            declared=self._declared,
            choice=self._choice,
            rates=self._rates,
            layout=self._layout,
            trace=trace,
            jobs=jobs,
            buffer=buffer,
        )


def _check_durability(model: nn.Module, config: Config, resume: bool) -> None:
    if config.durability == "off" and resume:
        raise ConfigError(
            "resume=True goes on from committed states, which there are with "
            "Config(durability='step')"
        )
    if config.durability != "off" and not any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        raise ConfigError(
            "durability commits what is trained, and all parameters are frozen; set "
            "durability='off'"
        )


def _parameter_facts(model: nn.Module, trains: bool) -> list[Fact]:
    """Every parameter under each of its names, in the order of the modules."""
    facts, first = [], dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = list(parameter.shape), str(parameter.dtype).removeprefix("torch.")
            is_trained = trains and parameter.requires_grad
        words = f"{dtype} {shape}, {'trained' if is_trained else 'frozen'}"
        tied = first.setdefault(id(parameter), name)
        words += f", the same as {tied}" * (tied != name)
        facts.append(Fact(f"parameter {name}", words))
    return facts
