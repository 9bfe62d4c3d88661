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

    def terms(self) -> tuple[float, float]:
        """What to sum over the ranks for `agree`: 20 bits of the hash and their square, exact in double precision."""
        value = self._hash & 0xFFFFF
        return float(value), float(value * value)


def agree(total: float, squares: float, ranks: int) -> bool:
    """Whether all `ranks` have the same `Calls`, given the sums of their terms: only equal values have no variance."""
    return ranks * int(squares) == int(total) ** 2


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
