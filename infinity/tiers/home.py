"""Where a block lives: buffers in memory or extents on NVMe, and which of two holds its content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.placement.spec import Placed
from infinity.tiers.originals import FileExtent

if TYPE_CHECKING:
    import torch

    from infinity.tiers.arena import Lease
    from infinity.tiers.drives import Extent


class Home:
    """The home of one block. The store alone changes it, under its lock.

    A block in memory has `buffers`, a block on NVMe has `extents`. Where an update writes beside
    the old content there are two of them: `version` is the current one, `target` the one that the
    next update writes. The cached part of a block on NVMe lies in `cached` (uint8) and is rewritten
    in place. The extent of a block that nobody rewrote yet may be a place in files of the user.

    `written` is False until the first update ends: such a block reads as zeros, without I/O.
    """

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        """Where this is: where the configuration wants it, and from `Store.open` on as decided."""
        self.buffers: tuple[Lease, ...] = ()
        self.extents: tuple[Extent | FileExtent, ...] = ()
        self.cached: torch.Tensor | None = None
        self.version = 0
        self.written = False
        self.updates = 0
        """How many updates have begun to replace the content."""
        self.durable: int | None = None
        """Which of the extents the last commit speaks of, or the first one will when another one
        has been sealed since: nobody writes there. None: none."""
        self.sealed: int | None = None
        """Which of them the next commit speaks of, or did: once it is the content, nobody writes
        there either."""
        self._flips = self._sealed_flips = 0
        self._is_rewritten = False

    @property
    def buffer(self) -> Lease | None:
        """The memory that holds the current content; None on NVMe."""
        return self.buffers[self.version] if self.buffers else None

    @property
    def whole(self) -> torch.Tensor | None:
        """All of the home (uint8) where it is memory: the block, or the unit that it is a part of
        (`BlockSpec.whole`); None on NVMe."""
        return None if self.buffer is None else self.buffer.tensor

    @property
    def memory(self) -> torch.Tensor | None:
        """The block (uint8) where it is at home in memory; None on NVMe."""
        spec, tensor = self.placed.spec, self.whole
        if tensor is None or not spec.whole:
            return tensor
        return tensor[spec.at : spec.at + spec.nbytes]

    def memory_of(self, begin: int) -> torch.Tensor | None:
        """The memory (uint8, from element 0 on) that is the home of element `begin`, if any."""
        if self.buffers:
            return self.memory
        return self.cached if begin < self.placed.cached_elements else None

    @property
    def extent(self) -> Extent | FileExtent:
        """The place on NVMe of the current content, but for what is cached in memory."""
        return self.extents[self.version]

    @property
    def original(self) -> FileExtent | None:
        """The place in files of the user, while the content is there."""
        extent = self.extents[self.version] if self.extents else None
        return extent if isinstance(extent, FileExtent) else None

    @property
    def has_shadow(self) -> bool:
        """Whether an update writes beside the old content what is not cached in memory."""
        return max(len(self.extents), len(self.buffers)) == 2

    @property
    def target(self) -> int:
        """Which of the extents or buffers the next update writes."""
        if self._is_rewritten:
            return self.version
        return (self.version + 1) % max(len(self.extents), len(self.buffers), 1)

    @property
    def is_free(self) -> bool:
        """Whether an update may write: what it overwrites is in no commit that is still needed."""
        was_sealed = self.target == self.sealed and self._flips > self._sealed_flips
        return self.target != self.durable and not was_sealed

    def rewrite(self) -> bool:
        """What is written next, all of it, takes the place of the content where no commit speaks of
        that; False where one does."""
        sealed = self.version == self.sealed and self._flips >= self._sealed_flips
        self._is_rewritten = self.version != self.durable and not sealed
        return self._is_rewritten

    def seal(self, extent: int) -> None:
        """The next commit speaks of `extent`: the current one, or the target of an update that has
        yet to end."""
        self.durable = self.sealed if self.durable is None else self.durable
        self.sealed = extent
        self._sealed_flips = self._flips + (extent != self.version)

    def flip(self) -> None:
        """An update has written all of the target: that is the content from now on."""
        self._flips += not self._is_rewritten
        self.version = self.target
        self._is_rewritten = False
        self.written = True
        if self.version and self.extents and isinstance(self.extents[0], FileExtent):
            self.extents = self.extents[1:]
            self.version = 0

    def forget(self) -> None:
        """Read as zeros again, without I/O."""
        self.written = False
        for buffer in self.buffers:
            buffer.tensor.zero_()
        if self.cached is not None:
            self.cached.zero_()

    def drop(self) -> None:
        """The store was closed: let go of the memory."""
        self.buffers = ()
        self.cached = None
