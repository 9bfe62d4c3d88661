"""Building an engine: `wrap`, and the steps that it takes.

[Note: all or nothing]
What can be refused is refused by the first steps, which change nothing. From then on every step
tells `Build.undo` how to undo it, before the next one begins. The last line of the last step is
covered, too. So after a failure, however late (exhausted device memory, Ctrl-C), the model, the
process and the directories are as they were. The data of the parameters stays alive until all is
done: see `infinity.weights.snapshot`.

Several ranks meet after the steps that may fail on one of them alone, so that all go on or none
(`together`).
"""

from __future__ import annotations

import logging
import math
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from infinity.activations.first_batch import FirstBatch
from infinity.activations.gauge import Gauge
from infinity.activations.partitions import Partitions, check_partitions
from infinity.activations.recompute import Recomputation
from infinity.activations.saved_tensors import SavedTensorOffloader
from infinity.activations.treatments import Treatments
from infinity.closing import end_with
from infinity.config import Config
from infinity.device import ComputeDevice, profiler_ranges
from infinity.engine import ATTRIBUTE, Engine, Parts
from infinity.errors import ConfigError
from infinity.free_memory import Available, choose, most_of_device, read_host
from infinity.measure.rates import DTYPES, copies, formats_of, updates
from infinity.modules.check import check_arguments, check_model
from infinity.modules.division import Division, divisions, first_fitting
from infinity.modules.execution import Executions
from infinity.modules.facade import move_buffers
from infinity.modules.given import GivenTensors
from infinity.modules.grouping import Units
from infinity.modules.hooks import Hooks
from infinity.modules.spans import Spans
from infinity.observe import Recorder
from infinity.optim.family import typical_update
from infinity.optim.job import JobQueue
from infinity.optim.kernels import Kernels
from infinity.optim.lazy_gradient import LazyGradients
from infinity.optim.speculation import Policy
from infinity.optim.step import StepRun
from infinity.optim.updater import StepListeners, Updater
from infinity.own_engines import beside_own_engines
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Machine
from infinity.placement.demand import Demand, UnitShape, demand_of, in_one_pool
from infinity.placement.stay import describe_choice
from infinity.placement.treatment import ActivationRoom
from infinity.report import Reporter, StepMeter
from infinity.schedule.runtime import Runtime
from infinity.schedule.trace import Trace
from infinity.sharding import collectives
from infinity.sharding.alike import Fact, Facts, check_alike, facts_of, settings_of
from infinity.sharding.exchange import Exchange
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.ranks import GivenGroup, check_reach, find_ranks
from infinity.sharding.tensor_parallel import with_tensor_parallel
from infinity.sharding.tiles import tile_places
from infinity.sharding.unit import Unit, UnitListeners, UnitServices, declare
from infinity.sharding.views import GatheredParameter
from infinity.sharding.watch import announce, ranks_of_this_node, together, told
from infinity.tier import GPU, TIERS
from infinity.tiers.originals import StoredBytes
from infinity.tiers.resident import CopyListeners
from infinity.tiers.store import Store
from infinity.tiles.tiling import InTiles, refuse_retained, relink
from infinity.unwrapping import KeptValues, forget_kept, unwrap
from infinity.version import __version__
from infinity.weights.frozen import StoredParameters, find_stored
from infinity.weights.init import replace_meta
from infinity.weights.load import FirstValues, Weights, fill_units, open_weights, persistent_buffers
from infinity.weights.matching import all_adapters
from infinity.weights.snapshot import Snapshot
from infinity.weights.taped import as_built, give_up
from infinity.weights.tensors import Source

if TYPE_CHECKING:
    from infinity.durable.session import Session
    from infinity.durable.store import DurableStore

log = logging.getLogger("infinity")

Model = TypeVar("Model", bound=nn.Module)

