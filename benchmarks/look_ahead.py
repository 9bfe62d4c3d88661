#!/usr/bin/env python3
"""What it would bring to look ahead no further than some distance, instead of as far as there is
room: arithmetic, no timing.

Walks the planner's own look-ahead over forwards and backwards of real decoders, with copies that
take as long as they are large, one after the other, and compute that takes `--ratios` of that per
block. For each model the table says how much longer a step takes as the engine does it than with
the best of all distances, which somebody who measured copies and compute could choose; and how much
longer with one unit ahead, the usual distance; over several sizes of the compute device.

    python benchmarks/look_ahead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from infinity.bench.summary import Row, Spread, Summary
from infinity.schedule.planner import look_ahead
from infinity.schedule.trace import Trace
from infinity.tiers.slots import SlotMap

QUESTION = "Would a limited look-ahead distance make a step faster?"
LIMIT = "the best of all distances"
# Millions of parameters: blocks, each of them, the embedding and the head.
DECODERS = {
    "llama-1b": (16, 61, 263),
    "gpt2-xl": (48, 31, 82),
    "llama-7b": (32, 202, 131),
    "llama-8b": (32, 218, 525),
    "llama-13b": (40, 317, 164),
    "llama-70b": (80, 856, 1050),
}
PARTS = (0.15, 0.25, 0.4, 0.6, 0.8, 0.95)
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16)


def seconds(
    order: Sequence[int],
    sizes: Sequence[int],
    slots: int,
    copies: Sequence[float],
    compute: Sequence[float],
    distance: float,
    cycles: int = 4,
) -> float:
    """How long one of the last two of `cycles` takes: uses of units in `order`, each with its size
    in slots, and the seconds of a copy and of a use. Nothing is brought for a use that is more than
    `distance` away."""
    placed: SlotMap[int] = SlotMap(slots)
    trace, arrives = Trace(), dict[int, float]()
    now = link = begun = 0.0

    def bring(unit: int, beyond: float, in_use: int | None) -> bool:
        nonlocal link
        if beyond > distance:
            return False
        place = placed.place(
            sizes[unit], lambda other: None if other == in_use else trace.next_use(other), beyond
        )
        if place is None:
            return False
        start = max(now, link)
        for victim in place.evicted:
            placed.give_back(victim)
            start = max(start, arrives.pop(victim))
        placed.take(unit, place.start, sizes[unit])
        arrives[unit] = link = start + copies[unit]
        return True

    for cycle in range(cycles):
        begun = now if cycle == cycles - 2 else begun
        trace.begin("train")
        for unit in order:
            trace.use(unit)
            if unit not in arrives and not bring(unit, -1, None):
                raise ValueError(f"unit {unit} does not fit")
            look_ahead(
                trace,
                arrives.__contains__,
                lambda other, beyond, unit=unit: bring(other, beyond, unit),
            )  # type: ignore[misc]
            now = max(now, arrives[unit]) + compute[unit]
    return (now - begun) / 2


def compare(blocks: int, block: int, end: int, part: float, ratio: float) -> tuple[float, float]:
    """Our step over the best distance's, and that with one unit ahead over ours.

    A decoder with room for `part` of it, whose blocks compute for `ratio` of the time of their
    copy.
    """
    grain = max(block // 10, 1)
    sizes = [round(end / grain), *[round(block / grain)] * blocks, round(end / grain)]
    order = [*range(blocks + 2), *reversed(range(blocks + 1))]
    slots = max(int(part * sum(sizes)), 2 * max(sizes) + sizes[1])
    copies, block_compute = [float(size) for size in sizes], ratio * sizes[1]
    compute = [0.01 * block_compute, *[block_compute] * blocks, block_compute * end / block]
    found = {
        each: seconds(order, sizes, slots, copies, compute, each) for each in (*DISTANCES, math.inf)
    }
    return found[math.inf] / min(found.values()), found[1] / found[math.inf]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.3, 0.7, 1.0, 1.5, 3.0],
        help="compute over copy, of a block",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, decoder in DECODERS.items():
        figures = [compare(*decoder, part, ratio) for part in PARTS for ratio in options.ratios]
        over_best, one_ahead = zip(*figures, strict=True)
        rows.append(
            Row(
                name=name,
                ratio=Spread.of(over_best),
                others={"one_ahead_over_ours_ratio": Spread.of(one_ahead)},
                facts={
                    "mean_ratio": statistics.fmean(over_best),
                    "one_ahead_mean_ratio": statistics.fmean(one_ahead),
                },
            )
        )
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=vars(options))
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
