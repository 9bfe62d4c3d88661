"""Divides host memory between staging and cache: pure functions of sizes and a budget. Imports no
torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

# A chunk is a multiple of this many elements: the block of the gradient norm, 64 KiB of fp32.
CHUNK_ELEMENTS = 16384
# 2 MiB of fp32: enough for full bandwidth, and short enough for other requests to run in between.
FULL_CHUNK_ELEMENTS = 1 << 19
# Per drive. A chunk costs at least 0.8 ms of Python. In that time a drive of 7 GB/s moves 6 MB: so
# larger models and more drives get larger chunks.
MOST_CHUNK_ELEMENTS = 1 << 20
# Per model. With fewer, the first unit of a forward waits noticeably for the chunk before its own.
FEWEST_CHUNKS = 64
# Chunks in flight in the optimizer pipeline: two reads and four writes.
STAGED_SETS = 6
MOST_STAGED_SETS = 24  # those beyond STAGED_SETS are read ahead
# Reading ahead gets one part in so many of the memory beyond STAGED_SETS, and the cache the rest.
AHEAD_SHARE = 4
PAGE = 4096
WIDEST_ELEMENT = 4  # bytes; a staging slot fits a chunk of any kind


class Staged(NamedTuple):
    """The need for staging, and the bytes that a cache could hold instead.

    One chunk of every kind takes `kinds` slots, of which `others` stay even if all of NVMe is
    cached. A chunk is a multiple of `granule` elements. The largest block has `longest` elements,
    and all parameters together have `elements`. `on_nvme` bytes on `drives` drives may be cached.
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
    """`slots` staging slots of `chunk_elements` elements each, and `cache` bytes. The slots hold
    `staged_sets` sets; a set is one chunk of every kind."""

    chunk_elements: int
    staged_sets: int
    slots: int
    cache: int


def divide_with_activations(
    available: int, staged: Staged, cache: int | None, activations: int | Literal["auto"]
) -> tuple[HostPlan, int]:
    """Like `divide`, with `activations` bytes (a multiple of 4096) for saved activations. Returns
    the plan and these bytes.

    With "auto", half of `available` is for saved activations, because a byte for them saves about
    as much traffic as a byte of cache. They get less if staging needs more than the other half.
    They also get the bytes that staging and cache leave.
    """
    if activations != "auto":
        return divide(available - activations, staged, cache), activations
    plan = divide(max(available - available // 2, staged.least), staged, cache)
    left = available - plan.cache - plan.slots * plan.chunk_elements * WIDEST_ELEMENT
    return plan, left // PAGE * PAGE


def divide(available: int, staged: Staged, cache: int | None) -> HostPlan:
    """Divide `available` bytes of host memory, at least `staged.least`. At most `cache` bytes are
    cached; None is no limit.

    If all of NVMe fits into the cache, its kinds are not staged. Otherwise overlap needs
    `STAGED_SETS` sets of full chunks. A part of the rest is for reading ahead, which starts I/O
    before the gradients arrive. The larger part is cache, which saves I/O. Chunks grow beyond full
    length only if the sets then take no more than half of the memory.

    Example: 100 million parameters in bf16 with gradients in host memory. Chunks of four kinds take
    16 MiB a set. Of 210 MiB, the six sets take 96. A quarter of the other 114 holds one set to read
    ahead. The remaining 98 are cache.
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
