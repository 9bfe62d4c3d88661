"""The measured speeds of a machine, as input for decisions. `infinity.measure` measures them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

ALIKE = 1.25
"""Speeds that differ by less than this factor count as equal: repeated measurements differ as
much."""


class Rates(NamedTuple):
    """Bytes per second to the compute device, from it, and on all drives together (half reads, half
    writes). Parameters per second that the CPU updates."""

    upload: float
    download: float
    nvme: float
    updates: float


def levelled(speeds: Sequence[float]) -> list[float]:
    """`speeds`, in the same order, with each group of equal speeds (see `ALIKE`) replaced by its
    mean."""
    result = list(speeds)
    groups: list[list[int]] = []
    for number in sorted(range(len(speeds)), key=speeds.__getitem__):
        if groups and speeds[number] < ALIKE * speeds[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        for number in group:
            result[number] = statistics.fmean(speeds[one] for one in group)
    return result
