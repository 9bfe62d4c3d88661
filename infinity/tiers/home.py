"""The home of a block: buffers in memory or extents on NVMe, and which of them has its content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.placement.spec import Placed
from infinity.tiers.originals import FileExtent

if TYPE_CHECKING:
    import torch

    from infinity.tiers.arena import Lease
    from infinity.tiers.states_files import Extent


class Home:
    """The home of one block. Only the store changes it, under its lock.

    A block in memory has `buffers`; a block on NVMe has `extents`. If an update writes beside the
    old content, there are several of them: `version` is the current one, and an update writes
    `target`. The cached part of a block on NVMe lies in `cached` (uint8) and is rewritten in place.
    Until its first update, the extent of a block may be a place in the user's files.

    `left` is the number of steps between the step of an update and the next committed step. It is 0
    for the committed step itself, for a write outside of steps, and if every step or no step is
    committed.

    `written` is False until an update ends or the block is filled: until then it reads as zeros,
    without I/O.
    """

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        """The spec and its tier: as configured, and from `Store.open` on as decided."""
        self.buffers: tuple[Lease, ...] = ()
        self.extents: tuple[Extent | FileExtent, ...] = ()
        self.cached: torch.Tensor | None = None
        self.version = 0
        self.written = False
        self.updates = 0
        """How many updates have begun."""

    @property
    def buffer(self) -> Lease | None:
        """The lease that has the current content; None on NVMe."""
        return self.buffers[self.version] if self.buffers else None

    @property
    def whole(self) -> torch.Tensor | None:
        """All of the home (uint8) in memory: the block, or the unit that contains it
        (`BlockSpec.whole`). None on NVMe."""
        return None if self.buffer is None else self.buffer.tensor

    @property
    def memory(self) -> torch.Tensor | None:
        """The block (uint8) in memory; None on NVMe."""
        spec, tensor = self.placed.spec, self.whole
        if tensor is None or not spec.whole:
            return tensor
        return tensor[spec.at : spec.at + spec.nbytes]

    def memory_of(self, begin: int) -> torch.Tensor | None:
        """The memory (uint8, from element 0) that is the home of element `begin`; None on NVMe."""
        if self.buffers:
            return self.memory
        return self.cached if begin < self.placed.cached_elements else None

    @property
    def extent(self) -> Extent | FileExtent:
        """The place on NVMe of the current content, except for its cached part."""
        return self.extents[self.version]

    @property
    def original(self) -> FileExtent | None:
        """The place in the user's files, while the content is there; else None."""
        extent = self.extents[self.version] if self.extents else None
        return extent if isinstance(extent, FileExtent) else None

    @property
    def has_shadow(self) -> bool:
        """Whether an update writes beside the old content, except for its cached part."""
        return max(len(self.extents), len(self.buffers)) > 1

    def target(self, left: int = 0) -> int:
        """The number of the extent or buffer that an update writes."""
        return (self.version + 1) % max(len(self.extents), len(self.buffers), 1)

    def writes_through(self, left: int = 0) -> bool:
        """Whether an update also writes the cached part to its target on NVMe."""
        return False

    def is_free(self, left: int = 0) -> bool:
        """Whether an update may write: no commit still needs the bytes that it overwrites."""
        return True

    def is_pinned(self, left: int = 0) -> bool:
        """Whether an update would overwrite bytes that a snapshot has not read yet."""
        return False

    def flip(self, left: int = 0) -> None:
        """An update has written all of the target: make it the current content."""
        self._become(self.target(left))

    def _become(self, version: int) -> None:
        self.version, self.written = version, True
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
        """The store was closed: release the memory."""
        self.buffers = ()
        self.cached = None
