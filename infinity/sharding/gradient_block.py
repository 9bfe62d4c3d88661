"""The home of the gradients of a unit: it adds them up, and rewrites them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

import torch

from infinity.device import Copy, copy_alone
from infinity.placement.spec import Kind
from infinity.sharding.facts import UnitFacts
from infinity.sharding.listeners import UnitListeners
from infinity.tiers.block import Block
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store


class GradientBlock:
    """The gradient block of one unit, in any step.

    Methods that say so run on the thread of the exchange, all other methods on the thread of the
    model.
    """

    def __init__(
        self,
        facts: UnitFacts,
        blocks: Mapping[Kind, Block],
        store: Store,
        listeners: UnitListeners,
    ) -> None:
        """Only trainable units have a gradient block. Methods are for these."""
        self._facts, self._blocks, self._store = facts, blocks, store
        self._listeners = listeners

    @property
    def _block(self) -> Block:
        return self._blocks[Kind.GRAD]

    def _starts(self) -> Sequence[int]:
        """The first element of every chunk of this rank's shard."""
        return self._store.staging.chunks(self._blocks[Kind.PARAM])

    def flat(self) -> torch.Tensor:
        """The home in memory: this rank's shard (shard_numel,), or the whole unit (numel,) if
        gradients are reduced late."""
        home = self._block.home.buffer
        if home is None:
            raise RuntimeError(f"the gradients of {self._facts.name} have no home in memory")
        return home.tensor.view(self._facts.gradient_dtype)

    def part(self, index: int) -> torch.Tensor:
        """The home of the gradient of parameter `index`, in its shape."""
        place = self._facts.layout.places[index]
        return self.flat()[place.offset : place.end].view(place.shape)

    def rewrite(
        self, factors: Mapping[int, float | torch.Tensor | None], fresh: bool = False
    ) -> None:
        """Multiply the gradients of these parameters, by index. None makes zeros of any content. A
        tensor (numel,) replaces the content.

        Reads and writes the chunks of this rank's shard that have some of them. With `fresh` it
        reads nothing and writes all chunks: all other elements become zeros, padding too.
        """
        facts, block, staging = self._facts, self._block, self._store.staging
        overlaps = {i: facts.overlap(i) for i in factors}
        starts = self._starts()
        for begin, end in zip(starts, [*starts[1:], facts.layout.shard_numel], strict=True):
            spans = {
                i: (max(o.in_shard, begin), min(o.in_shard + o.length, end))
                for i, o in overlaps.items()
            }
            spans = {
                i: (low - begin, high - begin) for i, (low, high) in spans.items() if low < high
            }
            if not spans and not fresh:
                continue
            loaded = () if fresh else [block]
            (chunk,) = staging.check_out(ChunkRequest([block], begin, loaded))
            try:
                chunk.wait()
                values = chunk.tensor.view(facts.gradient_dtype)
                if fresh:
                    values.zero_()
                for index, (low, high) in spans.items():
                    factor = factors[index]
                    if factor is None:
                        values[low:high].zero_()
                    elif isinstance(factor, torch.Tensor):
                        skipped = overlaps[index].in_parameter - overlaps[index].in_shard + begin
                        values[low:high].copy_(factor[low + skipped : high + skipped])
                    else:
                        values[low:high].mul_(factor)
                chunk.commit()
            finally:
                chunk.release()
        self.came()

    def add_up(self, shard: torch.Tensor, first: bool) -> None:
        """Add `shard` (shard_numel,) to its home; if gradients are reduced late, the whole unit
        (numel,). The `first` of a step replaces the content. With an exchange, on its thread."""
        dtype, block = self._facts.gradient_dtype, self._block
        staging, add = self._store.staging, self._listeners.updates.add_gradients
        with closing(staging.bring_home(block, shard.view(torch.uint8), add=not first)) as parts:
            for home, part in parts:
                (copy_alone if first else add)(home.view(dtype), part.view(dtype))
        self.came()

    def change(self, function: Callable[[torch.Tensor], object]) -> None:
        """Call `function` with every chunk of the content. It changes the chunk in place. With an
        exchange, on its thread."""
        block, staging = self._block, self._store.staging
        for begin in self._starts():
            (chunk,) = staging.check_out(ChunkRequest([block], begin, [block]))
            try:
                chunk.wait()
                function(chunk.tensor.view(self._facts.gradient_dtype))
                chunk.commit()
            finally:
                chunk.release()
        self.came()

    def begin_home(self, full: torch.Tensor) -> Copy | None:
        """Start a copy of `full` (numel,), the first gradients of the unit, to its home, and return
        it. Call `came` after it. None if other ranks or the host must take part first."""
        if self._facts.reduces_each_turn:
            return None
        return self._store.staging.begin_home(self._block, full.view(torch.uint8))

    def came(self) -> None:
        """New gradients are at home."""
        self._store.resident.end_update([self._block])

    def zero(self, indices: Iterable[int]) -> None:
        """Zero the gradients of these parameters, of this rank, before a late reduction."""
        flat = self.flat()
        for place in (self._facts.layout.places[index] for index in indices):
            flat[place.offset : place.end].zero_()

    def spread(self) -> None:
        """Undo a late reduction: multiply this rank's shard by the number of shards, and zero the
        rest. The next reduction then gives the same mean."""
        shards = self.flat().chunk(self._facts.layout.ranks)
        for rank, shard in enumerate(shards):
            if rank == self._facts.rank:
                shard.mul_(len(shards))
            else:
                shard.zero_()
