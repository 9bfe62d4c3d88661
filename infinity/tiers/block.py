"""A block: aligned bytes with an identity and one state. What never changes of it is its `BlockSpec`."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from infinity.config import Tier
from infinity.placement.spec import BlockSpec, Format, Kind, Placed

if TYPE_CHECKING:
    import torch

    from infinity.device import Mark
    from infinity.tiers.access import Fetch, Pending
    from infinity.tiers.arena import Lease
    from infinity.tiers.drives import Extent


class BlockState(enum.Enum):
    """Where the content of a block is, and what that costs in memory.

    HOME: on its home tier alone; a lease, if any, is the place that a failed fetch left for the next one.
    FETCHING: a clean copy is under way to a leased run of the compute arena.
    RESIDENT: a clean copy (or, for a block whose home is the compute device, the block itself) lies in its lease.
    UPDATING: the optimizer replaces the content; a lease, if any, gets the new content as it is made.
    """

    HOME = enum.auto()
    FETCHING = enum.auto()
    RESIDENT = enum.auto()
    UPDATING = enum.auto()


class Block:
    """The live side of one `BlockSpec`: what it holds now, and where.

    Owned by the store, which alone changes a block, under its lock. `placed` says where it is at home: on the tier that the
    configuration wants until `Store.open`, and from then on for good where the layout puts it.

    `written` is False until the first update ends: such a block reads as zeros without I/O (a zero extent). A block that is
    rewritten copy-on-write has two extents, or two homes in memory, and `version` says which of them holds the current content;
    `updates` is how often that was replaced. What is kept of a block on NVMe lies in `cached` (uint8) and is rewritten in place.
    """

    def __init__(self, spec: BlockSpec) -> None:
        self.placed = Placed(spec)
        self.state = BlockState.HOME
        self.written = False
        self.updates = 0
        self.homes: tuple[Lease, ...] = ()
        self.cached: torch.Tensor | None = None
        self.extents: tuple[Extent, ...] = ()
        self.version = 0
        self.lease: Lease | None = None
        self.fetch: Fetch | None = None
        self.gathering: Pending | None = None
        """What fills the rest of the span from other ranks, or has; until then the lease may neither end nor get other
        content."""
        self.pins = 0
        self.used: Mark | None = None
        """After what the lease may be filled: the model's last use of it, or of what had its place before. None: at once."""
        self.copying = 0
        """Copies from or to the lease that are under way; it may not end meanwhile."""
        self.outdated = False
        """Whether the lease of a block that is UPDATING holds its old content, where not `renewed`."""
        self.renewed: set[int] = set()
        """First elements of the chunks of which the lease holds what an update made: the new content of a block that is UPDATING,
        or of one that is RESIDENT, and that nobody uses, what its next update will make if that is not taken back."""

    # What never changes

    @property
    def spec(self) -> BlockSpec:
        return self.placed.spec

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
    def kept(self) -> int:
        """How many elements of a block on NVMe, from the first one on, are at home in host memory."""
        return self.placed.kept

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross to NVMe when the block is read or written whole."""
        return self.placed.moved_bytes

    # Where its content is

    @property
    def home(self) -> Lease | None:
        """The memory that is the home of the current content, unless that is on NVMe."""
        return self.homes[self.version] if self.homes else None

    @property
    def memory(self) -> torch.Tensor | None:
        """The block, uint8, where it is at home in memory; None on NVMe."""
        if self.home is None:
            return None
        spec = self.spec
        return self.home.tensor[spec.at : spec.at + spec.nbytes] if spec.whole else self.home.tensor

    @property
    def has_second_place(self) -> bool:
        """Whether an update writes beside the old content what it does not find kept in memory."""
        return max(len(self.extents), len(self.homes)) == 2

    @property
    def target(self) -> int:
        """Which of the extents or homes the next update writes."""
        return (self.version + 1) % max(len(self.extents), len(self.homes), 1)

    @property
    def pending(self) -> Pending | Fetch | None:
        """What has to end before the lease may."""
        return self.gathering if self.gathering is not None and not self.gathering.ended() else self.fetch

    def to_fetching(self, fetch: Fetch) -> None:
        """HOME or UPDATING -> FETCHING, with the lease that `fetch` fills."""
        self._expect(BlockState.HOME, BlockState.UPDATING)
        self.state, self.fetch = BlockState.FETCHING, fetch
        self._settle()

    def to_resident(self) -> None:
        """FETCHING or UPDATING -> RESIDENT."""
        self._expect(BlockState.FETCHING, BlockState.UPDATING)
        self.state, self.fetch = BlockState.RESIDENT, None
        self._settle()

    def to_home(self) -> None:
        """Any state -> HOME; the lease on the compute device, if any, ends."""
        if self.lease is not None and not self.permanent:
            self.lease.release()
            self.lease = None
        self.state, self.fetch = BlockState.HOME, None
        self._settle()

    def _settle(self) -> None:
        self.outdated, self.renewed = False, set()

    def to_failed(self) -> None:
        """FETCHING -> HOME; the lease stays: on other ranks the same fetch arrived, and places must not differ (I6)."""
        self._expect(BlockState.FETCHING)
        self.state, self.fetch = BlockState.HOME, None

    def give_up_lease(self) -> None:
        """HOME or RESIDENT -> HOME; a block that is UPDATING stays so, without the lease held ready for it."""
        self._expect(BlockState.HOME, BlockState.RESIDENT, BlockState.UPDATING)
        updating = self.state is BlockState.UPDATING
        self.to_home()
        if updating:
            self.state = BlockState.UPDATING

    def to_updating(self, keep: bool) -> None:
        """HOME or RESIDENT -> UPDATING; a copy, outdated then, is dropped or kept to be renewed."""
        self._expect(BlockState.HOME, BlockState.RESIDENT)
        resident = self.state is BlockState.RESIDENT
        if not (keep or self.permanent):
            self.to_home()
        self.state, self.outdated = BlockState.UPDATING, keep and resident
        self.updates += 1

    def to_outdated(self) -> None:
        """RESIDENT -> HOME, for what the lease holds is not the content; the lease stays, as in `to_failed`."""
        self._expect(BlockState.RESIDENT)
        self.state = BlockState.HOME
        self._settle()

    def drop(self) -> None:
        """The store was closed: somebody may keep the block, but not what it held."""
        self.lease = self.fetch = self.gathering = self.cached = None
        self.homes = ()

    def _expect(self, *states: BlockState) -> None:
        if self.state not in states:
            raise RuntimeError(f"{self.name} is {self.state.name}, not {' or '.join(s.name for s in states)} (invariant I1)")
