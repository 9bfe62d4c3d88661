"""A linear layer in parts."""

from infinity.deepspeed.tiling import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
