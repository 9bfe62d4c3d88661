"""How what a unit saves is cut into pieces, which are items of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from infinity.checkpoint.series import Series

PIECE = 1 << 22  # elements: 16 MiB of fp32


class ShardPiece(NamedTuple):
    """Elements of one parameter under `key`: their start in this rank's shard, and per dimension
    where they lie under it."""

    key: str
    in_shard: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many they are."""
        return math.prod(self.sizes)

    @property
    def address(self) -> MetadataIndex:
        """DCP's name of it."""
        return MetadataIndex(self.key, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """DCP's word for where it lies in the parameter."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


class Box(NamedTuple):
    """`rows` x `columns` elements from (`row`, `column`) on, of a matrix; the first is number
    `number` of what was cut."""

    number: int
    row: int
    column: int
    rows: int
    columns: int


def boxes(begin: int, end: int, width: int, left: int = 0) -> Iterator[Box]:
    """Elements [begin, end) of a matrix of `width` columns, which are those from `left` on of a
    wider one, as boxes in that: the end of a row, whole rows, and the beginning of a row, as far as
    there are any.

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
    """What this rank has of parameter `number`, under a key of the shape `size`: that which
    `Series.size` gives, or if this is one row any other."""
    key = ".".join((*series.prefix, series.unit.keys[number]))
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
