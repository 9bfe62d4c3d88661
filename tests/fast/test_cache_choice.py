"""What of the states on NVMe is kept in host memory, and how that memory is divided: the choice
alone, without an engine."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infinity.placement.budget import (
    CHUNK_ELEMENTS,
    FULL_CHUNK_ELEMENTS,
    MOST_CHUNK_ELEMENTS,
    Staged,
    divide,
)
from infinity.placement.cache import CacheRules, Candidate, choose, distribute, spread
from infinity.placement.spec import FP32, SPLIT, BlockSpec, Format, Kind
from infinity.tier import NVME

MIB = 1 << 20

# What is kept


def candidates(sizes: list[tuple[int, int, float]]) -> list[Candidate]:
    return [
        Candidate(e, CHUNK_ELEMENTS, CHUNK_ELEMENTS * width, e * width, worth)
        for e, width, worth in sizes
    ]


SIZES = st.lists(
    st.tuples(
        st.integers(1, 9 * CHUNK_ELEMENTS // 2048).map(lambda n: n * 2048),
        st.integers(1, 14),
        st.sampled_from([2, 2.5, 3, 4]),
    ),
    max_size=8,
).map(candidates)


def spent(kept: list[int], sizes: list[Candidate]) -> int:
    """Bytes, from the definition: whole pieces, or all."""
    return sum(
        c.nbytes if k == c.elements else k // CHUNK_ELEMENTS * c.piece
        for k, c in zip(kept, sizes, strict=True)
    )


@given(SIZES, st.integers(0, 1 << 22))
def test_never_more_than_the_budget_and_in_whole_pieces(
    sizes: list[Candidate], budget: int
) -> None:
    kept = distribute(budget, sizes)
    assert spent(kept, sizes) <= budget
    assert all(
        k == c.elements or (0 <= k < c.elements and k % CHUNK_ELEMENTS == 0)
        for k, c in zip(kept, sizes, strict=True)
    )


@given(SIZES, st.integers(0, 1 << 22), st.integers(0, 1 << 22))
def test_more_memory_keeps_no_less_of_anything(
    sizes: list[Candidate], budget: int, more: int
) -> None:
    less = distribute(budget, sizes)
    assert all(a <= b for a, b in zip(less, distribute(budget + more, sizes), strict=True))


@given(SIZES, st.integers(0, 1 << 22))
def test_what_fits_is_kept_and_what_is_left_is_less_than_a_piece(
    sizes: list[Candidate], budget: int
) -> None:
    whole = sum(c.nbytes for c in sizes)
    kept = distribute(budget, sizes)
    if whole <= budget:
        assert kept == [c.elements for c in sizes]
    else:
        assert budget - spent(kept, sizes) < max(c.piece for c in sizes)


@given(SIZES, st.integers(0, 1 << 22))
def test_the_worthiest_and_then_the_first_comes_first(sizes: list[Candidate], budget: int) -> None:
    kept = distribute(budget, sizes)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index].worth, index))
    shares = [kept[index] / sizes[index].elements for index in order]
    assert shares == sorted(shares, reverse=True)
    assert sum(0 < share < 1 for share in shares) <= 1


def blocks_of(
    *kinds: Kind, unit: int = 0, itemsize: int = 2, master: Format = SPLIT
) -> list[BlockSpec]:
    plain = Format("plain", 1, itemsize)
    form = {Kind.PARAM: plain, Kind.GRAD: plain, Kind.MASTER: master}
    return [
        BlockSpec(
            unit, k, 4 * CHUNK_ELEMENTS, form.get(k, FP32), NVME, 0, 0, f"{k.value} of u{unit}"
        )
        for k in kinds
    ]


MIXED = (Kind.PARAM, Kind.GRAD, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def test_parameters_then_gradients_then_states_where_no_update_is_speculative() -> None:
    blocks = blocks_of(*MIXED) + blocks_of(*MIXED, unit=1)
    parameters, gradients, states = 4 * 2, 4 * 2, 4 * 10
    budget = CHUNK_ELEMENTS * (2 * parameters + 2 * gradients + states + 11)
    kept = choose(blocks, budget, CacheRules(CHUNK_ELEMENTS, False, 0.0))
    whole = 4 * CHUNK_ELEMENTS
    assert [kept[b] for b in blocks] == [whole] * 5 + [whole, whole] + [CHUNK_ELEMENTS] * 3


def test_parameters_and_states_of_a_unit_together_where_updates_are_speculative() -> None:
    blocks = blocks_of(*MIXED, unit=3) + blocks_of(Kind.PARAM, unit=4)
    kept = choose(
        blocks, CHUNK_ELEMENTS * (4 * 2 + 3 * 12), CacheRules(CHUNK_ELEMENTS, True, 0.0)
    )  # gradients first, for they are worth 3
    assert [kept[b] // CHUNK_ELEMENTS for b in blocks] == [3, 4, 3, 3, 3, 0]


def test_a_parameter_inside_its_master_is_worth_more_than_a_rounded_or_frozen_one() -> None:
    own = blocks_of(Kind.PARAM, Kind.GRAD, unit=2, itemsize=4)
    frozen = blocks_of(Kind.PARAM, unit=0)
    rounded = blocks_of(Kind.PARAM, Kind.GRAD, Kind.MASTER, unit=1, master=FP32)
    split = blocks_of(Kind.PARAM, Kind.GRAD, Kind.MASTER, unit=3)
    budget = sum(unit[0].nbytes + unit[1].nbytes for unit in (own, split)) + rounded[1].nbytes
    kept = choose(frozen + rounded + own + split, budget, CacheRules(CHUNK_ELEMENTS, False, 0.0))
    assert [b.name for b, elements in kept.items() if elements] == [
        "grad of u1", "param of u2", "grad of u2", "param of u3", "grad of u3"
    ]  # fmt: skip


def test_parameters_that_fit_on_the_compute_device_are_worth_no_more_than_their_writes() -> None:
    blocks = blocks_of(Kind.PARAM, Kind.GRAD, Kind.MASTER)
    for resident, first in (
        (0.0, Kind.PARAM),
        (0.4, Kind.PARAM),
        (0.6, Kind.MASTER),
        (1.0, Kind.MASTER),
    ):
        kept = choose(blocks, 2 * blocks[0].nbytes, CacheRules(CHUNK_ELEMENTS, False, resident))
        assert {b.kind for b, elements in kept.items() if elements} == {first, Kind.GRAD}


# How memory is divided


def test_what_is_written_all_the_same_is_worth_its_reads() -> None:
    """With commits a parameter that the compute device has room for is worth nothing, and a state
    of a unit that is read once as much as a parameter that is."""
    blocks = blocks_of(Kind.PARAM, Kind.GRAD, Kind.MASTER)
    for resident, first in ((0.0, Kind.PARAM), (0.4, Kind.PARAM), (0.6, Kind.MASTER)):
        kept = choose(
            blocks, 2 * blocks[0].nbytes, CacheRules(CHUNK_ELEMENTS, False, resident, 1.0)
        )
        assert {b.kind for b, elements in kept.items() if elements} == {first, Kind.GRAD}


def test_how_memory_is_divided() -> None:
    """The example in the docstring: six sets of long chunks, a quarter of the rest to read ahead,
    and cache."""
    everything = 12 * 100_000_000
    staged = Staged(
        kinds=4,
        others=0,
        granule=CHUNK_ELEMENTS,
        longest=1 << 26,
        elements=100_000_000,
        on_nvme=everything,
    )
    for cache, sets, kept in (
        (None, 6 + 1, 98 * MIB),
        (0, 6 + 7, 0),
        (50 * MIB, 6 + 4, 50 * MIB),
        (1 << 40, 6, 114 * MIB),
    ):
        assert divide(210 * MIB, staged, cache) == (MOST_CHUNK_ELEMENTS, sets, 4 * sets, kept)
        whole = cache in (None, 1 << 40)
        assert divide(everything, staged, cache) == (
            MOST_CHUNK_ELEMENTS,
            *((0, 0, everything) if whole else (24, 96, cache)),
        )
        assert divide(everything - 1, staged, cache).slots > 0


def test_chunks_are_longer_for_larger_models_and_budgets() -> None:
    def chunk(elements: int, available: int, drives: int = 1) -> int:
        staged = Staged(
            kinds=4,
            others=0,
            granule=CHUNK_ELEMENTS,
            longest=elements,
            elements=elements,
            on_nvme=12 * elements,
            drives=drives,
        )
        return divide(available, staged, cache=0).chunk_elements

    full, most = FULL_CHUNK_ELEMENTS, MOST_CHUNK_ELEMENTS
    assert [chunk(n << 20, 210 * MIB) for n in (1, 32, 48, 64, 1000)] == [
        full,
        full,
        3 * full // 2,
        most,
        most,
    ]
    # Six sets of four kinds: full chunks take 48 MiB, and what is longer at most half of all.
    assert [chunk(1 << 30, n * MIB) for n in (24, 48, 96, 144, 192)] == [
        full // 2,
        full,
        full,
        3 * full // 2,
        most,
    ]
    # So that four drives are not kept waiting by what each chunk costs in Python.
    assert [chunk(1 << 30, n << 30, drives=4) for n in (1, 8)] == [4 * most, 4 * most]
    assert chunk(1 << 30, 192 * MIB, drives=4) == most  # where there is room
    assert chunk(32 << 20, 8 << 30, drives=4) == full  # and enough chunks


@given(
    st.integers(0, 1 << 30),
    st.integers(0, 5),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
    st.integers(0, 1 << 22),
    st.integers(0, 1 << 30),
    st.none() | st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 8]),
)
def test_what_is_divided_is_all_there_is(
    extra: int,
    kinds: int,
    others: int,
    granules: int,
    longest: int,
    on_nvme: int,
    cache: int | None,
    drives: int,
) -> None:
    staged = Staged(
        kinds + others,
        others,
        granules * CHUNK_ELEMENTS,
        longest,
        2 * longest,
        on_nvme if kinds else 0,
        drives,
    )
    available = staged.least + extra
    plan = divide(available, staged, cache)
    assert plan.slots * plan.chunk_elements * 4 + plan.cache <= available
    assert plan.chunk_elements % staged.granule == 0
    assert 0 < plan.chunk_elements <= MOST_CHUNK_ELEMENTS * drives
    assert cache is None or plan.cache <= cache
    assert plan.staged_sets > 0 or plan.cache == staged.on_nvme


# What stays for inference


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 7))
def test_as_many_equal_ones_as_fit_lie_evenly(budget: int, count: int, size: int) -> None:
    taken = spread(budget, [size] * count)
    assert len(taken) == min(budget // size, count)
    ends = [-1, *taken, count]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    assert all(gap <= -(-count // max(len(taken), 1)) for gap in gaps[1:-1])


@given(st.integers(0, 60), st.lists(st.integers(0, 20), max_size=8))
def test_what_stays_fits_and_the_largest_come_first(budget: int, sizes: list[int]) -> None:
    taken = spread(budget, sizes)
    left = budget - sum(sizes[number] for number in taken)
    assert taken == sorted(set(taken))
    assert left >= 0
    for number in set(range(len(sizes))) - set(taken):
        larger = sum(sizes[each] for each in taken if sizes[each] >= sizes[number])
        assert larger + sizes[number] > budget or sizes[number] == 0
