"""Chunks cover a block, are whole in its format and fit a staging slot, and a cut of the unit ends
one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infinity.placement.budget import WIDEST_ELEMENT
from infinity.placement.spec import BF16, FP32, INT8, BlockSpec, Format, Kind, Placed
from infinity.tier import NVME
from infinity.tiers.chunks import Chunks

GRANULE = INT8.elements
WIDE = Format("fp64", 1, 8)


def made(elements: int, form: Format = FP32, cached: int = 0) -> Placed:
    return Placed(
        BlockSpec(0, Kind.PARAM, elements, form, NVME, form.bytes_of(elements), 0, "a block"),
        cached_elements=cached,
    )


@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.sets(st.integers(1, 39)),
    st.sampled_from([BF16, FP32, INT8, WIDE]),
)
def test_chunks_cover_a_block(granules: int, most: int, cuts: set[int], form: Format) -> None:
    block, borders = made(granules * GRANULE, form), [cut * GRANULE for cut in cuts]
    chunks = Chunks(most * GRANULE, {0: borders, 1: [1]})
    ends = [chunks.end(block, begin) for begin in chunks.starts(block)]
    assert [0, *ends[:-1]] == list(chunks.starts(block)) and ends[-1] == block.spec.elements
    assert {cut for cut in borders if cut < block.spec.elements} <= {*ends}
    places = [chunks.bytes_of(block, begin) for begin in chunks.starts(block)]
    assert [at for at, _ in places] == [
        0,
        *itertools.accumulate(nbytes for _, nbytes in places[:-1]),
    ]
    assert sum(nbytes for _, nbytes in places) == block.spec.nbytes
    assert all(nbytes <= most * GRANULE * WIDEST_ELEMENT for _, nbytes in places)


def test_an_example() -> None:
    assert list(Chunks(400, {0: [600]}).starts(made(1000))) == [0, 400, 600, 800]


def test_runs_join_what_lies_together_and_end_at_the_border() -> None:
    chunks, block = Chunks(100, {0: [250]}), made(600, cached=250)
    assert chunks.runs(block, without=()) == [(0, 250), (250, 600)]
    assert chunks.runs(block, without={100, 300}) == [(0, 100), (200, 250), (250, 300), (400, 600)]
    assert chunks.runs(block, without=chunks.starts(block)) == []
