"""The engine: assembles tiers, units, plan, optimizer and hooks around one model."""

from __future__ import annotations

import math
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from infinity.build import ATTRIBUTE, Build, Units, building
from infinity.checkpoint.loading import load
from infinity.checkpoint.saving import save
from infinity.checkpoint.state import State
from infinity.config import Config
from infinity.device import profiler_ranges
from infinity.errors import ConfigError, EngineClosedError
from infinity.modules.hooks import Hooks, Listeners
from infinity.modules.interleave import Interleaver
from infinity.modules.load import persistent_buffers
from infinity.modules.saved_tensors import SavedTensorOffloader
from infinity.observe import Recorder, Report
from infinity.optim.norm import clip, clip_factor
from infinity.optim.optimizer import Optimizer
from infinity.optim.speculation import Policy
from infinity.optim.step import Share
from infinity.optim.updater import StepListeners, Updater
from infinity.placement.spec import Kind
from infinity.schedule.planner import Traffic, UnitCost, predict
from infinity.schedule.runtime import Runtime
from infinity.sharding import collectives
from infinity.sharding.ranks import GivenGroup, whole_group
from infinity.sharding.tensor_parallel import local, whole
from infinity.sharding.unit import MOMENTS, Unit
from infinity.sharding.use import described
from infinity.tiers.activations import ActivationTraffic
from infinity.tiers.drives import ALIGNMENT
from infinity.tiers.store import Store

Model = TypeVar("Model", bound=nn.Module)

STATES = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
_OURS = f"{__name__.partition('.')[0]}."