PROBE_BYTES = 64 << 20
"""What is copied to see how fast this machine is: more than caches hold."""
PROBE_PARAMETERS = 16 << 20
"""How many parameters are updated for that, at most."""
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
    """Move the states of `model` to the tiers that `config` says, and train it from then on;
    returns the same module.

    Without `config` the states are at home in host memory, in budgets that follow from what is
    free.

    Parameters get their values from `weights`: a safetensors file or one of `torch.save`, an index
    or a directory with them, the id of a model in the cache of the Hugging Face hub, or a state
    dict. Names and layouts are converted as transformers does, and what PEFT adds to names is left
    out. A parameter without a tensor there keeps its values. A warning lists those, and tensors
    that the model does not use.

    Without `weights`, parameters built inside `infinity.init()` get the values that their
    constructors wrote; with `seed`, those of constructors after `torch.manual_seed(seed)`.
    `units` chooses classes or modules whose parameters move together (default: the repeated blocks,
    small ones with those beside them).

    `group` says which ranks train one model together. "auto" takes all ranks where
    `torch.distributed` is initialized, as DDP and FSDP2 do, and one rank elsewhere; None is one
    rank. A process group shards over its ranks. A `DeviceMesh` has one dimension, or two
    (replicate, shard): parts are then shared inside the second, and each has a replica along the
    first. Parameters may be DTensors on another dimension of the mesh (`parallelize_module`),
    placed as `Shard` or `Replicate`: each rank then shards what it has of them. Plain ones, and
    their gradients, must be the same on all tensor parallel ranks, as they are where these see the
    same activations.

    A wrapped model that got parameters since is wrapped once more, or a model around it: adapters
    of PEFT are taken in so. `config` is then that of the engine before, unless it is given, and
    `infinity.engine(model)` is another one. Optimizers are made anew. Where this fails, parameters
    are plain ones, mapped from files.

    With `resume` and `Config(durability="step")` training goes on from the last step that an
    earlier run committed in the `nvme` directories: parameters, optimizer states and buffers are
    those, and optimizers that are made as they were then continue (`Engine.committed_step` says at
    which step). Where nothing was committed it begins as without `resume`. Several ranks go on from
    the last step that all of them have. `CheckpointError` or `ConfigError` on all ranks says where
    they have none.

    Several ranks may be given one `Config(nvme=...)`: each has files in `rank<N>` below it.

    All or nothing: whatever fails, and be it Ctrl-C, leaves the model as it was, and no thread or
    file. Raises `ConfigError` for a model, a configuration or weights that cannot work,
    `BudgetError`, `PathInUseError`, `NvmeError`, and `InfinityError` where another rank fails,
    which it names. What parameters held is freed at the end, so wrapping takes host memory for the
    model beside `cpu_memory`; a model that was built inside `infinity.init()` has no memory to
    keep.
    """
    with beside_own_engines(config), ExitStack() as undo:
        build = _built(model, config, weights, units, group, seed, undo, resume)
        build.keep()
    return model


@contextmanager
def wrapping(model: Model, config: Config | None = None, units: Units = None) -> Iterator[Model]:
    """`wrap`, and a block that belongs to it: what fails in the block, on any rank, undoes all."""
    with beside_own_engines(config), ExitStack() as undo:
        build = _built(model, config, None, units, "auto", None, undo)
        with build.together():
            yield model
        build.keep()


def _built(
    model: nn.Module,
    config: Config | None,
    weights: Source | Weights | None,
    units: Units,
    group: GivenGroup,
    seed: int | None,
    undo: ExitStack,
    resume: bool = False,
) -> Build:
    """All steps of `wrap`, which `undo` undoes."""
    check_arguments(model, config, units, seed)
    values: FirstValues | None = weights if isinstance(weights, Weights) else None
    before = _outgrown(model)
    if before is not None:
        config = before.config if config is None else config
        _take_apart(before)
        values = KeptValues.of(model, are_fresh=True)
    elif weights is None and not resume:
        values = KeptValues.of(model)
    config = Config() if config is None else config
    build = Build(model, config, group, undo, resume)
    origin = [("weights", "none" if values is weights is None else "given"), ("seed", seed)]
    with as_built(), nullcontext() if config.inference else all_adapters(model):
        with build.together() as room:
            build.check()
            room += build.room()
        with build.together():  # before anything that depends on what the ranks were given
            build.compare(origin)
        with build.together():
            if weights is not None and not isinstance(weights, Weights):
                values = open_weights(weights, model)
            build.group(units, values, room[0])
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
            build.allocate()
        with build.together():
            build.meet()
            build.take_over()
        with build.together():  # no rank gives up what another one may still refuse
            build.fill(values, seed)
            build.move_buffers()
            build.await_pinned()
            build.hook()
    return build


