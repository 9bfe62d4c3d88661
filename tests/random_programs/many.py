"""Many random programs, in some processes, with a summary, and for what differs a recipe that shows it again."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time

from random_programs.comparing import Difference, difference, shrunk
from random_programs.recipes import KNOWN, Recipe, draw


def main() -> int:
    """Run the programs that the command line says; returns how many differ."""
    parser = argparse.ArgumentParser(prog="random_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000, help="how many")
    parser.add_argument("--first", type=int, default=1000, help="the number of the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-shrink", action="store_true", help="show the programs that differ as they were drawn")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.programs)
    begin, differing = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done, (number, found) in enumerate(pool.imap_unordered(_one, numbers), 1):
            if found is not None:
                differing += 1
                print(f"program {number}: {found}", flush=True)
                if not options.no_shrink:
                    print(report(draw(number), found), flush=True)
            if done % 500 == 0:
                print(f"{done} programs, {differing} differ, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(numbers)} programs from number {options.first} on: {differing} differ, {time.monotonic() - begin:.0f} s")
    for feature, reason in KNOWN.items():
        print(f"not in these programs: {feature} ({reason})")
    return differing


def _one(number: int) -> tuple[int, Difference | None]:
    logging.getLogger("infinity").setLevel(logging.ERROR)
    return number, difference(draw(number))


def report(recipe: Recipe, found: Difference) -> str:
    """What a person needs to see it again."""
    smaller = shrunk(recipe, found)
    return f"in {smaller.placements}: {found.text}\nit shows in\n\n    difference({smaller!r})\n"
