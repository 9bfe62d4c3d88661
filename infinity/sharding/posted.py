"""Collectives in flight: the part that this rank contributes, each collective as a value that a
caller holds, and the queue of all of them.

[Note: one order]
All ranks must join the same collectives in the same order (invariant I6). The thread that runs the
model posts them, at points that follow from the uses of units alone. They are joined first come,
first served. So the first in the queue waits for the part of this rank, a shard that is still being
read or updated. A later one could perhaps begin at once, but its part need not have arrived on
other ranks. Before each collective the ranks compare what they have posted so far, a few bytes.
Units often have one size. So without the comparison, ranks that run different modules would take
data of one unit for data of another. If sizes differ, gloo would end the process.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup

from infinity.device import Copy
from infinity.errors import EngineClosedError
from infinity.sharding import collectives
from infinity.sharding.ranks import Among
from infinity.sharding.watch import RECENT, Note

Look = tuple[float, Callable[[], None]]
"""A function that a waiting thread calls now and then, and the seconds between calls."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Contribution:
    """The part of this rank in one collective."""

    join: Callable[[], Any]
    """Joins the collective, and gives its result."""
    sent: float = 0
    """The bytes that this rank sends in it."""
    arrive: Callable[[], object] = _nothing
    """Returns when the data of this rank is present. It is called before `join`."""
    idle: Callable[[], Any] | None = None
    """Given by a rank with zeros only. It is called instead of `join` if all ranks give one."""
    alike: int = 0
    """A number below 2**64. If ranks differ in it, no rank joins, and the result is None."""


class Collective:
    """One collective in flight, number `number` of its engine, called `name`. Any thread may wait
    for it.

    One class, because every field describes one flight, and the thread of the exchange and waiting
    threads share all of them.
    """

    def __init__(
        self,
        number: int,
        name: str,
        contribution: Contribution,
        groups: Sequence[ProcessGroup],
        after: Any,
        look: Look,
    ) -> None:
        self.number, self.name, self.contribution = number, name, contribution
        self.groups = groups
        """The groups in which it is joined, in turn."""
        self.after = after
        """On a stream device it runs after this work, as of `ComputeDevice.mark`."""
        self.order = 0
        """`Calls.value`, with this collective."""
        self.arrived = math.inf
        """When the data of this rank was present, in seconds of `time.perf_counter`."""
        self._look = look
        self._queued, self._ended = threading.Event(), threading.Event()
        self._copy = Copy()
        self._result: Any = None
        self._error: EngineClosedError | None = None

    def queued(self) -> bool:
        """Whether `await_queued` would not wait."""
        return self._queued.is_set()

    def ended(self) -> bool:
        """Whether `wait` would not wait."""
        return self._ended.is_set()

    def start(self, copy: Copy) -> None:
        """All ranks have come. Its work on the device is queued, and ends with `copy`."""
        self._copy = copy
        self._queued.set()

    def end(self, result: Any = None, error: EngineClosedError | None = None) -> None:
        """It was joined and gave `result`, or failed with `error`. It releases all that it
        holds."""
        self._result, self._error, self.groups = result, error, ()
        self._copy = Copy()
        self.contribution = replace(self.contribution, join=_nothing, arrive=_nothing, idle=None)
        self._ended.set()
        self._queued.set()

    def await_queued(self) -> Copy:
        """Block until its work on the device is queued. Returns the copy that ends with this work.
        Raises like `wait`."""
        self._await(self._queued)
        copy = self._copy
        self._check()
        return copy

    def await_end(self) -> None:
        """Block until it has ended, well or not."""
        self._await(self._ended)

    def wait(self) -> Any:
        """Block until it has ended, and return its result. Raises `EngineClosedError` if it, or a
        collective before it, failed."""
        self.await_end()
        self._check()
        return self._result

    def _await(self, event: threading.Event) -> None:
        pause, look = self._look
        while not event.wait(pause):
            look()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineClosedError(str(self._error)) from self._error.__cause__


class Posted:
    """The collectives of one engine that have not ended, in their order. See [Note: one order]. Any
    thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Collective, None] = {}
        self._queue: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._calls, self._part_calls = collectives.Calls(), collectives.Calls()
        self._recent: deque[str] = deque(maxlen=RECENT)
        self.count = 0
        """The number of collectives among all ranks that were posted."""
        self.error: EngineClosedError | None = None
        """The first failure. After it no collective is joined."""
        self._is_closing = False

    def add(self, collective: Collective, operation: str, unit: str, among: Among) -> None:
        """Queue `collective`. After a failure or `close` it ends at once, with an error.

        Tensor parallel ranks have an order of their own (`Among.PARTS`): data parallel ranks may
        post more of these collectives, or fewer. Work of this rank alone is in no order.
        """
        calls = self._part_calls if among is Among.PARTS else self._calls
        with self._lock:
            if among is not Among.ALONE:
                calls.note(operation, unit)
            if among not in (Among.ALONE, Among.PARTS):
                self._recent.append(collective.name)
                self.count += 1
            collective.order = calls.value
            if self._is_closing or self.error is not None:
                collective.end(error=self.error or EngineClosedError("the engine was closed"))
            else:
                self._open[collective] = None
                self._queue.put(collective)

    def take(self) -> Collective | None:
        """Block until a collective is next, and return it; None after `close`."""
        return self._queue.get()

    def first(self) -> Collective | None:
        """The first collective that has not ended."""
        with self._lock:
            return next(iter(self._open), None)

    def last(self) -> Collective | None:
        """The last collective that has not ended."""
        with self._lock:
            return next(reversed(self._open), None)

    def names(self) -> list[str]:
        """The names of all collectives that have not ended."""
        with self._lock:
            return [collective.name for collective in self._open]

    def remove(self, collective: Collective) -> bool:
        """`collective` was joined. Returns False if `fail` has ended it before."""
        with self._lock:
            is_open = collective in self._open
            self._open.pop(collective, None)
            return is_open

    def note(self, going: Collective | None, failed: bool = False, reason: str = "") -> Note:
        """The note of this rank, which waits in `going`."""
        with self._lock:
            at = (
                (self.count, "", False)
                if going is None
                else (going.number, going.name, going.arrived < math.inf)
            )
            return Note(*at, failed, self.count, list(self._recent), reason)

    def fail(self, error: EngineClosedError) -> None:
        """Join no further collective. All present and later waits raise `error`."""
        with self._lock:
            self.error = self.error or error
            waited_for, self._open = list(self._open), {}
        for collective in waited_for:
            collective.end(error=self.error)

    def close(self) -> None:
        """Let `take` return None after the collectives that are queued. May be called twice."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._queue.put(None)
