"""Spans and counters of one engine: times, lanes and bytes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

LANES = (
    "model",
    "compute",
    "wait nvme",
    "wait adam",
    "wait collective",
    "nvme read",
    "nvme write",
    "adam",
    "collective",
)
MOST_SPANS = 200_000


class Meter:
    """Bytes that crossed to NVMe on behalf of one purpose; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read = self.written = 0

    def add(self, read: int = 0, written: int = 0) -> None:
        """Count bytes of requests that were submitted."""
        with self._lock:
            self.read += read
            self.written += written


class Stopwatch:
    """Adds up the seconds between each `start` and its `stop`, by one thread; any thread may read
    `seconds` at any time."""

    def __init__(self) -> None:
        # The seconds of stretches that have ended, and the begin of the current one.
        self._state: tuple[float, float | None] = 0.0, None

    @property
    def seconds(self) -> float:
        """The seconds of all stretches so far, with the current one."""
        ended, since = self._state
        return ended if since is None else ended + time.perf_counter() - since

    def start(self) -> None:
        """A stretch begins."""
        self._state = self._state[0], time.perf_counter()

    def stop(self) -> None:
        """It ends."""
        self._state = self.seconds, None


class Span(NamedTuple):
    """A stretch of time: `start` and `end` are seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float


class Ranges(NamedTuple):
    """The functions that show ranges to a profiler. `begin` takes a text and returns the argument
    of `end`, which any thread may call."""

    begin: Callable[[str], Any]
    end: Callable[[Any], object]


class Recorder:
    """Collects spans and counters; any thread may call it. Memory is bounded: the oldest spans are
    dropped.

    With `ranges` each span is also a range of the profiler, "lane: name", which begins on the
    thread of the span.
    """

    def __init__(self, ranges: Ranges | None = None) -> None:
        self._ranges = ranges
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the time spent inside as one span."""
        start = time.perf_counter()
        try:
            with self.range(lane, name):
                yield
        finally:
            self.add(lane, name, start, time.perf_counter())

    def range(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Show the block to a profiler. An `add` counts it."""
        return nullcontext() if self._ranges is None else self._shown(lane, name)

    @contextmanager
    def _shown(self, lane: str, name: str) -> Iterator[None]:
        shown = self.show(lane, name)
        try:
            yield
        finally:
            self.hide(shown)

    def show(self, lane: str, name: str) -> Any:
        """Like `range`, with the end elsewhere: pass the result to `hide` once, on any thread."""
        return None if self._ranges is None else self._ranges.begin(f"{lane}: {name}")

    def hide(self, shown: Any) -> None:
        """End what `show` began; None is nothing."""
        if self._ranges is not None and shown is not None:
            self._ranges.end(shown)

    def add(self, lane: str, name: str, start: float, end: float) -> None:
        """Record a span whose times are already known."""
        with self._lock:
            self._spans.append(Span(lane, name, start, end))
            self._seconds[lane, name] += end - start

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name`."""
        with self._lock:
            self._counters[name] += amount

    def spans(self) -> list[Span]:
        """The recorded spans, oldest first."""
        with self._lock:
            return list(self._spans)

    def counters(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def seconds(self, lane: str) -> dict[str, float]:
        """Total seconds per span name of one lane."""
        with self._lock:
            return {name: total for (at, name), total in self._seconds.items() if at == lane}
