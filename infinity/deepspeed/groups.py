"""`deepspeed.utils.groups`: all ranks share one model, and nothing else divides it."""

from __future__ import annotations

import torch.distributed as dist


def one() -> int:
    """The number of model, tensor and sequence parallel ranks."""
    return 1


def zero() -> int:
    """The number of this rank among them."""
    return 0


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks; None where torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


def ranks() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_numbers() -> list[int]:
    """The numbers of all ranks."""
    return list(range(ranks()))


def no() -> bool:
    """Whether parameters have another group of ranks than all: never."""
    return False


def nothing() -> None:
    """That group."""
