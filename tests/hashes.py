"""`python -m hashes FILE`: hashes of all that random programs see on each placement, and of what
simulated machines show. Writes them where there is no file yet, and compares them where there is
one. A change that moves code changes none; exits 1 where one differs."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, is_dataclass
from pathlib import Path
from typing import Any

import torch

from random_programs.many import EACH, drawn
from random_programs.players import Raised, play
from simulation.many import divided, simulating
from simulation.programs import number_of
from support.threads import one_thread

FIRST = 1000
"""The first seed of either kind."""


def main() -> int:
    """Hash what the command line asks for; returns how many differ from those of the file."""
    parser = argparse.ArgumentParser(prog="hashes", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--programs", type=int, default=1000, help="how many random programs")
    parser.add_argument("--seeds", type=int, default=1000, help="how many simulated seeds")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begin = time.monotonic()
    jobs: list[tuple[Any, ...]] = [
        ("programs", FIRST + number) for number in range(-(-options.programs // EACH))
    ]
    seeds = range(FIRST, FIRST + options.seeds)
    jobs += [("seeds", *part) for part in divided(seeds, options.processes)]
    hashes: dict[str, str] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for part in pool.imap_unordered(_job, jobs):
            hashes |= part
    print(f"{len(hashes)} hashes, {time.monotonic() - begin:.0f} s")
    if not options.file.exists():
        options.file.write_text(json.dumps(hashes, indent=0, sort_keys=True))
        return 0
    before = json.loads(options.file.read_text())
    differing = sorted(name for name in hashes if before.get(name, "none") != hashes[name])
    print("\n".join(differing[:40]))
    print(f"{len(differing)} of {len(hashes)} differ from {options.file}")
    return len(differing)


def _job(job: tuple[Any, ...]) -> dict[str, str]:
    logging.getLogger("infinity").setLevel(logging.ERROR)
    kind, *seeds = job
    return of_programs(*seeds) if kind == "programs" else of_seeds(seeds)


def of_programs(seed: int) -> dict[str, str]:
    """Of what each program of a seed sees on each of its placements."""
    torch.set_num_threads(1)
    hashes = {}
    for number, recipe in enumerate(drawn(seed, EACH)):
        for placement in recipe.placements:
            with tempfile.TemporaryDirectory(prefix="hashes-") as directory:
                seen = play(recipe, placement, Path(directory))
            hashes[f"program {seed}.{number} on {placement}"] = hash_of(seen)
    return hashes


def of_seeds(seeds: Iterable[int]) -> dict[str, str]:
    """Of what each seed has found, and of what the program shows that it disturbs. How often it
    reads and writes a place depends on the threads."""
    hashes = {}
    with one_thread(), simulating() as simulation:
        for seed in seeds:
            hashes[f"seed {seed}"] = hash_of(simulation.run(seed).text)
            shape = simulation.shape(seed)
            name = f"program of seeds {number_of(seed)}"
            hashes[name] = hash_of((shape.shown, shape.states))
    return hashes


def hash_of(value: Any) -> str:
    """Of tensors by their bits, and of errors by their kinds: their texts name addresses."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()[:24]


def _add(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Raised):
        digest.update(f"{value.kind} {value.refusal}".encode())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _add(digest, (key, value[key]))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(digest, each)
    elif is_dataclass(value) and not isinstance(value, type):
        _add(digest, astuple(value))
    else:
        digest.update(repr(value).encode())


if __name__ == "__main__":
    sys.exit(min(main(), 1))
