"""Many foreign files, in a process with limits, with a summary."""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from foreign_files.kinds import Kind, kinds

MOST_MEMORY = 256 << 20
"""Bytes of address space that files of some kB may take."""
MOST_SECONDS = 5.0
"""Of the CPU, for one file."""


class Count(NamedTuple):
    """How many files of a kind were read and refused, the longest time for one in seconds, and by
    how many bytes the peak of memory has grown."""

    read: int
    refused: int
    longest: float
    grown: int


class Misread(Exception):
    """A file ended in an error that is not ours. The text has the file."""


def count(name: str, kind: Kind, files: int, seed: int) -> Count:
    """Read the valid file, and so many changed ones. Raises `Misread`."""
    kind.read(kind.valid)
    before, read, longest = _peak(), 0, 0.0
    for number in range(files):
        content = kind.change(Random(f"{name} {seed} {number}"), kind.valid)
        begin = time.process_time()
        try:
            kind.read(content)
            read += 1
        except (MemoryError, RecursionError) as error:
            raise Misread(f"{name} {seed} {number}: {error!r}\n{content!r}") from error
        except kind.refused as error:
            # Of a `ValueError`, as pydantic's, callers make one line.
            if "\n" in str(error) and not isinstance(error, ValueError):
                raise Misread(f"{name} {seed} {number}: {error!r}\n{content!r}") from error
        except Exception as error:
            raise Misread(f"{name} {seed} {number}: {error!r}\n{content!r}") from error
        longest = max(longest, time.process_time() - begin)
    return Count(read, files - read, longest, _peak() - before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, used + MOST_MEMORY))


def main() -> None:
    """Read as many files as the command line says, and print what came of them."""
    parser = argparse.ArgumentParser(prog="foreign_files", description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000, help="how many of all kinds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("infinity").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        some = kinds(Path(directory))
        each = -(-options.files // len(some))
        for kind in some.values():
            kind.read(kind.valid)  # what that imports is not counted
        _limit()
        for name, kind in some.items():
            found = count(name, kind, each, options.seed)
            print(
                f"{name}: {found.read} read, {found.refused} refused, longest "
                f"{found.longest * 1e3:.0f} ms, memory grew by {found.grown / 2**20:.0f} MiB",
                flush=True,
            )
            if found.longest > MOST_SECONDS:
                raise SystemExit(f"{name}: a file took {found.longest:.1f} s")
