"""The collectives of a sharded unit, as functions over a process group; with one rank they move
nothing.

[Note: reductions over gloo]
Gloo makes a reduce-scatter from an all-reduce, which sends twice as much. So on the host each rank
sends every other rank that rank's part, together (N-1)/N of the whole. It adds the received parts
to its own, in rank order. So the sum has the same bits on every rank, and an all-reduce is this and
an exchange of the parts. Received pieces pass two halves of a memory of constant size, so a unit of
any size allocates nothing.

[Note: what a group reaches]
A backend takes tensors of some kinds of device: NCCL those of GPUs alone, gloo those of the host,
"cpu:gloo,cuda:nccl" both. Units are gathered, and gradients reduced, in the memory of the compute
device. A block at home on the host is gathered there if the group reaches it. Otherwise it passes
the device, a piece at a time (`all_gather_home`). The same holds for averages over replicas. The
few bytes by which ranks agree on something are made where the group takes them.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity.device import ComputeDevice, add_alone, divide_alone, read_values

Group = dist.ProcessGroup | None

RECEIVING_BYTES = 2 << 20
"""What a rank has for the pieces of reductions on the way to it: with two ranks, two of 1 MiB."""

PASSING_BYTES = 8 << 20
"""What a rank sends at a time of a tensor on the host that passes the compute device; that has room
for those of all ranks."""

# Their names from torch 2.13 on; the older ones then warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Calls:
    """The collectives that one rank has posted, in their order, as a hash that the ranks compare
    (invariant I6).

    Units are often of one size, so ranks that run different modules would take each other's data
    for their own.
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
    """Fill `full` (n * ranks,) with the shards (n,) of all ranks; `shard` may be this rank's part
    of `full`.

    Backends see bytes. Gloo and NCCL know neither bool nor every float8, and a gather only moves.
    """
    if group is not None:
        _gather(full.view(torch.uint8), shard.view(torch.uint8), group=group)


