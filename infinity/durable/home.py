"""Which extent of a block an update writes, so that those of commits stay as they are.

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

import enum
from typing import NamedTuple

from infinity.placement.spec import Placed
from infinity.tiers.block import Block
from infinity.tiers.home import Home

SPARE = 2
"""Which of the extents is the spare one, where there is one."""


class Version(NamedTuple):
    """What a block has after some step: which of its extents, and whether that was ever written."""

    extent: int
    is_written: bool


class ExtentState(enum.Enum):
    """Which commit speaks of an extent, and what becomes of it. `tests/fast/test_home.py` runs this
    table.

    state      of    step  in place  flip       seal       ahead     other      commits    later
    FREE       none  yes   yes       FREE       SEALED     PROMISED  FREE       -          FREE
    PROMISED   next  yes   -         SEALED     -          PROMISED  -          -          PROMISED
    SEALED     next  no    no        -          SEALED     -         COMMITTED  COMMITTED  SEALED
    COMMITTED  last  no    no        COMMITTED  COMMITTED  -         COMMITTED  COMMITTED  FREE

    - of: which commit speaks of the extent.
    - step, in place: whether the update of a step may write it, and a write outside of steps, if it
      is the content.
    - flip: the state after all of it was written. COMMITTED: of a block with one extent, into which
      a checkpoint is loaded.
    - seal: after the next commit is to speak of it, as the content. ahead: as what an update, which
      is on its way, will make. other: of another extent, while there is no commit yet.
    - commits: after it is committed. later: after another extent is.

    "-" does not occur.
    """

    FREE = enum.auto()
    PROMISED = enum.auto()
    SEALED = enum.auto()
    COMMITTED = enum.auto()


_KEPT = ExtentState.SEALED, ExtentState.COMMITTED


class DurableHome(Home):
    """The home of a block of a `DurableStore`.

    Jobs ask it without the lock of the store, so `states` are replaced as a whole.
    """

    def __init__(self, placed: Placed) -> None:
        super().__init__(placed)
        self.states = (ExtentState.FREE,) * (SPARE + 1)
        """Of each extent; those that there are not are FREE."""
        self.pinned: int | None = None
        """Which extent a snapshot has yet to read. An update waits before it writes there, whatever
        the state says. None: none."""
        self._is_rewritten = False  # a write outside of steps is replacing the content in place
        self._has_cached = True  # whether the current extent also has what is cached

    def _find(self, *wanted: ExtentState) -> int | None:
        """The extent in the first of these states that one has; None where none has any."""
        states = self.states
        return next((states.index(each) for each in wanted if each in states), None)

    def _set(self, changes: dict[int, ExtentState]) -> None:
        self.states = tuple(changes.get(at, state) for at, state in enumerate(self.states))

    # What is written next

    def target(self, left: int = 0) -> int:
        """Which of the extents or buffers an update writes."""
        if self._is_rewritten:
            return self.version
        if len(self.extents) <= SPARE:
            return super().target()
        promised = self._find(ExtentState.PROMISED)
        if promised is not None:
            return promised
        last = self._find(ExtentState.SEALED, ExtentState.COMMITTED)
        whole = 1 - (self.version if last is None else last)
        if not self.placed.moved_bytes:
            return SPARE if left or self.version == whole else whole
        wanted, other = (SPARE, whole) if left % 2 else (whole, SPARE)
        return wanted if wanted != self.version else other

    def writes_through(self, left: int = 0) -> bool:
        """Whether an update writes what is cached in memory to its target, too."""
        return self.placed.write_through and left == 0 and self.target() != SPARE

    def is_free(self, left: int = 0) -> bool:
        """Whether an update may write: what it overwrites is in no commit that is still needed."""
        return self.states[self.target(left)] not in _KEPT

    def is_pinned(self, left: int = 0) -> bool:
        """Whether an update would overwrite what a snapshot has yet to read."""
        return self.target(left) == self.pinned

    @property
    def may_rewrite(self) -> bool:
        """Whether a write outside of steps, of all of it, may take the place of the content: that
        is whole, and no commit speaks of it."""
        return self.version != SPARE and self.states[self.version] not in _KEPT

    @property
    def is_rewrite_pinned(self) -> bool:
        """`is_pinned`, of a write outside of steps."""
        return self.pinned == (self.version if self.may_rewrite else self.target())

    def begin_rewrite(self) -> None:
        """A write outside of steps begins, and ends with `flip`: in place where it may."""
        self._is_rewritten = self.may_rewrite

    def flip(self, left: int = 0) -> None:
        """An update has written all of the target: that is the content from now on."""
        self._has_cached = not self.placed.cached_elements or self.writes_through(left)
        target = self.target(left)
        if self.states[target] is ExtentState.PROMISED:
            self._set({target: ExtentState.SEALED})
        self._is_rewritten = False
        self._become(target)

    def forget(self) -> None:
        """Read as zeros again, without I/O."""
        self.version = self.target() if self.version == SPARE else self.version
        super().forget()

    # What commits speak of

    @property
    def is_whole(self) -> bool:
        """Whether a commit may speak of the content."""
        return self.version != SPARE and (self._has_cached or not self.written)

    def will_be_whole(self, left: int) -> bool:
        """The same, of what an update that is on its way makes."""
        has_cached = not self.placed.cached_elements or self.writes_through(left)
        return self.target(left) != SPARE and has_cached

    @property
    def is_sealed(self) -> bool:
        """Whether any commit speaks of the block, or will."""
        return self._find(ExtentState.PROMISED, *_KEPT) is not None

    def seal(self, extent: int) -> None:
        """The next commit speaks of `extent`: the current one, or the target of an update that has
        yet to end."""
        changes = {}
        last = self._find(ExtentState.PROMISED, ExtentState.SEALED)
        if last is not None and last != extent:
            is_first = self._find(ExtentState.COMMITTED) is None
            changes[last] = ExtentState.COMMITTED if is_first else ExtentState.FREE
        if self.states[extent] is not ExtentState.COMMITTED:
            is_here = extent == self.version
            changes[extent] = ExtentState.SEALED if is_here else ExtentState.PROMISED
        self._set(changes)

    def commit(self, extent: int) -> None:
        """The last commit speaks of `extent`, and no other one before it is needed."""
        before = self._find(ExtentState.COMMITTED)
        changes = {} if before is None else {before: ExtentState.FREE}
        self._set({**changes, extent: ExtentState.COMMITTED})

    def resume(self, version: Version) -> None:
        """The states that were taken over are at this version."""
        self.version, self.written = version
        self.commit(version.extent)


def home_of(block: Block) -> DurableHome:
    """The home of a block of a `DurableStore`."""
    if not isinstance(block.home, DurableHome):
        raise RuntimeError(f"{block.name} is in no durable store")
    return block.home
