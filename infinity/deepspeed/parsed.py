"""`DeepSpeedConfig`: a configuration that a script reads before it has an engine."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.blocks import (
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    get_bfloat16_config,
)
from infinity.deepspeed.communication import get_rank, get_world_size
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.keys import KEYS
from infinity.deepspeed.refused import Lacking
from infinity.deepspeed.settings import Settings
from infinity.deepspeed.source import Source


class DeepSpeedConfig(Lacking):
    """The numbers of a configuration for the present ranks. `infinity.initialize` takes the
    configuration itself.

    Each key at the top of the configuration is an attribute, too. Raises `ConfigError` for each key
    that `infinity.initialize` refuses. One class, because scripts read these names of DeepSpeed
    from one object.
    """

    instead = (
        "engine.config is the configuration as it came, and `infinity config explain` says what "
        "becomes of each key"
    )

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise DeepSpeedConfigError(
                "DeepSpeedConfig: mpu and mesh_device are not supported; leave them out"
            )
        self._settings = settings = Settings.read(config, get_world_size())
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
        self.optimizer_params = None if settings.optimizer is None else settings.optimizer.params
        self.scheduler_params = None if settings.scheduler is None else settings.scheduler.params
        self.world_size, self.global_rank = get_world_size(), get_rank()
        self.scheduler_name = None if settings.scheduler is None else settings.scheduler.type

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS or "." in name or name.startswith("_"):
            return super().__getattr__(name)
        value = self._settings.raw.get(name)
        found = KEYS[name].default if value is None else value
        return super().__getattr__(name) if found is None else found
