"""What a machine gives, as measured, in the form that decisions take it. `infinity.measure`
measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

ALIKE = 1.25
"""Speeds that differ by less than this factor are taken to be equal: measured again, they would
differ as much."""


class Rates(NamedTuple):
    """What this machine gives: bytes per second to the compute device, from it, and to and from all
    drives (half of each); parameters per second that the CPU updates."""

    upload: float
    download: float
    nvme: float
    updates: float


def levelled(speeds: Sequence[float]) -> list[float]:
    """`speeds`, where those that are alike all have their mean."""
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
