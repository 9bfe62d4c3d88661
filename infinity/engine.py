"""The engine: the handle that a user holds of one wrapped model. `infinity.assembly` makes it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from infinity.checkpoint.checkpoints import Checkpoints
from infinity.checkpoint.inert import pack_item, read_item
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.closing import shut_down
from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.directories.mapped import mapped
from infinity.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    in_words,
    sentence,
)
from infinity.modules.execution import Executions
from infinity.modules.facade import Facade
from infinity.modules.given import GivenTensors
from infinity.modules.hooks import Hooks
from infinity.modules.interleave import Interleaver
from infinity.modules.merging import Merges
from infinity.observe import Recorder
from infinity.optim.lazy_gradient import LazyGradients
from infinity.optim.norm import clip, clip_factor
from infinity.optim.optimizer import Optimizer
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.report import Report, Reporter
from infinity.schedule.planner import Traffic
from infinity.schedule.runtime import Runtime
from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_ledger import GradientState
from infinity.sharding.parameter import TRAINED
from infinity.sharding.tensor_parallel import local, whole
from infinity.sharding.tiles import JoinedTiles, TiledWeight, named_wholes, pieces_of
from infinity.sharding.unit import Unit
from infinity.sharding.use import described
from infinity.sharding.watch import together
from infinity.tiers.store import Store
from infinity.unwrapping import rejoin, unwrap
from infinity.weights.load import buffer_names, persistent_buffers

if TYPE_CHECKING:
    from infinity.durable.session import Session

ATTRIBUTE = "_infinity_engine"
"""The attribute of a wrapped model that holds its engine."""
_OUTER = "_infinity_outer"


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, made by `infinity.assembly`."""

    recorder: Recorder
    device: ComputeDevice
    store: Store
    units: Sequence[Unit]
    exchange: Exchange | None
    runtime: Runtime
    executions: Executions
    updater: Updater
    hooks: Hooks
    given: GivenTensors
    grads: LazyGradients
    reporter: Reporter
    durability: Session | None
    finalizer: weakref.finalize[Any, Any]
    tiled: list[str]
    """The names of the weights that `wrap` has put into tiles."""


