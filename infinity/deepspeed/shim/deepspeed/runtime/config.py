"""Configurations."""

from infinity.deepspeed.blocks import get_gradient_clipping
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.parsed import DeepSpeedConfig

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LION_OPTIMIZER = "lion"

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "get_gradient_clipping"]
