"""Decides which units stay on the compute device, before `Placement.layout` divides the budgets.

[Note: units that stay for inference]
Every forward uses the units in the same order. Look-ahead always finds a unit that is needed sooner
than the unit just used. So every travelling unit is fetched once per forward, however many copies
fit. Units at home on the compute device are never fetched. Of n equal units with room for k, k - 2
stay: one place is for the unit in use, and one for the next. So a forward reads n - k + 2 units.

The largest travelling unit, mostly the embeddings, sets the size of these two places. So it may be
better to keep it. The units that stay are spread evenly over the model, so that the drive always
has something to read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from infinity.placement.cache import spread
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Placement, home_bytes_of, those_that_fit
from infinity.placement.spec import BlockSpec, units_of
from infinity.quantities import format_bytes
from infinity.tier import GPU

MOST_CANDIDATES = 32
"""At most about so many choices of the units that stay on the compute device are weighed."""


def needs_rates(place: Placement, concurrent: int, reserve: int) -> bool:
    """Whether `with_gpu_cache` needs rates: it may choose how many units stay, and some but not all
    fit. Its arguments are those of `with_gpu_cache`."""
    room = _room(place, reserve)
    some_fit = any(home_bytes_of(unit) <= room for unit in place.trainable_units())
    return place.may_choose and some_fit and not _all_fit(place, concurrent, reserve)


def with_gpu_cache(
    place: Placement, concurrent: int, reserve: int, rates: Rates | None = None
) -> Placement:
    """Move all states of the first units to the compute device, as `Tuning.gpu_cache` says.

    "auto" moves all units if they fit beside `concurrent` bytes for gathered units and `reserve`
    bytes for gradient buffers. Otherwise it moves the number that makes a step shortest by `rates`,
    or none without `rates`.
    """
    wanted = place.config.tuning.gpu_cache
    if wanted != "auto":
        return place.with_first(wanted)
    if place.may_choose and _all_fit(place, concurrent, reserve):
        return _all_on_device(place)
    if rates is None or not place.may_choose:
        return place
    return place.with_resident(_fastest(place, concurrent, reserve, rates))


def with_kept(place: Placement, concurrent: Callable[[Placement], int]) -> Placement:
    """For inference: move as many bytes of parameters to the compute device as fit and
    `Tuning.gpu_cache` allows. See [Note: units that stay for inference].

    `concurrent` gives the bytes that a placement needs there for gathered units.
    """
    most, units = place.config.tuning.gpu_cache, _movable(place)
    sizes = sorted({home_bytes_of(unit) for unit in units}, reverse=True)
    best = place
    for size in [math.inf, *sizes[:: -(-len(sizes) // MOST_CANDIDATES) or 1]]:
        larger = [unit for unit in units if home_bytes_of(unit) >= size]
        larger_stay = place.with_resident([spec for unit in larger for spec in unit])
        room = place.budgets.gpu - larger_stay.home_bytes(GPU) - concurrent(larger_stay)
        if most != "auto":
            room = min(room, most - larger_stay.gpu_cache_bytes)
        if room < 0:
            continue
        others = _movable(larger_stay)
        kept = larger_stay.with_resident(
            [s for i in spread(room, list(map(home_bytes_of, others))) for s in others[i]]
        )
        best = max(best, kept, key=lambda each: each.gpu_cache_bytes)
    return best


def _movable(place: Placement) -> list[list[BlockSpec]]:
    """The blocks that are not on the compute device, by unit."""
    units = units_of(spec for spec in place.specs if not spec.tier.is_device)
    return [list(unit.values()) for unit in units.values()]


def _room(place: Placement, reserve: int) -> int:
    return max(place.budgets.gpu - place.home_bytes(GPU) - reserve, 0)


def _all_on_device(place: Placement) -> Placement:
    return place.with_resident([spec for unit in place.trainable_units() for spec in unit])


def _all_fit(place: Placement, concurrent: int, reserve: int) -> bool:
    return _all_on_device(place).fits(concurrent, reserve)


def _fastest(place: Placement, concurrent: int, reserve: int, rates: Rates) -> list[BlockSpec]:
    """The first units, as many as make the busiest part of a step shortest.

    Example: a GPU with 50 GB/s each way, and a CPU that updates 6e9 parameters per second. A GB
    of GPU memory holds the bf16 states of 71 million parameters. They save 12 ms of updates, 6
    ms of uploads and 3 ms of downloads per step. The same GB holds copies of 500 million
    parameters, which save 20 ms of uploads only. So the choice depends on which part is
    longest.
    """
    room, units = _room(place, reserve), place.trainable_units()
    ends = [end for end in itertools.accumulate(map(home_bytes_of, units)) if end <= room]
    longest = math.inf
    chosen: list[BlockSpec] = []
    for size in [0, *ends[:: max(1, -(-len(ends) // MOST_CANDIDATES))], room]:
        resident = those_that_fit(units, size)
        moved = place.with_resident(resident).moved(room - home_bytes_of(resident), concurrent)
        if moved is not None and max(moved.seconds(rates)) < longest:
            longest, chosen = max(moved.seconds(rates)), resident
    return chosen


def describe_choice(placement: Placement, rates: Rates) -> str:
    """A line for the log: the choice of `with_gpu_cache` and its `rates`."""
    drives = f", {rates.nvme / 1e9:.1f} of the drives" if rates.nvme < math.inf else ""
    return (
        f"{format_bytes(placement.gpu_cache_bytes)} of states stay on the compute device; "
        f"measured: {rates.upload / 1e9:.1f} GB/s to it, {rates.download / 1e9:.1f} from "
        f"it{drives}, and {rates.updates / 1e9:.2f} billion updates of parameters per second on "
        "the CPU"
    )
