"""Where every parameter lies in its unit's flat buffer, and in whose shard: pure arithmetic, in
elements."""

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
