"""Every element of every parameter lies in exactly one shard, at an aligned place, and `overlap`
says where."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.sharding.layout import PARAMETER_ALIGNMENT, FlatLayout, Overlap, shard_alignment

SHAPES = st.lists(st.lists(st.integers(0, 30), max_size=3).map(tuple), max_size=8)
RANKS = st.integers(1, 5)
PADDING = -1


@settings(deadline=None)
@given(SHAPES, RANKS, st.sampled_from([1, 2, 4, 8, 16]))
def test_places_are_aligned_and_disjoint_and_shards_are_whole_blocks(shapes, ranks, itemsize):
    layout = FlatLayout(shapes, ranks, itemsize=itemsize)
    alignment = shard_alignment(itemsize)
    assert alignment * min(itemsize, 2) == 4096
    end = 0
    for shape, place in zip(shapes, layout.places, strict=True):
        assert place.shape == shape and place.numel == math.prod(shape)
        assert place.offset % PARAMETER_ALIGNMENT == 0
        assert end <= place.offset < end + PARAMETER_ALIGNMENT, (
            "no overlap, and no more room than the alignment takes"
        )
        end = place.end
    assert end <= layout.numel < end + PARAMETER_ALIGNMENT + alignment * ranks
    assert layout.shard_numel * ranks == layout.numel > 0
    assert layout.shard_numel % alignment == 0


@settings(deadline=None)
@given(SHAPES, RANKS)
def test_overlaps_put_the_parameters_together_again(shapes, ranks):
    layout = FlatLayout(shapes, ranks)
    values = [np.arange(math.prod(shape)) + 100_000 * index for index, shape in enumerate(shapes)]
    shards = np.full((ranks, layout.shard_numel), PADDING)
    rebuilt = [np.full(v.size, PADDING) for v in values]
    for rank in range(ranks):
        for index in range(len(shapes)):
            part = layout.overlap(index, rank)
            assert part.length >= 0
            target = shards[rank, part.in_shard : part.in_shard + part.length]
            assert (target == PADDING).all(), "two parameters in one place"
            target[:] = values[index][part.in_parameter : part.in_parameter + part.length]
            rebuilt[index][part.in_parameter : part.in_parameter + part.length] = target
    for index, place in enumerate(layout.places):
        assert (rebuilt[index] == values[index]).all(), "every element is in some shard"
        assert (shards.reshape(-1)[place.offset : place.end] == values[index]).all(), (
            "and the shards are the flat buffer, cut"
        )
    assert (shards != PADDING).sum() == sum(v.size for v in values), "in one shard only"


def test_the_example_of_layout():
    layout = FlatLayout([(3, 5), (7,)], ranks=2)
    assert [place.offset for place in layout.places] == [0, 64]
    assert (layout.places[-1].end, layout.numel, layout.shard_numel) == (71, 4096, 2048)
    assert layout.overlap(1, 0) == Overlap(64, 0, 7)
    assert layout.overlap(1, 1).length == 0


def test_a_parameter_is_cut_where_a_shard_ends():
    layout = FlatLayout([(1900,), (200,)], ranks=2)
    assert layout.overlap(1, 0) == Overlap(1920, 0, 128)
    assert layout.overlap(1, 1) == Overlap(0, 128, 72)
