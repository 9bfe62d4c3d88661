"""Finds the block that a memory address belongs to."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from infinity.tiers.arena import Arena
from infinity.tiers.block import Block


class Addresses:
    """The addresses of blocks: in the compute arena, and in memory that stands in for it. Any
    thread may call it; `changed` is the lock of the store."""

    def __init__(self, arena: Arena, blocks: Iterable[Block], changed: threading.Condition) -> None:
        self._arena = arena
        self._changed = changed
        self._stand_ins: dict[Block, dict[range, int]] = {}
        # Blocks that are at home in the arena, by the offsets of their buffers.
        self._homes = {
            buffer.offset: block
            for block in blocks
            if block.permanent
            for buffer in block.home.buffers
        }

    def block_at(self, address: int) -> tuple[Block, int] | None:
        """The block whose compute copy or stand-in contains `address`, and the byte offset in its
        span. None outside of all copies, and after another thread closed the store."""
        memory = self._arena.memory
        offset = address - memory.data_ptr()
        if not 0 <= offset < memory.numel():
            return self._stood_in(address) if self._stand_ins else None
        with self._changed:
            owner = self._arena.owner_at(offset)
            if isinstance(owner, Block) and owner.copy.lease is not None:
                return owner, offset - owner.copy.lease.offset
            start = self._arena.start_at(offset)
            block = None if start is None else self._homes.get(start)
            buffer = None if block is None else block.home.buffer
            if block is None or buffer is None or not buffer.holds(offset):
                return None
            return block, offset - buffer.offset

    def _stood_in(self, address: int) -> tuple[Block, int] | None:
        with self._changed:
            for block, parts in self._stand_ins.items():
                for addresses, at in parts.items():
                    if address in addresses:
                        return block, at + address - addresses.start
        return None

    def stand_in(self, block: Block, at: int, addresses: range) -> None:
        """Until `end_stand_ins`, memory at these `addresses` is found as the bytes of `block` that
        lie `at` bytes into its span."""
        with self._changed:
            self._stand_ins.setdefault(block, {})[addresses] = at

    def end_stand_ins(self, block: Block) -> None:
        """Undo all `stand_in` of `block`."""
        with self._changed:
            self._stand_ins.pop(block, None)