class Engine:
    """The handle of one wrapped model, made by `infinity.wrap`. Used by the thread that trains;
    `close` may be called twice. One class, because it is the only object that a user holds.

    A context manager; also closed when the model is collected or the interpreter ends. After
    `close` the parameters keep shape and dtype but have no data: save first.
    """

    open: ClassVar[weakref.WeakSet[Engine]] = weakref.WeakSet()
    """The engines of this process that were not closed, also where their models are out of reach;
    `infinity.own_engines` closes them."""

    def __init__(self, model: nn.Module, config: Config, parts: Parts) -> None:
        self.config = config
        self.recorder = parts.recorder
        self._model = weakref.ref(model)
        self._device = parts.device
        self._store = parts.store
        self._units = parts.units
        self._exchange = parts.exchange
        self._runtime = parts.runtime
        self._executions = parts.executions
        self._updater = parts.updater
        self._hooks = parts.hooks
        self._given = parts.given
        self._grads = parts.grads
        self._finalizer = parts.finalizer
        self._reporter = parts.reporter
        self._durability = parts.durability
        self._tiled = parts.tiled
        self._checkpoints = Checkpoints(
            self._units,
            self._updater,
            self._exchange,
            config.tuning.io_engine,
            config.tuning.collective_timeout,
        )

    def attach(self, model: nn.Module) -> None:
        """`model` has this engine from now on, until `close`."""
        Engine.open.add(self)
        vars(model)[ATTRIBUTE] = self
        vars(model)["zero_grad"] = self.zero_grad
        vars(model)["no_sync"] = self.no_sync
        check = self._store.latch.check_awake
        Facade.attach(model, self._given, self._state_directory, check)
        Merges.attach(model, self._hand_over)

    def _hand_over(self, inner: nn.Module) -> None:
        """`inner`, a part of the model, is used without the rest: it gets this engine, too, and
        keeps it alive."""
        if inner is not self.model:
            vars(inner)[ATTRIBUTE] = self
            vars(inner)[_OUTER] = self.model

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero; `model.zero_grad()` does the same. `zero_grad`
        of a part of the model forgets them."""
        self._updater.forget(self._all_shares(), set_to_none)

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> float:
        """Between backward and step: clip all gradients to the global L2 norm `max_norm`; returns
        the norm before.

        As `torch.nn.utils.clip_grad_norm_`: a NaN among them makes all of them NaN, an infinity
        makes the finite ones zeros. With `error_if_nonfinite` raises `NonFiniteError` instead,
        which names the parameter, before anything is changed.
        """
        if not isinstance(max_norm, (int, float, torch.Tensor)):
            raise ConfigError(f"max_norm is {in_words(max_norm)}; give a number")
        shares = self._all_shares()
        self._updater.settle([share.unit for share in shares])
        norm = self._updater.norm.of(shares)
        if not math.isfinite(norm):
            self._updater.norm.take_nonfinite(
                norm, shares, self._updater.next_number, error_if_nonfinite
            )
        clip(shares, clip_factor(norm, max_norm))
        return norm

    def _all_shares(self) -> list[UnitShare]:
        """All parameters that may have a gradient."""
        return [
            UnitShare(unit, tuple(range(len(unit.facts.parameters))))
            for unit in self._units
            if unit.facts.trainable
        ]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of `parameter.grad` of the plain model, on the host: clipped, and also after a
        step, until it is zeroed. If the loss was scaled, it is in fp32 and unscaled. None if there
        is no gradient. Whole, also for a DTensor. With several ranks every rank must call it."""
        if isinstance(parameter, TiledWeight):
            return parameter.cat([self.gradient(piece) for piece in parameter.pieces])
        unit = next(
            (unit for unit in self._units if unit.data.position(parameter) is not None), None
        )
        if unit is None:
            raise ConfigError("engine.gradient takes a parameter of the wrapped model")
        return self._grads.fetch(unit.facts, unit.data.index_of(parameter))

    def interleaver(self) -> Interleaver:
        """A new interleaver, which runs micro-batches together once. Raises `RuntimeError` inside
        of a forward, a backward, or another interleaver."""
        if self.config.inference:
            raise ConfigError(f"infinity.accumulate runs backwards, but {TRAINED}")
        self._executions.refuse_inside("infinity.accumulate")
        self._runtime.prepare()  # a resume restores the random states that micro-batches fork
        return Interleaver(
            self._hooks, self._executions, self._runtime.trace, self._device, self._updater.scales
        )

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
        """Every parameter, by its first name, and every persistent buffer, on the host. Holds one
        unit at a time, and a weight in tiles until it is whole.

        Tensors are plain and whole, also for DTensors. Waits for pending updates. With several
        ranks every rank must iterate to the end.
        """
        self._updater.look()
        joining = JoinedTiles()
        for unit in self._units:
            for name, tile, value in zip(
                unit.facts.names, unit.facts.tiles, _values(unit), strict=True
            ):
                if tile is None:
                    yield name, value
                elif (joined := joining.add(tile, value)) is not None:
                    yield tile.name, joined
                del value  # before the next unit is brought
        for name, buffer in self._buffers().items():
            yield name, buffer.detach().cpu()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`model.state_dict()` of the plain model, on the host. Parameters are mapped from unnamed
        files in the first NVMe directory, or in the directory of `tempfile`, so the kernel can
        reclaim their memory (`directories/mapped`). Those below 64 KiB lie in memory. Frozen
        parameters that stay in files of the user are mapped from there.

        With several ranks every rank must call it. Each gets whole plain tensors, also for
        DTensors, as from `get_model_state_dict` of torch for FSDP2 with `full_state_dict=True`. Any
        number of data and tensor parallel ranks can load them.
        """
        there = {
            name
            for unit in self._units
            if unit.states.are_in_files
            for name, tile in zip(unit.facts.names, unit.facts.tiles, strict=True)
            if tile is None
        }
        values = {
            name: value if name in there else mapped(value, self._state_directory)
            for name, value in self.weights()
        }
        names = self._first_names() | buffer_names(self.model)
        later = {name: p.detach().to("cpu", copy=True) for name, p in self._later().items()}
        return {name: values[first] for name, first in names.items()} | later

    def _first_names(self) -> dict[str, str]:
        """For every name of a parameter the name that its unit knows; tied parameters have several.
        Parameters that came after `wrap` have no unit: see `_later`."""
        known = {
            id(p): key
            for unit in self._units
            for p, key in zip(unit.facts.parameters, unit.facts.keys, strict=True)
        }
        named = [(name, pieces_of([p])[0]) for name, p in named_wholes(self.model)]
        return {name: known[id(p)] for name, p in named if id(p) in known}

    def _later(self) -> dict[str, torch.Tensor]:
        """The parameters that came to the model after `wrap`, by name."""
        known = self._first_names()
        return {name: p for name, p in named_wholes(self.model) if name not in known}

    def _check_complete(self) -> None:
        """Raise `ConfigError` if a checkpoint would lack parameters of the model."""
        later = self._later()
        if later:
            raise ConfigError(
                f"{described(list(later))} came to the model after infinity.wrap, and a checkpoint "
                "of the engine would lack it: wrap the model once more, infinity.wrap(model, "
                "config), before it is trained; model.state_dict() has it"
            )

    @property
    def _state_directory(self) -> Path | None:
        """The directory of mapped state dicts; None leaves that to `tempfile`."""
        return self.config.nvme[0] if self.config.nvme else None

    # Checkpoints

    def save_checkpoint(
        self,
        directory: str | Path,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        *,
        trainable_only: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write weights, buffers, and all of `optimizer` (one or several; none: only the weights)
        to `directory`. With `trainable_only` frozen parameters are left out, such as the base of
        adapters; a model that loads the checkpoint keeps its own.

        `load_checkpoint` returns `extra` on every rank: dicts, lists, tuples, numbers, texts and
        tensors, for example the state of a scheduler or of random generators. Gradients are not
        saved. All ranks call it, and each writes its part; `infinity.checkpoint.state` describes
        format and memory. A checkpoint in `directory` is replaced when the new one is whole, and
        not before. With `Tuning.update="delayed"` the model sees the last update from a save on, in
        this run and in runs that load it. They continue with the same bits if they save at the same
        steps. `progress(done, total)` is called repeatedly with bytes of this rank; an exception of
        it ends the save.

        Raises `ConfigError` for arguments of other kinds, and if parameters came to the model after
        `wrap`. Raises `CheckpointError` if the checkpoint cannot be written. Then files that were
        there are unchanged, and training can continue.
        """
        self._store.latch.check_awake()
        self._check_complete()
        self._checkpoints.save(
            self._buffers(),
            self._tied(),
            _path_of(directory),
            optimizer,
            _given(extra),
            trainable_only,
            progress,
        )

    def snapshot(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> SnapshotTask:
        """Write the checkpoint of the last committed step to `directory`, as `save_checkpoint` at
        that step would, on a thread of its own, while training continues. Returns a handle at once:
        its `step` is that step, and `wait` waits until the checkpoint is written.

        Needs `durability`. It reads the states of that step on NVMe, and checks their checksums. An
        update that would overwrite some of them waits until they have been read, unit by unit.
        `extra` is copied. It belongs to `committed_step`, which with `durability="step"` is the
        step before the last one between `optimizer.step()` and the next forward.
        `progress(done, total)` is called on the thread.

        All ranks call it at the same place in the program, and meet there. One snapshot is under
        way at a time. A later failure is logged, and raises in `wait` of the handle on all ranks.
        Then files in `directory` are unchanged, and training continues. `close` waits for the
        snapshot.

        Raises `ConfigError` with `durability="off"`, for arguments of other kinds, while another
        snapshot is under way, and when the optimizer of the committed step is gone. Raises
        `CheckpointError` for what `extra` may not have.
        """
        durability = self._durability
        if durability is None:
            raise ConfigError(
                "a snapshot is made of committed steps: set durability='step', or use "
                "save_checkpoint, which training waits for"
            )
        with self._refused_together():
            self._store.latch.check_awake()
            path = _path_of(directory)
            given = read_item(pack_item("extra", dict(_given(extra))).getvalue())
            durability.snapshots.check()
            self._check_complete()
        return durability.snapshot(
            lambda committed: self._checkpoints.snapshot(
                committed, self._tied(), path, given, progress
            ),
            self._refused_together,
        )

    @contextmanager
    def _refused_together(self) -> Iterator[None]:
        """If one rank refuses a snapshot inside, all do: the other ranks raise `CheckpointError`,
        which names the rank and its reason."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        if self._exchange is not None and self._durability is not None:
            exchange = self._exchange

            def meet(refuses: bool) -> bool:
                (count,) = exchange.sum([float(refuses)], "of snapshots that cannot begin")
                return count > 0

            reason = "" if problem is None else sentence(problem)
            said = self._durability.snapshots.refusals(reason, meet)
            if problem is None and said:
                problem = CheckpointError(f"no rank begins this snapshot: {said}")
        if problem is not None:
            raise problem

    def _tied(self) -> dict[str, str]:
        """The other names of tied parameters, each with the first name."""
        return {name: first for name, first in self._first_names().items() if name != first}

    def load_checkpoint(
        self,
        directory: str | Path,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        strict: bool = True,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]:
        """Continue from a `save_checkpoint`, with any number of ranks, placement and format.
        Returns its `extra` (of the first rank, if the number of ranks differs; replicas get that of
        the first of them).

        Bits are the same, except for moments in a narrower format than they were saved in, which
        are rounded to nearest. Without `optimizer` only the weights are loaded. With `strict=False`
        parameters and buffers that the checkpoint lacks keep their values, and the checkpoint may
        have others; a warning names both. Gradients are forgotten. All ranks call it.
        `progress(done, total)` is called repeatedly with bytes of this rank; an exception of it
        ends the engine.

        Raises `ConfigError` if another optimizer updates parameters in the same units: load all of
        these together. Raises `CheckpointError` before anything is changed, if the checkpoint is
        missing, incomplete, mixed with files of another save, newer, or no checkpoint. Every item
        is compared with its digest as it is read. If damage shows in the middle of the load, the
        engine cannot continue. No code of the checkpoint runs.
        """
        self._store.latch.check_awake()
        loading = nullcontext() if self._durability is None else self._durability.loading()
        with loading:
            return self._checkpoints.load(
                self._buffers(), _path_of(directory), optimizer, strict, progress
            )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the persistent buffers."""
        return {name: local(buffer) for name, buffer in persistent_buffers(self.model)}

    # Steps that outlive the process

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut, on all ranks, counted from 1; 0 for the
        states of `wrap`.

        After `wrap(..., resume=True)` the next step is this plus 1. None with `durability="off"`,
        and until the first commit.
        """
        return None if self._durability is None else self._durability.committed_step

    @property
    def posted_step(self) -> int:
        """The last step of an optimizer, counted like `committed_step`, or that was left out."""
        return self._updater.next_number - 1

    def track(self, **objects: Any) -> None:
        """Commit with every step the `state_dict()` of these objects when the next forward begins,
        such as of schedulers, or of the position in the data.

        After `wrap(..., resume=True)` `track` calls their `load_state_dict` with the committed
        states of their names. Make optimizers before. Nothing happens with `durability="off"`.
        Raises `ConfigError` for objects without these methods.
        """
        if self._durability is not None:
            self._durability.track(objects)

    def discard_committed(self) -> None:
        """Committed states are not needed any more: `close` removes them, and all files of the
        engine in the `nvme` directories. Nothing happens with `durability="off"`."""
        if self._durability is not None:
            self._durability.discard()

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
        """The device of the model and its inputs."""
        return self._device.torch

    @property
    def compute_device(self) -> ComputeDevice:
        """The same device, with its streams and random generators."""
        return self._device

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, in the order of the modules."""
        return tuple(self._units)

    @property
    def io(self) -> Any:
        """The native I/O engine of the first directory (counters, fault injection); None if no
        state is on NVMe."""
        return next(iter(self.ios), None)

    @property
    def ios(self) -> tuple[Any, ...]:
        """The native I/O engines, one per directory; empty if no state is on NVMe."""
        return tuple(self._store.nvme.engines)

    def plan(self) -> Traffic:
        """The planned NVMe traffic of this rank in one optimizer step of the recorded trace, in
        bytes. With `inference=True` the traffic of one forward, which is one token."""
        return self._reporter.plan()

    def memory(self) -> dict[str, int]:
        """Bytes in use now, per tier. While the engine sleeps, the file of its memory counts as
        NVMe."""
        return self._store.used()

    def activity(self) -> dict[str, float]:
        """Numbers for the log of a training loop at each step. Does not wait.

        Bytes that the last finished step moved: "nvme_read", "nvme_written", "copied_to_device" and
        "copied_from_device". Seconds that the model has waited since the start: "wait_nvme",
        "wait_adam", and with several ranks "wait_collective".
        """
        return self._reporter.activity()

    def report(self) -> Report:
        """A report of the run so far; waits for pending updates."""
        return self._reporter.report()

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` inside of a forward or backward of the model, on any thread; `what`
        is the name of the call for the message."""
        self._executions.refuse_inside(what)

    @property
    def is_open(self) -> bool:
        """Whether it is open: not closed, and its model exists."""
        return self._finalizer.alive

    def drain(self) -> None:
        """Wait until no update is under way; raises `EngineClosedError` if one failed."""
        self._updater.rest()

    def sleep(self) -> int:
        """Between two steps: give the memory of the engine back until `wake`, for another program
        on the same device. Returns the bytes of the file that has the content meanwhile.

        Frees `gpu_memory` and `cpu_memory`: homes and the cache go to a file without a name in the
        first `nvme` directory, or in that of `tempfile`. Copies on the device are dropped. States
        in the files of the engine stay there. Training then continues with the same bits. Waits
        for updates and commits under way. A second call does nothing and returns 0. All ranks call
        it at the same place.

        Until `wake`, every use of the model, its optimizers and checkpoints raises
        `EngineClosedError`. `memory`, `activity`, `report` and `close` work.

        Raises `RuntimeError` inside of a forward, a backward or `infinity.gathered`, while
        gradients wait for a step, while a snapshot is under way, and while tensors that a forward
        saved wait for the backward. Raises `ConfigError` if drives write to the memory of the GPU
        (`gpu_direct`), `FileError` if the directory cannot have the file, and `InfinityError` if
        another rank raises. Then nothing has changed, on all ranks.
        """
        what = "engine.sleep()"
        self._store.latch.check_process()
        self._executions.refuse_inside(what)
        sleeps = self._store.latch.asleep  # perhaps on this rank alone, after a `wake` that failed
        if not sleeps:
            self._executions.end_interrupted()
            self._store.latch.check()
        exchange, durability = self._exchange, self._durability
        try:
            with (
                nullcontext()
                if exchange is None
                else together(exchange.ranks, self._store.patience)
            ):
                if sleeps:
                    return 0
                snapshot = None if durability is None else durability.snapshots.under_way
                _refuse_sleep(self._store, self._units, snapshot)
                self._updater.rest()
                if durability is not None:
                    durability.rest()
                nbytes = self._store.sleeper.save(self._state_directory)
        except BaseException:
            if not sleeps:
                self._store.sleeper.close()
            raise
        self._store.sleeper.begin()
        return nbytes

    def wake(self) -> None:
        """Take back the memory that `sleep` gave away, with its content. Does nothing while the
        engine is awake. All ranks call it at the same place.

        Raises `BudgetError` if the device or the host has no room, and `FileError` if the file
        cannot be read. The engine sleeps still then, and `wake` may be called again.
        """
        self._store.latch.check_process()
        self._store.sleeper.end()

    def close(self) -> None:
        """Finish pending updates, end every thread, remove hooks and files, free memory. May be
        called twice, and while the engine sleeps."""
        Engine.open.discard(self)
        detached = self._finalizer.detach()
        if detached is not None:
            model, _, (parts,), _ = detached
            try:
                shut_down(parts)
            finally:
                self._checkpoints.close()
                for name in (ATTRIBUTE, "zero_grad", "no_sync"):
                    vars(model).pop(name, None)
                for module in model.modules():
                    vars(module).pop(ATTRIBUTE, None)
                    vars(module).pop(_OUTER, None)
                Merges.detach(model)
                Facade.detach(model)

    def unwrap(self) -> nn.Module:
        """End the engine as `close` does, but keep the values of the model; returns the model.

        Parameters then are plain ones, the same objects, on the host and in their present dtype.
        Weights that `wrap` has cut are whole, and new objects. They are mapped from unnamed files,
        as in `state_dict`, so the kernel can reclaim their memory. Gradients and the moments of
        optimizers are gone, and these optimizers cannot step any more. The model can be used as any
        other, and wrapped once more. Masters are kept for that, unless parameters are written.

        With several ranks every rank must call it. Raises `ConfigError` for DTensors and inside of
        `infinity.gathered`, `RuntimeError` inside of a forward or backward, `FileError` if there is
        no space, and `EngineClosedError` after the end of the engine, before anything is changed.
        """
        self._store.latch.check_awake()
        self.refuse_inside("engine.unwrap()")
        self._executions.end_interrupted()
        model, files = self.model, self._state_directory
        self.drain()
        unwrap(model, self.units, self.close, "engine.unwrap()")
        rejoin(model, self._tiled, files)
        return model

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _given(extra: object) -> Mapping[str, Any]:
    if not isinstance(extra, (Mapping, NoneType)):
        raise ConfigError(
            f"extra is {in_words(extra)}; give a dict with what load_checkpoint gives back"
        )
    return extra or {}


def _path_of(directory: object) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"the directory of a checkpoint is {in_words(directory)}; give a path")
    return Path(directory)


def is_wrapped(model: nn.Module) -> bool:
    """Whether `model` itself has an engine."""
    return ATTRIBUTE in vars(model)


def _refuse_sleep(store: Store, units: Sequence[Unit], snapshot: SnapshotTask | None) -> None:
    """Raise unless the engine may give its memory back."""
    pending = GradientState.COLLECTING, GradientState.SETTLED
    for unit in units:
        ledger = unit.gradients.ledger
        if unit.blocks[Kind.PARAM].copy.pins:
            raise RuntimeError(
                f"{unit.facts.name} is in use; call engine.sleep() after infinity.gathered"
            )
        if ledger.state in pending and ledger.present():
            raise RuntimeError(
                f"the gradient of {unit.facts.names[ledger.present()[0]]} waits for a step; call "
                "engine.sleep() after optimizer.step(), or after model.zero_grad()"
            )
    if store.activations is not None and store.activations.saves():
        raise RuntimeError(
            "tensors that a forward saved wait for the backward; call engine.sleep() after "
            "loss.backward(), or drop the loss"
        )
    if snapshot is not None:
        raise RuntimeError(
            f"a snapshot of step {snapshot.step} is being written to {snapshot.directory}; wait "
            "for it (wait()), or end it (cancel()), before engine.sleep()"
        )
    if store.nvme.direct:
        raise ConfigError(
            "drives write to the memory of the GPU (GPUDirect Storage), which engine.sleep() "
            "cannot give back; set Tuning(gpu_direct='off')"
        )


def _values(unit: Unit) -> Iterator[torch.Tensor]:
    """The value of each parameter of `unit`, whole and on the host."""
    stored = unit.states.in_files()
    if stored is not None:
        yield from stored
        return
    flat = unit.states.gather(Kind.PARAM)
    for parameter, place in zip(unit.facts.parameters, unit.facts.layout.places, strict=True):
        yield whole(flat[place.offset : place.end].view(place.shape), parameter)


def engine(model: nn.Module) -> Engine:
    """The engine of a wrapped model; raises `ConfigError` for any other."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"infinity.engine takes the module that infinity.wrap returned, not {in_words(model)}"
        )
    found = vars(model).get(ATTRIBUTE)
    if not isinstance(found, Engine):
        raise ConfigError(
            "the model is not wrapped, or its engine was closed; call model = "
            "infinity.wrap(model, config)"
        )
    return found


def snapshot(
    model: nn.Module | Engine,
    directory: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> SnapshotTask:
    """A checkpoint of the last committed step, written while training continues: `Engine.snapshot`
    of the engine of a wrapped model."""
    found = model if isinstance(model, Engine) else engine(model)
    return found.snapshot(directory, extra, progress=progress)
