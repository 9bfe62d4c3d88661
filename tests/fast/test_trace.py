"""The trace predicts the next round from the last one of its phase, and unexpected uses cost a miss
and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.schedule import trace as trace_module
from infinity.schedule.trace import Cycle, Trace
from support.counting_trace import CountingTrace
from support.naive_trace import NaiveTrace

UNITS = range(5)
ORDERS = st.lists(st.sampled_from(UNITS), max_size=10)


def naive_distance(order: list[int], unit: int, position: int) -> float:
    round_trip = order[position:] + order[:position]
    return round_trip.index(unit) if unit in round_trip else math.inf


@settings(deadline=None)
@given(ORDERS, st.sampled_from(UNITS), st.data())
def test_distance_and_find_agree_with_a_scan(order, unit, data):
    position = data.draw(st.integers(0, len(order)))
    cycle = Cycle(order)
    assert cycle.distance(unit, position) == naive_distance(order, unit, position)
    rest = order[position:]
    assert cycle.find(unit, position) == (position + rest.index(unit) if unit in rest else None)


REPEATED = st.tuples(ORDERS, ORDERS, st.integers(1, 5)).map(
    lambda parts: parts[0] + parts[1] * parts[2]
)
CYCLES = st.lists(st.tuples(st.sampled_from(["train", "eval"]), ORDERS | REPEATED), max_size=8)


@settings(deadline=None)
@given(CYCLES)
def test_the_trace_does_what_a_list_would(cycles):
    trace, naive = CountingTrace(), NaiveTrace()
    for phase, uses in cycles:
        trace.begin(phase)
        naive.begin(phase)
        for unit in [None, *uses]:
            if unit is not None:
                trace.use(unit)
                naive.use(unit)
            assert (trace.position, trace.misses) == (
                naive.place if naive.round else naive.position,
                naive.misses,
            )
            assert list(trace.upcoming()) == naive.upcoming()
            assert [trace.next_use(u) for u in UNITS] == [naive.next_use(u) for u in UNITS]
            expected = naive.recording if naive.phase == "train" else naive.past.get("train", [])
            assert trace.last_cycle("train").order == tuple(expected)
            assert trace.first_uses() == sorted(set(expected), key=expected.index)


def run(trace: CountingTrace, order: list[int], phase: str = "train") -> int:
    """One cycle; the number of its misses."""
    before = trace.misses
    trace.begin(phase)
    for unit in order:
        trace.use(unit)
    return trace.misses - before


@settings(deadline=None)
@given(ORDERS, ORDERS.filter(bool))
def test_a_new_order_is_learned_in_one_cycle(first, second):
    trace = CountingTrace()
    run(trace, first)
    assert run(trace, first) == 0
    run(trace, second)
    assert run(trace, second) == 0
    trace.begin("train")
    assert trace.predicted.order == tuple(
        unit for unit, before in zip(second, [None, *second], strict=False) if unit != before
    )


def test_an_order_costs_misses_only_where_it_differs():
    trace = CountingTrace()
    assert run(trace, [0, 1, 2, 3]) == 4, "nothing was known"
    assert run(trace, [0, 1, 2, 3]) == 0
    assert run(trace, [0, 2, 3]) == 1, "2 came before it was expected"
    assert run(trace, [0, 4, 2, 3]) == 1, "4 was not expected at all, and what follows was"


def test_phases_do_not_disturb_each_other():
    trace = CountingTrace()
    run(trace, [0, 1, 2, 1, 0])
    assert run(trace, [0, 1, 2], "eval") == 3
    assert run(trace, [0, 1, 2, 1, 0]) == 0
    assert run(trace, [0, 1, 2], "eval") == 0
    assert trace.last_cycle("train").order == (0, 1, 2, 1, 0)


def test_uses_of_one_unit_one_after_the_other_count_once():
    trace = CountingTrace()
    trace.begin("train")
    assert [trace.use(unit) for unit in (0, 0, 1, 1, 0)] == [False, True, False, True, False]
    assert trace.last_cycle("train").order == (0, 1, 0)


def test_what_was_in_use_around_a_use_is_recorded_with_it():
    trace = CountingTrace()
    for around in (frozenset({0}), frozenset()):
        trace.begin("train")
        trace.use(0)
        trace.use(1, around)
        trace.use(1, frozenset({5}))
        assert trace.last_cycle("train").held == (frozenset(), around)
        trace.begin("eval")
        assert (trace.last_cycle("train").order, trace.last_cycle("train").held) == (
            (0, 1),
            (frozenset(), around),
        )


def test_the_example_of_distance():
    cycle = Cycle([0, 1, 2, 1, 0])
    assert [cycle.distance(unit, 2) for unit in (2, 1, 0, 3)] == [0, 1, 2, math.inf]


def test_what_comes_after_the_turn_is_expected_too():
    trace = CountingTrace()
    run(trace, [0, 1, 2, 1, 0])
    trace.begin("train")
    for unit in (0, 1, 2):
        trace.use(unit)
    assert list(trace.upcoming()) == [(1, 0), (0, 1), (2, 4)]
    assert trace.next_use(2) == 4


@settings(deadline=None)
@given(ORDERS.filter(bool), ORDERS, ORDERS.filter(bool), st.integers(0, 20))
def test_a_cycle_that_comes_again_is_expected_from_its_start(expected, before, order, end):
    """However far the prediction was, and even if the last uses repeat others before them."""
    trace = CountingTrace()
    trace.expect("train", expected)
    run(trace, before)
    run(trace, [*order, *order[:end]])
    clock = trace.clock
    trace.expect_again()
    recorded = trace.last_cycle("train")
    assert [unit for unit, _ in trace.upcoming()] == recorded.first_uses == trace.first_uses()
    assert [trace.next_use(unit) for unit in UNITS] == [recorded.distance(u, 0) for u in UNITS]
    assert trace.clock >= clock
    trace.expect_again()
    trace.use(UNITS[-1] + 1)
    assert trace.last_cycle("train").order == (*recorded.order, UNITS[-1] + 1), (
        "its end is recorded"
    )


def without_repeats(order: list[int]) -> list[int]:
    """`order`, gone round for ever, as the trace counts it: uses of one unit one after the other
    are one."""
    return [unit for number, unit in enumerate(order) if unit != order[number - 1]]


MANY = st.lists(st.integers(0, 20), min_size=2, max_size=40).map(without_repeats).filter(bool)


@settings(deadline=None)
@given(st.sampled_from(["train", "eval"]), MANY, MANY, st.integers(0, 40))
def test_a_program_that_repeats_itself_and_begins_no_cycle_is_learned(phase, before, order, begin):
    """Whatever came before it; then the prediction is right, and the same is brought as in a loop
    that begins cycles."""
    trace = CountingTrace()
    trace.begin(phase)
    for unit in [*before, *order[begin:]]:
        trace.use(unit)
    for _ in range(4):
        for unit in order:
            trace.use(unit)
    before_more = trace.misses
    for _ in range(3):
        for number, unit in enumerate(order):
            rest = [*order[number:], *order[:number]]
            assert dict(trace.upcoming()) == {other: rest.index(other) for other in set(order)}
            trace.use(unit)
    assert trace.misses == before_more
    recorded = [*before, *order[begin:], *order * 7]
    assert trace.last_cycle("train").order == (
        tuple(without_runs(recorded)) if phase == "train" else ()
    )


def without_runs(order: list[int]) -> list[int]:
    return [unit for unit, last in zip(order, [None, *order], strict=False) if unit != last]


@settings(deadline=None)
@given(MANY, MANY, st.integers(1, 3))
def test_a_program_in_parts_is_learned_after_whole_cycles_of_the_model(whole, order, times):
    trace = CountingTrace()
    for _ in range(times):
        run(trace, whole, "eval")
    for _ in range(4 + len(whole)):
        for unit in order:
            trace.use(unit)
    before = trace.misses
    for unit in order * 3:
        trace.use(unit)
    assert trace.misses == before


@settings(deadline=None)
@given(ORDERS.filter(bool), st.lists(ORDERS, max_size=4))
def test_what_was_recorded_of_a_cycle_does_not_depend_on_rounds_inside_of_it(order, others):
    """A module that a forward calls many times is no program that repeats itself: its cycle
    ends."""
    trace = CountingTrace()
    for uses in [*others, order * 5, order * 5]:
        run(trace, uses)
    assert run(trace, order * 5) == 0
    assert trace.last_cycle("train").order == tuple(without_runs(order * 5))


def test_a_cycle_goes_on_as_it_is_known_after_a_round_inside_of_it():
    trace = CountingTrace()
    run(trace, [0, 1, 2, 3, 4])
    assert run(trace, [0, 1, 2, 1, 2, 1, 2, 1, 2, 3, 4]) == 2, (
        "1 and 2 came again, then were expected to"
    )


def endless(units: int, uses: int) -> Iterator[int]:
    """Uses that never repeat themselves."""
    generator, last = random.Random(0), -1
    for _ in range(uses):
        last = generator.choice([unit for unit in range(units) if unit != last])
        yield last


@pytest.mark.parametrize("repeats", [True, False])
def test_a_cycle_without_end_takes_no_more_memory_than_its_units_ask_for(repeats, monkeypatch):
    monkeypatch.setattr(trace_module, "LEAST_USES", 512)
    trace, units, most = CountingTrace(), 10, 0
    trace.begin("eval")
    for unit in [*range(units)] * 500 if repeats else endless(units, 5000):
        trace.use(unit)
        most = max(most, len(trace._recording), len(trace._held), sum(map(len, trace._at.values())))
    assert most == trace_module.USES_PER_UNIT * units
    assert trace.misses == 2 * units if repeats else trace.misses > 2500
    trace.begin("eval")
    assert len(trace.predicted.order) <= trace_module.USES_PER_UNIT * units
    for unit in range(units):
        trace.use(unit)
        assert trace.current == unit, "goes on"


def test_a_round_that_changes_is_learned_anew():
    trace = CountingTrace()
    trace.begin("eval")
    for order in ([0, 1, 2, 3], [0, 2], [3, 2, 1, 0, 1]):
        for unit in order * 8:
            trace.use(unit)
        before = trace.misses
        for unit in order * 8:
            trace.use(unit)
        assert trace.misses == before


def test_what_is_expected_is_predicted_until_a_cycle_was_recorded():
    """Of its phase alone."""
    trace = Trace()
    trace.expect("eval", [0, 1, 2])
    trace.begin("train")
    assert list(trace.upcoming()) == []
    trace.begin("eval")
    assert list(trace.upcoming()) == [(0, 0), (1, 1), (2, 2)]
    for unit in (2, 0):
        trace.use(unit)
    trace.begin("eval")
    assert list(trace.upcoming()) == [(2, 0), (0, 1)]
    assert trace.last_cycle("eval").order == ()
    trace.begin("train")
    assert trace.last_cycle("eval").order == (2, 0)
