"""Optimizers of parameters in fp16."""

from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer

__all__ = ["fused_optimizer", "unfused_optimizer"]
