"""Optimizers, and what native parts there are."""

from deepspeed.ops import adagrad, adam, aio, lion, op_builder
from infinity.deepspeed.builders import COMPATIBLE as __compatible_ops__

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lion", "op_builder"]
