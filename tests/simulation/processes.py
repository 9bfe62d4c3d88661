"""The processes of one life, a rank each: which threads are whose, what they tell each other, and
how they find that one is gone.

A rank has a machine, and random generators of its own. A thread belongs to the rank whose thread
started it. A thread of none is the only process that there is.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from simulation.machine import Machine

HASTE = 20
"""How much faster time passes for who waits for ranks of which one is in trouble."""
_TICK = 1e-6  # seconds from one look at the clock to the next
_LOOK = 1e-3  # seconds between two looks at what others may have changed
_NAMED_AT_RANDOM = re.compile("[0-9a-f]{32}")


class Generators(NamedTuple):
    """Of random numbers: Python's, numpy's, torch's."""

    python: Any
    numpy: Any
    torch: torch.Generator


class Gone(RuntimeError):
    """What gloo raises where a peer is gone, or cannot be reached."""

    def __init__(self, reason: str = "Connection closed by peer") -> None:
        super().__init__(reason)


class Rank:
    """A process on `machine`, number `number` of those that are `together`."""

    def __init__(self, together: Together, number: int, machine: Machine) -> None:
        self.together, self.number, self.machine = together, number, machine
        self.generators = Generators(
            random.Random(number), np.random.RandomState(number), torch.Generator()
        )
        self.groups: list[Any] = []
        """Its process groups; the first one is that of all ranks."""
        machine.stopped = together.look

    @property
    def is_gone(self) -> bool:
        """Whether the others hear nothing of it any more."""
        return self.machine.is_off or self.number in self.together.ended

    def act(self, kind: str, name: str, does: Callable[[], Any]) -> Any:
        """An operation that other ranks see; raises `OSError` where the network fails, or the
        machine has stopped. What is named at random has one name in all replays."""
        machine = self.machine
        with machine.lock:
            operation = machine.begin(kind, _NAMED_AT_RANDOM.sub("life", name))
            result = does()
            machine.strike(operation, "after")
        return result


class Together:
    """The ranks of a life, and what they share. `keeps_store`: rank 0 holds the store of
    torch.distributed, which is gone with it; else what starts the ranks does."""

    def __init__(self, machines: Sequence[Machine], keeps_store: bool) -> None:
        self.ended: set[int] = set()
        """Ranks whose process has ended."""
        self.keeps_store = keeps_store
        self.notes: dict[str, bytes] = {}
        """What the store has."""
        self.met: dict[tuple[str, int], dict[int, Any]] = {}
        """What the ranks that have come bring to a collective: of which group, and its number."""
        self.mail: dict[tuple[str, int, int, int], torch.Tensor] = {}
        """What was sent: in which group, by whom, to whom, and its number."""
        self.changed = threading.Condition()
        """Told of all of this."""
        self._now = 0.0
        self._leaving: set[int] = set()
        self._threads: list[threading.Thread] = []
        self.ranks = [Rank(self, number, machine) for number, machine in enumerate(machines)]

    def look(self) -> None:
        """Something has changed."""
        with self.changed:
            self.changed.notify_all()

    def leave(self, rank: Rank) -> None:
        """The process of `rank` is about to end."""
        with self.changed:
            self._leaving.add(rank.number)

    def end(self, rank: Rank) -> None:
        """The process of `rank` has ended."""
        with self.changed:
            self.ended.add(rank.number)
            self.changed.notify_all()

    def begin(self, work: Callable[[Rank], None]) -> None:
        """`work` of each rank, which raises nothing, at once."""

        def process(rank: Rank) -> None:
            torch.set_num_threads(1)
            try:
                work(rank)
            finally:
                self.end(rank)

        self._threads = [threading.Thread(target=process, args=(rank,)) for rank in self.ranks]
        for thread, rank in zip(self._threads, self.ranks, strict=True):
            _give(thread, rank)
            thread.start()

    def join(self) -> None:
        """Return when all have ended."""
        for thread in self._threads:
            thread.join()

    # Time, for who waits for others

    def monotonic(self) -> float:
        """Time hardly passes while nothing is wrong, so no rank ever comes too late. As soon as one
        is gone, or will be, it passes fast."""
        with self.changed:
            self._now += _TICK
            return self._now

    def sleep(self, seconds: float) -> None:
        """Until something may have changed."""
        with self.changed:
            self.changed.wait(min(seconds, _LOOK))
            if self._leaving or any(rank.is_gone for rank in self.ranks):
                self._now += HASTE * seconds

    def await_others(self, rank: Rank, members: Sequence[int], done: Callable[[], bool]) -> None:
        """Return when it is `done` (under the lock). Raises `Gone` where one of `members` is."""
        while not done():
            rank.machine.check()
            if any(self.ranks[member].is_gone for member in members):
                raise Gone
            self.changed.wait()


_RANK = "simulated_rank"


def _give(thread: threading.Thread, rank: Rank | None) -> None:
    setattr(thread, _RANK, rank)


def here() -> Rank | None:
    """The rank that this thread belongs to."""
    found: Rank | None = getattr(threading.current_thread(), _RANK, None)
    return found


def generators() -> Generators:
    """Those that the process of this thread draws from."""
    rank = here()
    return _ALONE if rank is None else rank.generators


_ALONE = Generators(random, np.random, torch.default_generator)


class SimulatedTime:
    """Is `time` for the modules that wait for other ranks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        rank = here()
        (time.sleep if rank is None else rank.together.sleep)(seconds)

    def monotonic(self) -> float:
        rank = here()
        return time.monotonic() if rank is None else rank.together.monotonic()


class SimulatedRandom:
    """Is `random` for what commits the states of generators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(generators().python, name)


class SimulatedNumpy:
    """Is `numpy` for what commits the states of generators."""

    def __getattr__(self, name: str) -> Any:
        return generators().numpy if name == "random" else getattr(np, name)


@contextmanager
def threads_of_ranks() -> Iterator[None]:
    """Inside, a thread belongs to the rank of the thread that starts it."""
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if not hasattr(thread, _RANK):
            _give(thread, here())
        start(thread)

    with mock.patch.object(threading.Thread, "start", starting):
        yield
