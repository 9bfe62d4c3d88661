"""What becomes of what blocks save: the choice alone, without an engine."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinity.placement import treatment
from infinity.placement.treatment import (
    ActivationRoom,
    BlockCost,
    Treatment,
    choose,
    exposed,
    leanest,
    peak,
    seconds,
)

MIB = 1 << 20


@st.composite
def costs(draw: st.DrawFn) -> BlockCost:
    inside = draw(st.integers(0, 40))
    return BlockCost(
        draw(st.integers(0, 10)),
        inside,
        draw(st.integers(0, inside)),
        draw(st.integers(0, 20)) / 4,
        draw(st.booleans()),
    )


BLOCKS = st.lists(costs(), max_size=5)
SPEEDS = st.sampled_from([0.5, 3.0, 8.0, math.inf])
ROOMS = st.builds(
    ActivationRoom, st.integers(0, 150), st.sampled_from([0, 7, 40, math.inf]), SPEEDS, SPEEDS
)


def every(blocks: list[BlockCost], room: ActivationRoom) -> list[tuple[Treatment, ...]]:
    ways: list[list[Treatment]] = [
        ["keep", *(["offload"] if room.away else []), *(["recompute"] if b.recomputable else [])]  # type: ignore[list-item]
        for b in blocks
    ]
    return list(itertools.product(*ways))


@given(BLOCKS, st.integers(0, 20), ROOMS)
@example([BlockCost(1, 9, 9, 1.0)] * 3, 0, ActivationRoom(19))
def test_the_choice_is_the_fastest_that_fits(
    blocks: list[BlockCost], others: int, room: ActivationRoom
) -> None:
    found = choose(blocks, others, room)
    fits = [e for e in every(blocks, room) if peak(blocks, others, e, room) <= room.device]
    assert found in every(blocks, room)
    if not fits:
        assert found == leanest(blocks, room)
        return
    assert peak(blocks, others, found, room) <= room.device
    least = min(seconds(blocks, others, each, room) for each in fits)
    assert seconds(blocks, others, found, room) == least


@given(BLOCKS, st.integers(0, 20), ROOMS)
def test_nothing_needs_less_than_the_leanest(
    blocks: list[BlockCost], others: int, room: ActivationRoom
) -> None:
    least = min(peak(blocks, others, each, room) for each in every(blocks, room))
    assert peak(blocks, others, leanest(blocks, room), room) == least


@given(st.lists(costs(), min_size=6, max_size=40), st.integers(0, 20), ROOMS, st.integers(1, 8))
def test_a_thinned_table_gives_no_more_than_it_promises(
    blocks: list[BlockCost], others: int, room: ActivationRoom, most: int
) -> None:
    """It fits where anything does, and is not slower than the two plain choices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treatment, "MOST_STATES", most + 1)
        found = choose(blocks, others, room)
    plain: list[tuple[Treatment, ...]] = [leanest(blocks, room)]
    plain.append(("offload" if room.away else "keep",) * len(blocks))
    for each in plain:
        if peak(blocks, others, each, room) <= room.device:
            assert peak(blocks, others, found, room) <= room.device
            assert seconds(blocks, others, found, room) <= seconds(blocks, others, each, room)


def test_a_hundred_equal_blocks() -> None:
    """Each saves 34 MiB, of which 2 are its input. With room for 40 that are kept beside the inputs
    of the others, the first 60 are recomputed: see [Note: bytes that must fit]."""
    blocks = [BlockCost(2 * MIB, 32 * MIB, 32 * MIB, 0.01)] * 100
    room = ActivationRoom((60 * 2 + 40 * 34) * MIB)
    found = choose(blocks, 0, room)
    assert found.count("recompute") == 60
    assert peak(blocks, 0, found, room) <= room.device
    assert choose(blocks, 0, ActivationRoom(100 * 34 * MIB)) == ("keep",) * 100
    # The last one may be kept even where there is least room: it would come back at once.
    least = ActivationRoom((99 * 2 + 34) * MIB)
    assert choose(blocks, 0, least).count("recompute") == 99
    assert choose(blocks, 0, ActivationRoom(0)) == ("recompute",) * 100


def test_what_a_link_hides_is_offloaded_and_the_rest_recomputed() -> None:
    """Ten blocks of 1 s and 10 bytes. At 5 bytes per second 50 bytes leave in the 10 s of the
    forward; more of them cost 0.2 s per byte each way, and one that is recomputed 1 s."""
    blocks = [BlockCost(0, 10, 10, 1.0)] * 10
    assert exposed(50, 10.0, ActivationRoom(0, math.inf, 5.0, 5.0)) == 0.0
    assert exposed(60, 10.0, ActivationRoom(0, math.inf, 5.0, 5.0)) == 2.0
    room = ActivationRoom(10, math.inf, 5.0, 5.0)
    found = choose(blocks, 0, room)
    assert found.count("offload") == 5
    assert found.count("recompute") == 4
    assert found.count("keep") == 1
    assert seconds(blocks, 0, found, room) == 4.0
    fast = ActivationRoom(10, math.inf, 50.0, 50.0)
    assert choose(blocks, 0, fast).count("recompute") == 0
    slow = ActivationRoom(10, math.inf, 0.1, 0.1)
    assert choose(blocks, 0, slow).count("offload") == 0
