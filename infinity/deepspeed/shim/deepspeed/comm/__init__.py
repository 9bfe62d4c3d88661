"""torch.distributed, and what initializes it."""

from typing import Any

import torch.distributed

from infinity.deepspeed.communication import (
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    log_summary,
)

__all__ = [
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "is_initialized",
    "log_summary",
]

inference_all_reduce = torch.distributed.all_reduce


def __getattr__(name: str) -> Any:
    return getattr(torch.distributed, name)
