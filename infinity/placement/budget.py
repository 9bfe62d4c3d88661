"""How host memory is divided between staging and cache: a pure function of sizes and a budget.
Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

# A chunk is a multiple of this many elements: the block of the gradient norm, 64 KiB of fp32.
CHUNK_ELEMENTS = 16384
# 2 MiB of fp32: enough for full bandwidth, and short enough for others to get between
FULL_CHUNK_ELEMENTS = 1 << 19
# For each drive. A chunk costs 0.8 ms of Python, or more where the model keeps every CPU busy, and
# one drive of 7 GB/s moves 6 MB meanwhile: so larger ones for larger models, and for more drives.
MOST_CHUNK_ELEMENTS = 1 << 20
# Of a model: with fewer the first unit of a forward waits noticeably for the chunk before its own.
FEWEST_CHUNKS = 64
# Chunks in flight in the optimizer pipeline: two that are read and four that are written.
STAGED_SETS = 6
MOST_STAGED_SETS = 24  # what is left of them is read ahead
# Of the memory beyond STAGED_SETS, the part that is for reading ahead, not for cache: one in so
# many.
AHEAD_SHARE = 4
PAGE = 4096
WIDEST_ELEMENT = 4  # bytes; a staging slot fits a chunk of any kind


class Staged(NamedTuple):
    """What may pass through staging, and what may be cached instead.

    `kinds` of blocks are staged, `others` of them for another reason than being on NVMe. A chunk is
    a multiple of `granule` elements, the largest block has `longest`, and all parameters together
    `elements`. `on_nvme` is in bytes, on so many `drives`.
    """

    kinds: int
    others: int
    granule: int
    longest: int
    elements: int
    on_nvme: int
    drives: int = 1

    @property
    def least(self) -> int:
        """The smallest staging that works, in bytes."""
        return max(self.kinds, 1) * self.granule * WIDEST_ELEMENT


class HostPlan(NamedTuple):
    """`slots` staging slots of a chunk each, which are `staged_sets` of chunks of all kinds, and
    `cache` bytes beside them."""

    chunk_elements: int
    staged_sets: int
    slots: int
    cache: int


def divide_with_activations(
    available: int, staged: Staged, cache: int | None, activations: int | Literal["auto"]
) -> tuple[HostPlan, int]:
    """Like `divide`, with that many bytes, a multiple of 4096, for saved activations beside it;
    returns them, too.

    With "auto" these get half, for a byte of theirs saves about as much traffic as one of the
    cache; less where staging needs more, and whatever staging and cache do not use.
    """
    if activations != "auto":
        return divide(available - activations, staged, cache), activations
    plan = divide(max(available - available // 2, staged.least), staged, cache)
    left = available - plan.cache - plan.slots * plan.chunk_elements * WIDEST_ELEMENT
    return plan, left // PAGE * PAGE


def divide(available: int, staged: Staged, cache: int | None) -> HostPlan:
    """Divide `available` bytes of host memory, `staged.least` or more; `cache` is the most to
    cache, None for no limit.

    Overlap needs `STAGED_SETS` chunks of full length. The rest is divided. A part is for reading
    ahead, which starts I/O before the gradients are there. The larger part is cache, which saves
    the I/O. Longer chunks take no more than half. Example: 100 million parameters in bf16 with
    gradients in host memory, so chunks of four kinds, 16 MiB a set. Of 210 MiB, 96 are the six
    sets, a quarter of the other 114 holds one set to read ahead, and 98 are cache. Where everything
    fits, nothing is staged.
    """
    kinds, cached = max(staged.kinds, 1), 0
    wanted = available if cache is None else cache
    if staged.on_nvme <= min(
        wanted, available - staged.others * STAGED_SETS * FULL_CHUNK_ELEMENTS * WIDEST_ELEMENT
    ):
        kinds, cached = staged.others, staged.on_nvme
    elements = (
        (available - cached) // (STAGED_SETS * kinds * WIDEST_ELEMENT) if kinds else staged.longest
    )
    most = max(
        FULL_CHUNK_ELEMENTS,
        min(MOST_CHUNK_ELEMENTS * staged.drives, staged.elements // FEWEST_CHUNKS, elements // 2),
    )
    elements = min(elements, staged.longest, most) // staged.granule * staged.granule
    chunk_elements = max(staged.granule, elements)
    if not kinds:
        return HostPlan(chunk_elements, 0, 0, cached)
    a_set = kinds * chunk_elements * WIDEST_ELEMENT
    sets = min(STAGED_SETS, (available - cached) // a_set)
    rest = available - cached - sets * a_set
    ahead = rest // AHEAD_SHARE if cache is None else max(rest - wanted, 0)
    ahead = min(MOST_STAGED_SETS - STAGED_SETS, ahead // a_set)
    return HostPlan(
        chunk_elements,
        sets + ahead,
        (sets + ahead) * kinds,
        cached or min(wanted, rest - ahead * a_set),
    )
