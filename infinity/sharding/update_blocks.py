"""The blocks of a unit, as an update finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity.placement.spec import Kind
from infinity.placement.traffic import is_rounded
from infinity.sharding.facts import UnitFacts
from infinity.tiers.block import Block
from infinity.tiers.store import Store


class UpdateBlocks:
    """Answers of the `blocks` of one unit to an update: the bytes it may write, and its device.
    It reads and changes no content. Any thread may call it."""

    def __init__(self, facts: UnitFacts, blocks: Mapping[Kind, Block], store: Store) -> None:
        self._facts, self._blocks, self._store = facts, blocks, store

    @property
    def is_rounded(self) -> bool:
        """Whether the parameters are their masters, rounded. Then an update writes them and does
        not read them."""
        return is_rounded({kind: block.spec for kind, block in self._blocks.items()})

    @property
    def has_shadow(self) -> bool:
        """Whether all blocks that an update rewrites have a shadow copy, except for cached
        elements. Then the update can be rolled back."""
        return all(
            block.home.has_shadow for kind, block in self._blocks.items() if kind is not Kind.GRAD
        )

    def is_free(self, left: int) -> bool:
        """Whether an update may write: no needed commit has the bytes that it overwrites. `left`:
        see `Home`."""
        return all(block.home.is_free(left) for block in self._blocks.values())

    def is_pinned(self, left: int) -> bool:
        """Whether an update would overwrite bytes that a snapshot has yet to read. `left`: see
        `Home`."""
        return any(block.home.is_pinned(left) for block in self._blocks.values())

    @property
    def staged_from(self) -> int:
        """The first element of this rank's shard with a state that is copied for an update."""
        return min(
            self._store.staging.staged_from(block, self.gpu_resident)
            for block in self._blocks.values()
        )

    @property
    def gpu_resident(self) -> bool:
        """Whether the kernels of the compute device update all blocks in their home."""
        return all(self._store.staging.is_gpu_resident(block) for block in self._blocks.values())

    @property
    def rewritten_in_place_until(self) -> int:
        """The first element from which on all rewritten blocks have a shadow copy; `shard_numel` if
        there is none."""
        if not self.has_shadow:
            return self._facts.layout.shard_numel
        return max(
            block.cached_elements for kind, block in self._blocks.items() if kind is not Kind.GRAD
        )

    def chunks(self) -> Sequence[int]:
        """The first element of every chunk that an update takes at once."""
        return self._store.staging.chunks(self._blocks[Kind.PARAM], self.gpu_resident)
