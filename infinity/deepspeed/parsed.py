"""`DeepSpeedConfig`: a configuration that a script reads before it has an engine."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.blocks import (
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    get_bfloat16_config,
)
from infinity.deepspeed.communication import get_world_size
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.settings import Settings
from infinity.deepspeed.source import Source


class DeepSpeedConfig:
    """The numbers of a configuration for the ranks that there are; `infinity.initialize` takes the
    configuration itself.

    Raises `ConfigError` for all that `infinity.initialize` refuses in it.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise DeepSpeedConfigError(
                "DeepSpeedConfig: mpu and mesh_device are not supported; leave them out"
            )
        settings = Settings.read(config, get_world_size())
        self.train_batch_size = settings.batches.train
        self.train_micro_batch_size_per_gpu = settings.batches.micro
        self.gradient_accumulation_steps = settings.batches.accumulation
        self.gradient_clipping = settings.gradient_clipping
        self.gradient_allreduce_op = settings.average
        self.zero_config = DeepSpeedZeroConfig(**(settings.raw.get("zero_optimization") or {}))
        self.float16_config = DeepSpeedFP16Config(**(settings.raw.get("fp16") or {}))
        self.bfloat16_config = get_bfloat16_config(settings.raw)
        self.zero_optimization_stage = settings.config.stage
        self.zero_enabled = settings.config.stage > 0
        self.optimizer_name = None if settings.optimizer is None else settings.optimizer.type
        self.scheduler_name = None if settings.scheduler is None else settings.scheduler.type
