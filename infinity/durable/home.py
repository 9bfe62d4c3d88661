"""Which extent of a block an update writes, so that committed extents do not change.

[Note: a spare extent]
If one of N > 1 steps is committed, a block has two whole extents and a spare extent. Commits refer
to the whole extents. The committed extent does not change until the next commit, so the updates in
between write the other one and the spare in turn. The spare has no room for bytes that are cached
in memory. Only the update of a step that is committed writes these.

The extent that an update writes follows from the number of steps until the commit. The update of
the committed step writes a whole extent, the update before it the spare, and so on backwards. With
N = 3, and A committed:

    step          1    2       3             4    5       6
    steps left    2    1       0             2    1       0
    written       B    spare   B, commits    A    spare   A, commits

If a step is left out, or a unit has no gradients, content may lie in the spare, or lack the cached
bytes, when a commit falls due. The store then writes the missing bytes first. A block that is
cached as a whole has an empty spare.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from infinity.placement.spec import Placed
from infinity.tiers.block import Block
from infinity.tiers.home import Home

SPARE = 2
"""The number of the spare extent, if there is one."""


class Version(NamedTuple):
    """The content of a block after some step: its extent, and whether that was ever written."""

    extent: int
    is_written: bool


class ExtentState(enum.Enum):
    """The commit that refers to an extent, and the next states. `tests/fast/test_home.py` runs this
    table.

    state      of    step  in place  flip       seal       ahead     other      commits    later
    FREE       none  yes   yes       FREE       SEALED     PROMISED  FREE       -          FREE
    PROMISED   next  yes   -         SEALED     -          PROMISED  -          -          PROMISED
    SEALED     next  no    no        -          SEALED     -         COMMITTED  COMMITTED  SEALED
    COMMITTED  last  no    no        COMMITTED  COMMITTED  -         COMMITTED  COMMITTED  FREE

    - of: the commit that refers to the extent.
    - step: whether the update of a step may write it. in place: whether a write outside of steps
      may, if it is the content.
    - flip: the state after all of it was written. COMMITTED occurs for a block with one extent,
      into which a checkpoint is loaded.
    - seal: the state after it was sealed as the content. ahead: after it was sealed as the target
      of an update that has not ended. other: after another extent was sealed, before any commit.
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
        """The state of each extent; FREE for extents that do not exist."""
        self.pinned: int | None = None
        """The extent that a snapshot has yet to read, or None. An update waits before it writes
        there, in any state."""
        self._is_rewritten = False  # a write outside of steps is replacing the content in place
        self._has_cached = True  # whether the current extent has the cached bytes, too

    def _find(self, *wanted: ExtentState) -> int | None:
        """An extent in the first of these states that any extent has; None if none has one."""
        states = self.states
        return next((states.index(each) for each in wanted if each in states), None)

    def _set(self, changes: dict[int, ExtentState]) -> None:
        self.states = tuple(changes.get(at, state) for at, state in enumerate(self.states))

    # Writes

    def target(self, left: int = 0) -> int:
        """The number of the extent or buffer that an update writes."""
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
        """Whether an update writes the bytes cached in memory to its target, too."""
        return self.placed.write_through and left == 0 and self.target() != SPARE

    def is_free(self, left: int = 0) -> bool:
        """Whether an update may write: it overwrites no commit that is still needed."""
        return self.states[self.target(left)] not in _KEPT

    def is_pinned(self, left: int = 0) -> bool:
        """Whether an update would overwrite bytes that a snapshot has yet to read."""
        return self.target(left) == self.pinned

    @property
    def may_rewrite(self) -> bool:
        """Whether a write outside of steps may replace the content in place: the content is whole,
        and no commit refers to it."""
        return self.version != SPARE and self.states[self.version] not in _KEPT

    @property
    def is_rewrite_pinned(self) -> bool:
        """`is_pinned`, for a write outside of steps."""
        return self.pinned == (self.version if self.may_rewrite else self.target())

    def begin_rewrite(self) -> None:
        """A write outside of steps begins, in place if it may. It ends with `flip`."""
        self._is_rewritten = self.may_rewrite

    def flip(self, left: int = 0) -> None:
        """An update has written all of the target, which is the content from now on."""
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

    # Commits

    @property
    def is_whole(self) -> bool:
        """Whether a commit may refer to the content."""
        return self.version != SPARE and (self._has_cached or not self.written)

    def will_be_whole(self, left: int) -> bool:
        """Whether a commit may refer to the result of an update that has not ended."""
        has_cached = not self.placed.cached_elements or self.writes_through(left)
        return self.target(left) != SPARE and has_cached

    @property
    def is_sealed(self) -> bool:
        """Whether a commit refers to the block, or will."""
        return self._find(ExtentState.PROMISED, *_KEPT) is not None

    def seal(self, extent: int) -> None:
        """The next commit refers to `extent`: the current one, or the target of an update that has
        not ended."""
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
        """The last commit refers to `extent`. Earlier commits are not needed any more."""
        before = self._find(ExtentState.COMMITTED)
        changes = {} if before is None else {before: ExtentState.FREE}
        self._set({**changes, extent: ExtentState.COMMITTED})

    def resume(self, version: Version) -> None:
        """The adopted states are at this version."""
        self.version, self.written = version
        self.commit(version.extent)


def home_of(block: Block) -> DurableHome:
    """The home of a block of a `DurableStore`."""
    if not isinstance(block.home, DurableHome):
        raise RuntimeError(f"{block.name} is in no durable store")
    return block.home
