"""Which chunk comes next: the queue asks what it must, once, and no later job than the one that it
takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infinity.optim.job import Job, UnitUpdate
from infinity.optim.job_queue import JobQueue
from infinity.placement.spec import Kind


class World:
    """Units of one chunk each, and a store that counts what it is asked."""

    def __init__(self, units: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self.free, self.placed = set(range(units)), set[int]()
        resident = SimpleNamespace(has_copy=lambda block: self._answer("place", block.number))
        self.store: Any = SimpleNamespace(
            is_durable=True, resident=resident, steps_left=lambda number: 0
        )
        self.queue = JobQueue(self.store)
        self.jobs = [self._job(number) for number in range(units)]
        # Those that are needed last come first, as in backward.
        updates = [UnitUpdate(job.unit, ()) for job in reversed(self.jobs)]
        self.queue.fix(self.jobs[::-1], updates, delayed=False)

    def _answer(self, question: str, number: int) -> bool:
        self.asked.append((question, number))
        return number in (self.free if question == "free" else self.placed)

    def _job(self, number: int) -> Job:
        blocks = SimpleNamespace(
            chunks=lambda: [0],
            staged_from=0,
            rewritten_in_place_until=0,
            is_free=lambda left: self._answer("free", number),
            is_pinned=lambda left: False,
        )
        block = SimpleNamespace(moved_bytes=1, number=number)
        unit: Any = SimpleNamespace(
            facts=SimpleNamespace(index=number),
            store=self.store,
            update_blocks=blocks,
            blocks={Kind.PARAM: block},
        )
        return Job(unit, place=number, number=1)

    def take(self) -> int | None:
        """The number of the unit that is taken; what was `asked` before is forgotten."""
        self.asked.clear()
        taken = self.queue.chunks.take(may_hold=True, ready=True)
        return None if taken is None else taken[0].place


@pytest.fixture
def world() -> World:
    return World(4)


def test_no_later_job_is_asked_than_the_one_that_is_taken(world: World) -> None:
    world.placed = {0, 1, 2, 3}
    for unit in (0, 1):
        assert world.take() == unit and set(world.asked) == {("place", unit), ("free", unit)}


def test_whether_a_commit_is_waited_for_is_asked_once_and_where_a_place_is_lacking(
    world: World,
) -> None:
    assert world.take() is None
    free = [number for question, number in world.asked if question == "free"]
    assert sorted(free) == [0, 1, 2, 3]


def test_an_update_that_waits_for_a_commit_hurries_those_before_it(world: World) -> None:
    world.free = {1, 2, 3}
    assert [world.take() for _ in range(4)] == [1, 2, 3, None]
    world.free.add(0)
    world.placed = {0}
    assert world.take() == 0
