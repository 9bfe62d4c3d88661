"""Tools for checkpoints."""

from infinity.deepspeed.refused import get_model_ckpt_name_for_rank
from infinity.deepspeed.tools import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]
