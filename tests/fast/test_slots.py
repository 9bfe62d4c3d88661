"""Runs of slots never overlap, a window is found if and only if there is one, and what goes is what
is needed last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.tiers.slots import Clock, SlotMap, SlotRun, SlotWindow

USES = st.one_of(st.none(), st.integers(0, 5).map(float), st.just(math.inf))


@st.composite
def filled(draw: st.DrawFn) -> tuple[SlotMap[int], dict[int, float | None]]:
    """A map with some runs in it, in any order of their owners, and the next use of each (None: not
    to be evicted)."""
    count = draw(st.integers(1, 12))
    slots: SlotMap[int] = SlotMap(count)
    runs, at = [], 0
    while at < count:
        at += draw(st.integers(0, 3))
        length = draw(st.integers(1, 4))
        if at + length > count:
            break
        runs.append((at, length))
        at += length
    owners = draw(st.permutations(range(len(runs))))
    for owner in owners:
        slots.take(owner, *runs[owner])
    return slots, {owner: draw(USES) for owner in owners}


def every_window(
    slots: SlotMap[int], length: int, uses: dict[int, float | None], beyond: float
) -> list[SlotWindow[int]]:
    """All windows that may be had, best first, from the definition alone."""
    cells: list[int | None] = [None] * slots.count
    for owner, run in slots.runs.items():
        cells[run.start : run.end] = [owner] * run.length
    ranked = []
    for start in range(slots.count - length + 1):
        evicted = {owner for owner in cells[start : start + length] if owner is not None}
        if any(uses[owner] is None or uses[owner] <= beyond for owner in evicted):
            continue
        soonest = min((uses[owner] for owner in evicted), default=math.inf)
        ranked.append((-soonest, sum(cells.count(owner) for owner in evicted), start, evicted))
    return [
        SlotWindow(start, tuple(sorted(evicted)))
        for _, _, start, evicted in sorted(ranked, key=lambda r: r[:3])
    ]


@settings(deadline=None)
@given(filled(), st.integers(1, 13), st.one_of(st.just(-math.inf), st.integers(-1, 5).map(float)))
def test_place_finds_the_window_that_belady_would(state, length, beyond):
    slots, uses = state
    before = dict(slots.runs)
    found = slots.place(length, uses.__getitem__, beyond)
    windows = every_window(slots, length, uses, beyond)
    assert (found is None) == (not windows)
    if found is not None:
        assert SlotWindow(found.start, tuple(sorted(found.evicted))) == windows[0]
    assert slots.runs == before, "place only looks"


@settings(deadline=None)
@given(filled(), st.integers(1, 12), st.integers(0, 5))
def test_what_place_evicts_is_used_after_beyond_and_makes_the_window_free(state, length, beyond):
    slots, uses = state
    found = slots.place(length, uses.__getitem__, beyond)
    if found is None:
        return
    for owner in found.evicted:
        assert uses[owner] is not None and uses[owner] > beyond
        slots.give_back(owner)
    assert slots.take("new", found.start, length) == SlotRun(found.start, length)


def test_the_example_of_place():
    slots: SlotMap[str] = SlotMap(5)
    slots.take("A", 0, 2)
    slots.take("B", 2, 1)
    uses = {"A": 9.0, "B": 2.0}
    assert slots.place(3, uses.__getitem__, beyond=1) == SlotWindow(2, ("B",))
    assert slots.place(3, uses.__getitem__, beyond=2) is None
    assert slots.place(2, uses.__getitem__, beyond=2) == SlotWindow(3, ())
    assert slots.place(6, uses.__getitem__) is None


class Slots(RuleBasedStateMachine):
    """take and give_back against a list with one cell per slot."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[int | None] = [None] * 10
        self.slots: SlotMap[int] = SlotMap(10)
        self.next = 0

    @rule(start=st.integers(-1, 10), length=st.integers(1, 5))
    def take(self, start: int, length: int) -> None:
        inside = start >= 0 and start + length <= 10
        if inside and self.cells[start : start + length] == [None] * length:
            assert self.slots.take(self.next, start, length) == (start, length)
            self.cells[start : start + length] = [self.next] * length
            self.next += 1
        else:
            with pytest.raises(ValueError, match="slots"):
                self.slots.take(self.next, start, length)

    @precondition(lambda self: self.slots.runs)
    @rule(data=st.data())
    def take_twice(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.slots.runs)))
        free = [i for i, cell in enumerate(self.cells) if cell is None]
        with pytest.raises(ValueError, match="slots"):
            self.slots.take(owner, free[0] if free else 0, 1)

    @precondition(lambda self: self.slots.runs)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.slots.runs)))
        self.slots.give_back(owner)
        self.cells = [None if cell == owner else cell for cell in self.cells]

    @rule(length=st.integers(1, 10))
    def free_window(self, length: int) -> None:
        free = [s for s in range(11 - length) if self.cells[s : s + length] == [None] * length]
        found = self.slots.place(length, lambda _: None)
        assert found == (SlotWindow(free[0], ()) if free else None)

    @invariant()
    def same(self) -> None:
        cells: list[int | None] = [None] * 10
        for owner, run in self.slots.runs.items():
            assert cells[run.start : run.end] == [None] * run.length, "two owners in one slot"
            cells[run.start : run.end] = [owner] * run.length
        assert cells == self.cells
        assert self.slots.used == 10 - cells.count(None)


