"""The bytes that a step moves between tiers, and the seconds that they take: pure functions of
sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from infinity.placement.calibrate import Rates
from infinity.placement.spec import SPLIT, BlockSpec, Kind, units_of


class Moves(NamedTuple):
    """The work of one step: bytes to the compute device, bytes from it, bytes to and from the
    drives, and parameters that the CPU updates."""

    upload: float
    download: float
    nvme: float
    updates: float

    def seconds(self, rates: Rates) -> tuple[float, ...]:
        """Seconds that each field takes alone. All run at the same time, so a step takes at least
        the longest."""
        return tuple(amount / max(rate, 1.0) for amount, rate in zip(self, rates, strict=True))


def moves(
    blocks: Iterable[BlockSpec],
    resident: float,
    cached: Mapping[BlockSpec, int],
    write_through: float = 0.0,
) -> Moves:
    """Return the work of a step on `blocks`, which are all blocks of one rank.

    `resident` is the share of the travelling parameters that the compute device has room for.
    `cached` is the number of elements of each NVMe block that host memory keeps. `write_through` is
    the share of steps that write these elements to NVMe as well.

    A unit that lives on the compute device entirely moves nothing. Any other parameter is uploaded
    for each use that finds it evicted. The update uploads it for the first of two uses. Gradients
    are downloaded, and the CPU updates. A gradient block that is whole in host memory (stage 1) is
    downloaded whole and uploaded to be reduced, and this rank's part is downloaded again.
    """
    upload = download = nvme = 0.0
    updates = 0
    for unit in units_of(blocks).values():
        if all(block.tier.is_device for block in unit.values()):
            continue
        trains = Kind.GRAD in unit
        for kind, block in unit.items():
            if kind is Kind.PARAM:
                brought = 0.0 if block.tier.is_device else (1 - resident) * (1 if trains else 2)
                upload += block.nbytes * (brought + trains)
                there = 1.0 if block.tier.is_device else resident * block.tier.is_drive
                download += block.nbytes * there * (trains and not is_rounded(unit))
            elif kind is Kind.GRAD:
                download += block.nbytes
                if block.whole and block.tier.is_host:  # down whole, and up to be reduced
                    upload, download = upload + block.span, download + block.span
            elif block.tier.is_device:
                upload, download = upload + block.nbytes, download + block.nbytes
            if block.tier.is_drive:
                in_memory = block.format.bytes_of(cached.get(block, 0))
                nvme += traffic(kind, unit, resident) * (block.nbytes - in_memory)
                nvme += in_memory * write_through * written(kind, unit)
        updates += trains * unit[Kind.PARAM].elements
    return Moves(upload, download, nvme, updates)


def traffic(kind: Kind, unit: Mapping[Kind, BlockSpec], resident: float) -> float:
    """NVMe bytes that a step moves per byte of the block `kind` of `unit`, if it lives on NVMe.

    - A trainable parameter is read for backward and written by the update: 2. If its master is
      split, the update reads it too: 3.
    - A frozen parameter is read for forward and for backward: 2.
    - The share `resident` of the parameters is on the compute device and causes no reads.
    - A gradient is written by backward, and read by the norm and by the update: 3.
    - A master or a moment is read and written: 2.
    """
    if kind is Kind.PARAM:
        written, read = (1, 1 if is_rounded(unit) else 2) if Kind.GRAD in unit else (0, 2)
        return written + read * (1 - resident)
    return 3 if kind is Kind.GRAD else 2


def written(kind: Kind, unit: Mapping[Kind, BlockSpec]) -> int:
    """How often a step writes a block of `kind` that a commit includes: 1, or 0 for a gradient or a
    frozen unit."""
    return int(kind is not Kind.GRAD and Kind.GRAD in unit)


def is_rounded(unit: Mapping[Kind, BlockSpec]) -> bool:
    """Whether the parameters are rounded copies of full masters. Then an update writes them and
    does not read them."""
    return Kind.MASTER in unit and unit[Kind.MASTER].format is not SPLIT
