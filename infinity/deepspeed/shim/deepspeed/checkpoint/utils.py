"""Tools for checkpoints."""

from infinity.deepspeed.tools import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