class Engine:
    """The handle of one wrapped model, made by `infinity.wrap`. Used by the thread that trains; `close` may be called twice.

    A context manager; also closed when the model is collected or the interpreter ends. After `close` the parameters keep
    shape and dtype but have no data: save first.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        weights: str | Path | None = None,
        units: Units = None,
        group: GivenGroup = "auto",
        seed: int | None = None,
    ) -> None:
        self.config = config
        self.recorder = Recorder(profiler_ranges())
        self._model = weakref.ref(model)
        self._fetched_before = (0, 0)
        self._traffic_last = (0, 0)  # bytes read and written
        with building(model, config, self.recorder, weights, units, group, seed) as build:
            self._device, self._store, self._units, self._unit_of = build.device, build.store, build.units, build.unit_of
            self._buffer, self._exchange = build.buffer, build.exchange
            self._copied_last, self._copied_before = (0, 0), self._copied()  # bytes to the compute device and from it
            self._hook(model, build)

    def _hook(self, model: nn.Module, build: Build) -> None:
        """The last step of building: what runs the model and updates its units, and whoever calls that."""
        config = self.config
        self._runtime = Runtime(self._store, self._units, build.trace, self.recorder)
        policy, listeners = Policy(self._update_mode()), StepListeners(self._settled, self._stepped)
        delay = config.tuning.delayed_after if config.tuning.update == "delayed" else math.inf
        self._updater = Updater(
            self._store, self._units, build.jobs, build.kernels, self._runtime, policy, listeners, self.recorder, delay
        )
        build.undo.callback(self._updater.close)
        offloader = SavedTensorOffloader(self._store.activations, model, self._device.torch)
        told = Listeners(self._locate, self._before_evaluation, self._after_backward)
        self._hooks = Hooks(model, build.users, self._units, self._runtime, told, self.recorder, offloader)
        build.undo.callback(self._hooks.close)
        vars(model)[ATTRIBUTE] = self
        vars(model)["zero_grad"], vars(model)["no_sync"] = self.zero_grad, self.no_sync
        self._finalizer = weakref.finalize(model, _collected, os.getpid(), self._hooks, self._updater, self._store, self._units)
        build.undo.callback(self._finalizer.detach)

    def _update_mode(self) -> str:
        """The configured mode; "auto" waits for updates where there is nothing to hide: no I/O, and one set of CPUs for all."""
        alone = self._store.io is None and self._device.unified_memory
        return "plain" if self.config.tuning.update == "auto" and alone else self.config.tuning.update

    def _locate(self, address: int) -> tuple[Unit, int] | None:
        found = self._store.resident.block_at(address)
        return None if found is None else (self._units[found[0].unit], found[1])

    def _before_evaluation(self) -> None:
        if self.config.tuning.update == "delayed":
            self._store.latch.check_usable()  # a forked child would wait for a thread that it does not have
            self._updater.look()

    def _after_backward(self) -> None:
        if self._buffer is not None:
            self._buffer.flush()

    def _settled(self) -> None:
        self._store.latch.check_usable()
        self._hooks.settle()

    def _stepped(self) -> None:
        meter = self._store.meter
        fetched, before = (meter.read, meter.written), self._fetched_before
        updates = self._updater.last.meters  # of the step before: they ran between that step and this one
        read, written = sum(m.read for m in updates), sum(m.written for m in updates)
        self._traffic_last = fetched[0] - before[0] + read, fetched[1] - before[1] + written
        self._fetched_before = fetched
        copied, earlier = self._copied(), self._copied_before
        self._copied_last, self._copied_before = (copied[0] - earlier[0], copied[1] - earlier[1]), copied
        if self._store.activations is not None:
            self._store.activations.stepped()
        self._runtime.stepped()

    def _copied(self) -> tuple[int, int]:
        """Bytes copied to the compute device and from it so far."""
        return self._device.copied.written, self._device.copied.read

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero; also what `model.zero_grad()` does. That of a part of the model forgets."""
        self._updater.forget(self._all_shares(), set_to_none)

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> float:
        """Between backward and step: clip all gradients to the global L2 norm `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`: a NaN among them makes all of them NaN, an infinity makes the finite ones zeros.
        With `error_if_nonfinite` raises `NonFiniteError` instead, which names the parameter, before anything is changed.
        """
        shares = self._all_shares()
        self._updater.settle([share.unit for share in shares])
        norm = self._updater.norm.of(shares)
        if not math.isfinite(norm):
            self._updater.norm.take_nonfinite(norm, shares, self._updater.next_number, error_if_nonfinite)
        clip(shares, clip_factor(norm, max_norm))
        return norm

    def _all_shares(self) -> list[Share]:
        """Everything that may have a gradient."""
        return [Share(unit, tuple(range(len(unit.parameters)))) for unit in self._units if unit.trainable]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of what `parameter.grad` of the plain model would be, on the host: clipped, and until it is zeroed, also after a
        step. In fp32 where the loss was scaled, which is divided out; None when there is none. Whole, also of a DTensor. With
        several ranks every rank must call it."""
        unit = self._unit_of[id(parameter)]
        self._updater.settle([other for other in self._units if other.trainable])
        index = unit.position(parameter)
        if not unit.gradients.has(index):
            return None
        place, scale, clip = unit.layout.places[index], unit.gradients.loss_scale, unit.gradients.clip_of(index)
        found = unit.gather(Kind.GRAD)[place.offset : place.end].view(place.shape)
        gradient = whole(found, unit.parameters[index]).clone()
        gradient = gradient if scale == 1.0 else gradient.float() / scale
        return gradient if clip == 1.0 else gradient.mul_(clip)

    def interleaver(self) -> Interleaver:
        """What runs micro-batches together, once; `RuntimeError` inside of a forward, a backward, or what another one runs."""
        self._hooks.refuse_inside("infinity.accumulate")
        return Interleaver(self._hooks, self._runtime.trace, self._device, self._updater.scales)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`infinity.no_sync` for this engine."""
        exchange = self._exchange
        if exchange is None:
            yield
            return
        before, exchange.averages = exchange.averages, False
        try:
            yield
        finally:
            exchange.averages = before

    # Weights

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, by its first name, and every persistent buffer, on the host; one unit is held at a time.

        Tensors are plain and whole, those of DTensors too. Waits for pending updates. With several ranks every rank must iterate
        to the end.
        """
        self._updater.look()
        for unit in self._units:
            flat = unit.gather(Kind.PARAM)
            for name, parameter, place in zip(unit.names, unit.parameters, unit.layout.places, strict=True):
                yield name, whole(flat[place.offset : place.end].view(place.shape), parameter)
            del flat  # before the next one is made
        for name, buffer in persistent_buffers(self.model):
            yield name, local(buffer).detach().cpu()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What `model.state_dict()` of the plain model would be, on the host: needs as much memory as the weights.

        With several ranks every rank must call it, and each gets the whole, which any number of data and tensor parallel ranks
        can take: of DTensors, too, plain tensors of the whole shape, as `get_model_state_dict` of torch gives for FSDP2 with
        `full_state_dict=True`.
        """
        values = dict(self.weights())
        first = {id(p): name for unit in self._units for p, name in zip(unit.parameters, unit.names, strict=True)}
        result = {name: values[first[id(p)]] for name, p in self.model.named_parameters(remove_duplicate=False)}
        return result | {name: values[name] for name, _ in persistent_buffers(self.model)}

    # Checkpoints

    def save_checkpoint(
        self,
        directory: str | Path,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write weights, buffers, and all of `optimizer` (one or several; none: the weights alone) to `directory`.

        `load_checkpoint` gives `extra` back on every rank: dicts, lists, tuples, numbers, texts and tensors, for example the
        state of a scheduler or of random generators. Gradients are not saved. All ranks call it, each writes its part;
        `infinity.checkpoint.state` tells of format and memory. A checkpoint that is in `directory` is replaced when the new one
        is whole, and not before. With `Tuning.update="delayed"` the last update is seen from a save on, in this run and in those
        that load it: they go on with the same bits if they save at the same steps.

        Raises `CheckpointError` when it cannot be written; what was there is as it was, and training can go on.
        """
        save(self._state(optimizer), Path(directory).absolute(), extra or {})

    def load_checkpoint(self, directory: str | Path, optimizer: Optimizer | Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called: with any number of ranks, placement and format; returns what was `extra`
        (that of the first rank, when the number of ranks is another one; replicas get that of the first of them).

        Bits are the same, but for moments in a narrower format than they were saved in, which are rounded to nearest. Without
        `optimizer` the weights alone are loaded. Gradients are forgotten. All ranks call it.

        Raises `ConfigError` when another optimizer updates parameters in the same units: load all of these together.
        Raises `CheckpointError` when the checkpoint is missing, incomplete, mixed with files of another save, newer or of
        something else, before anything is changed. Every item is compared with its digest as it is read: when damage shows in
        the middle of the load, the engine cannot go on. No code of the checkpoint runs.
        """
        state = self._state(optimizer)
        shared = self._updater.owners.beside({u: None for each in state.optimizers for u in each.units}, state.optimizers)
        others = [name for _, names in shared for name in names]
        if others:
            raise ConfigError(
                f"another optimizer than those given updates {described(others)}, whose states lie together with theirs; save "
                "and load them together: load_checkpoint(directory, [first, second])"
            )
        extra = load(state, Path(directory).absolute())
        for share, _ in shared:  # of these the checkpoint may have some, of an optimizer that was not saved
            self._updater.owners.forget_states(
                share, [kind for kind in MOMENTS[share.unit.algorithm] if kind in share.unit.blocks]
            )
        return extra

    def _state(self, optimizer: Optimizer | Sequence[Optimizer]) -> State:
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not all(isinstance(each, Optimizer) and each.updater is self._updater for each in optimizers):
            raise ConfigError("a checkpoint takes optimizers of infinity for the parameters of this model")
        buffers = {name: local(buffer) for name, buffer in persistent_buffers(self.model)}
        return State(self._units, buffers, optimizers, self._rest, self._savers, self._updater, self._run)

    @cached_property
    def _run(self) -> str:
        return uuid.uuid4().hex

    @cached_property
    def _savers(self) -> collectives.Group:
        return whole_group(self._units[0].ranks)

    def _rest(self) -> None:
        """Return when nothing is under way, so that others may read and write states and join collectives."""
        self._updater.drain()
        if self._exchange is not None:
            self._exchange.rest()

    # Observation and the end

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        model = self._model()
        if model is None:
            raise EngineClosedError("the model of this engine is gone")
        return model

    @property
    def device(self) -> torch.device:
        """Where the model runs: inputs go there."""
        return self._device.torch

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, in the order of the modules."""
        return tuple(self._units)

    @property
    def io(self) -> Any:
        """The native I/O engine of the first directory (counters, fault injection); None when nothing is on NVMe."""
        return self._store.io

    @property
    def ios(self) -> tuple[Any, ...]:
        """The native I/O engines, one per directory; empty when nothing is on NVMe."""
        return self._store.ios

    def plan(self) -> Traffic:
        """The NVMe traffic of this rank in one optimizer step, in bytes, that the planner states for the recorded trace."""

        def on_nvme(unit: Unit, *kinds: Kind) -> int:
            return sum(unit.blocks[k].moved_bytes for k in kinds if k in unit.blocks)

        costs, cycles = [], max(self._runtime.accumulation, 1)
        for unit in self._units:
            states = on_nvme(unit, *STATES)
            param, gradient = on_nvme(unit, Kind.PARAM), on_nvme(unit, Kind.GRAD)
            slots = 0 if unit.blocks[Kind.PARAM].permanent else -(-unit.nbytes // ALIGNMENT)
            old = 0 if unit.is_rounded else param
            # A gradient is written by every backward, and read by all but the first, by each norm and by the update.
            read = states + gradient * (cycles + self._updater.norm.asked)
            costs.append(UnitCost(slots, param, old, read, states + param + gradient * cycles, unit.trains))
        cycle = self._runtime.trace.train_cycle()
        mode = self.config.tuning.update
        return predict(
            cycle.order, costs, self._store.copy_slots, cycles, cycle.held, waits=mode == "plain", delayed=mode == "delayed"
        )

    def memory(self) -> dict[str, int]:
        """Bytes in use now, per tier."""
        return self._store.used()

    def report(self) -> Report:
        """What the run did so far; waits for pending updates."""
        self._updater.rest()
        count = sum(p.numel() for unit in self._units for p in unit.parameters)
        planned = self.plan()
        waits = self.recorder.seconds("wait nvme")
        for_adam = sum(self.recorder.seconds("wait adam").values())
        model = sum(self.recorder.seconds("model").values())
        for_ranks = {}
        if self._exchange is not None:
            for_ranks = {lane: sum(self.recorder.seconds(lane).values()) for lane in ("wait collective", "collective")}
        config, counters = self.config, self.recorder.counters()
        cached, on_nvme = self._store.cached()
        activations = self._store.activations
        moved = ActivationTraffic() if activations is None else activations.last_step
        return Report(
            parameters=count,
            steps=self._updater.posted_steps,
            read_per_parameter=self._traffic_last[0] / count,
            written_per_parameter=self._traffic_last[1] / count,
            planned_read_per_parameter=planned.read / count,
            planned_written_per_parameter=planned.update_written / count,
            seconds={
                "compute": model - sum(waits.values()) - for_adam - for_ranks.get("wait collective", 0.0),
                "wait nvme": sum(waits.values()),
                "wait adam": for_adam,
                "adam": sum(self.recorder.seconds("adam").values()),
            }
            | for_ranks,
            updates_kept=counters.get("updates kept", 0),
            updates_rolled_back=counters.get("updates rolled back", 0),
            skipped_steps=self._updater.skipped_steps,
            copied_to_device=self._copied_last[0],
            copied_from_device=self._copied_last[1],
            gpu_direct=self._store.gpu_direct,
            updated=sum(map(_renewed, self._units)),
            updated_on_gpu=sum(_renewed(unit) for unit in self._units if unit.gpu_resident),
            activations_offloaded=moved.offloaded,
            activations_not_offloaded=moved.not_offloaded,
            activations_written=moved.written,
            activations_read=moved.read,
            activations_peak=0 if activations is None else activations.peak,
            waits=waits,
            cached=cached,
            on_nvme=on_nvme,
            gpu_resident=self._store.layout.placement.gpu_cache_bytes,
            peaks=self._store.peaks(),
            budgets={
                "gpu": config.gpu_memory,
                "cpu": config.cpu_memory,
                "nvme": config.tuning.nvme_memory or self._store.used()["nvme"],
            },
        )

    def drain(self) -> None:
        """Wait until no update is under way; raises `EngineClosedError` when one failed."""
        self._updater.rest()

    def close(self) -> None:
        """Finish pending updates, end every thread, remove hooks and files, give memory back. May be called twice."""
        detached = self._finalizer.detach()
        if detached is not None:
            model, _, parts, _ = detached
            try:
                _shut_down(*parts)
            finally:
                vars(model).pop(ATTRIBUTE, None)
                for name in ("zero_grad", "no_sync"):
                    vars(model).pop(name, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _collected(*parts: Any) -> None:
    """The finalizer of the model: shut down here, or on a thread of its own when this one is in the middle of our code, or of
    operators that somebody intercepts, as torch.compile does while it traces.

    A collection may start at any allocation: on a thread that the shutdown joins, or under a lock that it needs.
    """
    if os.getpid() != parts[0]:
        return
    frame: FrameType | None = sys._getframe(1)
    detached = bool(_get_current_dispatch_mode_stack())
    while frame is not None and not detached:
        detached, frame = frame.f_globals.get("__name__", "").startswith(_OURS), frame.f_back
    if detached:
        threading.Thread(target=_shut_down, args=parts, name="infinity-closing", daemon=False).start()
    else:
        _shut_down(*parts)


def _shut_down(process: int, hooks: Hooks, updater: Updater, store: Store, units: Sequence[Unit]) -> None:
    """Not a method, so that the finalizer of the model does not keep the engine, and with it nothing of the model, alive.

    Nothing in a forked child: the threads are not there, and files and locks are the parent's.
    """
    if os.getpid() != process:
        return
    with ExitStack() as stack:  # each of these happens, whatever the others meet
        stack.callback(store.close)
        for unit in units:
            stack.callback(unit.close)
        if units[0].exchange is not None:  # may be in the middle of a gather, into memory of the store
            stack.callback(units[0].exchange.close)
        stack.callback(hooks.close)
        stack.callback(updater.close)


def wrap(
    model: Model,
    config: Config,
    *,
    weights: str | Path | None = None,
    units: Units = None,
    group: GivenGroup = "auto",
    seed: int | None = None,
) -> Model:
    """Move the states of `model` to the tiers that `config` says, and train it from then on; returns the same module.

    Parameters built inside `infinity.init()` get their values from the safetensors in `weights` (a Hugging Face directory or
    one file), or from the modules' own initialisation under `seed`. `units` chooses classes or modules whose parameters move
    together (default: the repeated blocks, small ones with those beside them).

    `group` says which ranks train one model together. "auto" takes all ranks where `torch.distributed` is initialized, as DDP and
    FSDP2 do, and one rank elsewhere; None is one rank. A process group shards over its ranks. A `DeviceMesh` has one dimension,
    or two (replicate, shard): parts are then shared inside the second, and each has a replica along the first. Parameters may be
    DTensors on another dimension of the mesh (`parallelize_module`), placed as `Shard` or `Replicate`: each rank then shards what
    it has of them. Plain ones, and their gradients, must be the same on all tensor parallel ranks, as they are where these see
    the same activations.

    Several ranks may be given one `Config(nvme=...)`: each has files in `rank<N>` below it.

    All or nothing: whatever fails, and be it Ctrl-C, leaves the model as it was, and no thread or file. Raises `ConfigError` for
    a model, a configuration or weights that cannot work, `BudgetError`, `PathInUseError`, `NvmeError`, and `InfinityError` where
    another rank fails, which it names. What parameters held is freed at the end, so wrapping takes host memory for the model
    beside `cpu_memory`; a model that was built inside `infinity.init()` has no memory to keep.
    """
    Engine(model, config, weights, units, group, seed)
    return model


def engine(model: nn.Module) -> Engine:
    """The engine of a wrapped model; raises `ConfigError` for any other."""
    found = vars(model).get(ATTRIBUTE)
    if not isinstance(found, Engine):
        raise ConfigError("the model is not wrapped, or its engine was closed; call model = infinity.wrap(model, config)")
    return found


def _renewed(unit: Unit) -> int:
    """Bytes of masters and moments that a step renews."""
    return sum(unit.blocks[kind].nbytes for kind in STATES if kind in unit.blocks) if unit.trains else 0
