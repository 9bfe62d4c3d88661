"""Samples the bytes in each tier during a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from infinity.cli.history import Sample

SHORTEST = 0.01  # seconds between two samples, at first
MOST_SAMPLES = 4000


class Sampler:
    """Appends samples of `memory()` to `samples` on its own thread, from enter to exit.

    Memory is bounded. At `most` samples, every second one is dropped and the interval doubles. An
    exception of `memory` ends the sampling silently, because the run meets the same error.
    """

    def __init__(
        self, memory: Callable[[], dict[str, int]], samples: list[Sample], most: int = MOST_SAMPLES
    ) -> None:
        self._memory, self._samples, self._most = memory, samples, most
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        interval = SHORTEST
        while True:
            try:
                used = self._memory()
            except Exception:
                return
            self._samples.append(Sample(time.perf_counter(), used))
            if len(self._samples) >= self._most:
                del self._samples[1::2]
                interval *= 2
            if self._stop.wait(interval):
                return
