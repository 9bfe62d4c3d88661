"""Mixtures of experts, which are refused."""

from deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
