"""The trace predicts the next round from the last one of its phase, and unexpected uses cost a miss and nothing else."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.plan.trace import Cycle, Trace

UNITS = range(5)
ORDERS = st.lists(st.sampled_from(UNITS), max_size=10)


def naive_distance(order: list[int], unit: int, position: int) -> float:
    round_trip = order[position:] + order[:position]
    return round_trip.index(unit) if unit in round_trip else math.inf


class NaiveTrace:
    """The same words in the plainest code: lists, scanned from the start every time."""

    def __init__(self) -> None:
        self.past: dict[str, list[int]] = {}
        self.phase, self.recording, self.predicted = "", [], []
        self.position, self.misses = 0, 0

    def begin(self, phase: str) -> None:
        if self.recording:
            self.past[self.phase] = self.recording
        self.phase, self.recording = phase, []
        self.predicted, self.position = self.past.get(phase, []), 0

    def use(self, unit: int) -> bool:
        if self.recording[-1:] == [unit]:
            return False
        self.recording.append(unit)
        rest = self.predicted[self.position :]
        if unit not in rest:
            self.misses += 1
        else:
            skipped = rest.index(unit)
            self.misses += skipped > 0
            self.position += skipped + 1
        return True

    def future(self) -> list[tuple[int, int]]:
        """What is expected up to the same place of the next round."""
        units = self.predicted[self.position :] + self.predicted[: self.position]
        return [(unit, ahead) for ahead, unit in enumerate(units)]

    def upcoming(self) -> list[tuple[int, int]]:
        found: dict[int, int] = {}
        for unit, ahead in self.future():
            found.setdefault(unit, ahead)
        return list(found.items())

    def next_use(self, unit: int) -> float:
        return dict(self.upcoming()).get(unit, math.inf)


@settings(deadline=None)
@given(ORDERS, st.sampled_from(UNITS), st.data())
def test_distance_and_find_agree_with_a_scan(order, unit, data):
    position = data.draw(st.integers(0, len(order)))
    cycle = Cycle(order)
    assert cycle.distance(unit, position) == naive_distance(order, unit, position)
    rest = order[position:]
    assert cycle.find(unit, position) == (position + rest.index(unit) if unit in rest else None)


CYCLES = st.lists(st.tuples(st.sampled_from(["train", "eval"]), ORDERS), max_size=8)


@settings(deadline=None)
@given(CYCLES)
def test_the_trace_does_what_a_list_would(cycles):
    trace, naive = Trace(), NaiveTrace()
    for phase, uses in cycles:
        trace.begin(phase)
        naive.begin(phase)
        for unit in [None, *uses]:
            if unit is not None:
                assert trace.use(unit) == naive.use(unit)
            assert (trace.position, trace.misses) == (naive.position, naive.misses)
            assert list(trace.upcoming()) == naive.upcoming()
            assert [trace.next_use(u) for u in UNITS] == [naive.next_use(u) for u in UNITS]
            expected = naive.recording if naive.phase == "train" else naive.past.get("train", [])
            assert trace.train_order() == tuple(expected)
            assert trace.first_uses() == sorted(set(expected), key=expected.index)


def run(trace: Trace, order: list[int], phase: str = "train") -> int:
    """One cycle; the number of its misses."""
    before = trace.misses
    trace.begin(phase)
    for unit in order:
        trace.use(unit)
    return trace.misses - before


@settings(deadline=None)
@given(ORDERS, ORDERS.filter(bool))
def test_a_new_order_is_learned_in_one_cycle(first, second):
    trace = Trace()
    run(trace, first)
    assert run(trace, first) == 0
    run(trace, second)
    assert run(trace, second) == 0
    trace.begin("train")
    assert trace.predicted.order == tuple(unit for unit, before in zip(second, [None, *second], strict=False) if unit != before)


def test_an_order_costs_misses_only_where_it_differs():
    trace = Trace()
    assert run(trace, [0, 1, 2, 3]) == 4, "nothing was known"
    assert run(trace, [0, 1, 2, 3]) == 0
    assert run(trace, [0, 2, 3]) == 1, "2 came before it was expected"
    assert run(trace, [0, 4, 2, 3]) == 1, "4 was not expected at all, and what follows was"


def test_phases_do_not_disturb_each_other():
    trace = Trace()
    run(trace, [0, 1, 2, 1, 0])
    assert run(trace, [0, 1, 2], "eval") == 3
    assert run(trace, [0, 1, 2, 1, 0]) == 0
    assert run(trace, [0, 1, 2], "eval") == 0
    assert trace.train_order() == (0, 1, 2, 1, 0)


def test_uses_of_one_unit_one_after_the_other_count_once():
    trace = Trace()
    trace.begin("train")
    assert [trace.use(unit) for unit in (0, 0, 1, 1, 0)] == [True, False, True, False, True]
    assert trace.train_order() == (0, 1, 0)


def test_what_was_in_use_around_a_use_is_recorded_with_it():
    trace = Trace()
    for around in (frozenset({0}), frozenset()):
        trace.begin("train")
        trace.use(0)
        trace.use(1, around)
        trace.use(1, frozenset({5}))
        assert trace.train_cycle().held == (frozenset(), around)
        trace.begin("eval")
        assert (trace.train_cycle().order, trace.train_cycle().held) == ((0, 1), (frozenset(), around))


def test_the_example_of_distance():
    cycle = Cycle([0, 1, 2, 1, 0])
    assert [cycle.distance(unit, 2) for unit in (2, 1, 0, 3)] == [0, 1, 2, math.inf]


def test_what_comes_after_the_turn_is_expected_too():
    trace = Trace()
    run(trace, [0, 1, 2, 1, 0])
    trace.begin("train")
    for unit in (0, 1, 2):
        trace.use(unit)
    assert list(trace.upcoming()) == [(1, 0), (0, 1), (2, 4)]
    assert trace.next_use(2) == 4
