"""Parameters that are shared among ranks."""

from torch import arange as _orig_torch_arange

from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.zero import GatheredParameters, Init, ZeroParamStatus

zero_wrapper_for_fp_tensor_constructor = None
"""transformers replaces it, to keep the dtype of `torch.arange`. Nothing changes that here."""

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "_orig_torch_arange",
    "get_accelerator",
    "zero_wrapper_for_fp_tensor_constructor",
]
