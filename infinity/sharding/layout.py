"""The place of each parameter in its unit's flat buffer and shards, and of a part of a tensor in
the whole. Pure arithmetic, in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from infinity.quantities import round_up

# Elements: at least a cache line for every dtype, so SIMD kernels start aligned.
PARAMETER_ALIGNMENT = 64
PAGE = 4096  # bytes: every block is a multiple of it, so that O_DIRECT can move the block
# Bytes per element of a split master or a bf16 moment, beside a parameter that may be wider.
NARROWEST_STATE = 2


def shard_alignment(itemsize: int) -> int:
    """The number of elements in a shard is a multiple of this, for parameters of `itemsize` bytes.
    So every block of the unit has whole pages.

    Example: 4096 elements of int8; 2048 of bf16 or fp32, because their states may have 2 bytes.
    """
    return PAGE // min(itemsize, NARROWEST_STATE)


class ParameterPlace(NamedTuple):
    """One parameter in the flat buffer: elements [offset, offset + numel)."""

    offset: int
    numel: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Overlap(NamedTuple):
    """The part of a parameter that lies in one shard: its start in the shard, its start in the
    parameter, its length."""

    in_shard: int
    in_parameter: int
    length: int


class FlatLayout:
    """Parameters of `shapes` laid out one after the other, and cut into `ranks` equal shards.

    `rooms` reserves a number of elements for each parameter, by default its own number. An element
    has `itemsize` bytes.

    Example: shapes (3, 5) and (7,) for 2 ranks: offsets 0 and 64, 71 elements, padded to 4096;
    shards of 2048.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        ranks: int = 1,
        rooms: Sequence[int] = (),
        itemsize: int = 4,
    ) -> None:
        places, offset = [], 0
        for shape, room in zip(shapes, rooms or [0] * len(shapes), strict=True):
            numel = math.prod(shape)
            places.append(ParameterPlace(offset, numel, tuple(shape)))
            offset = round_up(offset + max(numel, room), PARAMETER_ALIGNMENT)
        self.places = tuple(places)
        self.ranks = ranks
        self.numel = round_up(max(offset, 1), shard_alignment(itemsize) * ranks)
        self.shard_numel = self.numel // ranks

    def overlap(self, index: int, rank: int) -> Overlap:
        """The part of parameter `index` in the shard of `rank`; its length may be 0."""
        place, start = self.places[index], rank * self.shard_numel
        begin, end = max(place.offset, start), min(place.end, start + self.shard_numel)
        return Overlap(max(begin - start, 0), max(begin - place.offset, 0), max(end - begin, 0))


class LocalPart(NamedTuple):
    """A rank's part of a tensor. The tensor is a matrix of `rows` x `columns`; the part is its
    `width` columns from `begin`.

    No part has more than `room` elements. Example: a tensor of shape (4, 6, 5) is cut along
    dimension 1. As a matrix it has 4 x 30 elements. The second of two ranks has the 15 columns from
    15, with room for 60 elements. A whole tensor is one row.
    """

    rows: int
    columns: int
    begin: int
    width: int
    room: int


def part_within(
    shape: Sequence[int], dimension: int, begin: int, end: int, longest: int
) -> LocalPart:
    """The part from `begin` to `end` along `dimension` of a tensor of `shape`. No part of the
    tensor is longer than `longest`."""
    rows, below = math.prod(shape[:dimension]), math.prod(shape[dimension + 1 :])
    room = rows * longest * below
    return LocalPart(rows, shape[dimension] * below, begin * below, (end - begin) * below, room)


class TilePlace(NamedTuple):
    """Where a tile lies in the parameter `name` of `shape`: from `begin` to `end` along
    `dimension`."""

    name: str
    shape: tuple[int, ...]
    dimension: int
    begin: int
    end: int

    @property
    def bounds(self) -> tuple[slice, ...]:
        """The indices of the tile in the whole parameter."""
        return (*[slice(None)] * self.dimension, slice(self.begin, self.end))

    @property
    def part(self) -> LocalPart:
        """The same as a part of a matrix. It has no room for more."""
        return part_within(self.shape, self.dimension, self.begin, self.end, self.end - self.begin)
