"""Cuts the states that a unit saves into pieces, which are the items of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from infinity.checkpoint.series import Series

PIECE = 1 << 22  # elements: 16 MiB of fp32


class ShardPiece(NamedTuple):
    """Elements of one parameter under `key`: their start in this rank's shard, and their offsets
    and sizes, per dimension, in the tensor of that key."""

    key: str
    in_shard: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def address(self) -> MetadataIndex:
        """DCP's index of the piece."""
        return MetadataIndex(self.key, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """DCP's description of the place in the parameter."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


class Box(NamedTuple):
    """`rows` x `columns` elements of a matrix, from (`row`, `column`) on. The first element has the
    position `number` in the range that was cut."""

    number: int
    row: int
    column: int
    rows: int
    columns: int


def boxes(begin: int, end: int, width: int, left: int = 0) -> Iterator[Box]:
    """Cut elements [begin, end) of a matrix of `width` columns into boxes: the end of a row, whole
    rows, and the beginning of a row. The matrix may be a part of a wider one, from column `left`
    on. The boxes then have coordinates in the wider one.

    Example: 3 to 17 of 5 columns: 2 elements of row 0, rows 1 and 2, and 2 elements of row 3.
    """
    at = begin
    while at < end:
        row, column = divmod(at, width)
        rows = 1 if column or end - at < width else (end - at) // width
        columns = min(width - column, end - at)
        yield Box(at - begin, row, left + column, rows, columns)
        at += rows * columns


def pieces_of(series: Series, number: int, size: torch.Size) -> Iterator[ShardPiece]:
    """The pieces of parameter `number` in this rank's shard, under a key of shape `size`. `size` is
    `Series.size`. If that has one dimension, `size` may also be a matrix of the same elements."""
    key = ".".join((*series.prefix, series.unit.facts.keys[number]))
    overlap, part = series.unit.facts.overlap(number), series.unit.facts.parts[number]
    first, width, left = (
        (part.begin, size[-1], 0) if part.rows == 1 else (0, part.width, part.begin)
    )
    at, stop = overlap.in_shard, overlap.in_shard + overlap.length
    while at < stop:
        end = min(stop, at // PIECE * PIECE + PIECE)
        begin = first + overlap.in_parameter + at - overlap.in_shard
        for box in boxes(begin, begin + end - at, width, left):
            offsets, sizes = (box.row, box.column), (box.rows, box.columns)
            yield ShardPiece(key, at + box.number, offsets[-len(size) :], sizes[-len(size) :])
        at = end
