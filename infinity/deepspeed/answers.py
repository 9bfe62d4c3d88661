"""The parts of a DeepSpeed engine, and its answers about its configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from infinity.deepspeed.communication import get_local_rank, get_rank, get_world_size
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.settings import Settings
from infinity.engine import Engine
from infinity.errors import EngineClosedError
from infinity.optim.optimizer import Optimizer


class Answers:
    """The parts and counters of a DeepSpeed engine, and its answers to questions of frameworks,
    under the names of DeepSpeed. Only `set_train_batch_size` and the similar setters change
    anything."""

    module: nn.Module
    settings: Settings
    optimizer: Optimizer | None
    client_optimizer: torch.optim.Optimizer | None
    """The optimizer of the script; its groups are those of `optimizer`."""
    lr_scheduler: Any
    global_steps: int
    """Optimizer steps, including steps that were left out."""
    global_samples: int
    micro_steps: int
    """Calls of `step`."""
    skipped_steps: int
    _kept: Engine

    @property
    def engine(self) -> Engine:
        """The engine that keeps the states. Raises `EngineClosedError` after `destroy`."""
        if not self._kept.is_open:
            raise EngineClosedError(
                "the engine was destroyed; give infinity.initialize the model once more (with a "
                "Trainer: make a new one)"
            )
        return self._kept

    @property
    def config(self) -> dict[str, Any]:
        """The original configuration."""
        return dict(self.settings.raw)

    # Batches

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.settings.batches.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward of one rank."""
        return self.settings.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Forwards of a rank for each optimizer step."""
        return self.settings.batches.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of one step, by changing the number of forwards. Raises `ConfigError`
        unless it is a multiple of the samples of one forward on all ranks."""
        together = self.settings.batches.micro * self.dp_world_size
        if train_batch_size < together or train_batch_size % together:
            raise DeepSpeedConfigError(
                f"train_batch_size={train_batch_size} is no multiple of {together}, which the "
                "ranks take in one forward each"
            )
        self._change(train=train_batch_size, accumulation=train_batch_size // together)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples of one forward. Those of a step follow."""
        train = micro_batch_size * self.settings.batches.accumulation * self.dp_world_size
        self._change(train=train, micro=micro_batch_size)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set the number of forwards of a step. Its samples follow."""
        train = self.settings.batches.micro * steps * self.dp_world_size
        self._change(train=train, accumulation=steps)

    def _change(self, **numbers: int) -> None:
        batches = dataclasses.replace(self.settings.batches, **numbers)
        self.settings = dataclasses.replace(self.settings, batches=batches)

    # Precision and gradients

    def loss_scale(self) -> float:
        """The scale of the next loss. 1 without scaling."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    # ZeRO

    def zero_optimization_stage(self) -> int:
        """The stage, 0 to 3."""
        return self.settings.config.stage

    # Ranks

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return get_world_size()

    dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return get_rank()

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return get_local_rank()
