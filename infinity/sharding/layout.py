"""Where every parameter lies in its unit's flat buffer, in whose shard, and where a part of a
tensor lies in the whole: pure arithmetic, in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from infinity.quantities import round_up

# Elements: a cache line or more for every dtype, so SIMD kernels start aligned.
PARAMETER_ALIGNMENT = 64
PAGE = 4096  # bytes: every block is whole device blocks, so that O_DIRECT can move it
# Bytes per element of a split master or a bf16 moment, beside a parameter that may be wider.
NARROWEST_STATE = 2


def shard_alignment(itemsize: int) -> int:
    """Elements that a shard is a multiple of, for parameters of `itemsize` bytes: whole pages of
    every block of the unit.

    Example: 4096 elements of int8; 2048 of bf16 or fp32, whose states may have 2 bytes each.
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
    """Parameters of `shapes` laid out one after the other, cut into `ranks` equal shards; each has
    room for as many elements as `rooms` says, by default its own. An element takes `itemsize`
    bytes.

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
    """What a rank has of a tensor: of the tensor as a matrix of `rows` x `columns`, the `width`
    columns from `begin` on.

    No part has more than `room` elements. Example: a tensor of shape (4, 6, 5) is cut along
    dimension 1. As a matrix it has 4 x 30 elements. The second of two ranks has the 15 columns from
    15 on, with room for 60 elements. A whole tensor is one row.
    """

    rows: int
    columns: int
    begin: int
    width: int
    room: int


def part_within(
    shape: Sequence[int], dimension: int, begin: int, end: int, longest: int
) -> LocalPart:
    """What lies from `begin` to `end` along `dimension` of a tensor of `shape`, of which no part is
    longer than `longest`."""
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
        """The indices that take the tile out of the whole."""
        return (*[slice(None)] * self.dimension, slice(self.begin, self.end))

    @property
    def part(self) -> LocalPart:
        """The same as a part of a matrix. It has no room for more."""
        return part_within(self.shape, self.dimension, self.begin, self.end, self.end - self.begin)
