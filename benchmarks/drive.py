#!/usr/bin/env python3
"""NVMe directories through infinity's I/O engine at its best setting, and through fio with equal
parameters.

The comparison runs where fio is installed. `infinity bench io` has all options, and says what
limits the drive.

    benchmarks/drive.py --nvme DIR [--nvme DIR ...] [--load] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from infinity.bench.io.benchmark import Benchmark
from infinity.bench.io.plan import MODES, Plan
from infinity.bench.summary import Row, Spread, Summary
from infinity.quantities import parse_bytes

QUESTION = "What does the drive give to infinity's I/O engine, and to fio with equal parameters?"
LIMIT = "fio with equal parameters, in the same round"
FACTS = (
    "cpu_seconds_per_gb",
    "of_quiet_ratio",
    "latency_p50_seconds",
    "latency_p99_seconds",
    "latency_p99_9_seconds",
    "io_per_training_step_seconds",
)


def row_of(measured: dict[str, Any], paths: int) -> Row:
    """A mode on all paths, or on one of them, with or without a load beside it."""
    where = f" on {measured['paths'][0]} alone" if len(measured["paths"]) < paths else ""
    beside = f" beside {measured['load']}" if measured["load"] else ""

    def spread(form: str) -> Spread:
        return Spread(
            **{name: measured[form.format(name)] for name in ("median", "lowest", "highest")}
        )

    return Row(
        name=measured["mode"] + where + beside,
        unit="GB/s",
        rounds=measured["rounds_count"],
        value=spread("{}_gb_per_second"),
        ratio=spread("fio_{}_ratio") if "fio_median_ratio" in measured else None,
        facts={name: measured[name] for name in FACTS if measured.get(name) is not None},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nvme", type=Path, action="append", required=True, help="a directory on the drive"
    )
    parser.add_argument("--size", type=parse_bytes, default=2 << 30, help="the file on each path")
    parser.add_argument("--engine", choices=["auto", "io_uring", "posix"], default="auto")
    parser.add_argument("--depth", type=int, help="requests in flight (default: searched)")
    parser.add_argument("--request-bytes", type=parse_bytes, help="one request (default: searched)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--search-seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=1.0)
    parser.add_argument(
        "--load", action="store_true", help="measure also beside CPU Adam and copies to a GPU"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan(
        paths=tuple(options.nvme),
        size=options.size,
        reserve=4 << 30,
        engine=options.engine,
        depth=options.depth,
        request_bytes=options.request_bytes,
        threads=None,
        search_seconds=options.search_seconds,
        modes=tuple(options.modes),
        rounds=options.rounds,
        round_seconds=options.round_seconds,
        tensor_bytes=1 << 20,
        model_parameters=7_000_000_000,
        load=options.load,
        compare_fio=shutil.which("fio") is not None,
        sustained=None,
        write_set=None,
        endurance=None,
        runs=1,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    result = Benchmark(plan, say).run()
    settings = {key: value for key, value in vars(options).items() if key != "nvme"}
    settings |= {f"best_{key}": value for key, value in result["best"].items()}
    rows = [row_of(measured, len(plan.paths)) for measured in result["rows"]]
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=settings)
    for line in summary.table():
        print(line)
    for sentence in result["limits"]:
        print(sentence)
    summary.write(options.json)


if __name__ == "__main__":
    main()
