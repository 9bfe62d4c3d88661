"""Configurations."""

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.parsed import DeepSpeedConfig

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LION_OPTIMIZER = "lion"

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
