"""Mixtures of experts, which are refused."""

from infinity.deepspeed.refused import MoE

__all__ = ["MoE"]
