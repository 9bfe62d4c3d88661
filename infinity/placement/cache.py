"""Chooses the part of the states on NVMe that host memory keeps: pure functions of sizes and a
budget. Imports no torch.

[Note: a part that always stays]
Every step uses every block in the same order: a cyclic scan. In a cyclic scan no policy hits more
than C of N bytes with C bytes of cache, and evictions cause writes. A fixed part reaches that bound
without evictions. It needs no shadow copy on the drive, unless commits need it there
(`Placed.write_through`). It is the same in every run, so the planner can state the bytes that move.

[Note: the order of the cache]
First come the blocks that save most NVMe traffic per byte of memory: 2 or 3 bytes in a step
(`infinity.placement.traffic`). Among equal blocks, the unit that comes first in the module wins,
because the next forward waits for its update first.

But an update may begin before its step only if it rewrites nothing in place (see
`infinity.optim.pipeline`). So with speculative updates the same elements of a unit's parameters and
states are cached. To cache parameters alone would move up to 8 % less with bf16, where they are 2
of 12 bytes (fp32: 14 %, 4 of 12). But then no update could be speculative.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from infinity.placement.spec import BlockSpec, Kind, units_of
from infinity.placement.traffic import traffic, written


class Candidate(NamedTuple):
    """Blocks that are cached together: their first n times `granule` elements, or all `elements`.

    `piece` is the bytes of `granule` elements, and `nbytes` the bytes of all. `worth` is the bytes
    of NVMe traffic per step that a cached byte saves.
    """

    elements: int
    granule: int
    piece: int
    nbytes: int
    worth: float


def distribute(budget: int, candidates: Sequence[Candidate]) -> list[int]:
    """The number of elements of each candidate to cache in `budget` bytes: by falling worth, equal
    candidates in order.

    At most one candidate is cached in part. Less than one of its pieces of the budget remains.
    """
    cached = [0] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda index: -candidates[index].worth):
        candidate = candidates[index]
        if candidate.nbytes > budget:
            cached[index] = budget // candidate.piece * candidate.granule
            break
        cached[index] = candidate.elements
        budget -= candidate.nbytes
    return cached


def fill(budget: int, sizes: Sequence[int]) -> list[int]:
    """The indices of `sizes` that fit into `budget` bytes: greedy first fit, in order."""
    taken = []
    for number, size in enumerate(sizes):
        if size <= budget:
            taken.append(number)
            budget -= size
    return taken


def spread(budget: int, sizes: Sequence[int]) -> list[int]:
    """The indices of `sizes` to take into `budget` bytes: the largest sizes first. If equal sizes
    fit only in part, the indices are spread evenly among them.

    Example: 3 of 8 equal sizes are the indices 1, 4 and 6.
    """
    taken = []
    for size in sorted(set(sizes), reverse=True):
        alike = [number for number, each in enumerate(sizes) if each == size]
        count = min(len(alike), budget // max(size, 1))
        taken += [alike[(2 * each + 1) * len(alike) // (2 * count)] for each in range(count)]
        budget -= count * size
    return sorted(taken)


class CacheRules(NamedTuple):
    """The facts of a run that the choice of the cache depends on."""

    granule: int
    """A part of a block is a multiple of this many elements."""
    speculative: bool
    """Whether updates may begin before their step."""
    resident: float
    """The share of the travelling parameters that the compute device has room for."""
    write_through: float = 0.0
    """The share of steps that also write cached elements to NVMe."""
    never: Collection[Kind] = ()
    """The kinds that are not cached."""


def choose(blocks: Sequence[BlockSpec], budget: int, rules: CacheRules) -> dict[BlockSpec, int]:
    """The number of first elements of each NVMe block to cache in `budget` bytes of host memory:
    all, or a multiple of `rules.granule`."""
    units = units_of(blocks)
    groups = [group for unit in units.values() for group in _groups(unit, rules)]
    candidates = [_candidate(group, units[group[0].unit], rules) for group in groups]
    shares = zip(groups, distribute(budget, candidates), strict=True)
    return {block: min(cached, block.elements) for group, cached in shares for block in group}


def _groups(unit: Mapping[Kind, BlockSpec], rules: CacheRules) -> list[list[BlockSpec]]:
    """The blocks of one unit that may be cached, in groups. Blocks of a group cache the same
    elements."""
    on_nvme = {
        kind: block
        for kind, block in unit.items()
        if block.tier.is_drive and kind not in rules.never
    }
    parameter, gradient = (
        [on_nvme[kind]] if kind in on_nvme else [] for kind in (Kind.PARAM, Kind.GRAD)
    )
    states = [block for kind, block in on_nvme.items() if kind not in (Kind.PARAM, Kind.GRAD)]
    found = (
        [parameter + states, gradient]
        if rules.speculative and states
        else [parameter, gradient, states]
    )
    return [group for group in found if group]


def _candidate(
    group: Sequence[BlockSpec], unit: Mapping[Kind, BlockSpec], rules: CacheRules
) -> Candidate:
    saved = sum(
        (
            traffic(block.kind, unit, rules.resident)
            - rules.write_through * written(block.kind, unit)
        )
        * block.nbytes
        for block in group
    )
    nbytes = sum(block.nbytes for block in group)
    piece = sum(block.format.bytes_of(rules.granule) for block in group)
    return Candidate(
        max(block.elements for block in group), rules.granule, piece, nbytes, saved / nbytes
    )
