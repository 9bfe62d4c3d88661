"""The collectives of one engine with several ranks: on a thread of their own, in the order in which they are posted.

[Note: one order]
All ranks must join the same collectives in the same order (invariant I6). They are posted by the thread that runs the model, at
points that follow from the uses of units alone, and joined first come, first served. So the first one in the queue waits for
what this rank brings to it, a shard that is still being read or updated, even if a later one could go on at once: what has
arrived here is no reason to go on, for it need not have arrived elsewhere.

[Note: groups of its own]
They run in copies of the process groups that the engine was given. In the groups themselves the user's code, or a checkpoint,
may join collectives from another thread meanwhile, and which of two comes first would differ from rank to rank.

[Note: a place that is being gathered into]
A gather is posted when the unit has its place, ahead of its use. Until it has ended the place is neither given to another unit
nor rewritten by an update: who wants to waits (`Block.gathering`). Not to evict it would be a choice that depends on time.
An update whose gather is posted must be able to end without the thread that waits: it is posted after all that
`Store.begin_update` may have to wait for.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError
from infinity.observe import Recorder
from infinity.sharding import collectives
from infinity.sharding.ranks import Ranks
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

CLOSING_SECONDS = 30.0
"""How long `Exchange.close` waits for the other ranks to join what was posted."""


class Collective:
    """One collective on its way: `operation` on `unit` (a name). Any thread may wait for it."""

    def __init__(
        self, operation: str, unit: str, join: Callable[[], Any], sent: float, arrive: Callable[[], object], after: Any
    ) -> None:
        self.operation, self.unit, self.join, self.sent, self.arrive, self.after = operation, unit, join, sent, arrive, after
        self.arrived = math.inf
        """When what this rank brings was there, in seconds of `time.perf_counter`."""
        self._ended = threading.Event()
        self._result: Any = None
        self._error: EngineClosedError | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.operation} {self.unit}"

    def ended(self) -> bool:
        """Whether `wait` would not wait."""
        return self._ended.is_set()

    def end(self, result: Any = None, error: EngineClosedError | None = None) -> None:
        """It was joined and gave `result`, or never will be. What it holds is let go."""
        self._result, self._error = result, error
        self.join = self.arrive = lambda: None
        self._ended.set()

    def settle(self) -> None:
        """Block until it has ended, well or not."""
        self._ended.wait()

    def wait(self) -> Any:
        """Block until it has ended; its result. Raises `EngineClosedError` when it, or one before it, failed."""
        self._ended.wait()
        if self._error is not None:
            raise EngineClosedError(str(self._error)) from self._error.__cause__
        return self._result


class Exchange:
    """The collectives among `ranks`, which are copied: every rank must make one. Methods are for the thread that runs the model.

    An error is told to the store, so that it reaches the user's next call, and nothing is joined any more.
    """

    def __init__(self, ranks: Ranks, device: ComputeDevice, store: Store, recorder: Recorder) -> None:
        self._device, self._store, self._recorder = device, store, recorder
        self.ranks = ranks.copy()
        self.bytes_per_second: float | None = None
        """For tests and benchmarks: every collective takes at least as long as sending at this rate what this rank sends."""
        self._calls = collectives.Calls()
        self._lock = threading.Lock()
        self._open: dict[Collective, None] = {}  # posted, and not ended
        self._posted: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._error: EngineClosedError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-exchange", daemon=True)
        self._thread.start()

    def post(
        self, operation: str, unit: str, join: Callable[[], Any], sent: float = 0, arrive: Callable[[], object] = lambda: None
    ) -> Collective:
        """Have `join` called after all that was posted before, and when `arrive` has returned.

        On a stream device it runs after what the caller has queued so far. This rank sends `sent` bytes in it.
        """
        collective = Collective(operation, unit, join, sent, arrive, self._device.mark())
        with self._lock:
            self._calls.note(operation, unit)
            if self._closing.is_set() or self._error is not None:
                collective.end(error=self._error or EngineClosedError("the engine was closed"))
            else:
                self._open[collective] = None
                self._posted.put(collective)
        return collective

    def terms(self) -> tuple[float, float]:
        """What was posted so far, as `Calls.terms`."""
        return self._calls.terms()

    def sum(self, values: Sequence[float], what: str, everywhere: bool = True) -> list[float]:
        """The sums of `values` over all ranks, or over those that the shards are divided among; for `what` says a report."""
        groups = self.ranks.groups() if everywhere else [group for group in (self.ranks.shards,) if group is not None]
        found: list[float] = self.post("sum", what, lambda: collectives.all_reduce_sum(values, groups)).wait()
        return found

    def rest(self) -> None:
        """Block until everything that was posted has ended."""
        with self._lock:
            last = next(reversed(self._open), None)
        if last is not None:
            last.settle()

    def fail(self, error: EngineClosedError) -> None:
        """Nothing is joined any more, and who waits, now or later, gets `error`. May be called by any thread."""
        with self._lock:
            self._error = self._error or error
            waited_for, self._open = list(self._open), {}
        for collective in waited_for:
            collective.end(error=self._error)

    def close(self) -> None:
        """Join what was posted, as the other ranks do, and end the thread; after an error, or `CLOSING_SECONDS`, give it up.

        What was given up on ends when torch.distributed ends it. May be called twice.
        """
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._posted.put(None)
        self._thread.join(CLOSING_SECONDS if self._error is None else 1.0)
        if self._thread.is_alive():
            going = [collective.name for collective in self._open]
            log.warning("the engine was closed although other ranks have not joined %s", ", then ".join(going) or "all")
            self.fail(EngineClosedError("the engine was closed"))
        else:
            ranks, self.ranks = self.ranks, Ranks()
            ranks.end()

    # On the thread

    def _run(self) -> None:
        while (collective := self._posted.get()) is not None:
            if not collective.ended():
                self._join(collective)

    def _join(self, collective: Collective) -> None:
        try:
            collective.arrive()
            collective.arrived = start = time.perf_counter()
            with self._device.aside(collective.after):
                result = collective.join()
            if self.bytes_per_second is not None:
                self._closing.wait(start + collective.sent / self.bytes_per_second - time.perf_counter())
            self._recorder.add("collective", collective.name, start, time.perf_counter())
        except BaseException as error:
            failed = error if isinstance(error, EngineClosedError) else self._store.fail(error, collective.name)
            self.fail(failed)
            return
        with self._lock:
            going = collective in self._open  # else `fail` has ended it meanwhile
            self._open.pop(collective, None)
        if going:
            collective.end(result)
