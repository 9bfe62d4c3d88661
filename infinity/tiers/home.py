"""Where a block lives: buffers in memory or extents on NVMe, and which of them holds its content.

[Note: a spare extent]
Where one of N > 1 steps is committed, a block has two whole extents and a spare one. Commits speak
of the two. The committed one stays as it is until the next commit, so the updates in between write
the other one and the spare in turn. The spare has no room for what is cached in memory: the update
of the step that is committed alone writes that.

Which of them an update writes follows from how many steps are left until the commit: that of the
step itself writes a whole extent, the one before it the spare, and so on backwards. With N = 3, and
A committed:

    step          1    2       3             4    5       6
    steps left    2    1       0             2    1       0
    written       B    spare   B, commits    A    spare   A, commits

Where something comes between (a step that is left out, a unit without gradients), content may lie
in the spare, or lack what is cached, as a commit falls due. The store then writes what is lacking
first. A block that is cached as a whole has an empty spare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from infinity.placement.spec import Placed
from infinity.tiers.originals import FileExtent

if TYPE_CHECKING:
    import torch

    from infinity.tiers.arena import Lease
    from infinity.tiers.states_files import Extent


SPARE = 2
"""Which of the extents is the spare one, where there is one."""


class Version(NamedTuple):
    """What a block has after some step: which of its extents, and whether that was ever written."""

    extent: int
    is_written: bool


class Home:
    """The home of one block. The store alone changes it, under its lock.

    A block in memory has `buffers`, a block on NVMe has `extents`. Where an update writes beside
    the old content there are several of them: `version` is the current one, `target` the one that
    an update writes. The cached part of a block on NVMe lies in `cached` (uint8) and is rewritten
    in place. The extent of a block that nobody rewrote yet may be a place in files of the user.

    `left` is how many steps lie between the one of an update and the one that is committed next: 0
    for that one itself, for a write outside of steps, and wherever every step is committed.

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
        self.pinned: int | None = None
        """Which of them a snapshot has yet to read: nobody writes there. None: none."""
        self._flips = self._sealed_flips = 0
        self._is_rewritten = False
        self._has_cached = True  # whether the current extent also has what is cached

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
        return max(len(self.extents), len(self.buffers)) > 1

    def target(self, left: int = 0) -> int:
        """Which of the extents or buffers an update writes."""
        if self._is_rewritten:
            return self.version
        if len(self.extents) <= SPARE:
            return (self.version + 1) % max(len(self.extents), len(self.buffers), 1)
        if self.sealed is not None and self._flips < self._sealed_flips:
            return self.sealed  # an update on its way
        whole = 1 - (self.version if self.sealed is None else self.sealed)
        if not self.placed.moved_bytes:
            return SPARE if left or self.version == whole else whole
        wanted, other = (SPARE, whole) if left % 2 else (whole, SPARE)
        return wanted if wanted != self.version else other

    def writes_through(self, left: int = 0) -> bool:
        """Whether an update writes what is cached in memory to its target, too."""
        return self.placed.write_through and left == 0 and self.target() != SPARE

    def is_free(self, left: int = 0) -> bool:
        """Whether an update may write: what it overwrites is in no commit that is still needed."""
        target = self.target(left)
        was_sealed = target == self.sealed and self._flips > self._sealed_flips
        return target != self.durable and not was_sealed

    def is_pinned(self, left: int = 0) -> bool:
        """Whether an update would overwrite what a snapshot has yet to read."""
        return self.target(left) == self.pinned

    def rewrite(self) -> bool:
        """What is written next, all of it, takes the place of the content where that is whole and
        no commit speaks of it; else False."""
        sealed = self.version == self.sealed and self._flips >= self._sealed_flips
        self._is_rewritten = self.version not in (self.durable, SPARE) and not sealed
        return self._is_rewritten

    @property
    def is_whole(self) -> bool:
        """Whether a commit may speak of the content."""
        return self.version != SPARE and (self._has_cached or not self.written)

    def will_be_whole(self, left: int) -> bool:
        """The same, of what an update that is on its way makes."""
        has_cached = not self.placed.cached_elements or self.writes_through(left)
        return self.target(left) != SPARE and has_cached

    def seal(self, extent: int) -> None:
        """The next commit speaks of `extent`: the current one, or the target of an update that has
        yet to end."""
        self.durable = self.sealed if self.durable is None else self.durable
        self.sealed = extent
        self._sealed_flips = self._flips + (extent != self.version)

    def flip(self, left: int = 0) -> None:
        """An update has written all of the target: that is the content from now on."""
        self._has_cached = not self.placed.cached_elements or self.writes_through(left)
        self.version, flips = self.target(left), self._flips + (not self._is_rewritten)
        self._flips, self._is_rewritten, self.written = flips, False, True
        if self.version and self.extents and isinstance(self.extents[0], FileExtent):
            self.extents = self.extents[1:]
            self.version = 0

    def forget(self) -> None:
        """Read as zeros again, without I/O."""
        self.written = False
        self.version = self.target() if self.version == SPARE else self.version
        for buffer in self.buffers:
            buffer.tensor.zero_()
        if self.cached is not None:
            self.cached.zero_()

    def drop(self) -> None:
        """The store was closed: let go of the memory."""
        self.buffers = ()
        self.cached = None
