"""The engine."""

from infinity.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