TestSlots = Slots.TestCase


class Future:
    """Uses that come as a round says, but for some that do not, and its clock."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.position, self.clock = order, 0, Clock(0, 0)

    def next_use(self, owner: int) -> float:
        ahead = [*self.order[self.position :], *self.order[: self.position]]
        return ahead.index(owner) if owner in ahead else math.inf

    def advance(self, count: int) -> None:
        """One use as predicted, or a jump."""
        self.position = (self.position + count) % len(self.order)
        version, time = self.clock
        self.clock = Clock(version, time + 1) if count == 1 else Clock(version + 1, 0)


@given(
    order=st.lists(st.integers(0, 9), min_size=2, max_size=30),
    moves=st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(0, 9), st.integers(-1, 12), st.sets(st.integers(0, 9))
        )
    ),
    runs=st.integers(1, 6),
    length=st.integers(1, 3),
    rest=st.integers(0, 2),
)
def test_a_clock_changes_no_answer(order, moves, runs, length, rest) -> None:
    slots: SlotMap[int] = SlotMap(runs * length + min(rest, length - 1))
    future = Future(order)
    for count, wanted, beyond, pinned in moves:
        future.advance(count)

        def next_use(owner: int, pinned: set[int] = pinned) -> float | None:
            return None if owner in pinned else future.next_use(owner)

        if wanted in slots.runs:
            if beyond == 7:
                slots.give_back(wanted)  # which leaves a gap
            continue
        found = slots.place(length, next_use, beyond, future.clock)
        assert found == slots.place(length, next_use, beyond)
        if found is not None:
            for victim in found.evicted:
                slots.give_back(victim)
            slots.take(wanted, found.start, length)
            assert slots.owner_at(found.start + length - 1) == wanted


def test_with_a_clock_a_choice_asks_of_few_owners_however_many_there_are() -> None:
    asked = {}
    for count in (50, 500):
        slots: SlotMap[int] = SlotMap(count)
        future = Future([*range(2 * count)])
        questions = 0

        def next_use(owner: int, future: Future = future) -> float:
            nonlocal questions
            questions += 1
            return future.next_use(owner)

        for owner in range(count):
            slots.take(owner, owner, 1)
        for used in range(count):
            future.advance(1)
            found = slots.place(1, next_use, -1, future.clock)
            assert found is not None
            slots.give_back(*found.evicted)
            slots.take(count + used, found.start, 1)
        asked[count] = questions / count
    assert asked[500] <= 1.1 * asked[50]
