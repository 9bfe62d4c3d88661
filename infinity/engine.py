"""The engine: the handle that a user holds of one wrapped model. `infinity.build` makes it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, TracebackType
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
from infinity.sharding.parameter import TRAINED
from infinity.sharding.tensor_parallel import local, whole
from infinity.sharding.tiles import JoinedTiles, TiledWeight, named_wholes, pieces_of
from infinity.sharding.unit import Unit
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
    """What an engine is made of, by `infinity.build`."""

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
    """The weights that `wrap` has put into tiles."""


class Engine:
    """The handle of one wrapped model, made by `infinity.wrap`. Used by the thread that trains;
    `close` may be called twice.

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
        Facade.attach(model, self._given, self._state_directory)
        Merges.attach(model, self._hand_over)

    def _hand_over(self, inner: nn.Module) -> None:
        """`inner`, a part of the model, goes on without what is around it: it has this engine, too,
        and keeps it alive."""
        if inner is not self.model:
            vars(inner)[ATTRIBUTE] = self
            vars(inner)[_OUTER] = self.model

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero; also what `model.zero_grad()` does. That of a
        part of the model forgets."""
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
        """Everything that may have a gradient."""
        return [
            UnitShare(unit, tuple(range(len(unit.parameters))))
            for unit in self._units
            if unit.trainable
        ]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of what `parameter.grad` of the plain model would be, on the host: clipped, and
        until it is zeroed, also after a step. In fp32 where the loss was scaled, which is divided
        out; None when there is none. Whole, also of a DTensor. With several ranks every rank must
        call it."""
        if isinstance(parameter, TiledWeight):
            return parameter.cat([self.gradient(piece) for piece in parameter.pieces])
        unit = next(
            (unit for unit in self._units if unit.data.position(parameter) is not None), None
        )
        if unit is None:
            raise ConfigError("engine.gradient takes a parameter of the wrapped model")
        return self._grads.fetch(unit, unit.position(parameter))

    def interleaver(self) -> Interleaver:
        """What runs micro-batches together, once; `RuntimeError` inside of a forward, a backward,
        or what another one runs."""
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
        """Every parameter, by its first name, and every persistent buffer, on the host; one unit is
        held at a time, and a weight in tiles until it is whole.

        Tensors are plain and whole, those of DTensors too. Waits for pending updates. With several
        ranks every rank must iterate to the end.
        """
        self._updater.look()
        joining = JoinedTiles()
        for unit in self._units:
            for name, tile, value in zip(unit.names, unit.facts.tiles, _values(unit), strict=True):
                if tile is None:
                    yield name, value
                elif (joined := joining.add(tile, value)) is not None:
                    yield tile.name, joined
                del value  # before the next unit is brought
        for name, buffer in self._buffers().items():
            yield name, buffer.detach().cpu()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What `model.state_dict()` of the plain model would be, on the host. Parameters are mapped
        from unnamed files in the first NVMe directory, or where `tempfile` puts files, and take no
        memory that the kernel cannot have back (`directories/mapped`). Those below 64 KiB lie in
        memory. Frozen ones that stay in files of the user are mapped from there.

        With several ranks every rank must call it, and each gets the whole, which any number of
        data and tensor parallel ranks can take: of DTensors, too, plain tensors of the whole shape,
        as `get_model_state_dict` of torch gives for FSDP2 with `full_state_dict=True`.
        """
        there = {
            name
            for unit in self._units
            if unit.states.are_in_files
            for name, tile in zip(unit.names, unit.facts.tiles, strict=True)
            if tile is None
        }
        values = {
            name: value if name in there else mapped(value, self._state_directory)
            for name, value in self.weights()
        }
        names = self._first_names() | buffer_names(self.model)
        return {name: values[first] for name, first in names.items()}

    def _first_names(self) -> dict[str, str]:
        """By every name of a parameter the one that its unit knows; tied ones have several. What
        was added to the model after `wrap` has no unit."""
        known = {
            id(p): key
            for unit in self._units
            for p, key in zip(unit.parameters, unit.keys, strict=True)
        }
        named = [(name, pieces_of([p])[0]) for name, p in named_wholes(self.model)]
        return {name: known[id(p)] for name, p in named if id(p) in known}

    @property
    def _state_directory(self) -> Path | None:
        """Where state dicts are mapped from; None leaves that to `tempfile`."""
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
        """Write weights, buffers, and all of `optimizer` (one or several; none: the weights alone)
        to `directory`. With `trainable_only` frozen parameters are left out, such as the base of
        adapters; a model that loads this keeps its own.

        `load_checkpoint` gives `extra` back on every rank: dicts, lists, tuples, numbers, texts and
        tensors, for example the state of a scheduler or of random generators. Gradients are not
        saved. All ranks call it, each writes its part; `infinity.checkpoint.state` tells of format
        and memory. A checkpoint that is in `directory` is replaced when the new one is whole, and
        not before. With `Tuning.update="delayed"` the last update is seen from a save on, in this
        run and in those that load it: they go on with the same bits if they save at the same steps.
        `progress(done, total)` is called again and again with bytes of this rank; what it raises
        ends the save.

        Raises `ConfigError` for arguments of other kinds, and `CheckpointError` when it cannot be
        written; what was there is as it was, and training can go on.
        """
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
        """Write what `save_checkpoint` would have written at the last committed step to
        `directory`, on a thread of its own, while training goes on. Returns a handle at once: its
        `step` says which step that is, and `wait` waits until it is written.

        Needs `durability`. It reads the states of that step where they lie on NVMe, checked
        by their checksums. An update that would overwrite some of them waits until these have been
        read, unit by unit. `extra` is copied; it belongs to `committed_step`, which with
        `durability="step"` is the step before the last one between `optimizer.step()` and the next
        forward. `progress(done, total)` is called on the thread.

        All ranks call it at the same place in the program, and meet there. One snapshot is under
        way at a time. What fails later raises in `wait` of the handle, on all ranks, and is logged:
        what was in `directory` is as it was, and training goes on. `close` waits for the snapshot.

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
            path = _path_of(directory)
            given = read_item(pack_item("extra", dict(_given(extra))).getvalue())
            durability.snapshots.check()
        return durability.snapshot(
            lambda committed: self._checkpoints.snapshot(
                committed, self._tied(), path, given, progress
            ),
            self._refused_together,
        )

    @contextmanager
    def _refused_together(self) -> Iterator[None]:
        """A snapshot that is refused inside on one rank is refused on all: the others raise
        `CheckpointError`, which names the rank and its reason."""
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
        """Other names of tied parameters, and for each the first one."""
        return {name: first for name, first in self._first_names().items() if name != first}

    def load_checkpoint(
        self,
        directory: str | Path,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        strict: bool = True,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called: with any number of ranks, placement and format;
        returns what was `extra` (that of the first rank, when the number of ranks is another one;
        replicas get that of the first of them).

        Bits are the same, but for moments in a narrower format than they were saved in, which are
        rounded to nearest. Without `optimizer` the weights alone are loaded. With `strict=False`
        parameters and buffers that the checkpoint lacks keep their values, it may have others, and
        a warning names both. Gradients are forgotten. All ranks call it. `progress(done, total)` is
        called again and again with bytes of this rank; what it raises ends the engine.

        Raises `ConfigError` when another optimizer updates parameters in the same units: load all
        of these together. Raises `CheckpointError` when the checkpoint is missing, incomplete,
        mixed with files of another save, newer or of something else, before anything is changed.
        Every item is compared with its digest as it is read: when damage shows in the middle of the
        load, the engine cannot go on. No code of the checkpoint runs.
        """
        loading = nullcontext() if self._durability is None else self._durability.loading()
        with loading:
            return self._checkpoints.load(
                self._buffers(), _path_of(directory), optimizer, strict, progress
            )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers, of which this rank has its part."""
        return {name: local(buffer) for name, buffer in persistent_buffers(self.model)}

    # Steps that outlive the process

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut, on all ranks, counted from 1; 0 is what
        `wrap` made.

        After `wrap(..., resume=True)` that is the step to go on from: the next one is this plus 1.
        None with `durability="off"`, and until the first commit.
        """
        return None if self._durability is None else self._durability.committed_step

    def track(self, **objects: Any) -> None:
        """Commit with every step what `state_dict()` of these gives, as the next forward begins;
        schedulers, or the position in the data.

        After `wrap(..., resume=True)` they get back by `load_state_dict` what was committed under
        their names. Make optimizers before. Nothing happens with `durability="off"`. Raises
        `ConfigError` for objects without these methods.
        """
        if self._durability is not None:
            self._durability.track(objects)

    def discard_committed(self) -> None:
        """The result is safe elsewhere: closing the engine removes what was committed, and all
        files in the `nvme` directories. Nothing happens with `durability="off"`."""
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
        """Where the model runs: inputs go there."""
        return self._device.torch

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, in the order of the modules."""
        return tuple(self._units)

    @property
    def io(self) -> Any:
        """The native I/O engine of the first directory (counters, fault injection); None when
        nothing is on NVMe."""
        return next(iter(self.ios), None)

    @property
    def ios(self) -> tuple[Any, ...]:
        """The native I/O engines, one per directory; empty when nothing is on NVMe."""
        return tuple(self._store.nvme.engines)

    def plan(self) -> Traffic:
        """The NVMe traffic of this rank in one optimizer step, in bytes, that the planner states
        for the recorded trace. With `inference=True` that of one forward: of one token."""
        return self._reporter.plan()

    def memory(self) -> dict[str, int]:
        """Bytes in use now, per tier."""
        return self._store.used()

    def activity(self) -> dict[str, float]:
        """What a training loop may log at each step, without a wait.

        Bytes that the last finished step moved: "nvme_read", "nvme_written", "copied_to_device" and
        "copied_from_device". And seconds that the model has waited since the start: "wait_nvme",
        "wait_adam", and with several ranks "wait_collective".
        """
        return self._reporter.activity()

    def report(self) -> Report:
        """What the run did so far; waits for pending updates."""
        return self._reporter.report()

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` inside of a forward or backward of the model, on any thread; `what`
        the caller wants to do."""
        self._executions.refuse_inside(what)

    @property
    def is_open(self) -> bool:
        """Whether it has neither been closed nor ended with its model."""
        return self._finalizer.alive

    def drain(self) -> None:
        """Wait until no update is under way; raises `EngineClosedError` when one failed."""
        self._updater.rest()

    def close(self) -> None:
        """Finish pending updates, end every thread, remove hooks and files, give memory back. May
        be called twice."""
        Engine.open.discard(self)
        detached = self._finalizer.detach()
        if detached is not None:
            model, _, parts, _ = detached
            try:
                shut_down(*parts)
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
        """End the engine as `close` does, but leave the model its values; returns it.

        Parameters are plain ones afterwards, the same objects, on the host and in the dtype that
        they have now; weights that `wrap` has cut are whole, and new ones. They are mapped from
        unnamed files, as those of `state_dict`, so they take no memory that the kernel cannot have
        back. Gradients and the moments of optimizers are gone. Optimizers of before cannot step any
        more. The model can be used as any other, and wrapped once more: what masters have beyond
        their parameters is kept for that, unless parameters are written meanwhile.

        With several ranks every rank must call it. Raises `ConfigError` for DTensors and inside of
        `infinity.gathered`, `RuntimeError` inside of a forward or backward, `FileError` where there
        is no space, and `EngineClosedError` after the end of the engine, before anything is
        changed.
        """
        self.refuse_inside("engine.unwrap()")
        self._executions.end_interrupted()
        model, files = self.model, self._state_directory
        self.drain()
        unwrap(model, self.units, self.close, "engine.unwrap()")
        rejoin(model, self._tiled, files)
        return model

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def _values(unit: Unit) -> Iterator[torch.Tensor]:
    """The value of each parameter of `unit`, whole and on the host."""
    stored = unit.states.in_files()
    if stored is not None:
        yield from stored
        return
    flat = unit.states.gather(Kind.PARAM)
    for parameter, place in zip(unit.parameters, unit.layout.places, strict=True):
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
    """A checkpoint of the last committed step, written while training goes on: `Engine.snapshot` of
    the engine of a wrapped model."""
    found = model if isinstance(model, Engine) else engine(model)
    return found.snapshot(directory, extra, progress=progress)
