"""The simulation of lanes: order, needs, urgency, and devices that two lanes share."""

from __future__ import annotations

import pytest

from infinity.plan.lanes import Task, simulate, spans


def test_a_lane_runs_one_task_after_the_other() -> None:
    first, second = Task("a", "first", 2.0), Task("a", "second", 3.0)
    simulate([first, second], {})
    assert (first.start, first.end, second.start, second.end) == (0, 2, 2, 5)


def test_needs_and_urgency() -> None:
    start = Task("a", "start", 1.0)
    slow = Task("b", "slow", 4.0, [start])
    late = Task("a", "late", 1.0, [start], urgency=2.0)
    soon = Task("a", "soon", 1.0, [start], urgency=1.0)
    end = Task("a", "end", 0.0, [slow, late])
    simulate([start, slow, late, soon, end], {})
    assert (soon.start, late.start, end.end) == (1, 2, 5)


def test_two_lanes_share_a_device() -> None:
    """Both go at half their speed until one has ended."""
    read, write = Task("read", "", 2.0), Task("write", "", 3.0)
    simulate([read, write], {frozenset(("read", "write")): 0.5})
    assert read.end == pytest.approx(4.0)
    assert write.end == pytest.approx(5.0)


def test_spans_are_cut_to_a_window() -> None:
    tasks = [Task("a", "x", 2.0), Task("a", "y", 2.0), Task("a", "nothing", 0.0)]
    simulate(tasks, {})
    assert [(s.name, s.start, s.end) for s in spans(tasks, 1.0, 3.0)] == [("x", 0, 1), ("y", 1, 2)]
