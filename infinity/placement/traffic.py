"""What a step moves, by where blocks are at home, and how long that takes: pure functions of sizes.
Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from infinity.placement.calibrate import Rates
from infinity.placement.spec import SPLIT, BlockSpec, Kind, units_of


class Moves(NamedTuple):
    """What a step of one cycle moves: bytes to the compute device, from it, and to and from the
    drives; and how many parameters the CPU updates."""

    upload: float
    download: float
    nvme: float
    updates: float

    def seconds(self, rates: Rates) -> tuple[float, ...]:
        """How long each of these takes alone; all are under way at once, so a step takes no less
        than the longest."""
        return tuple(amount / max(rate, 1.0) for amount, rate in zip(self, rates, strict=True))


def moves(
    blocks: Iterable[BlockSpec],
    resident: float,
    cached: Mapping[BlockSpec, int],
    write_through: float = 0.0,
) -> Moves:
    """What a step moves of `blocks`, all of a rank's. The compute device has room for `resident` of
    all parameters that come and go, and of a block on NVMe `cached` elements are in host memory; in
    `write_through` of all steps these are written all the same.

    Where all of a unit is at home on the compute device nothing moves. Else a parameter is brought
    to each use that finds it gone. If the update puts it there for the first use, that is one of
    two. A gradient leaves, and the CPU updates. What is collected whole on the host (stage 1) goes
    there, to the device and back.
    """
    upload = download = nvme = 0.0
    updates = 0
    for unit in units_of(blocks).values():
        if all(block.tier == "gpu" for block in unit.values()):
            continue
        trains = Kind.GRAD in unit
        for kind, block in unit.items():
            if kind is Kind.PARAM:
                brought = 0.0 if block.tier == "gpu" else (1 - resident) * (1 if trains else 2)
                upload += block.nbytes * (brought + trains)
                there = {"gpu": 1.0, "nvme": resident, "cpu": 0.0}[block.tier]
                download += block.nbytes * there * (trains and not is_rounded(unit))
            elif kind is Kind.GRAD:
                download += block.nbytes
                if block.whole and block.tier == "cpu":  # leaves whole, and comes to be reduced
                    upload, download = upload + block.span, download + block.span
            elif block.tier == "gpu":
                upload, download = upload + block.nbytes, download + block.nbytes
            if block.tier == "nvme":
                in_memory = block.format.bytes_of(cached.get(block, 0))
                nvme += traffic(kind, unit, resident) * (block.nbytes - in_memory)
                nvme += in_memory * write_through * written(kind, unit)
        updates += trains * unit[Kind.PARAM].elements
    return Moves(upload, download, nvme, updates)


def traffic(kind: Kind, unit: Mapping[Kind, BlockSpec], resident: float) -> float:
    """NVMe bytes that a step moves per byte of `kind` of `unit`, where it is on NVMe.

    A parameter is fetched for backward, written by the update, and read by it where it is a part of
    its master: 2 or 3; a frozen one is fetched for forward and for backward: 2. What the compute
    device has room for is not fetched and not read, so that share of the reads does not count. A
    gradient is written by backward and read by the norm and by the update: 3. A master or a moment
    is read and written: 2.
    """
    if kind is Kind.PARAM:
        written, read = (1, 1 if is_rounded(unit) else 2) if Kind.GRAD in unit else (0, 2)
        return written + read * (1 - resident)
    return 3 if kind is Kind.GRAD else 2


def written(kind: Kind, unit: Mapping[Kind, BlockSpec]) -> int:
    """How often a step writes the states of `kind` that a commit speaks of."""
    return int(kind is not Kind.GRAD and Kind.GRAD in unit)


def is_rounded(unit: Mapping[Kind, BlockSpec]) -> bool:
    """Whether the parameters are nothing but their masters, rounded: then an update writes them and
    does not read them."""
    return Kind.MASTER in unit and unit[Kind.MASTER].format is not SPLIT
