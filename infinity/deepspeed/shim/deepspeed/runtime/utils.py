"""Tools."""

from torch.nn.utils import clip_grad_norm_

from infinity.deepspeed.tools import see_memory_usage

__all__ = ["clip_grad_norm_", "see_memory_usage"]
