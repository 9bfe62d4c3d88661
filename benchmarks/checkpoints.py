#!/usr/bin/env python3
"""How fast a checkpoint is saved and loaded, beside what the drive gives in the same round.

A save reads states from the drive and writes as many bytes to a new file, and a load reads the
checkpoint and writes as many bytes to states that are there. All rates count both directions: bytes
of states that were moved, plus bytes of the checkpoint, per second. GB = 1e9 bytes.

- The limit of a load is "half": half reads and half writes of a file that is there, in pieces of
  `infinity bench io`, through the same I/O engine in the same directory.
- The limit of a save is "half, to a new file": such reads beside writes to a file that is made for
  them, is as long as the checkpoint, is written in the pieces and requests of a save, and is
  flushed. A virtual disk takes longer for blocks that no file has had since they were discarded.
- `over_half_ratio` is beside "half" for both, and `over_mixed_ratio` beside the mode "mixed" of
  `infinity bench io`, of which 70% are reads.

Parameters, masters and moments are on NVMe, nothing is cached. Everything that a save wrote is
flushed when it ends. "save" makes a new directory. "save over another" replaces the last
checkpoint, and so also removes as many bytes, which takes long where the file system discards what
it frees. The file of the drive was written before, as with `infinity bench io`.

With --slowed the I/O engines of the states and of the checkpoint are slowed to a rate, each in its
direction. The limit is then the time that the bytes of one direction take. This shows what is lost
between reading and writing, also on a machine that is not quiet.

    benchmarks/checkpoints.py --directory DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity import native
from infinity.bench.io import patterns
from infinity.bench.io.patterns import Transfer
from infinity.bench.io.rig import PIECE_BYTES, Drive, Rig, make_engine
from infinity.bench.io.search import Setting
from infinity.bench.io.workspace import workspace
from infinity.bench.summary import Row, Spread, Summary
from infinity.checkpoint.data_file import BUFFER_BYTES, BUFFERS
from infinity.device import HostMemory
from infinity.quantities import parse_bytes

QUESTION = "How near do saving and loading a checkpoint come to the drive?"
LIMIT = (
    "half reads and half writes on the same drive, in the same round, and to a new file for a "
    "save; of a slowed drive, its rate in each direction"
)


class Block(nn.Module):
    """A residual MLP; only its parameters matter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def half_and_half(size: int, piece: int) -> Iterator[Transfer]:
    """A read and a write in turns, each with a position of its own."""
    reads = patterns.sequential("read", size, piece)
    writes = patterns.sequential("write", size, piece)
    return itertools.chain.from_iterable(zip(reads, writes, strict=False))


MODES: dict[str, Callable[[int, int], Iterator[Transfer]]] = {
    "read": lambda size, piece: patterns.sequential("read", size, piece),
    "write": lambda size, piece: patterns.sequential("write", size, piece),
    "mixed": patterns.mixed,
    "half": half_and_half,
}


