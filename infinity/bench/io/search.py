"""Finds the fastest setting of the I/O engine for a device in few measurements. A pure function of
them.

[Note: a climb, not a grid]
Speed rises with request size and requests in flight up to a plateau, and may fall after it. So the
search starts from a middling setting. It climbs one axis after the other in factors of two until
nothing is better: about 10 measurements per engine instead of 48. The speed of a disk also varies.
So the best few settings, and the best of each engine, are measured again in turns, and medians
decide. Among settings that are about as fast, io_uring wins, because it needs no thread per
request. Then the setting with the fewest bytes in flight wins, because more would cost memory and
latency for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.errors import ConfigError
from infinity.quantities import format_bytes

REQUEST_BYTES = tuple(1 << shift for shift in range(18, 24))  # 256 KiB to 8 MiB
DEPTHS = tuple(1 << shift for shift in range(8))  # 1 to 128
THREADS = tuple(1 << shift for shift in range(6))  # 1 to 32
STEP = 0.01
"""A step of the climb must gain this share."""
AS_GOOD = 0.05
"""Settings within this share of the fastest count as equally fast."""
FINALISTS, FINAL_ROUNDS = 3, 2


@dataclass(frozen=True, order=True)
class Setting:
    """The setting of one engine per path. `depth` device requests of `request_bytes` are in flight.
    POSIX has one per thread."""

    engine: str
    depth: int
    request_bytes: int
    threads: int

    @property
    def in_flight_bytes(self) -> int:
        """The most bytes in flight."""
        return self.depth * self.request_bytes

    def facts(self) -> dict[str, int | str]:
        """The setting ready for JSON, with units."""
        return {
            "engine": self.engine,
            "depth_requests": self.depth,
            "request_bytes": self.request_bytes,
            "threads_count": self.threads,
        }


@dataclass(frozen=True)
class Space:
    """The settings of one engine: every pair of a request size and a width (depth, or for POSIX
    threads)."""

    engine: str
    requests: tuple[int, ...]
    widths: tuple[int, ...]
    most_in_flight: int

    def at(self, request: int, width: int) -> Setting | None:
        """The setting at these two indices. None outside, or if it has more in flight than the
        memory holds."""
        if not (0 <= request < len(self.requests) and 0 <= width < len(self.widths)):
            return None
        depth = self.widths[width]
        setting = Setting(
            self.engine, depth, self.requests[request], depth if self.engine == "posix" else 1
        )
        return setting if setting.in_flight_bytes <= self.most_in_flight else None

    def start(self) -> tuple[int, int]:
        """Indices of a middling setting, about 16 requests of 1 MiB, that fits."""
        places = [
            (r, w)
            for r in range(len(self.requests))
            for w in range(len(self.widths))
            if self.at(r, w)
        ]
        if not places:
            raise ConfigError(
                f"{self.engine}: at least {format_bytes(self.requests[0] * self.widths[0])} would "
                f"be in flight, of {format_bytes(self.most_in_flight)} that there is memory for; "
                "lower `depth`, `threads` or `request_bytes`"
            )
        return min(
            places,
            key=lambda at: (
                abs(_log2(self.requests[at[0]], 1 << 20)) + abs(_log2(self.widths[at[1]], 16))
            ),
        )

    def middle(self) -> Setting:
        """The setting at `start`."""
        setting = self.at(*self.start())
        assert setting is not None
        return setting


def _log2(value: int, reference: int) -> int:
    return value.bit_length() - reference.bit_length()


@dataclass(frozen=True)
class Found:
    """The outcome: the best setting, its median score, and every score in the order of the first
    measurement."""

    best: Setting
    score: float
    scores: dict[Setting, list[float]]


class _OutOfTime(Exception):
    pass


def search(
    spaces: Sequence[Space], measure: Callable[[Setting], float | None], trials: int
) -> Found:
    """The setting with the highest score in at most `trials` calls of `measure`, finals included.

    `measure` returns a score, higher is better, or None if the time is over. The search then ends
    with the scores so far. Raises `ValueError` without any measurement.
    """
    scores: dict[Setting, list[float]] = {}
    # The finals get the rest.
    calls, climbing = 0, trials - min(FINALISTS * FINAL_ROUNDS, trials // 3)

    def score(setting: Setting, again: bool = False) -> float:
        nonlocal calls
        if setting in scores and not again:
            return scores[setting][0]
        if calls >= (trials if again else climbing):
            raise _OutOfTime
        calls += 1
        value = measure(setting)
        if value is None:
            raise _OutOfTime
        scores.setdefault(setting, []).append(value)
        return value

    try:
        starts = sorted((-score(space.middle()), number) for number, space in enumerate(spaces))
        for _, number in starts:
            _climb(spaces[number], score)
    except _OutOfTime:
        pass
    if not scores:
        raise ValueError("the search ended before its first measurement; give it more time")
    ranked = sorted(scores, key=lambda setting: (-scores[setting][0], setting))
    best_of_each = {setting.engine: setting for setting in reversed(ranked)}.values()
    finalists = list(dict.fromkeys([*best_of_each, *ranked]))[: max(FINALISTS, len(best_of_each))]
    try:
        for _ in range(FINAL_ROUNDS if len(finalists) > 1 else 0):
            for setting in finalists:
                score(setting, again=True)
    except _OutOfTime:
        pass
    medians = {setting: statistics.median(scores[setting]) for setting in finalists}
    highest = max(medians.values())
    as_good = [setting for setting in finalists if medians[setting] >= (1 - AS_GOOD) * highest]
    best = min(
        as_good,
        key=lambda setting: (
            setting.engine != "io_uring",
            setting.in_flight_bytes,
            -medians[setting],
            setting,
        ),
    )
    return Found(best, medians[best], scores)


def _climb(space: Space, score: Callable[[Setting], float]) -> None:
    """Measure uphill from the start, axis by axis, until neither axis gains."""
    place = space.start()
    best = score(space.middle())
    moved = True
    while moved:
        moved = False
        for axis in (1, 0):  # the bytes in flight matter more than the request size
            for direction in (1, -1):
                gained = False
                while True:
                    step = (
                        place[0] + (direction if axis == 0 else 0),
                        place[1] + (direction if axis == 1 else 0),
                    )
                    setting = space.at(*step)
                    value = score(setting) if setting is not None else 0.0
                    if value <= best * (1 + STEP):
                        break
                    place, best, gained, moved = step, value, True, True
                if gained:
                    break
