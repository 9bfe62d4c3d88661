"""Adam and AdamW."""

from infinity.deepspeed.clients import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
