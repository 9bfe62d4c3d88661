"""Mixtures of experts, which are refused."""

from deepspeed.moe import layer

__all__ = ["layer"]
