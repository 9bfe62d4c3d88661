"""The collectives of a sharded unit, as functions over a process group; with one rank they move nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from infinity.device import divide_alone

Group = dist.ProcessGroup | None

# Their names from torch 2.13 on; the older ones then warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Calls:
    """The collectives that one rank has posted, in their order, as a hash that the ranks compare (invariant I6).

    Units are often of one size, so ranks that run different modules would take each other's data for their own.
    """

    def __init__(self) -> None:
        self._hash = 0

    def note(self, operation: str, unit: str) -> None:
        """This rank will join a collective on a unit, after those it noted before."""
        self._hash = zlib.crc32(f"{operation} {unit}".encode(), self._hash)

    @property
    def value(self) -> int:
        """32 bits."""
        return self._hash


def size(group: Group) -> int:
    """Ranks in `group`; 1 without torch.distributed."""
    return dist.get_world_size(group) if group is not None else 1


def rank(group: Group) -> int:
    """This process' rank in `group`; 0 without torch.distributed."""
    return dist.get_rank(group) if group is not None else 0


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """Fill `full` (n * ranks,) with the shards (n,) of all ranks; `shard` may be this rank's part of `full`."""
    if group is not None:
        _gather(full, shard, group=group)


def reduce_scatter_mean(shard: torch.Tensor, full: torch.Tensor, group: Group) -> None:
    """This rank's part of the mean over ranks of `full` (n * ranks,), into `shard` (n,), which is that part of `full`.

    Overwrites `full`, and needs no other memory.
    """
    if group is not None:
        divide_alone(full, dist.get_world_size(group))
        _reduce_scatter(shard, full, group=group)


def same(value: int, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` call this with the same `value`, of less than 64 bits."""
    both = torch.tensor([value, -value], device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, minus_least = both.tolist()
    return bool(most == -minus_least)


def all_reduce_mean(values: torch.Tensor, group: Group) -> None:
    """The mean over ranks of `values` (n,), in place."""
    if group is not None:
        divide_alone(values, dist.get_world_size(group))
        dist.all_reduce(values, group=group)


def all_reduce_sum(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """The sum over the ranks of all `groups`, one after the other, of each of `values`, in double precision."""
    result = list(values)
    for group in groups:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        total = torch.tensor(result, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        result = [float(value) for value in total]
    return result
