"""The collectives of a sharded unit, as functions over a process group; with one rank they move nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


class Calls:
    """The gathers and reductions of one rank in their order, as a hash that the ranks compare (invariant I6).

    Units are often of one size, so ranks that run different modules would take each other's data for their own.
    """

    def __init__(self) -> None:
        self._hash = 0

    def note(self, operation: str, unit: int) -> None:
        """This rank joins a collective on a unit."""
        self._hash = zlib.crc32(f"{operation} {unit}".encode(), self._hash)

    def terms(self) -> tuple[float, float]:
        """What to sum over the ranks for `agree`: 20 bits of the hash and their square, exact in double precision."""
        value = self._hash & 0xFFFFF
        return float(value), float(value * value)


def agree(total: float, squares: float, group: Group) -> bool:
    """Whether all ranks have the same `Calls`, given the sums of their terms: only equal values have no variance."""
    return size(group) * int(squares) == int(total) ** 2


def size(group: Group) -> int:
    """Ranks in `group`; 1 without torch.distributed."""
    return dist.get_world_size(group) if group is not None else 1


def rank(group: Group) -> int:
    """This process' rank in `group`; 0 without torch.distributed."""
    return dist.get_rank(group) if group is not None else 0


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """Fill `full` (n * ranks,) with the shards (n,) of all ranks; `shard` may be this rank's part of `full`."""
    if group is not None:
        dist.all_gather_into_tensor(full, shard, group=group)


def reduce_scatter_mean(shard: torch.Tensor, full: torch.Tensor, group: Group) -> None:
    """This rank's part of the mean over ranks of `full` (n * ranks,), into `shard` (n,). Overwrites `full`."""
    if group is None:
        shard.copy_(full)
        return
    full.div_(dist.get_world_size(group))
    dist.reduce_scatter_tensor(shard, full, group=group)


def all_reduce_sum(values: Sequence[float], group: Group) -> list[float]:
    """The sum over ranks of each of `values`, in double precision."""
    if group is None:
        return list(values)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return [float(value) for value in total]
