"""Building an engine: `wrap`, and the steps that it takes.

[Note: all or nothing]
What can be refused is refused by the first steps, which change nothing. From then on every step
tells `Build.undo` how to undo it, before the next one begins. The last line of the last step is
covered, too. So after a failure, however late (exhausted device memory, Ctrl-C), the model, the
process and the directories are as they were. The data of the parameters stays alive until all is
done: see `infinity.modules.snapshot`.

[Note: units that are too large]
The compute device has to hold the units that are in use at once, and the next one. Where it does
not, the largest blocks become a unit for each of their modules. That changes no bits. Where this
is not enough, large weights become tiles (`modules/tiling`), of half the largest unit, of a quarter
and so on. That changes the rounding of input gradients. Neither goes below `LEAST_SPLIT`. What is
left is refused by `place`. All follows from the configuration, from shapes, and from what is free
on the rank that has least, so all ranks do alike.

Several ranks meet after the steps that may fail on one of them alone, so that all go on or none
(`together`).
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from infinity.closing import end_with
from infinity.config import Config
from infinity.device import ComputeDevice, profiler_ranges
from infinity.durability import Durability
from infinity.engine import ATTRIBUTE, Engine, Parts
from infinity.errors import ConfigError
from infinity.free_memory import Available, Budgets, choose, read_host
from infinity.modules.check import check_arguments, check_model
from infinity.modules.execution import Executions
from infinity.modules.frozen import all_frozen, find_stored
from infinity.modules.grouping import (
    find_nestings,
    find_owners,
    find_users,
    group_parameters,
    join_small,
    stored_as,
)
from infinity.modules.hooks import Hooks
from infinity.modules.init import replace_meta
from infinity.modules.load import FirstValues, Weights, fill_units, open_weights, persistent_buffers
from infinity.modules.matching import all_adapters
from infinity.modules.recompute import Recomputation
from infinity.modules.saved_tensors import SavedTensorOffloader
from infinity.modules.snapshot import Snapshot
from infinity.modules.tensors import Source
from infinity.modules.tiling import Tile, tile_largest, tile_places
from infinity.observe import Recorder
from infinity.optim.job import JobQueue
from infinity.optim.kernels import Kernels
from infinity.optim.lazy_gradient import LazyGradients
from infinity.optim.speculation import Policy
from infinity.optim.updater import StepListeners, Updater
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Machine, Placement, describe_choice
from infinity.placement.demand import Demand, buffer_bytes
from infinity.quantities import format_bytes
from infinity.rates import DTYPES, copies, formats_of, updates
from infinity.report import Reporter, StepMeter
from infinity.schedule.runtime import Runtime
from infinity.schedule.trace import Trace
from infinity.sharding.agreement import Agreement
from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.ranks import GivenGroup, check_reach, find_ranks
from infinity.sharding.tensor_parallel import with_tensor_parallel
from infinity.sharding.unit import Unit, UnitListeners
from infinity.sharding.watch import announce, ranks_of_this_node, together, told
from infinity.tiers.durable import LeftStates, Member, common_step
from infinity.tiers.resident import CopyListeners
from infinity.tiers.store import Store
from infinity.unwrapping import outgrown, unwrap

log = logging.getLogger("infinity")

Model = TypeVar("Model", bound=nn.Module)

Units = Sequence[type[nn.Module] | nn.Module] | None
"""What `infinity.wrap` takes as `units`."""

LEAST_SPLIT = 16 << 20
"""Bytes of a unit below which it is not made smaller: collectives and I/O get slow."""
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
    with ExitStack() as undo:
        build = _built(model, config, weights, units, group, seed, undo, resume)
        build.keep()
    return model


@contextmanager
def wrapping(model: Model, config: Config | None = None, units: Units = None) -> Iterator[Model]:
    """`wrap`, and a block that belongs to it: what fails in the block, on any rank, undoes all."""
    with ExitStack() as undo:
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
    before = outgrown(model)
    if before is not None:
        config = before.config if config is None else config
        values = unwrap(before, model)
    config = Config() if config is None else config
    build = Build(model, config, group, undo, resume)
    with nullcontext() if config.inference else all_adapters(model):
        with build.together() as room:
            build.check()
            room += build.room()
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
        with build.together():  # nobody waits in collectives for a rank that has no room
            build.place(numbers)
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
        self.durability: Durability | None = None
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
            unit.renew()
        self.undo.pop_all()
        if self.durability is not None:
            self.durability.begin()

    # What changes nothing

    def check(self) -> None:
        """Refuse what cannot be wrapped."""
        announce(self.ranks)
        self.device = ComputeDevice(self._config.tuning.device)
        self.undo.callback(self.device.close)
        check_reach(self.ranks, self.device.torch.type)
        for name, module in self._model.named_modules():
            if ATTRIBUTE in vars(module):
                raise ConfigError(
                    (
                        f"{name} is wrapped already, on its own: build it again, and wrap the "
                        "model that holds it alone"
                    )
                    if name
                    else (
                        "the model is wrapped already: use it as it is, or close its engine and "
                        "build the model again"
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

    def room(self) -> Sequence[float]:
        """The bytes of the compute device that the engine may take at most."""
        config, most = self._config, 1 << 62
        if isinstance(config.gpu_memory, int):
            return [config.gpu_memory]
        found = Available(read_host(), self.device.memory(), ranks_of_this_node(self.ranks))
        choice = choose(config.gpu_memory, config.cpu_memory, found, Budgets(most, 0))
        return [choice.budgets.gpu]

    def group(self, given: Units, values: FirstValues | None, room: float) -> None:
        """Find the units, and the modules that use each. Meta parameters get a stand-in.

        Where the units do not fit into `room` bytes of the compute device, and nobody has `given`
        them, they are made smaller. See [Note: units that are too large].
        """
        model = self._model
        owners = find_owners(model, given)
        self._snapshot = Snapshot(model)
        self.undo.callback(self._snapshot.restore)
        self._empty = replace_meta(model)
        self.ranks = with_tensor_parallel(self.ranks, model, self.device.torch)
        self._blocks = {
            module: name
            for name, module in owners.items()
            if module is not model and not isinstance(module, Tile)
        }
        self._form(owners, values, given is None)
        if given is None and self._least() > room:
            self._refine(owners, values, room)

    def _form(self, owners: dict[str, nn.Module], values: FirstValues | None, joins: bool) -> None:
        """Make units of the parameters of `owners`, and of all other parameters."""
        model = self._model
        with all_frozen(model) if self._config.inference else nullcontext():
            self._make_units(owners, values, joins)
        numbers = {id(p): unit.index for unit in self.units for p in unit.parameters}
        used = find_users(model, owners, numbers)
        self.users = {module: [self.units[i] for i in units] for module, units in used.items()}
        self._nestings = find_nestings(model, used)
        if self._config.recompute == "all":
            for block in self._blocks:  # hooked, also where its modules have the units
                self.users.setdefault(block, [])

    def _make_units(
        self, owners: dict[str, nn.Module], values: FirstValues | None, joins: bool
    ) -> None:
        model = self._model
        dtype, stored = DTYPES.get(self._config.precision), {}
        if self._config.parameters == "nvme" and self._config.tuning.read_in_place:
            stored = find_stored(model, self._empty, values, dtype)
        groups = group_parameters(model, owners, dtype, stored)
        if not groups:
            raise ConfigError("the model has no parameters to manage")
        if joins:
            groups = join_small(groups, owners)
        tiles = {number: places[0] for number, places in tile_places(model).items()}
        self.units = [
            Unit(index, g.name, g.parameters, g.dtype, self.ranks, g.stored, tiles)
            for index, g in enumerate(groups)
        ]

    def _refine(
        self, owners: dict[str, nn.Module], values: FirstValues | None, room: float
    ) -> None:
        """Make units smaller until they fit into `room`, or as small as they get by themselves."""
        model, dtype = self._model, DTYPES.get(self._config.precision)

        def nbytes(module: nn.Module) -> int:
            return sum(p.numel() * stored_as(p, dtype).itemsize for p in module.parameters())

        sizes = {name: nbytes(owner) for name, owner in owners.items()}
        split: set[str] = set()
        for size in sorted({n for n in sizes.values() if n > LEAST_SPLIT}, reverse=True):
            split = {name for name, n in sizes.items() if n >= size}
            self._form({n: o for n, o in owners.items() if n not in split}, values, True)
            if self._least() <= room:
                break
        if split:
            log.info(
                "%d blocks of more than %s are a unit for each of their modules, because %s of the "
                "compute device hold no more",
                len(split),
                format_bytes(LEAST_SPLIT),
                format_bytes(room),
            )
        most = max(unit.nbytes for unit in self.units)
        while self._least() > room and most > LEAST_SPLIT:
            most = max(most // 2, LEAST_SPLIT)
            self._snapshot.restore()
            found = tile_largest(model, most, lambda weight: stored_as(weight, dtype).itemsize)
            self._empty = replace_meta(model)
            owners = find_owners(model)
            self._form({n: o for n, o in owners.items() if n not in split}, values, True)
            if found.names and (self._least() <= room or most == LEAST_SPLIT):
                log.info("%s; gradients of their inputs round otherwise", found.describe(most))

    def _least(self) -> int:
        """The bytes of the compute device that the units need at least."""
        shapes = [unit.shape for unit in self.units]
        specs = tuple(spec for shape in shapes for spec in shape.blocks(self._config))
        machine = Machine(self.device.unified_memory, self.device.has_kernels)
        placement = Placement(self._config, Budgets(0, 0), machine, specs)
        exchanges = self.exchanges_gradients
        buffer = buffer_bytes(shapes, self._config, exchanges)
        return Demand(placement, self._nestings, buffer, exchanges).least().gpu

    def size(self) -> None:
        """Declare what every unit needs on which tier."""
        config = self._config
        self.kernels = Kernels(config.tuning.instruction_set, config.tuning.threads)
        self.undo.callback(self.kernels.close)
        self.store = Store(
            config,
            self.device,
            self._recorder,
            self.ranks.own,
            self._resume,
            self.ranks.member,
        )
        self.undo.callback(self.store.close)
        for unit in self.units:
            unit.declare(self.store, config)
        shapes = [unit.shape for unit in self.units]
        self._buffer_bytes = buffer_bytes(shapes, config, self.exchanges_gradients)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients go home beside the model, on the thread of an exchange."""
        return self.ranks.number > 1 or not self.device.unified_memory

    @property
    def demand(self) -> Demand:
        """What the units ask, within the budgets that are known so far."""
        return Demand(
            self.store.placement, self._nestings, self._buffer_bytes, self.exchanges_gradients
        )

    def find(self) -> None:
        """Look what an earlier run left in the directories, which are locked from now on."""
        self._left = self.store.find() if self.store.is_durable else None

    def agree(self) -> None:
        """Have all ranks go on from one committed step, or begin one run. Changes nothing that
        could be gone on from."""
        says = self._left, self.ranks.member, uuid.uuid4().hex, self._config.durability
        said = told(self.ranks, self._config.tuning.collective_timeout, says)
        left = {rank: LeftStates.of(each) for rank, (each, *_) in said.items() if each}
        first = min(left, default=min(said))
        wanted = said[first][3]
        other = next((rank for rank in sorted(said) if said[rank][3] != wanted), None)
        if other is not None:
            raise ConfigError(
                f"durability is {wanted!r} on rank {first} and {said[other][3]!r} on rank {other}; "
                "give all ranks the same Config"
            )
        members = {rank: Member(*member) for rank, (_, member, *_) in said.items()}
        self._members, self._life = sorted(said), said[min(said)][2]
        if left:
            self.store.take(common_step(left, members), self._life)

    def look(self) -> Sequence[float]:
        """Choose the budgets that the configuration leaves open, by what is free now."""
        config = self._config
        found = Available(read_host(), self.device.memory(), ranks_of_this_node(self.ranks))
        budgets, least = (config.gpu_memory, config.cpu_memory), self.demand.least()
        self._choice = choose(*budgets, found, least, keeps=config.inference)
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
            return ()
        for unit in self.units:
            if unit.trainable:
                elements[unit.dtype] += unit.layout.shard_numel
        if not elements:
            return ()
        dtype, count = elements.most_common(1)[0]
        links = copies(
            ComputeDevice(config.tuning.device),
            min(PROBE_BYTES, self.store.budgets.gpu),
            PROBE_ROUNDS,
        )
        few = min(PROBE_PARAMETERS, count)
        update = updates(
            formats_of(config, dtype),
            few,
            self.kernels.threads,
            PROBE_ROUNDS,
            algorithm=config.algorithm,
            isa=self.kernels.isa,
        )
        both_ways = median(links["host_to_device"]), median(links["device_to_host"])
        return Rates(*both_ways, self.store.measure_drives(), median(update))

    def place(self, numbers: Sequence[float]) -> None:
        """Decide where every block is at home, by the rates that the slowest rank measured.

        Raises `BudgetError` where a budget cannot work (I10).
        """
        demand, rates = self.demand, Rates(*numbers) if numbers else None
        placement = demand.resident(rates)
        if rates is not None:
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
                self.store.reserve("gpu", self._layout.reserve).tensor, self._buffers
            )

    def meet(self) -> None:
        """Make groups of our own with the other ranks, and let the units know all that moves their
        gradients."""
        if self.exchanges_gradients or self.ranks.groups():
            timeout = self._config.tuning.collective_timeout
            self.exchange = Exchange(self.ranks, self.device, self.store, self._recorder, timeout)
            self.undo.callback(self.exchange.close)
        for unit in self.units:
            unit.bind(self.device.torch, self.buffer, self.exchange)

    def take_over(self) -> None:
        """Have what commits, and check that what was committed fits."""
        if not self.store.is_durable:
            return
        agreement = None
        if self.ranks.groups():
            timeout, latch = self._config.tuning.collective_timeout, self.store.latch
            rank, last = self.ranks.member.rank, self.store.taken_record
            agreement = Agreement(rank, self._members, self._life, last, timeout, latch)
        self.durability = Durability(self.store, self.jobs, self.device, self._recorder, agreement)
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
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device.torch)

    def await_pinned(self) -> None:
        """Let all host memory be pinned for a GPU, which began with its allocation."""
        self.device.await_pinned()

    def hook(self) -> None:
        """Tie the model to its units: what runs it, what updates it, and who is told of what."""
        config, store, units = self._config, self.store, self.units
        durability = self.durability
        runtime = Runtime(
            store,
            units,
            self.trace,
            self._recorder,
            durability.before_forward if durability is not None else lambda: None,
        )
        if config.inference:  # the first forward, too, has units read ahead
            self.trace.expect("eval", [unit.index for unit in units])
        executions = Executions(runtime, self._recorder, self.buffer)
        meter = StepMeter(store, self.device)
        policy = Policy(self._update_mode(), config.tuning.delayed_after)
        told = StepListeners(executions.end_interrupted, meter.stepped)
        if durability is not None:
            told = durability.listeners(told)
        updater = Updater(
            store, units, self.jobs, self.kernels, runtime, policy, told, self._recorder
        )
        self.undo.callback(updater.close)
        if durability is not None:
            durability.connect(self._model, updater)
        offloader = SavedTensorOffloader(store.activations, self._model, self.device.torch)
        blocks = self._blocks if config.recompute == "all" else {}
        recomputation = Recomputation(blocks)
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
            config.inference,
        )
        self.undo.callback(hooks.close)
        grads = LazyGradients(units, updater, self.device.torch)
        for unit in units:
            unit.connect(UnitListeners(updater, hooks, grads))
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
            grads,
            reporter,
            durability,
            finalizer,
        )
        Engine(self._model, config, parts).attach(self._model)

    def _update_mode(self) -> str:
        """The configured mode; "auto" waits for updates where there is nothing to hide: no I/O, and
        one set of CPUs for all."""
        alone = self.store.io is None and self.device.unified_memory
        return (
            "plain"
            if self._config.tuning.update == "auto" and alone
            else self._config.tuning.update
        )
