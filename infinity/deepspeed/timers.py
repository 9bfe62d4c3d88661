"""`deepspeed.utils.timer`: timers of the host, which wait for the compute device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.errors import DeepSpeedUsageError
from infinity.deepspeed.names import MISSING
from infinity.deepspeed.refused import Lacking
from infinity.deepspeed.tools import log_dist


class SynchronizedWallClockTimer(Lacking):
    """Timers by name, in milliseconds."""

    instead = "a call with a name gives the timer, and get_timers() all of them"

    class Timer(Lacking):
        """Adds up the time between its starts and stops."""

        instead = "elapsed() and mean() have its times, in milliseconds"

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._start = 0.0
            self._records: list[float] = []

        def start(self) -> None:
            """Start it. Raises `RuntimeError` if it runs."""
            if self.started_:
                raise DeepSpeedUsageError(f"the timer {self.name_} has been started already")
            self._start, self.started_ = _now(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Stop it. The arguments change nothing. Raises `RuntimeError` if it does not run."""
            if not self.started_:
                raise DeepSpeedUsageError(f"the timer {self.name_} has not been started")
            self._records.append(1000 * (_now() - self._start))
            self.started_ = False

        def reset(self) -> None:
            """Clear all times, and stop."""
            self.started_ = False
            self._records.clear()

        def elapsed(self, reset: bool = True) -> float:
            """The sum of all times, in milliseconds. A running timer continues."""
            runs = self.started_
            if runs:
                self.stop()
            total = sum(self._records)
            if reset:
                self.reset()
            if runs:
                self.start()
            return total

        def mean(self) -> float:
            """The mean of the times without the tenth part at each end, in milliseconds."""
            ordered = sorted(self._records)
            cut = round(len(ordered) * 0.1)
            return mean(ordered[cut : len(ordered) - cut]) if ordered else 0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All timers, by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """A line with the gibibytes on the compute device: in use, and at the peak."""
        device = get_accelerator()
        used, most = device.memory_allocated(), device.max_memory_allocated()
        return f" | mem_allocated: {used / 2**30:.4f} GB | max_mem_allocated: {most / 2**30:.4f} GB"

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """The mean time of each timer of `names`, in milliseconds divided by `normalizer`."""
        means = {
            name: self.timers[name].mean() / normalizer for name in names if name in self.timers
        }
        for name in means if reset else ():
            self.timers[name].reset()
        return means

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of `names`, divided by `normalizer`."""
        times = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        log_dist(" | ".join(["time (ms)", *times]), ranks or [0])


class NoopTimer:
    """Timers by name. All are this object, which measures nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def _zero(self, **_: Any) -> float:
        return 0

    start = stop = reset = log = get_mean = _nothing
    elapsed = mean = _zero

    def get_timers(self) -> dict[str, NoopTimer]:
        """None."""
        return {}


class ThroughputTimer(Lacking):
    """Counts epochs. `engine.report()` has the throughput."""

    instead = MISSING["monitor"]

    def __init__(self, config: Any = None, batch_size: int | None = None, **options: Any) -> None:
        self.batch_size = batch_size or 1
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """An epoch begins."""
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing."""


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
