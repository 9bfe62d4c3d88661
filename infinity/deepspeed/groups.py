"""`deepspeed.utils.groups`: all ranks share one model. No other group divides it."""

from __future__ import annotations

import torch.distributed as dist

from infinity.deepspeed.communication import get_world_size


def one() -> int:
    """The number of model, tensor and sequence parallel ranks."""
    return 1


def zero() -> int:
    """The number of this rank among them."""
    return 0


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks. None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


def all_numbers() -> list[int]:
    """The numbers of all ranks."""
    return list(range(get_world_size()))


def no() -> bool:
    """Whether parameters have a smaller group of ranks: never."""
    return False


def nothing() -> None:
    """The smaller group: None."""
