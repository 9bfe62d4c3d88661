"""Configurations."""

from infinity.deepspeed.errors import DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