class Bench:
    """A file of the drive, and the rates of each mode there."""

    def __init__(self, drive: Drive, setting: Setting) -> None:
        self._drive, self._setting = drive, setting
        with Rig([drive], setting) as rig:  # what was never written is read from nowhere
            count = -(-drive.size // PIECE_BYTES)
            rig.stream(
                lambda size: itertools.islice(MODES["write"](size, PIECE_BYTES), count),
                PIECE_BYTES,
            )
        drive.file.sync()

    def rate(self, mode: str, seconds: float) -> float:
        """GB/s, both directions together."""
        with Rig([self._drive], self._setting) as rig:
            return rig.stream(
                lambda size: MODES[mode](size, PIECE_BYTES), PIECE_BYTES, seconds
            ).gb_per_second

    def rate_of_new(self, path: Path) -> float:
        """GB/s of writes to a file that is made for them, as long as that of the drive."""
        with closing(native.aio().File(os.fspath(path), create=True)) as file:
            file.allocate(self._drive.size)
            drive = Drive(file, self._drive.size, self._drive.memory)
            count = -(-drive.size // PIECE_BYTES)
            with Rig([drive], self._setting) as rig:
                rate = rig.stream(
                    lambda size: itertools.islice(MODES["write"](size, PIECE_BYTES), count),
                    PIECE_BYTES,
                ).gb_per_second
        path.unlink()
        return rate

    def rate_of_half_to_new(self, path: Path, nbytes: int) -> float:
        """GB/s of reads of the drive's file beside writes of about `nbytes` to a file that is made
        for them, flush included."""
        setting, memory, old = self._setting, self._drive.memory.tensor, self._drive.file
        slots = memory.split(BUFFER_BYTES)[: 2 * BUFFERS]
        count = nbytes // BUFFER_BYTES
        places = itertools.cycle(range(0, self._drive.size - BUFFER_BYTES + 1, BUFFER_BYTES))
        with (
            closing(native.aio().File(os.fspath(path), create=True)) as new,
            closing(make_engine(setting)) as reading,
            closing(native.make_engine(setting.engine)) as writing,
        ):
            start = time.perf_counter()
            new.allocate(count * BUFFER_BYTES)
            tickets: deque[Any] = deque()
            for number in range(count):
                while len(tickets) > len(slots) - 2:
                    tickets.popleft().wait()
                to, of = (slots[(2 * number + each) % len(slots)].data_ptr() for each in (0, 1))
                tickets.append(reading.read(old, next(places), to, BUFFER_BYTES))
                tickets.append(writing.write(new, number * BUFFER_BYTES, of, BUFFER_BYTES))
            for ticket in tickets:
                ticket.wait()
            new.sync()
            seconds = time.perf_counter() - start
        path.unlink()
        return 2 * count * BUFFER_BYTES / seconds / 1e9


class Run:
    """A wrapped model whose states are all on NVMe and were updated once."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.manual_seed(0)
        states = folder / "states"
        states.mkdir()
        config = infinity.Config(
            nvme=states,
            precision="bf16",
            parameters="nvme",
            optimizer="nvme",
            gpu_memory=options.gpu_memory,
            cpu_memory=options.cpu_memory,
            tuning={"cache": 0, "device": "cpu"},
        )
        with infinity.init():
            model = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
        self.model = infinity.wrap(model, config)
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-4)
        self.model(torch.randn(2, options.width, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.drain()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.checkpoint = folder / "checkpoint"

    def save(self) -> None:
        self.engine.save_checkpoint(self.checkpoint, self.optimizer)

    def load(self) -> None:
        self.engine.load_checkpoint(self.checkpoint, self.optimizer)

    @property
    def checkpoint_bytes(self) -> int:
        """Of the checkpoint."""
        return sum(path.stat().st_size for path in self.checkpoint.iterdir())

    @property
    def moved_bytes(self) -> int:
        """Of states, which take 12 bytes a parameter, and of the checkpoint."""
        return self.checkpoint_bytes + 12 * self.parameters


@contextmanager
def slowed(run: Run, gb_per_second: float) -> Iterator[None]:
    """The engine of the states, and those that are made inside, move no more than this."""
    real, rate = native.make_engine, gb_per_second * 1e9

    def make_engine(*arguments: Any, **options: Any) -> Any:
        engine = real(*arguments, **options)
        engine.set_faults(bytes_per_second=rate)
        return engine

    native.make_engine = make_engine
    run.engine.io.set_faults(bytes_per_second=rate)
    try:
        yield
    finally:
        native.make_engine = real
        run.engine.io.set_faults()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    used, start = cpu_seconds(), time.perf_counter()
    work()
    return time.perf_counter() - start, cpu_seconds() - used


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(run: Run, bench: Bench, options: argparse.Namespace) -> list[Row]:
    """A row for each mode of the drive, and for a save and a load."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    news: list[float] = []
    halves_to_new: list[float] = []
    works = {"save": run.save, "save over another": run.save, "load": run.load}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for mode, measured in rates.items():
            measured.append(bench.rate(mode, options.seconds))
        new, nbytes = run.checkpoint.with_name("new"), run.checkpoint_bytes
        news.append(bench.rate_of_new(new))
        halves_to_new.append(bench.rate_of_half_to_new(new, nbytes))
        before, before_new = rates["half"][-1], halves_to_new[-1]
        shutil.rmtree(run.checkpoint)
        for name, work in works.items():
            os.sync()
            seconds, cpu = timed(work)
            # A shared drive is not as fast now as it was a moment ago.
            after = bench.rate("half", options.seconds)
            moved, half = run.moved_bytes / 1e9, statistics.mean((before, after))
            rate, before, limit = moved / seconds, after, half
            if work == run.save:
                after = bench.rate_of_half_to_new(new, nbytes)
                limit, before_new = statistics.mean((before_new, after)), after
                halves_to_new.append(after)
            found[name].append(
                {
                    "value": rate,
                    "ratio": rate / limit,
                    "over_half_ratio": rate / half,
                    "over_mixed_ratio": rate / rates["mixed"][-1],
                    "seconds": seconds,
                    "cpu_seconds_per_gb": cpu / moved,
                    "drive_gb_per_second": limit,
                }
            )
        for rate in options.slowed:
            shutil.rmtree(run.checkpoint)
            for name, work in (("save", run.save), ("load", run.load)):
                with slowed(run, rate):
                    seconds, cpu = timed(work)
                moved = run.moved_bytes / 1e9
                found.setdefault(f"{name}, slowed to {rate:g} GB/s", []).append(
                    {
                        "value": moved / seconds,
                        "ratio": moved / 2 / rate / seconds,
                        "seconds": seconds,
                        "cpu_seconds_per_gb": cpu / moved,
                    }
                )
    to_new = {"write to a new file": news, "half, to a new file": halves_to_new}
    rows = [
        Row(
            name=f"the drive, {mode}",
            unit="GB/s",
            rounds=options.rounds,
            value=Spread.of(measured),
        )
        for mode, measured in (rates | to_new).items()
    ]
    for name, measured in found.items():
        columns = {key: Spread.of([one[key] for one in measured]) for key in measured[0]}
        rows.append(
            Row(
                name=name,
                unit="GB/s",
                rounds=options.rounds,
                value=columns.pop("value"),
                ratio=columns.pop("ratio"),
                others=columns,
                facts={"moved_bytes": run.moved_bytes},
            )
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the drive (default: a temporary one)"
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=9, help="9 blocks of 2048: 302 M parameters")
    parser.add_argument("--gpu-memory", default="256MiB")
    parser.add_argument("--cpu-memory", default="1GiB")
    parser.add_argument("--size", type=parse_bytes, default=1 << 30, help="the file of the drive")
    parser.add_argument("--engine", choices=["io_uring", "posix"], default="io_uring")
    parser.add_argument("--requests", type=int, default=16, help="requests in flight there")
    parser.add_argument("--request-bytes", type=parse_bytes, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=1.0, help="each measurement of the drive")
    parser.add_argument(
        "--slowed", type=float, nargs="*", default=[], help="GB/s: also with a drive of these rates"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    setting = Setting(options.engine, options.requests, options.request_bytes, options.requests)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        (folder / "drive").mkdir()
        with workspace([folder / "drive"], options.size, 0) as (file,):
            memory = HostMemory(64 << 20)
            memory.tensor.view(torch.int64).random_()
            bench = Bench(Drive(file, options.size, memory), setting)
            run = Run(options, folder)
            with run.engine:
                run.save()
                rows = measure(run, bench, options)
            memory.close()
    settings = vars(options) | {"parameters": run.parameters}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
