"""What runs a model."""

from deepspeed.runtime import base_optimizer, config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["base_optimizer", "config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
