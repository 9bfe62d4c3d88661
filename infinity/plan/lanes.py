"""Tasks on lanes, and their times: a simulation without a clock. Imports no torch.

A lane runs one task at a time: the most urgent of those whose needs have ended. Lanes that share a
device slow each other down while both work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infinity.observe import Span

_NOTHING = 1e-12  # seconds; below it a task has ended


@dataclass(eq=False)
class Task:
    """Work that takes `seconds` on a `lane` without sharing. Needs are created before the task that
    has them."""

    lane: str
    name: str
    seconds: float
    needs: Sequence[Task] = ()
    urgency: float = 0.0
    """The lowest task of a lane runs first. Among equals, the task that was created first."""
    start: float = math.nan
    end: float = math.nan
    left: float = 0.0
    followers: list[Task] = field(default_factory=list, repr=False)
    missing: int = 0


Sharing = Mapping[frozenset[str], float]
"""For two lanes of one device: the speed of each while both work, over its speed alone."""


def simulate(tasks: Sequence[Task], sharing: Sharing) -> None:
    """Set `start` and `end` of every task."""
    ready: dict[str, list[tuple[float, int, Task]]] = {}
    running: dict[str, Task] = {}
    numbers = {id(task): number for number, task in enumerate(tasks)}
    now = 0.0

    def release(task: Task) -> None:
        heap = ready.setdefault(task.lane, [])
        heapq.heappush(heap, (task.urgency, numbers[id(task)], task))

    for task in tasks:
        task.left = task.seconds
        task.missing = len(task.needs)
        for need in task.needs:
            need.followers.append(task)
        if not task.needs:
            release(task)
    while True:
        for lane, heap in ready.items():
            if heap and lane not in running:
                running[lane] = heapq.heappop(heap)[2]
                running[lane].start = now
        if not running:
            return
        speeds = {lane: _speed(lane, running, sharing) for lane in running}
        passed = min(task.left / speeds[lane] for lane, task in running.items())
        now += passed
        for lane, task in list(running.items()):
            task.left -= passed * speeds[lane]
            if task.left <= _NOTHING:
                task.end = now
                del running[lane]
                for follower in task.followers:
                    follower.missing -= 1
                    if not follower.missing:
                        release(follower)


def _speed(lane: str, running: Mapping[str, Task], sharing: Sharing) -> float:
    return min(
        (
            speed
            for lanes, speed in sharing.items()
            if lane in lanes and all(other in running for other in lanes)
        ),
        default=1.0,
    )


def spans(tasks: Sequence[Task], begin: float, end: float) -> list[Span]:
    """The tasks from `begin` to `end`, cut to that range, with times from `begin` on."""
    return [
        Span(task.lane, task.name, max(task.start, begin) - begin, min(task.end, end) - begin)
        for task in tasks
        if task.end > begin and task.start < end and task.seconds > 0
    ]
