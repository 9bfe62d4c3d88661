"""A block: a frozen spec, a home, and a copy on the compute device in one of five states."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from infinity.placement.spec import BlockSpec, Format, Kind, Placed
from infinity.tier import Tier
from infinity.tiers.home import Home

if TYPE_CHECKING:
    from infinity.device import Copy, Mark
    from infinity.tiers.access import Fetch, Pending
    from infinity.tiers.arena import Lease
    from infinity.tiers.originals import FileExtent


class CopyState(enum.Enum):
    """The content of a block's copy on the compute device.

    ABSENT: nothing. Costs no memory there.
    RESERVED: a place without the content. It was just leased, a fetch into it failed, or the
    caller's code wrote to the copy.
    LOADING: a place, and a fetch that brings the content.
    READY: the content. A block at home on the compute device is always READY or UPDATING.
    UPDATING: the optimizer replaces the content. A place, if there is one, receives the new content
    chunk by chunk.
    """

    ABSENT = enum.auto()
    RESERVED = enum.auto()
    LOADING = enum.auto()
    READY = enum.auto()
    UPDATING = enum.auto()


class DeviceCopy:
    """The copy of one block on the compute device. The store alone changes it, under its lock.

                  reserve              to_loading            to_ready
        ABSENT  ----------> RESERVED ------------> LOADING ------------> READY
           ^                  ^  ^      to_failed     |                    |
           |                  |  +--------------------+     to_outdated    |
           |                  +--------------------------------------------+
           +-- evict, from RESERVED and READY

    `to_updating` leads from ABSENT, RESERVED and READY to UPDATING; `to_ready`, `to_loading` and
    `to_absent` end it.

    One class, because each step between states changes the lease and its transfers together.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = CopyState.ABSENT
        self.lease: Lease | None = None
        self.fetch: Fetch | None = None
        """The fetch that brings the content, while LOADING."""
        self.gathering: Pending | None = None
        """The collective that fills the rest of the span from other ranks. Until it has ended, the
        lease may neither end nor get other content."""
        self.pins = 0
        """How many uses need the copy in its place."""
        self.used: Mark | None = None
        """The lease may be filled after this mark: the model's last use of it, or of the copy that
        had its place before. None: at once."""
        self.arriving: Copy | None = None
        """The last copy into the lease that was queued. Readers of the lease run after it on their
        own streams. Its source does not change until it has ended."""
        self.leaving: Copy | None = None
        """The last copy from the lease that was queued. The lease does not end before it has."""
        self.copying = 0
        """How many copies from or to the lease are under way. The lease ends after them."""
        self.posting = 0
        """How many copies are in `renewed` already, but not queued yet."""
        self.holds_old = False
        """Whether chunks that are not in `renewed` hold the old content of an UPDATING block."""
        self.renewed: set[int] = set()
        """First elements of the chunks that an update wrote to the lease. While UPDATING, they
        hold the new content. While READY and not in use, they hold a guess: the content after the
        next update, unless that update is rolled back."""
        self._is_home = False

    @property
    def pending(self) -> Pending | Fetch | None:
        """The collective or fetch that has to end before the lease ends."""
        return (
            self.gathering
            if self.gathering is not None and not self.gathering.ended()
            else self.fetch
        )

    def be_home(self, lease: Lease) -> None:
        """-> READY. The compute device is the home of the block: `lease` is the block itself and
        never ends."""
        self.lease = lease
        self._is_home = True
        self.state = CopyState.READY

    def reserve(self, lease: Lease, used: Mark | None) -> None:
        """ABSENT -> RESERVED; an UPDATING block stays UPDATING. `lease` may be filled after
        `used`."""
        self._expect(CopyState.ABSENT, CopyState.UPDATING)
        self.lease = lease
        self.used = used
        if self.state is CopyState.ABSENT:
            self.state = CopyState.RESERVED

    def to_loading(self, fetch: Fetch) -> None:
        """RESERVED or UPDATING -> LOADING, with the lease that `fetch` fills."""
        self._expect(CopyState.RESERVED, CopyState.UPDATING)
        self._move_to(CopyState.LOADING)
        self.fetch = fetch

    def to_ready(self) -> None:
        """LOADING or UPDATING -> READY. Also RESERVED -> READY, if all missing bytes are queued."""
        self._expect(CopyState.RESERVED, CopyState.LOADING, CopyState.UPDATING)
        self._move_to(CopyState.READY)

    def to_failed(self) -> None:
        """LOADING -> RESERVED. The lease stays: on other ranks the same fetch arrived (I6)."""
        self._expect(CopyState.LOADING)
        self._move_to(CopyState.RESERVED)

    def to_outdated(self) -> None:
        """READY -> RESERVED: the lease does not hold the content. It stays, as in `to_failed`. An
        UPDATING block stays UPDATING: the end of its update fetches the content."""
        self._expect(CopyState.READY, CopyState.UPDATING)
        before = self.state
        self._move_to(CopyState.RESERVED)
        if before is CopyState.UPDATING:
            self.state = before

    def to_absent(self) -> None:
        """Any state -> ABSENT. The lease, if any, ends."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self._move_to(CopyState.ABSENT)

    def evict(self) -> None:
        """RESERVED or READY -> ABSENT; an UPDATING block stays UPDATING, without a place."""
        self._expect(CopyState.RESERVED, CopyState.READY, CopyState.UPDATING)
        before = self.state
        self.to_absent()
        if before is CopyState.UPDATING:
            self.state = before

    def to_updating(self, keep: bool) -> None:
        """ABSENT, RESERVED or READY -> UPDATING. A copy is dropped, or kept to be renewed."""
        self._expect(CopyState.ABSENT, CopyState.RESERVED, CopyState.READY)
        before = self.state
        if not (keep or self._is_home):
            self.to_absent()
        self.holds_old = keep and before is CopyState.READY
        self.state = CopyState.UPDATING

    def drop(self) -> None:
        """The store was closed: release the memory."""
        self.lease = self.fetch = self.gathering = None

    def _move_to(self, state: CopyState) -> None:
        self.state = state
        self.fetch = None
        self.holds_old = False
        self.renewed = set()

    def _expect(self, *states: CopyState) -> None:
        if self.state not in states:
            expected = " or ".join(state.name for state in states)
            raise RuntimeError(f"{self._name} is {self.state.name}, not {expected}")


class Block:
    """The live side of one `BlockSpec`: its home, and its copy on the compute device.

    Owned by the store, which alone changes a block, under its lock.
    """

    def __init__(self, spec: BlockSpec, home: type[Home] = Home) -> None:
        self.home = home(Placed(spec))
        self.copy = DeviceCopy(spec.name)

    @property
    def placed(self) -> Placed:
        return self.home.placed

    @property
    def spec(self) -> BlockSpec:
        return self.home.placed.spec

    @property
    def unit(self) -> int:
        return self.spec.unit

    @property
    def kind(self) -> Kind:
        return self.spec.kind

    @property
    def elements(self) -> int:
        return self.spec.elements

    @property
    def format(self) -> Format:
        return self.spec.format

    @property
    def tier(self) -> Tier:
        return self.spec.tier

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def permanent(self) -> bool:
        """Whether the compute copy is the block itself and never leaves."""
        return self.spec.permanent

    @property
    def cached_elements(self) -> int:
        """How many elements of a block on NVMe, from the first one on, are cached in host
        memory."""
        return self.placed.cached_elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross to NVMe when the block is read or written whole."""
        return self.placed.moved_bytes

    @property
    def written(self) -> bool:
        """Whether the block has content; if not, it reads as zeros."""
        return self.home.written

    @property
    def original(self) -> FileExtent | None:
        """The place in the user's files, while the content is there; else None."""
        return self.home.original

    def drop(self) -> None:
        """The store was closed: release the memory, even if a caller keeps the block."""
        self.home.drop()
        self.copy.drop()
