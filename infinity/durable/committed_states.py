"""Reads the states of a commit for a snapshot, while training continues.

[Note: a snapshot]
A snapshot reads committed states from their extents, which stay unchanged. It does not use the
staging of the store: an update may hold slots there while it waits until the snapshot has read its
block. The snapshot reads units in the order in which updates wait for them. It releases each unit
as soon as it has read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity.checkpoint.series import Series
from infinity.device import huge_pages, zero_alone
from infinity.durable.pins import PinnedStates
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import Updater
from infinity.placement.budget import WIDEST_ELEMENT
from infinity.placement.spec import Kind
from infinity.sharding.unit import Unit
from infinity.tiers.access import Checkout
from infinity.tiers.block import Block
from infinity.tiers.chunks import Chunks

READ_BYTES = 1 << 20
"""The most bytes of a chunk that a snapshot reads."""
READ_SLOTS = 8
"""The number of chunks that a snapshot holds in memory."""


class CommittedStates:
    """The states of a commit, with the step counts and optimizer headers of its record."""

    def __init__(
        self,
        pinned: PinnedStates,
        counts: tuple[int, int],
        buffers: Mapping[str, torch.Tensor],
        headers: Mapping[Optimizer, Mapping[str, Any]],
        first: Callable[[Sequence[Unit]], Unit],
        released: Callable[[], object],
    ) -> None:
        """`first` chooses the unit that is needed first. `released` is called after blocks were
        released."""
        self._pinned = pinned
        self._counts, self._headers = counts, dict(headers)
        self.buffers = buffers
        """The persistent buffers of the model, by name."""
        self._first, self._released = first, released
        self._chunks = Chunks(READ_BYTES // WIDEST_ELEMENT, {})
        self._slots: list[torch.Tensor] = []
        self._units: set[Unit] = set()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers in the record of the commit."""
        return list(self._headers)

    @property
    def step(self) -> int:
        """The number of the committed step, skipped steps included."""
        return sum(self._counts)

    def begin(self, series: Sequence[Series]) -> None:
        """Allocate memory, and release the blocks that `series` does not need."""
        self._slots = list(huge_pages(READ_SLOTS * READ_BYTES).split(READ_BYTES))
        needed = {
            block
            for each in series
            if not each.is_moment or self.is_written(each.unit.blocks[each.kind])
            for block in self._blocks(each)
        }
        self._units = {each.unit for each in series}
        self._pinned.release({b for unit in self._units for b in unit.blocks.values()} - needed)
        self._released()

    def end(self) -> None:
        """Release all blocks. Any thread may call it, more than once."""
        self._pinned.release()
        self._released()

    def counts(self, updater: Updater) -> tuple[int, int]:
        """The counts of the commit."""
        return self._counts

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """The header of the commit."""
        return self._headers[optimizer]

    def is_written(self, block: Block) -> bool:
        """Whether an update had written `block` before the commit."""
        return self._pinned.is_written(block)

    def starts(self, series: Series) -> Sequence[int]:
        """The first element of every chunk, of at most `READ_BYTES`."""
        return self._chunks.starts(series.unit.blocks[self._source(series)].placed)

    def check_out(self, series: Series, begin: int, waits: bool) -> list[Checkout] | None:
        """The chunk from element `begin` on. Its checksum is compared as it is read. A caller that
        `waits` holds no other chunk."""
        blocks = self._blocks(series)
        if len(self._slots) < len(blocks):
            return None
        chunks: list[Checkout] = []
        try:
            for block in blocks:
                chunks.append(self._read(block, begin))
        except BaseException:
            for chunk in chunks:
                chunk.release()
            raise
        return chunks

    def decode(
        self, series: Series, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        """See `States.decode`."""
        series.unit.states.decode(self._source(series), tensors, first, values)

    def in_order(self, units: Sequence[Unit | None]) -> Iterator[int]:
        """Unit by unit. Units for which an update waits come first."""
        numbers: dict[Unit, list[int]] = {}
        for number, unit in enumerate(units):
            if unit is None:
                yield number
            else:
                numbers.setdefault(unit, []).append(number)
        for unit in self._units.difference(numbers):
            self.leave(unit)
        while numbers:
            yield from numbers.pop(self._first(list(numbers)))

    def leave(self, unit: Unit) -> None:
        """Release the blocks of `unit`, so that updates may overwrite them."""
        self._pinned.release(unit.blocks.values())
        self._released()

    def _source(self, series: Series) -> Kind:
        """Like `States.source_of`, as of the commit."""
        unwritten = series.kind is Kind.MASTER and not self.is_written(
            series.unit.blocks[Kind.MASTER]
        )
        return Kind.PARAM if unwritten else series.kind

    def _blocks(self, series: Series) -> list[Block]:
        return series.unit.states.blocks_of(self._source(series))

    def _read(self, block: Block, begin: int) -> Checkout:
        slot = self._slots.pop()
        at, nbytes = self._chunks.bytes_of(block.placed, begin)
        tensor = slot[:nbytes]
        end = functools.partial(self._slots.append, slot)
        if not self.is_written(block):
            return Checkout(tensor, functools.partial(zero_alone, tensor), end=end)
        try:
            ticket = self._pinned.read(block, at, nbytes, tensor.data_ptr())
        except BaseException:
            end()
            raise
        return Checkout(tensor, ticket, end=end)
