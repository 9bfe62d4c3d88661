"""The compute device."""

from infinity.deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
