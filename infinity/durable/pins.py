"""The states of a commit, which do not change until their reader releases them.

[Note: what waits]
An update overwrites the states of the commit before the last one. If they are pinned, the update
waits (`JobTable`), block after block. A write outside of steps waits, too
(`DurableStore.begin_rewrite`). The snapshot, which reads, waits for no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from infinity.durable.home import Version, home_of
from infinity.nvme.ticket import Ticket
from infinity.tiers.block import Block
from infinity.tiers.block_io import BlockIo
from infinity.tiers.originals import FileExtent


class PinnedStates:
    """The blocks at the commit of `step`, and the other `content` of its record. Made by
    `DurableStore.pin`, under its lock; ends with `release` of all, which any thread may call."""

    def __init__(
        self,
        step: int,
        content: bytes,
        pinned: Mapping[Block, Version],
        originals: Mapping[Block, FileExtent],
        io: BlockIo,
        changed: threading.Condition,
    ) -> None:
        """`originals`: the places of blocks that lie in files of the user, which are only read."""
        self.step, self.content = step, content
        self._versions = dict(pinned)
        self._left = set(pinned)
        self._originals = dict(originals)
        self._io = io
        self._changed = changed
        for block, version in pinned.items():
            home_of(block).pinned = version.extent

    def is_written(self, block: Block) -> bool:
        """Whether it had been written when it was committed; else it contained zeros."""
        return block in self._originals or self._versions[block].is_written

    def read(self, block: Block, at: int, nbytes: int, address: int) -> Ticket:
        """Start reading bytes [at, at + nbytes) of `block` to `address`. `wait` of the ticket
        raises `CorruptStateError` if they are not the bytes that were written."""
        original = self._originals.get(block)
        if original is None and block not in self._left:
            raise RuntimeError(f"{block.name} may have been overwritten")
        extent = original or block.home.extents[self._versions[block].extent]
        return self._io.read_version(block, extent, at, nbytes, address)

    def release(self, blocks: Iterable[Block] | None = None) -> None:
        """`blocks` may be overwritten; None for all. May be called often."""
        with self._changed:
            for block in self._left if blocks is None else self._left.intersection(blocks):
                home_of(block).pinned = None
            self._left -= self._left if blocks is None else set(blocks)
            self._changed.notify_all()
