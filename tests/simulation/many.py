"""Many seeds, in some processes, with a summary, and for each that fails a command that runs it
again."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from simulation.programs import number_of
from simulation.seeds import Found, Simulation
from simulation.system import simulated
from support.threads import one_thread

EACH = 250
"""Seeds of one job; those of one program are together, which is looked at once."""


def main() -> int:
    """Run the seeds that the command line says; returns how many failed."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    begin = time.monotonic()
    failed, ran, blows = 0, 0, Counter[str]()
    processes = min(options.processes, options.seeds)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_job, part) for part in divided(seeds, processes)]
        for job in as_completed(jobs):
            for found in job.result():
                ran += 1
                blows += found.blows
                if found.text:
                    failed += 1
                    print(f"{told(found)}\n", flush=True)
            print(f"{ran} seeds, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"blows: {', '.join(f'{count} {what}' for what, count in blows.most_common())}")
    print(f"{ran} seeds from {options.first} on: {failed} failed, {time.monotonic() - begin:.0f} s")
    return failed


def told(found: Found) -> str:
    """What a seed has found, and how to see it again."""
    return (
        f"seed {found.seed}: {found.text}\n"
        f"again: make simulate SEEDS=1 FIRST={found.seed}, or in the folder tests: "
        f"python -m simulation --seeds 1 --first {found.seed}"
    )


def divided(seeds: Iterable[int], processes: int) -> list[list[int]]:
    """The seeds in jobs, so that those of a program are in few of them."""
    ordered = sorted(seeds, key=lambda seed: (number_of(seed), seed))
    each = max(1, min(EACH, -(-len(ordered) // processes)))
    return [ordered[at : at + each] for at in range(0, len(ordered), each)]


def _job(seeds: list[int]) -> list[Found]:
    with one_thread(), simulating() as simulation:
        return [simulation.run(seed) for seed in seeds]


@contextmanager
def simulating() -> Iterator[Simulation]:
    """Inside, the package meets simulated machines. It says nothing."""
    log = logging.getLogger("infinity")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()
    try:
        with simulated() as system, tempfile.TemporaryDirectory() as where:
            yield Simulation(system, Path(where))
    finally:
        log.setLevel(level)
