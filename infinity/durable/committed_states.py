"""What a snapshot reads: the states of a commit, while training goes on.

[Note: a snapshot]
What was committed stays whole in its extents. It is read from there, past the staging of the store:
an update that waits for a block to be read may hold slots of that. Units come in the order in which
updates wait for them, and each is given back as soon as it has been read.
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
"""How many of these it holds."""


class CommittedStates:
    """The states of a commit, and what its record says of steps and optimizers."""

    def __init__(
        self,
        pinned: PinnedStates,
        counts: tuple[int, int],
        buffers: Mapping[str, torch.Tensor],
        headers: Mapping[Optimizer, Mapping[str, Any]],
        first: Callable[[Sequence[Unit]], Unit],
        released: Callable[[], object],
    ) -> None:
        """`first` says which of some units is wanted first; `released` is told when one was
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
        """Those whose states were committed."""
        return list(self._headers)

    @property
    def step(self) -> int:
        """The step that was committed, those included that were left out."""
        return sum(self._counts)

    def begin(self, series: Sequence[Series]) -> None:
        """Take memory. What is not needed for `series` may be overwritten."""
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
        """All may be overwritten. Any thread may call it, often."""
        self._pinned.release()
        self._released()

    def counts(self, updater: Updater) -> tuple[int, int]:
        """As of the commit."""
        return self._counts

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """As of the commit."""
        return self._headers[optimizer]

    def is_written(self, block: Block) -> bool:
        """Whether an update had written it."""
        return self._pinned.is_written(block)

    def starts(self, series: Series) -> Sequence[int]:
        """The first element of every chunk, of at most `READ_BYTES`."""
        return self._chunks.starts(series.unit.blocks[self._source(series)].placed)

    def check_out(self, series: Series, begin: int, waits: bool) -> list[Checkout] | None:
        """The chunk from element `begin` on, checked as it comes. Who `waits` holds no other."""
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
        """Unit after unit, those first for which an update waits."""
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
        """It may be overwritten."""
        self._pinned.release(unit.blocks.values())
        self._released()

    def _source(self, series: Series) -> Kind:
        """As `States.source_of`, when it was committed."""
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
