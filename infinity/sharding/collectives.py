"""The collectives of a sharded unit, as functions over a process group. With one rank they move
nothing.

[Note: reductions over gloo]
Gloo makes a reduce-scatter from an all-reduce, which sends twice as much. So on the host each rank
sends every other rank the part of that rank, together (N-1)/N of the whole. It adds the received
parts to its own, in rank order. So the sum has the same bits on every rank. An all-reduce does the
same, and then exchanges the parts. Received pieces pass two halves of a memory of constant size, so
a unit of any size allocates nothing.

[Note: devices of a group]
A backend takes tensors of some kinds of device: NCCL of GPUs, gloo of the host,
"cpu:gloo,cuda:nccl" of both. Units are gathered, and gradients reduced, in the memory of the
compute device. A block at home on the host is gathered there if the group takes host tensors.
Otherwise it passes the device, a piece at a time (`all_gather_home`). The same holds for averages
over replicas. The few bytes by which ranks agree are allocated on a device that the group takes.
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
"""Bytes in which a rank receives pieces of reductions. With two ranks these are two pieces of
1 MiB."""

PASSING_BYTES = 8 << 20
"""The most bytes that a rank sends at a time of a host tensor that passes the compute device. The
device has room for the pieces of all ranks."""

# Torch 2.13 renamed them, and warns about the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Calls:
    """A hash of the collectives that a rank has posted, in their order. The ranks compare it
    (invariant I6).

    Many units have one size. So without it, ranks that run different modules would take data of one
    unit for data of another.
    """

    def __init__(self) -> None:
        self.value = 0
        """The hash, 32 bits."""

    def note(self, operation: str, unit: str) -> None:
        """This rank posts a collective on a unit, after the collectives that it noted before."""
        self.value = zlib.crc32(f"{operation} {unit}".encode(), self.value)


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
    """Like `all_gather`, of tensors on the host; see [Note: devices of a group]. On the thread of
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
    """Whether torch ends the process if a collective of `group` takes longer than its timeout.
    The watchdog of NCCL does, unless the environment disables it."""
    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    return "nccl" in _backends(group).values() and handling != "0"


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each kind of device, as in "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _kind_for(group: dist.ProcessGroup) -> str:
    """A kind of device that `group` takes: "cpu" if possible."""
    return "cpu" if reaches(group, "cpu") else next(iter(_backends(group)))


def receiving(groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The memory, uint8, in which reductions in `groups` receive. It is empty if the backends have
    memory of their own."""
    return torch.empty(RECEIVING_BYTES if any(map(_is_gloo, groups)) else 0, dtype=torch.uint8)


def reduce_scatter_mean(
    shard: torch.Tensor, full: torch.Tensor, room: torch.Tensor, group: Group
) -> None:
    """This rank's part of the mean over ranks of `full` (n * ranks,), into `shard` (n,), a view of
    that part of `full`.

    Overwrites `full`, and needs no memory besides `room`. On the host it adds in rank order.
    """
    if group is not None:
        divide_alone(full, dist.get_world_size(group))
        if full.device.type == "cpu" and _is_gloo(group):
            _add_parts(full.chunk(dist.get_world_size(group)), room, group)
        else:
            _reduce_scatter(shard, full, group=group)


def all_reduce_mean(values: torch.Tensor, room: torch.Tensor, group: Group) -> None:
    """The mean over ranks of `values` (n,), in place, with the bits of `reduce_scatter_mean`."""
    if group is not None:
        divide_alone(values, dist.get_world_size(group))
        if values.device.type == "cpu" and _is_gloo(group):
            parts = values.tensor_split(dist.get_world_size(group))
            _add_parts(parts, room, group)
            _share_parts(parts, group)
        else:
            dist.all_reduce(values, group=group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo runs the collectives of host tensors."""
    return _backends(group).get("cpu") == "gloo"


def _add_parts(parts: Sequence[torch.Tensor], room: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's part (n,), one of `parts`, over the ranks, in rank order.

    See [Note: reductions over gloo]. The pieces of the next turn travel while the pieces of one
    turn are added.
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
    """Send this rank's part to all ranks, and receive their parts."""
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
        if work is not None:  # None: this rank is not in the group
            work.wait()


def take_from(values: torch.Tensor, source: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """Replace `values` (n,), uint8, by the values of rank `source` of all processes. Sums over each
    of `groups` in turn are a sum over all ranks. The other ranks add zeros, so no bit changes."""
    if dist.get_rank() != source:
        values.zero_()
    for group in groups:
        _wait([dist.all_reduce(values, group=group, async_op=True)])


def same(value: int, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` call this with the same `value`, of less than 64 bits."""
    return same_values([value], [group])[0]


def same_values(values: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> list[bool]:
    """For each of `values`, of less than 64 bits, whether all ranks call this with the same value.
    All ranks get the same answer, because a maximum over each of `groups` in turn is a maximum over
    all ranks."""
    most = [value for each in values for value in (each, -each)]
    for group in groups:
        both = torch.tensor(most, device=_kind_for(group))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        most = [int(value) for value in read_values(both)]
    return [largest == -least for largest, least in zip(most[::2], most[1::2], strict=True)]


def sum_by_rank(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """Like `all_reduce_sum`, in rank order: other values in the same call change no bit."""
    result = list(values)
    for group in groups:
        rows = torch.zeros(size(group), len(result), dtype=torch.float64, device=_kind_for(group))
        rows[rank(group)] = torch.tensor(result, dtype=torch.float64)
        dist.all_reduce(rows, group=group)  # other ranks add zeros
        result = [sum(column) for column in zip(*read_values(rows), strict=True)]
    return result


def all_reduce_sum(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """The sum of each of `values`, in double precision, over the ranks of each of `groups` in
    turn."""
    return _all_reduce(values, groups, dist.ReduceOp.SUM)


def all_reduce_most(values: Sequence[float], groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """The largest of each of `values` over the ranks, the same bits on all ranks."""
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