def _outgrown(model: nn.Module) -> Engine | None:
    """The one engine in `model`, if parameters came to what it wrapped."""
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
    """The parts of an engine on their way: each step adds some. The steps are called once, in the
    order in which they stand."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        group: GivenGroup,
        undo: ExitStack,
        resume: bool = False,
    ) -> None:
        self.undo = undo
        """What undoes all that was done so far, the last first."""
        self.ranks = find_ranks(group, config.stage)
        self.exchange: Exchange | None = None
        self.buffer: GradientBuffer | None = None
        self.durability: Session | None = None
        self._durable: DurableStore | None = None  # the store, with durability
        self._repeated: dict[nn.Module, str] = {}  # its blocks, by name
        self._blocks: dict[nn.Module, str] = {}  # those that are recomputed
        self._resume = resume
        self._model = model
        self._config = config
        self._recorder = Recorder(profiler_ranges())

    def together(self) -> AbstractContextManager[list[float]]:
        """A block that ends well on all ranks or on none."""
        return together(self.ranks, self._config.tuning.collective_timeout)

    def keep(self) -> None:
        """The last step: nothing is undone any more."""
        for unit in self.units:
            unit.on_device.renew()
        if self._config.deterministic:
            self.device.compute_deterministically()
        if not self._config.inference:  # which changes no master
            forget_kept(self._model, self.undo)
        give_up(self._snapshot.parameters, self.undo)
        self.undo.pop_all()
        if self.durability is not None:
            self.durability.begin()

    # What changes nothing

    def check(self) -> None:
        """Refuse what cannot be wrapped."""
        announce(self.ranks)
        self.device = ComputeDevice(self._config.tuning.device)
        self.undo.callback(self.device.close)
        if self._config.deterministic and (problem := self.device.nondeterminism()):
            raise ConfigError(f"deterministic=True: {problem}")
        check_reach(self.ranks, self.device.torch.type)
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
        dtype = DTYPES.get(self._config.precision)
        check_model(self._model, dtype, trains=not self._config.inference)
        self._check_durability()

    def _check_durability(self) -> None:
        if self._config.durability == "off" and self._resume:
            raise ConfigError(
                "resume=True goes on from committed states, which there are with "
                "Config(durability='step')"
            )
        if self._config.durability != "off" and not any(
            parameter.requires_grad for parameter in self._model.parameters()
        ):
            raise ConfigError(
                "durability commits what is trained, and all parameters are frozen; set "
                "durability='off'"
            )

    def compare(self, origin: Sequence[tuple[str, object]]) -> None:
        """Raise one `ConfigError` on all ranks unless these were given the same: versions,
        settings, parameters, and the `origin` of their values."""
        names = [("infinity", __version__), ("torch", torch.__version__)]
        self._given = [
            *facts_of([*names, ("the kind of device", self.device.torch.type)]),
            *facts_of([*origin, ("resume", self._resume)]),
            *settings_of(self._config),
            *self._parameter_facts(),
        ]
        self._check_alike(self._given)

    def _parameter_facts(self) -> list[Fact]:
        """Every parameter under each of its names, in the order of the modules."""
        facts, first = [], dict[int, str]()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            with torch._C.DisableTorchFunctionSubclass():
                shape, dtype = list(parameter.shape), str(parameter.dtype).removeprefix("torch.")
                trains = parameter.requires_grad and not self._config.inference
            words = f"{dtype} {shape}, {'trained' if trains else 'frozen'}"
            tied = first.setdefault(id(parameter), name)
            words += f", the same as {tied}" * (tied != name)
            facts.append(Fact(f"parameter {name}", words))
        return facts

    def compare_places(self) -> None:
        """Like `compare`, of units and where their blocks are at home; among tensor parallel ranks,
        too."""
        facts = list(self._given)
        for unit in self._facts:
            kind = str(unit.dtype).removeprefix("torch.")
            facts.append(Fact(f"unit {unit.name}", f"{unit.layout.numel} elements of {kind}"))
            facts += [Fact(f"the unit of {name}", unit.name) for name in unit.names]
        for block in self._layout.blocks:
            spec = block.spec
            facts.append(Fact(f"the place of {spec.name}", f"{spec.tier}, {spec.format.name}"))
        facts += facts_of([("bytes on the device", self._layout.rooms.device)])
        self._check_alike(facts)

    def _check_alike(self, facts: Facts) -> None:
        timeout = self._config.tuning.collective_timeout
        way_out = (
            "give infinity.wrap the same model and Config on all ranks of `group`, or "
            "group=None where each rank trains a model of its own"
        )
        check_alike(self.ranks, timeout, facts, way_out)

    def room(self) -> Sequence[float]:
        """The bytes of the compute device that the engine may take at most."""
        config, ranks = self._config, ranks_of_this_node(self.ranks)
        self._available = Available(read_host(), self.device.memory(), ranks)
        self._config = in_one_pool(config, self._available)
        return [most_of_device(config.gpu_memory, config.cpu_memory, self._available)]

    def group(self, given: Units, values: FirstValues | None, room: float) -> None:
        """Find the units, and the modules that use each. Meta parameters get a stand-in.

        Where the units do not fit into `room` bytes of the compute device, and nobody has `given`
        them, they are made smaller (`modules/division`).
        """
        model, config = self._model, self._config
        self._snapshot = Snapshot(model)
        self.undo.callback(self._snapshot.restore)
        self._empty = replace_meta(model)
        self.ranks = with_tensor_parallel(self.ranks, model, self.device.torch)
        if config.tuning.partition_activations:
            check_partitions(model)
        stored = StoredParameters({}, Counter())

        def find() -> Mapping[int, StoredBytes]:
            nonlocal stored
            if TIERS[config.parameters].survives and config.tuning.read_in_place:
                stored = find_stored(model, self._empty, values, DTYPES.get(config.precision))
            return stored.places

        @contextmanager
        def afresh() -> Iterator[None]:
            self._snapshot.restore()
            yield
            self._empty = replace_meta(model)

        found = divisions(model, config, given, find, afresh)
        division = first_fitting(found, lambda each: self._asked(each).least().gpu, room)
        stored.tell()
        self._tiled = [] if division.tiled is None else division.tiled.names
        for line in division.describe(room):
            log.info("%s", line)
        self._demand = self._asked(division)
        tiles = {number: places[0] for number, places in tile_places(model).items()}
        shapes = self._shapes(division)
        self._facts = [
            UnitFacts.of(
                shape,
                group.parameters,
                group.stored,
                tiles,
                self.ranks,
                self.device.torch,
                config,
            )
            for shape, group in zip(shapes, division.groups, strict=True)
        ]
        self._users = dict(division.users)
        self._repeated = division.blocks
        if config.recompute != "off":
            self._blocks = division.blocks
            for block in self._blocks:  # hooked, also where its modules have the units
                self._users.setdefault(block, [])

    def _asked(self, division: Division) -> Demand:
        """What units of `division` ask of the memory of this rank, with no budgets yet."""
        machine = Machine(self.device.unified_memory, self.device.has_kernels)
        exchanges, shapes = self.exchanges_gradients, self._shapes(division)
        return demand_of(shapes, division.nestings, self._config, machine, exchanges)

    def _shapes(self, division: Division) -> list[UnitShape]:
        return division.shapes(collectives.size(self.ranks.shards), self.ranks.rank)

    def size(self) -> None:
        """Declare what every unit needs on which tier."""
        config = self._config
        self.kernels = Kernels(config.tuning.instruction_set, config.tuning.threads)
        self.undo.callback(self.kernels.close)
        self.store = self._new_store()
        self.undo.callback(self.store.close)
        self._declared = [declare(facts, self.store, config) for facts in self._facts]

    def _new_store(self) -> Store:
        parts = self._config, self.device, self._recorder, self.ranks.own
        if self._config.durability == "off":
            return Store(*parts)
        from infinity.durable.states import DurableStates  # not at the top: others need none of it
        from infinity.durable.store import DurableStore

        self._durable = DurableStore(*parts, DurableStates(self._resume, self.ranks.member))
        return self._durable

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients go home beside the model, on the thread of an exchange."""
        return self.ranks.number > 1 or not self.device.unified_memory

    @property
    def demand(self) -> Demand:
        """What the units ask, within the budgets that are known so far."""
        return self._demand.within(self.store.budgets)

    def find(self) -> None:
        """Look what an earlier run left in the directories, which are locked from now on."""
        self._left = None if self._durable is None else self._durable.find()

    def agree(self) -> None:
        """Have all ranks go on from one committed step, or begin one run. Changes nothing that
        could be gone on from."""
        says = self._left, self.ranks.member, uuid.uuid4().hex
        said = told(self.ranks, self._config.tuning.collective_timeout, says)
        self._members, self._life = sorted(said), said[min(said)][2]
        if self._durable is not None:
            self._durable.agree(said, self._life)

    def look(self) -> Sequence[float]:
        """Choose the budgets that the configuration leaves open, by what is free now."""
        config, ranks = self._config, ranks_of_this_node(self.ranks)  # all have met by now
        self._available = self._available._replace(ranks=ranks)
        budgets, least = (config.gpu_memory, config.cpu_memory), self.demand.least()
        self._choice = choose(*budgets, self._available, least, keeps=config.inference)
        return self._choice.budgets

    def budget(self, least: Sequence[float]) -> None:
        """Take the budgets that the ranks agree on, the `least` of theirs."""
        self._choice = self._choice.at_most(least)
        self.store.budgets = self._choice.budgets
        if not self._choice.is_given:
            log.info("%s", self._choice.describe())

    def measure(self) -> Sequence[float]:
        """`Rates` of this machine, in the format that most parameters have, where placement depends
        on that; else nothing.

        Nothing, too, where there are no kernels for any parameter.
        """
        config, elements = self._config, Counter[torch.dtype]()
        if not self.demand.needs_rates():
            return self._links() if self._moves_what_blocks_save else ()
        for unit in self._facts:
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
            self.kernels.threads,
            PROBE_ROUNDS,
            update=typical_update(config.algorithm),
            isa=self.kernels.isa,
        )
        return links._replace(updates=median(update))

    def _links(self) -> Rates:
        """`Rates` without updates."""
        links = copies(
            ComputeDevice(self._config.tuning.device),
            min(PROBE_BYTES, self.store.budgets.gpu),
            PROBE_ROUNDS,
        )
        both_ways = median(links["host_to_device"]), median(links["device_to_host"])
        return Rates(*both_ways, self.store.measure_drives(), math.inf)

    @property
    def _moves_what_blocks_save(self) -> bool:
        """Whether what a block saves may be offloaded or recomputed."""
        return self._config.recompute == "auto" and self.store.placement.moves_activations()

    def place(self, numbers: Sequence[float]) -> None:
        """Decide where every block is at home, by the rates that the slowest rank measured.

        Raises `BudgetError` where a budget cannot work (I10).
        """
        demand, rates = self.demand, Rates(*numbers) if numbers else None
        self._rates = rates
        placement = demand.resident(rates if demand.needs_rates() else None)
        if rates is not None and demand.needs_rates():
            log.info(describe_choice(placement, rates))
        self._layout, self._buffers = demand.layout(placement)
        self._check_directories()

    def _check_directories(self) -> None:
        """Without a directory nothing of ours can lie on NVMe."""
        stored = [block.spec for block in self._layout.blocks if block.reserved_bytes]
        if stored and not self._config.nvme:
            raise ConfigError(
                f"{stored[0].name} lies in no safetensors file as it is used, and has to be "
                "stored: set nvme=[...], or parameters='cpu'"
            )

    # What has to be undone

    def allocate(self) -> None:
        """Take all memory and disk space."""
        self.trace = Trace()
        self.jobs = JobQueue(self.store)
        trace = self.trace  # not this object, which knows the model
        listeners = CopyListeners(trace.next_use, self.jobs.placed, lambda: trace.clock)
        self.store.open(self._layout, listeners)
        if self._layout.reserve:
            self.buffer = GradientBuffer(
                self.store.reserve(GPU, self._layout.reserve).tensor, self._buffers
            )

    def meet(self) -> None:
        """Make groups of our own with the other ranks, and the units, which have all that they need
        now but listeners."""
        if self.exchanges_gradients or self.ranks.groups():
            timeout = self._config.tuning.collective_timeout
            self.exchange = Exchange(self.ranks, self.device, self.store, self._recorder, timeout)
            self.undo.callback(self.exchange.close)
        self._listeners = UnitListeners()
        services = UnitServices(self.store, self.ranks, self._listeners, self.buffer, self.exchange)
        self.units = [
            Unit(facts, blocks, services)
            for facts, blocks in zip(self._facts, self._declared, strict=True)
        ]
        self.users = {
            module: [self.units[number] for number in numbers]
            for module, numbers in self._users.items()
        }

    def take_over(self) -> None:
        """Have what commits, and check that what was committed fits."""
        if self._durable is None:
            return
        from infinity.durable.agreement import Agreement  # not at the top: see `_new_store`
        from infinity.durable.session import Session

        store, agreement = self._durable, None
        if self.ranks.groups():
            timeout, latch = self._config.tuning.collective_timeout, store.latch
            rank, last = self.ranks.member.rank, store.states.taken
            agreement = Agreement(rank, self._members, self._life, last, timeout, latch)
        self.durability = Session(store, self.jobs, self.device, self._recorder, agreement)
        self.undo.callback(self.durability.give_up)
        self.durability.check(self._model)

    def fill(self, values: FirstValues | None, seed: int | None) -> None:
        """Give the units their first values: from `values`, from the model, or from the modules'
        own initialisation."""
        model = self._model
        if values is not None:
            self._snapshot.keep_contents(
                buffer for name, buffer in persistent_buffers(model) if name in values
            )
        elif self._empty:
            self._snapshot.keep_contents(model.buffers())
            self.undo.callback(torch.set_rng_state, torch.get_rng_state())
        kept = self.durability is not None and self.durability.restore_blocks()
        fill_units(model, self.units, self._empty, values, seed, kept)

    def move_buffers(self) -> None:
        """Bring all buffers to the compute device."""
        move_buffers(self._model, self.device.torch, DTYPES.get(self._config.precision))

    def await_pinned(self) -> None:
        """Let all host memory be pinned for a GPU, which began with its allocation."""
        self.device.await_pinned()

    def hook(self) -> None:
        """Tie the model to its units: what runs it, what updates it, and who is told of what."""
        config, store, units = self._config, self.store, self.units
        durability = self.durability
        treatments: Treatments | None = None

        def before_forward() -> None:
            if durability is not None:
                durability.before_forward()
            if treatments is not None:
                treatments.before_forward()

        def stepped(before: StepRun) -> None:
            meter.stepped(before)
            if treatments is not None:
                treatments.step_ended()

        runtime = Runtime(store, units, self.trace, self._recorder, before_forward)
        if config.inference:  # the first forward, too, has units read ahead
            self.trace.expect("eval", [unit.index for unit in units])
        tiled = weakref.WeakSet(m for m in self._model.modules() if isinstance(m, InTiles))
        given = GivenTensors()

        def check() -> None:
            refuse_retained(tiled)
            given.check()

        spans = None
        if self.ranks.number > 1 and not config.inference:
            spans = Spans(self.users, runtime, self.buffer)
        executions = Executions(runtime, self._recorder, self.buffer, check, spans)
        partitions = self._partitions(executions)
        meter = StepMeter(store, self.device, partitions)
        policy = Policy(self._update_mode(), config.tuning.delayed_after)
        told = StepListeners(executions.end_interrupted, stepped)
        if durability is not None:
            told = durability.listeners(told)
        updater = Updater(
            store, units, self.jobs, self.kernels, runtime, policy, told, self._recorder
        )
        self.undo.callback(updater.close)
        if durability is not None:
            durability.connect(self._model, updater)
        offloader = SavedTensorOffloader(
            store.activations, self._model, self.device.torch, partitions
        )
        if config.recompute == "auto" and not config.inference:
            gauge = Gauge(
                self.device, offloader, lambda: executions.backwards, lambda: runtime.waited
            )
            names = [*self._blocks.values()]
            treatments = Treatments(names, gauge, self._activation_room, self.exchange)
        recomputation = Recomputation(self._blocks, treatments)
        hooks = Hooks(
            self._model,
            self.users,
            units,
            runtime,
            executions,
            updater,
            self._recorder,
            offloader,
            recomputation,
            FirstBatch(self._model, self._repeated, config, self._away, self.device),
            config.inference,
        )
        self.undo.callback(hooks.close)
        grads = LazyGradients(units, updater, self.device.torch)
        self._listeners.connect(updater, hooks, grads)
        relink(tiled)
        finalizer = end_with(self._model, durability, hooks, updater, self.buffer, store, units)
        self.undo.callback(finalizer.detach)
        reporter = Reporter(
            config,
            self._choice,
            store,
            units,
            runtime,
            updater,
            self.exchange,
            meter,
            self._recorder,
            recomputation,
            self._tiled,
        )
        parts = Parts(
            self._recorder,
            self.device,
            store,
            units,
            self.exchange,
            runtime,
            executions,
            updater,
            hooks,
            given,
            grads,
            reporter,
            durability,
            finalizer,
            self._tiled,
        )
        Engine(self._model, config, parts).attach(self._model)

    @property
    def _away(self) -> float:
        """Bytes of saved activations that may leave the compute device."""
        if self.store.activations is None:
            return 0.0
        on_nvme = TIERS[self._config.activations].needs_staging
        return math.inf if on_nvme else float(self._layout.rooms.saved)

    @property
    def _activation_room(self) -> ActivationRoom:
        """Where what blocks save may be: what `gpu_memory` leaves, and what "auto" leaves beside
        it; and the tier of activations, as fast as the slowest of what its bytes pass."""
        device = self._layout.left_bytes + self._choice.for_activations
        if self._rates is None or self.store.activations is None:
            return ActivationRoom(device)
        on_nvme = TIERS[self._config.activations].needs_staging
        slowest = self._rates.nvme if on_nvme else math.inf
        up, down = min(self._rates.upload, slowest), min(self._rates.download, slowest)
        return ActivationRoom(device, self._away, down, up)

    def _partitions(self, executions: Executions) -> Partitions | None:
        """What divides saved tensors among tensor parallel ranks, where that is wanted."""
        if not self._config.tuning.partition_activations or self.ranks.tensor is None:
            return None
        if self.exchange is None:
            raise RuntimeError("there are tensor parallel ranks, and no exchange")
        names = {module: name for name, module in self._model.named_modules()}
        return Partitions(
            self.exchange,
            self.store.activations,
            self.store.latch,
            self._recorder,
            names,
            executions.running,
            lambda: executions.backwards,
        )

    def _update_mode(self) -> str:
        """The configured mode; "auto" waits for updates where there is nothing to hide: no I/O, and
        one set of CPUs for all."""
        alone = not self.store.nvme.engines and self.device.unified_memory
        return (
            "plain"
            if self._config.tuning.update == "auto" and alone
            else self._config.tuning.update
        )
