#!/usr/bin/env python3
"""The optimizer kernels beside a plain loop over memory, torch's fused AdamW, and DeepSpeed's
CPUAdam where it is installed.

Needs 26 bytes of memory per parameter. `infinity/bench/adam.py` measures, and says how they are
compared.

    benchmarks/adam.py [--parameters 100e6 300e6] [--rounds 7] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from infinity.bench.adam import measure
from infinity.bench.summary import Row, Spread, Summary

QUESTION = (
    "How near do the optimizer kernels come to the memory bandwidth, and how do "
    "they compare with their peers?"
)
LIMIT = "the bytes per second of a plain in-place loop, in the same round"


def spread_of(figures: dict[str, Any], name: str) -> Spread:
    """The spread that `measure` wrote under `name`."""
    return Spread(**{key: figures[f"{name}_{key}"] for key in ("median", "lowest", "highest")})


def rows_of(result: dict[str, Any]) -> list[Row]:
    """A row for each format, the loops and the peers."""
    return [
        Row(
            name=f"{result['parameters_count']}, {row['name']}",
            unit="GB/s",
            rounds=result["rounds_count"],
            value=spread_of(row, "gb_per_second"),
            ratio=spread_of(row, "of_in_place_loop_ratio"),
            others=(
                {"of_shadow_loop_ratio": spread_of(row, "of_shadow_loop_ratio")}
                if "of_shadow_loop_ratio_median" in row
                else {}
            )
            | {
                f"steps_per_second_over_{peer}_ratio": spread_of(ratios, "ratio")
                for peer, ratios in row.get("over_peers", {}).items()
            },
            facts={key: row[key] for key in ("bytes_per_parameter", "nanoseconds_per_parameter")},
        )
        for row in result["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, nargs="+", default=[100e6, 300e6])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    rows, settings = [], vars(options)
    for count in map(int, options.parameters):
        result = measure(count, options.rounds, options.threads, not options.no_peers, say)
        rows += rows_of(result)
        settings |= {
            "threads": result["threads_count"],
            "instruction_set": result["instruction_set"],
        }
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
