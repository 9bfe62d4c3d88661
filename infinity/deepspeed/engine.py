"""`DeepSpeedEngine`: the calling convention of DeepSpeed around a wrapped model.

[Note: a step]
`engine.step()` is called after every backward. At the boundary of an accumulation it takes an
optimizer step, clears the gradients and steps the scheduler. The scheduler does not step if
gradients were not finite and the optimizer step was left out.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.deepspeed import engine_names
from infinity.deepspeed.agree import several
from infinity.deepspeed.answers import Answers
from infinity.deepspeed.checkpoints import TaggedCheckpoints
from infinity.deepspeed.data import Collate, loader
from infinity.deepspeed.errors import DeepSpeedConfigError, DeepSpeedUsageError
from infinity.deepspeed.losses import Losses, checked, mapped
from infinity.deepspeed.monitor import Monitor
from infinity.deepspeed.offload_devices import StateMoves
from infinity.deepspeed.settings import Settings
from infinity.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from infinity.engine import Engine, engine
from infinity.errors import InfinityError, in_words
from infinity.optim.optimizer import Optimizer

_ANYWAY = {"allreduce_gradients", "release_loss"}
"""Options of `backward` in earlier versions, without effect."""


_DIRECTORIES: weakref.WeakKeyDictionary[Engine, Sequence[Path]] = weakref.WeakKeyDictionary()
"""Directories that `initialize` made for an engine. They are removed with it if they are empty."""


def _remove_directories(ended: Engine) -> None:
    for directory in _DIRECTORIES.pop(ended, ()):
        with suppress(OSError):  # it is not empty
            directory.rmdir()


def unwrap(model: nn.Module) -> None:
    """`Engine.unwrap` of the engine of `model`. All ranks call it."""
    found = engine(model)
    found.unwrap()
    _remove_directories(found)


class Made(NamedTuple):
    """The parts of an engine, made by `infinity.initialize`."""

    model: nn.Module
    """The wrapped model."""
    settings: Settings
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    directories: Sequence[Path]
    """Directories that are removed with the engine if they are empty."""


class DeepSpeedEngine(Answers, nn.Module):
    """Trains a wrapped model like an engine of DeepSpeed. `infinity.initialize` makes it.

    Its other attributes are those of the model (`infinity.deepspeed.engine_names`). One class,
    because scripts and trainers call these names of DeepSpeed on one object.
    """

    def __init__(self, made: Made | None = None, *others: Any, **named: Any) -> None:
        """Raises `ConfigError` for the arguments of DeepSpeed, which `initialize` takes."""
        if not isinstance(made, Made):
            raise DeepSpeedConfigError(
                f"{type(self).__name__}(...) makes no engine; give its arguments to "
                "deepspeed.initialize(model=..., config=...), which returns one first"
            )
        nn.Module.__init__(self)
        model, optimizer, settings = made.model, made.optimizer, made.settings
        self.module = model
        self.training = model.training
        self.settings = settings
        self.optimizer = optimizer
        self.lr_scheduler = made.lr_scheduler
        self.training_dataloader = made.training_dataloader
        self.client_optimizer = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.mpu = None
        self.monitor = Monitor()
        self.timers: SynchronizedWallClockTimer = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(batch_size=self.train_batch_size())
        self._given_boundary: bool | None = None
        self._stepped = False
        self._apart = False  # whether inside of `no_sync`
        self._losses = Losses(self)
        self._kept = engine(model)
        _DIRECTORIES[self._kept] = made.directories
        self._checkpoints = TaggedCheckpoints(self)
        self._moves = StateMoves(settings.config)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if name in engine_names.VALUES:
            return engine_names.VALUES[name](self)
        if name in engine_names.METHODS:
            return functools.partial(engine_names.METHODS[name], self)
        try:
            return getattr(self.module, name)
        except AttributeError:
            if name.startswith("__") or hasattr(type(self.module), name):
                raise
            raise engine_names.missing(self.module, name) from None

    @property
    def device(self) -> torch.device:
        """The device of the model and its inputs."""
        return self.engine.device

    # Forward and backward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The forward of the model, under autocast if the configuration has it."""
        if self.settings.cast_inputs:
            inputs, named = mapped(_as_half, (inputs, named))
        with self._autocast():
            outputs = self.module(*inputs, **named)
        return self._losses.watch(outputs) if torch.is_grad_enabled() else outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.settings.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """`loss` times the loss scale, for a script that calls `backward` on it instead of
        `engine.backward`. `retain_graph` has no effect here."""
        return self._trained("scale").scale(checked(loss))

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """Run the backward from `loss`, a tensor of one element. With `scale_wrt_gas` it is first
        divided by the number of forwards of a step. Returns the divided loss."""
        unknown = [name for name in others if name not in _ANYWAY]
        if unknown:
            raise TypeError(f"engine.backward has no option {unknown[0]!r}")
        optimizer = self._trained("backward")
        divided = self._losses.backward(loss, optimizer, retain_graph, scale_wrt_gas)
        return divided.to(loss.dtype)

    def _trained(self, what: str) -> Optimizer:
        if self.optimizer is None:
            raise DeepSpeedConfigError(
                f"engine.{what} needs an optimizer: give infinity.initialize one, or the "
                'configuration a block "optimizer"'
            )
        return self.optimizer

    # Steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` is an optimizer step."""
        if self._given_boundary is not None:
            return self._given_boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on `is_boundary`, and not a count, decides whether `step` is an optimizer
        step."""
        if not self.settings.managed_accumulation:
            raise DeepSpeedUsageError(
                "set_gradient_accumulation_boundary has no say where managed_gradient_accumulation "
                "is false: there every step is one of the optimizer; leave out one of them"
            )
        self._given_boundary = bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`infinity.no_sync`, at any stage. An optimizer step must be outside."""
        before, self._apart = self._apart, True
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._apart = before

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Called after every backward. An optimizer step at a boundary; see [Note: a step]."""
        optimizer = self._trained("step")
        self._stepped = False
        if self.is_gradient_accumulation_boundary():
            self._check_scheduler(lr_kwargs)
            if self._apart:
                raise DeepSpeedUsageError(
                    "engine.step() is at the end of an accumulation, inside of engine.no_sync(); "
                    "leave no_sync() before the last backward"
                )
            if self.settings.refuse_unused:
                self._refuse_unused()
            optimizer.step()
            self._stepped = not optimizer.overflow
            self.engine.zero_grad()
            self.skipped_steps += optimizer.overflow
            if self._stepped and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def _check_scheduler(self, options: Mapping[str, Any] | None) -> None:
        """Raise `ConfigError` if the scheduler could not step after the optimizer."""
        if self.lr_scheduler is None:
            return
        try:
            signature = inspect.signature(self.lr_scheduler.step)
        except ValueError:  # compiled code has none
            return
        try:
            signature.bind(**(options or {}))
        except TypeError as error:
            raise DeepSpeedConfigError(
                f"{type(self.lr_scheduler).__name__}.step: {error}; give it in "
                "engine.step(lr_kwargs={...})"
            ) from None

    def _refuse_unused(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise DeepSpeedUsageError(
                    f"{name} got no gradient in this step, and "
                    "zero_optimization.ignore_unused_parameters is false; use it in the forward, "
                    "freeze it, or leave that key out"
                )

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed parameters."""
        return self._stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self.engine.zero_grad(set_to_none)

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of all gradients of the last optimizer step, before clipping. None before the
        first step. Infinite if they were not finite and the step was left out."""
        if self.optimizer is None:
            return None
        return math.inf if self.optimizer.overflow else self.optimizer.grad_norm

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int = 0,
    ) -> Any:
        """A loader of micro-batches of this rank, like that of `training_data`."""
        options = {"batch_size": batch_size} if batch_size else {}
        return loader(
            self.settings,
            dataset,
            collate_fn,
            sampler=data_sampler,
            pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0,
            **options,
        )

    # Weights and checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything to `save_dir/tag` (by default `global_step<N>`). All ranks call it.

        `client_state` may have numbers, texts and tensors in dicts, lists and tuples. With
        `exclude_frozen_parameters`, a model that loads this keeps its own frozen parameters.
        """
        if not isinstance(client_state, (Mapping, NoneType)):
            raise DeepSpeedConfigError(f"client_state is {in_words(client_state)}; give a dict")
        return self._checkpoints.save(
            _directory(save_dir), tag, client_state or {}, save_latest, exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from `load_dir/tag`, by default from the tag in the file `latest`. All ranks call
        it.

        Returns the directory and the saved `client_state`. Without `latest`, returns (None, None)
        and warns. Without `load_module_strict`, weights that only the model or only the checkpoint
        has stay unchanged. Optimizer states must fit if they are loaded.
        """
        if custom_load_fn is not None:
            raise DeepSpeedConfigError(
                "load_checkpoint: custom_load_fn is not supported, because checkpoints are "
                "streamed; leave it out, and change weights in infinity.gathered(write=True)"
            )
        optimizer = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        return self._checkpoints.load(
            _directory(load_dir), tag, optimizer, schedule, load_module_only, load_module_strict
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights like `torch.save`. All ranks call it. Returns False at stage 3, unless
        the configuration gathers weights on save, or frozen ones are left out."""
        return self._checkpoints.save_weights(
            _directory(save_dir) / save_filename, exclude_frozen_parameters
        )

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **named: Any
    ) -> dict[str, Any]:
        """The whole state dict of the model, on every rank."""
        state: dict[str, Any] = self.module.state_dict(*args, **named)
        if exclude_frozen_parameters:
            for name in self._checkpoints.frozen():
                state.pop(name, None)
        return state

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, **others: Any
    ) -> None:
        """Load the weights that `checkpoint` has under "module". All ranks call it."""
        if not isinstance(checkpoint, Mapping) or "module" not in checkpoint:
            raise DeepSpeedConfigError(
                f'load_module_state_dict takes a dict with weights under "module", and this is '
                f'{in_words(checkpoint)} without it; give {{"module": state_dict}}'
            )
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The weights on the first rank, None on other ranks. All ranks call it."""
        return self._checkpoints.weights(exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # Life

    def compile(self, backend: Any = None, compile_kwargs: Any = None, **others: Any) -> None:
        """`torch.compile` the model."""
        chosen = {} if backend is None else {"backend": backend}
        options = {**chosen, **(compile_kwargs or {})}
        allowed = inspect.signature(torch.compile).parameters
        others = {name: value for name, value in others.items() if name in allowed}
        self.module.compile(**options, **others)

    def offload_states(self, *states: Any, **options: Any) -> None:
        """See `StateMoves.offload_states`: warns if states lie on the GPU."""
        self._moves.offload_states(*states, **options)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Does nothing: the configuration decides where states are."""

    def destroy(self) -> None:
        """Finish updates, and free memory, threads and files. All ranks call it. May be called
        twice.

        The model then has its weights, as after `Engine.unwrap`, and may be initialized again. It
        has no data if the engine has failed, or if an exception is raised on one of several ranks,
        because the other ranks may not call this.
        """
        if not self._kept.is_open:
            return
        if not (several() and sys.exc_info()[0] is not None):
            with suppress(InfinityError):
                unwrap(self.module)
                return
        self._kept.close()
        _remove_directories(self._kept)


def _directory(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise DeepSpeedConfigError(
            f"the directory of a checkpoint is {in_words(path)}; give a path"
        )
    return Path(path)


def _as_half(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if is_float else value
