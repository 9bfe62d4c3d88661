"""Lion."""

from infinity.deepspeed.clients import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
