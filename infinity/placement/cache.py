"""Which part of the states on NVMe stays in host memory: pure functions of sizes and a budget.
Imports no torch.

[Note: a part that always stays]
Every step uses every block in the same order: a cyclic scan. For that no policy hits more than C of
N bytes with C bytes of cache, and evicted bytes must be written besides. A part that never leaves
reaches that bound. It moves nothing and needs no shadow copy on the drive, except
where commits need it there (`Placed.write_through`). It is the same in every run, so the planner
can state the bytes that move.

[Note: what is cached first]
What saves most NVMe traffic per byte of memory (`infinity.placement.traffic`): 2 or 3 bytes in a
step. Among equals the unit that comes first in the module: the next forward waits for its update
first.

But an update may begin before its step only where nothing is rewritten in place (see
`infinity.optim.pipeline`). Where updates are speculative, a unit's parameters and states are
therefore cached element by element together. Parameters alone would leave up to 8 % less to move
with bf16, where 2 bytes of 12 are cached of all (fp32: 14 %, 4 of 12), and let no update be
speculative at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from infinity.placement.spec import BlockSpec, Kind, units_of
from infinity.placement.traffic import traffic, written


class Candidate(NamedTuple):
    """Something of which any first part of n times `granule` elements may be cached, or all
    `elements`.

    `piece` is the bytes of `granule` elements, `nbytes` those of all, `worth` the bytes of NVMe
    traffic per step that a cached byte saves.
    """

    elements: int
    granule: int
    piece: int
    nbytes: int
    worth: float


def distribute(budget: int, candidates: Sequence[Candidate]) -> list[int]:
    """How many elements of each candidate to cache in `budget` bytes: the worthiest first, the
    first of equals first.

    Only one of them is cached in part, and less than one of its pieces of the budget is left over.
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
    """Which of things of `sizes` bytes, by number, to take into `budget` bytes: the first ones, and
    of those that follow one that does not fit what still does."""
    taken = []
    for number, size in enumerate(sizes):
        if size <= budget:
            taken.append(number)
            budget -= size
    return taken


def spread(budget: int, sizes: Sequence[int]) -> list[int]:
    """Which of things of `sizes` bytes, by number, to take into `budget` bytes: the largest first,
    and of equal ones some that lie evenly among them.

    Example: 3 of 8 equal ones are the numbers 1, 4 and 6.
    """
    taken = []
    for size in sorted(set(sizes), reverse=True):
        alike = [number for number, each in enumerate(sizes) if each == size]
        count = min(len(alike), budget // max(size, 1))
        taken += [alike[(2 * each + 1) * len(alike) // (2 * count)] for each in range(count)]
        budget -= count * size
    return sorted(taken)


def choose(
    blocks: Sequence[BlockSpec],
    budget: int,
    granule: int,
    speculative: bool,
    resident: float,
    write_through: float = 0.0,
    never: Collection[Kind] = (),
) -> dict[BlockSpec, int]:
    """How many elements, from the first on, to cache of each of `blocks` that is on NVMe, in
    `budget` bytes of host memory.

    It is all of them or a multiple of `granule`. With `speculative`, updates may begin before their
    step. The compute device has room for `resident` of all parameters. In `write_through` of all
    steps what is cached is written all the same. What is in `never` is not cached.
    """
    units = units_of(blocks)
    groups = [group for unit in units.values() for group in _groups(unit, speculative, never)]
    candidates = [
        _candidate(group, units[group[0].unit], granule, resident, write_through)
        for group in groups
    ]
    shares = zip(groups, distribute(budget, candidates), strict=True)
    return {block: min(cached, block.elements) for group, cached in shares for block in group}


def _groups(
    unit: Mapping[Kind, BlockSpec], speculative: bool, never: Collection[Kind]
) -> list[list[BlockSpec]]:
    """The blocks of one unit that may be cached, in groups that are cached element by element
    together."""
    on_nvme = {
        kind: block for kind, block in unit.items() if block.tier == "nvme" and kind not in never
    }
    parameter, gradient = (
        [on_nvme[kind]] if kind in on_nvme else [] for kind in (Kind.PARAM, Kind.GRAD)
    )
    states = [block for kind, block in on_nvme.items() if kind not in (Kind.PARAM, Kind.GRAD)]
    found = (
        [parameter + states, gradient] if speculative and states else [parameter, gradient, states]
    )
    return [group for group in found if group]


def _candidate(
    group: Sequence[BlockSpec],
    unit: Mapping[Kind, BlockSpec],
    granule: int,
    resident: float,
    write_through: float,
) -> Candidate:
    saved = sum(
        (traffic(b.kind, unit, resident) - write_through * written(b.kind, unit)) * b.nbytes
        for b in group
    )
    nbytes = sum(block.nbytes for block in group)
    piece = sum(block.format.bytes_of(granule) for block in group)
    return Candidate(max(block.elements for block in group), granule, piece, nbytes, saved / nbytes)
