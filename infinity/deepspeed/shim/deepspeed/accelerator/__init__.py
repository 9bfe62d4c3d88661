"""The compute device."""

from infinity.deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator"]
