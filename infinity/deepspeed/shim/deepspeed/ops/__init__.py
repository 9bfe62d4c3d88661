"""Optimizers."""

from deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