def all_gather_home(
    full: torch.Tensor, shard: torch.Tensor, group: Group, device: ComputeDevice
) -> None:
    """Like `all_gather`, of tensors on the host; see [Note: what a group reaches]. On the thread of
    the exchange."""
    if group is None or reaches(group, "cpu"):
        all_gather(full, shard, group)
        return
    ranks, length = size(group), max(PASSING_BYTES // shard.itemsize, 1)
    room = device.scratch(min(length, shard.numel()) * shard.itemsize * (ranks + 1)).view(
        shard.dtype
    )
    for piece in shard.split(length):
        here, gathered = room[: piece.numel()], room[piece.numel() :][: piece.numel() * ranks]
        here.copy_(piece)
        all_gather(gathered, here, group)
        begin = piece.storage_offset() - shard.storage_offset()
        for theirs, part in zip(full.chunk(ranks), gathered.chunk(ranks), strict=True):
            theirs[begin : begin + piece.numel()].copy_(part)


def reaches(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether collectives of `group` take tensors of this kind of device ("cpu", "cuda")."""
    return kind in _backends(group)


def is_watched(group: dist.ProcessGroup) -> bool:
    """Whether torch ends the process when a collective of `group` takes longer than its timeout:
    NCCL's watchdog does, unless the environment says no."""
    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    return "nccl" in _backends(group).values() and handling != "0"


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each kind of device, as in "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _kind_for(group: dist.ProcessGroup) -> str:
    """The kind of device that a few bytes for a collective of `group` lie on."""
    return "cpu" if reaches(group, "cpu") else next(iter(_backends(group)))


def receiving(groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The memory, uint8, that reductions in `groups` receive in; none where it is the backend's own
    affair."""
    return torch.empty(RECEIVING_BYTES if any(map(_is_gloo, groups)) else 0, dtype=torch.uint8)


def reduce_scatter_mean(
    shard: torch.Tensor, full: torch.Tensor, room: torch.Tensor, group: Group
) -> None:
    """This rank's part of the mean over ranks of `full` (n * ranks,), into `shard` (n,), which is
    that part of `full`.

    Overwrites `full`, and needs no other memory than `room`. On the host the bits are those of a
    sum in the order of the ranks.
    """
    if group is not None:
        divide_alone(full, dist.get_world_size(group))
        if full.device.type == "cpu" and _is_gloo(group):
            _add_parts(full.chunk(dist.get_world_size(group)), room, group)
        else:
            _reduce_scatter(shard, full, group=group)


def all_reduce_mean(values: torch.Tensor, room: torch.Tensor, group: Group) -> None:
    """The mean over ranks of `values` (n,), in place; as `reduce_scatter_mean` has it."""
    if group is not None:
        divide_alone(values, dist.get_world_size(group))
        if values.device.type == "cpu" and _is_gloo(group):
            parts = values.tensor_split(dist.get_world_size(group))
            _add_parts(parts, room, group)
            _share_parts(parts, group)
        else:
            dist.all_reduce(values, group=group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo joins the collectives of host memory."""
    return _backends(group).get("cpu") == "gloo"


def _add_parts(parts: Sequence[torch.Tensor], room: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Into this rank's one of `parts` (n,), the sum of what the ranks have there, added in their
    order.

    See [Note: reductions over gloo]. While the pieces of one turn are added, those of the next are
    on their way.
    """
    mine, others = dist.get_rank(group), _others(group)
    dtype = parts[mine].dtype
    length = room.numel() // (2 * len(others) * dtype.itemsize)
    turns: deque[tuple[torch.Tensor, dict[int, torch.Tensor], list[dist.Work | None]]] = deque()

    def finish() -> None:
        home, received, works = turns.popleft()
        _wait(works)
        boxes = [box for other, box in received.items() if other < mine]
        for box in boxes[1:]:
            add_alone(boxes[0], box)
        for box in [*boxes[:1], *(box for other, box in received.items() if other > mine)]:
            add_alone(home, box)

    for turn, begin in enumerate(range(0, max(part.numel() for part in parts), length)):
        if len(turns) == 2:
            finish()
        pieces = [part[begin : begin + length] for part in parts]
        boxes = (
            room[turn % 2 * (room.numel() // 2) :][: len(others) * length * dtype.itemsize]
            .view(dtype)
            .split(length)
        )
        received = {
            other: box[: pieces[mine].numel()] for other, box in zip(others, boxes, strict=True)
        }
        works = [
            dist.irecv(box, group=group, group_src=other)
            for other, box in received.items()
            if box.numel()
        ]
        works += [
            dist.isend(pieces[other], group=group, group_dst=other)
            for other in others
            if pieces[other].numel()
        ]
        turns.append((pieces[mine], received, works))
    while turns:
        finish()


def _share_parts(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give this rank's one of `parts` to all, and take theirs."""
    mine, others = parts[dist.get_rank(group)], _others(group)
    works = [
        dist.irecv(parts[other], group=group, group_src=other)
        for other in others
        if parts[other].numel()
    ]
    works += [dist.isend(mine, group=group, group_dst=other) for other in others if mine.numel()]
    _wait(works)


def _others(group: dist.ProcessGroup) -> list[int]:
    mine = dist.get_rank(group)
    return [rank for rank in range(dist.get_world_size(group)) if rank != mine]


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:  # that is for ranks that are not in the group
            work.wait()


def take_from(values: torch.Tensor, source: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """Replace `values` (n,), uint8, by those of rank `source` of all processes. A sum over each of
    `groups` in turn is one over all ranks; the others add zeros, so no bit changes."""
    if dist.get_rank() != source:
        values.zero_()
    for group in groups:
        _wait([dist.all_reduce(values, group=group, async_op=True)])


def same(value: int, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` call this with the same `value`, of less than 64 bits."""
    both = torch.tensor([value, -value], device=_kind_for(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, minus_least = read_values(both)
    return bool(most == -minus_least)


def same_values(values: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> list[bool]:
    """Of each of `values`, of less than 64 bits, whether all ranks call this with the same; all of
    them get the same answer. The largest along one of `groups` after the other is that of all
    ranks."""
    most = [value for each in values for value in (each, -each)]
    for group in groups:
        both = torch.tensor(most, device=_kind_for(group))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        most = [int(value) for value in read_values(both)]
    return [largest == -least for largest, least in zip(most[::2], most[1::2], strict=True)]


def sum_by_rank(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """Like `all_reduce_sum`, in the order of the ranks: what else is summed in the same call
    changes no bit."""
    result = list(values)
    for group in groups:
        rows = torch.zeros(size(group), len(result), dtype=torch.float64, device=_kind_for(group))
        rows[rank(group)] = torch.tensor(result, dtype=torch.float64)
        dist.all_reduce(rows, group=group)  # the others add zeros
        result = [sum(column) for column in zip(*read_values(rows), strict=True)]
    return result


def all_reduce_sum(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """The sum over the ranks of all `groups`, one after the other, of each of `values`, in double
    precision."""
    return _all_reduce(values, groups, dist.ReduceOp.SUM)


def all_reduce_most(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """Like `all_reduce_sum`, the largest; the same bits on all ranks."""
    return _all_reduce(values, groups, dist.ReduceOp.MAX)


def _all_reduce(
    values: Sequence[float], groups: Iterable[dist.ProcessGroup], operation: Any
) -> list[float]:
    result = list(values)
    for group in groups:
        total = torch.tensor(result, dtype=torch.float64, device=_kind_for(group))
        dist.all_reduce(total, operation, group=group)
        result = read_values(total)
    return result
