"""A block: aligned bytes with an identity and one state."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from infinity.config import Tier

if TYPE_CHECKING:
    import torch

    from infinity.device import Mark
    from infinity.tiers.access import Fetch, Pending
    from infinity.tiers.arena import Lease
    from infinity.tiers.drives import Extent


class Kind(str, enum.Enum):
    """What the bytes of a block mean."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


class Format(NamedTuple):
    """How values lie in memory and on NVMe: `elements` of them take `nbytes` bytes together, and cannot be moved apart."""

    name: str
    elements: int
    nbytes: int

    def bytes_of(self, elements: int) -> int:
        """Bytes of `elements` values."""
        return -(-elements // self.elements) * self.nbytes

    @property
    def width(self) -> int:
        """Bytes of one value, rounded up."""
        return -(-self.nbytes // self.elements)


FP32 = Format("fp32", 1, 4)
BF16 = Format("bf16", 1, 2)
SPLIT = Format("split", 1, 2)
"""A master as the 16 bits by which it differs from its bf16 parameter."""
INT8 = Format("int8", 32768, 36864)
"""32768 codes of a byte, then an fp32 scale for every 32 of them: whole pages, so that direct I/O can move them alone."""


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


@dataclass(eq=False)
class Block:
    """`elements` values in `format`, of kind `kind` of unit number `unit`, at home on `tier`.

    Owned by the store, which alone changes a block, under its lock. `written` is False until the first update ends: such a
    block reads as zeros without I/O (a zero extent). `span` and `at` (bytes) place a parameter shard inside the unit's
    gathered buffer. A block that is rewritten copy-on-write has two extents, or two homes in memory, and `version` says which of
    them holds the current content; `updates` is how often that was replaced.

    No update rewrites it where it is `frozen`. Where `whole`, the home in memory is that of the whole unit, `span` bytes, and the
    block is this rank's part of it.

    Of a block on NVMe the first `kept` elements are at home in host memory instead, in `cached` (uint8), and are rewritten in
    place; the extents hold the rest.
    """

    unit: int
    kind: Kind
    elements: int
    format: Format
    tier: Tier
    span: int
    at: int
    name: str
    whole: bool = False
    frozen: bool = False
    state: BlockState = BlockState.HOME
    written: bool = False
    updates: int = 0
    homes: tuple[Lease, ...] = ()
    kept: int = 0
    cached: torch.Tensor | None = None
    extents: tuple[Extent, ...] = ()
    version: int = 0
    lease: Lease | None = None
    fetch: Fetch | None = None
    gathering: Pending | None = None
    """What fills the rest of the span from other ranks, or has; until then the lease may neither end nor get other content."""
    pins: int = 0
    used: Mark | None = None
    """After what the lease may be filled: the model's last use of it, or of what had its place before. None: at once."""
    copying: int = 0
    """Copies from or to the lease that are under way; it may not end meanwhile."""
    outdated: bool = False
    """Whether the lease of a block that is UPDATING holds its old content, where not `renewed`."""
    renewed: set[int] = field(default_factory=set)
    """First elements of the chunks of which the lease holds what an update made: the new content of a block that is UPDATING, or
    of one that is RESIDENT, and that nobody uses, what its next update will make if that is not taken back."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.format.bytes_of(self.elements)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a block on NVMe that are at home in host memory."""
        return self.format.bytes_of(self.kept)

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross to NVMe when the block is read or written whole; 0 for a block of another tier."""
        return self.nbytes - self.kept_bytes if self.tier == "nvme" else 0

    @property
    def home(self) -> Lease | None:
        """The memory that is the home of the current content, unless that is on NVMe."""
        return self.homes[self.version] if self.homes else None

    @property
    def home_bytes(self) -> int:
        """Bytes of one home in memory."""
        return self.span if self.whole else self.nbytes

    @property
    def memory(self) -> torch.Tensor | None:
        """The block, uint8, where it is at home in memory; None on NVMe."""
        if self.home is None:
            return None
        return self.home.tensor[self.at : self.at + self.nbytes] if self.whole else self.home.tensor

    @property
    def has_second_place(self) -> bool:
        """Whether an update writes beside the old content what it does not find kept in memory."""
        return max(len(self.extents), len(self.homes)) == 2

    @property
    def target(self) -> int:
        """Which of the extents or homes the next update writes."""
        return (self.version + 1) % max(len(self.extents), len(self.homes), 1)

    @property
    def permanent(self) -> bool:
        """Whether the compute copy is the block itself and never leaves."""
        return self.kind is Kind.PARAM and self.tier == "gpu" and self.home_bytes == self.span

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
