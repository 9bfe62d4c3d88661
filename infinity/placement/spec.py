"""The blocks to place: kind, format, size and tier, as frozen values. Live blocks are in
`infinity.tiers.block`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from infinity.tier import Tier


class Kind(str, enum.Enum):
    """The state that a block holds."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SLOW = "exp_avg_slow"
    EXP_AVG_SQ = "exp_avg_sq"

    @property
    def is_moment(self) -> bool:
        """Whether it is a moment of an optimizer."""
        return self not in (Kind.PARAM, Kind.GRAD, Kind.MASTER)

    @property
    def code(self) -> str:
        """How the kernels code it in int8, if it is a moment: "second" is never negative."""
        return "second" if self is Kind.EXP_AVG_SQ else "first"


MOMENTS: dict[str, tuple[Kind, ...]] = {
    "adam": (Kind.EXP_AVG, Kind.EXP_AVG_SQ), "adagrad": (Kind.EXP_AVG_SQ,), "lion": (Kind.EXP_AVG,),
    "ademamix": (Kind.EXP_AVG, Kind.EXP_AVG_SLOW, Kind.EXP_AVG_SQ),
    "momentum": (Kind.EXP_AVG,), "sgd": (), "other": (),
}  # fmt: skip
"""The moments of each `Config.algorithm`."""


class Format(NamedTuple):
    """How values lie in memory and on NVMe: a group of `elements` values takes `nbytes` bytes and
    moves as a whole."""

    name: str
    elements: int
    nbytes: int

    def bytes_of(self, elements: int) -> int:
        """Bytes of `elements` values, in whole groups."""
        return -(-elements // self.elements) * self.nbytes

    @property
    def width(self) -> int:
        """Bytes of one value, rounded up."""
        return -(-self.nbytes // self.elements)


FP32 = Format("fp32", 1, 4)
BF16 = Format("bf16", 1, 2)
SPLIT = Format("split", 1, 2)
"""A master as the 16 bits that its bf16 parameter lacks."""
GROUP = 32
"""Elements of an int8 moment that share a scale."""
INT8 = Format("int8", 32768, 36864)
"""32768 codes of one byte, then an fp32 scale for every `GROUP` codes: whole pages, so that direct
I/O can move them alone."""


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """One block: `elements` values in `format`, of kind `kind` and unit number `unit`, at home on
    `tier`.

    A parameter shard lies at byte `at` of the unit's gathered buffer of `span` bytes. No update
    rewrites a `frozen` block. If `whole`, the home in memory holds the whole unit (`span` bytes),
    and the block is this rank's part. If `in_files`, the home of an NVMe block is files of the
    user, which are only read. Two specs are never equal: each stands for one block.
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
    in_files: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's values."""
        return self.format.bytes_of(self.elements)

    @property
    def home_bytes(self) -> int:
        """Bytes of one home in memory."""
        return self.span if self.whole else self.nbytes

    @property
    def permanent(self) -> bool:
        """Whether the copy on the compute device is the home itself, which never leaves."""
        return self.kind is Kind.PARAM and self.tier.is_device and self.home_bytes == self.span

    def on(self, tier: Tier) -> BlockSpec:
        """The same block, at home on `tier`."""
        return dataclasses.replace(self, tier=tier)


@dataclass(frozen=True)
class Placed:
    """The home of a block, on the tier of `spec`.

    It has `copies` homes in memory, or extents on NVMe: two if an update writes beside the old
    content. The first `cached_elements` elements of an NVMe block live in host memory instead. One
    of `steps_per_commit` steps is committed; 0 means none. The update of a committed step also
    writes the cached elements to an extent, which no update or fetch reads. With more than one step
    per commit, the other elements have a spare extent for the updates between two commits.
    """

    spec: BlockSpec
    copies: int = 1
    cached_elements: int = 0
    steps_per_commit: int = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes of an NVMe block that live in host memory."""
        return self.spec.format.bytes_of(self.cached_elements)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a read of the whole block takes from NVMe; 0 for another tier."""
        return self.spec.nbytes - self.cached_bytes if self.spec.tier.is_drive else 0

    @property
    def write_through(self) -> bool:
        """Whether updates of committed steps also write the cached elements to NVMe."""
        return self.steps_per_commit > 0

    @property
    def written_bytes(self) -> int:
        """Bytes that the update of every step writes to NVMe."""
        return self.moved_bytes + (self.cached_bytes if self.steps_per_commit == 1 else 0)

    @property
    def commit_bytes(self) -> int:
        """Bytes that the update of a committed step writes in addition to `written_bytes`."""
        return self.cached_bytes if self.steps_per_commit > 1 else 0

    @property
    def mean_written_bytes(self) -> int:
        """Bytes that an update writes to NVMe on average."""
        return self.written_bytes + self.commit_bytes // max(self.steps_per_commit, 1)

    @property
    def extent_bytes(self) -> int:
        """Bytes of each extent except the spare one."""
        return self.moved_bytes + (self.cached_bytes if self.write_through else 0)

    @property
    def has_spare(self) -> bool:
        """Whether it has a spare extent, which no commit includes."""
        return self.steps_per_commit > 1 and self.copies > 1

    @property
    def reserved_bytes(self) -> int:
        """Bytes that all its homes take in the NVMe directories."""
        if not self.spec.tier.is_drive or self.spec.in_files:
            return 0
        return self.extent_bytes * self.copies + (self.moved_bytes if self.has_spare else 0)


def units_of(specs: Iterable[BlockSpec]) -> dict[int, dict[Kind, BlockSpec]]:
    """The blocks of each unit by kind, by unit number, in the order of `specs`."""
    units: dict[int, dict[Kind, BlockSpec]] = {}
    for spec in specs:
        units.setdefault(spec.unit, {})[spec.kind] = spec
    return units
