"""Measurements and their statistics: medians and spread of rounds, percentiles, ratios. Ready for
JSON, with units."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from infinity.bench.io.rig import Measured, Pieces, Rig, percentile
from infinity.bench.summary import spread


@dataclass
class Case:
    """One measurement of every round: a mode on all paths together, or on one of them alone."""

    mode: str
    run: Callable[[Rig], Measured]
    pieces: Pieces | None  # for the latencies; None: the replay, whose requests wait for each other
    piece_bytes: int
    only: int | None = None
    quiet: list[Measured] = field(default_factory=list)
    loaded: list[Measured] = field(default_factory=list)
    fio: list[Measured] = field(default_factory=list)


def latency_facts(ordered: Sequence[float] | None) -> dict[str, Any]:
    """Percentiles of ascending seconds. None if nothing was measured."""
    names = {
        "latency_p50_seconds": 50.0,
        "latency_p99_seconds": 99.0,
        "latency_p99_9_seconds": 99.9,
    }
    return {
        name: percentile(ordered, percent) if ordered else None for name, percent in names.items()
    } | {"latency_requests_count": len(ordered or ())}


def fio_facts(case: Case) -> dict[str, Any]:
    """The speed of fio, and our speed over it round by round."""
    ratios = [
        ours.gb_per_second / theirs.gb_per_second
        for ours, theirs in zip(case.quiet, case.fio, strict=True)
    ]
    return {
        **{
            f"fio_{name}_gb_per_second": value
            for name, value in spread([run.gb_per_second for run in case.fio]).items()
        },
        **{f"fio_{name}_ratio": value for name, value in spread(ratios).items()},
        "fio_cpu_seconds_per_gb": statistics.median(run.cpu_seconds_per_gb for run in case.fio),
    }


def sustained_facts(samples: Sequence[tuple[float, int]], write_set: int) -> dict[str, Any]:
    """Speeds from (seconds, bytes written so far), ascending: of the first tenth of the time, and
    of the last half."""
    total_seconds, total = samples[-1]
    speeds = [
        ((now + then) / 2, (moved - before) / (now - then) / 1e9)
        for (then, before), (now, moved) in pairwise(samples)
        if now > then
    ]
    first = statistics.median(
        [speed for at, speed in speeds if at <= total_seconds / 10] or [speeds[0][1]]
    )
    last = statistics.median(
        [speed for at, speed in speeds if at >= total_seconds / 2] or [speeds[-1][1]]
    )
    return {
        "seconds": total_seconds,
        "written_bytes": total,
        "write_set_bytes": write_set,
        "whole_gb_per_second": total / total_seconds / 1e9,
        "first_tenth_gb_per_second": first,
        "last_half_gb_per_second": last,
        "kept_ratio": last / first if first else None,
        "timeline": [{"at_seconds": at, "gb_per_second": speed} for at, speed in speeds],
    }
