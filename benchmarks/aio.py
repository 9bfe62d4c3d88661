#!/usr/bin/env python3
"""The I/O engines against fio on one file: sequential, mixed and small random I/O, ordinary memory,
and demand latency.

Every round runs fio at its two best settings and our engines, in an order that changes from round
to round, and gives our figure over that round's of fio's better setting; medians and the spread
over rounds are printed. Both sides use O_DIRECT and run for as long, after a warm-up in which their
buffers are touched: fio's on huge pages by `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, ours in a
`infinity.device.HostMemory`. The file is written once before. CPU seconds are those of the process
(fio: its own figure).

    benchmarks/aio.py --dir DIR [--questions read,write,...] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infinity import native
from infinity.bench.summary import Row, Spread, Summary
from infinity.device import HostMemory

QUESTION = "How near do the I/O engines come to fio?"
LIMIT = "fio at its better setting, in the same round"
MIB = 1 << 20
WARM_UP = 0.4
Move = Callable[[int], Any]
Contenders = dict[str, Callable[[], Any]]


@dataclass
class Figure:
    """bytes per second, requests per second, and CPU seconds per GB"""

    rate: float
    requests: float
    cpu: float


def fio(
    path: Path,
    seconds: float,
    pattern: str,
    block: int,
    depth: int,
    *,
    huge: bool = True,
    mix: int = 70,
) -> Figure:
    command = [
        "fio",
        "--name=fio",
        f"--filename={path}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--rw={pattern}",
        f"--bs={block}",
        f"--iodepth={depth}",
        f"--rwmixread={mix}",
        f"--size={path.stat().st_size}",
        "--thread",
        "--time_based",
        f"--runtime={seconds * 1e3:.0f}ms",
        f"--ramp_time={WARM_UP * 1e3:.0f}ms",
        "--output-format=json",
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(huge)}"}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    moved = sum(job[way]["io_bytes"] for way in ("read", "write"))
    wall = max(job[way]["runtime"] for way in ("read", "write")) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall
    return Figure(moved / wall, moved / block / wall, cpu / (moved / 1e9))


def ordinary(nbytes: int) -> np.ndarray:
    """Memory on 4 KiB pages, touched in random order, as a process that has run for a while gets
    it."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(area, np.uint8)
    memory[np.random.default_rng(0).permutation(nbytes // 4096) * 4096] = 1
    return memory


class Ours:
    """An engine, a file and memory for `window` requests of `block` bytes that are always under
    way."""

    def __init__(
        self,
        kind: str,
        path: Path,
        memory: np.ndarray,
        block: int,
        *,
        register: bool = False,
        **options: int,
    ) -> None:
        self.engine = native.aio().Engine(kind, **options)
        self.file = native.aio().File(str(path))
        self.address, self.block, self.window = memory.ctypes.data, block, memory.size // block
        self.places = self.file.size() // block
        self.turn = 0
        if register:
            self.engine.register_memory(memory.ctypes.data, memory.size)

    def read(self, slot: int, place: int | None = None) -> Any:
        self.turn += 1
        place = self.turn % self.places if place is None else place
        return self.engine.read(
            self.file, place * self.block, self.address + slot * self.block, self.block
        )

    def write(self, slot: int) -> Any:
        self.turn += 1
        return self.engine.write(
            self.file,
            self.turn % self.places * self.block,
            self.address + slot * self.block,
            self.block,
        )

    def run(self, seconds: float, move: Move, requests: int = 1) -> Figure:
        """`move(slot)` starts `requests` requests with one ticket."""
        tickets = deque((slot, move(slot)) for slot in range(self.window))
        begin = time.perf_counter()
        start = cpu = count = 0.0
        while True:
            slot, ticket = tickets.popleft()
            ticket.wait()
            now = time.perf_counter()
            count += requests
            if not start and now - begin >= WARM_UP:
                start, cpu, count = now, time.process_time(), 0.0
            if start and now - start >= seconds:
                break
            tickets.append((slot, move(slot)))
        cpu = time.process_time() - cpu
        moved = count * self.block
        self.engine.close()
        self.file.close()
        return Figure(moved / (now - start), count / (now - start), cpu / (moved / 1e9))


def engine(
    kind: str, path: Path, memory: np.ndarray, seconds: float, way: str, **options: Any
) -> Figure:
    """Sequential or mixed, in requests of 32 MiB (mixed: 8 MiB), 128 MiB under way."""
    ours = Ours(kind, path, memory, (8 if way == "mixed" else 32) * MIB, **options)
    dice = random.Random(0)
    mixed: Move = lambda slot: (ours.read if dice.random() < 0.7 else ours.write)(slot)  # noqa: E731
    return ours.run(seconds, {"read": ours.read, "write": ours.write, "mixed": mixed}[way])


def small(
    path: Path, memory: np.ndarray, seconds: float, block: int, depth: int, **options: Any
) -> Figure:
    """Random reads of `block` bytes, `depth` on the device, in batches, four under way."""
    many = min(16 * depth, memory.size // (4 * block))
    ours = Ours("io_uring", path, memory[: 4 * many * block], block, depth=depth, **options)
    dice = np.random.default_rng(0)
    sizes = np.full(many, block, np.uint64)
    targets = [
        np.uint64(ours.address)
        + np.arange(i * many, (i + 1) * many, dtype=np.uint64) * np.uint64(block)
        for i in range(4)
    ]
    ours.window = 4

    def move(slot: int) -> Any:
        offsets = dice.integers(0, ours.places, many, dtype=np.uint64) * np.uint64(block)
        return ours.engine.read_batch(ours.file, offsets, targets[slot], sizes)

    return ours.run(seconds, move, many)


def demand(path: Path, memory: np.ndarray, seconds: float, background: bool) -> dict[str, float]:
    """Milliseconds that a read of 4 MiB takes while writes of 8 MiB are always under way: p50 and
    p99."""
    aio, size = native.aio(), 8 * MIB
    io, file = aio.Engine("io_uring"), aio.File(str(path))
    address, slots, turn = memory.ctypes.data, memory.size // size - 1, 0
    writes: deque[Any] = deque()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        while len(writes) < slots:
            turn += 1
            place = turn * size % (file.size() - size)
            writes.append(
                io.write(
                    file, place, address + (turn % slots + 1) * size, size, background=background
                )
            )
        begin = time.perf_counter()
        io.read(file, turn * 4 * MIB % (file.size() // 2), address, 4 * MIB).wait()
        times.append((time.perf_counter() - begin) * 1e3)
        while writes and writes[0].done():
            writes.popleft()
    io.close()
    file.close()
    return {
        "p50_ms": statistics.median(times),
        "p99_ms": float(np.percentile(times, 99)),
        "reads": len(times),
    }


class Questions:
    """Each gives the contenders by name: one call measures once. fio's names begin with fio."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.host = HostMemory(128 * MIB)
        self.huge = self.host.tensor.numpy()
        self.plain = ordinary(129 * MIB)

    def fio(self, pattern: str, block: int, depth: int, huge: bool = True) -> Callable[[], Figure]:
        return lambda: fio(self.path, self.seconds, pattern, block, depth, huge=huge)

    def ours(self, kind: str, memory: np.ndarray, way: str, **options: Any) -> Callable[[], Figure]:
        return lambda: engine(kind, self.path, memory, self.seconds, way, **options)

    def large(self, way: str, pattern: str) -> Contenders:
        return {
            "fio 4M x 8": self.fio(pattern, 4 * MIB, 8),
            "fio 1M x 32": self.fio(pattern, MIB, 32),
            "io_uring": self.ours("io_uring", self.huge, way),
            "io_uring, registered": self.ours("io_uring", self.huge, way, register=True),
            "posix": self.ours("posix", self.huge, way),
        }

    def read(self) -> Contenders:
        return self.large("read", "read")

    def write(self) -> Contenders:
        return self.large("write", "write")

    def mixed(self) -> Contenders:
        return self.large("mixed", "rw")

    def ordinary(self, way: str) -> Contenders:
        aligned, unaligned = self.plain[: 128 * MIB], self.plain[64 : 128 * MIB + 64]
        return {
            "fio 4M x 8, huge pages": self.fio(way, 4 * MIB, 8),
            "fio 1M x 32, ordinary pages": self.fio(way, MIB, 32, huge=False),
            "io_uring, ordinary": self.ours("io_uring", aligned, way),
            "io_uring, ordinary and unaligned": self.ours("io_uring", unaligned, way),
            "posix, ordinary": self.ours("posix", aligned, way),
        }

    def read_ordinary(self) -> Contenders:
        return self.ordinary("read")

    def write_ordinary(self) -> Contenders:
        return self.ordinary("write")

    def random(self, block: int) -> Contenders:
        contenders: Contenders = {}
        for depth in (64, 128):
            contenders[f"fio x {depth}"] = self.fio("randread", block, depth)
            contenders[f"io_uring x {depth}"] = partial(
                small, self.path, self.huge, self.seconds, block, depth
            )
        return contenders

    def random_4k(self) -> Contenders:
        return self.random(4 << 10)

    def random_64k(self) -> Contenders:
        return self.random(64 << 10)

    def demand(self) -> Contenders:
        """Latency, not speed."""
        return {
            f"reads beside {kind} writes": partial(
                demand, self.path, self.huge, self.seconds, kind == "background"
            )
            for kind in ("foreground", "background")
        }


def measure(contenders: Contenders, rounds: int) -> list[dict[str, Any]]:
    names = list(contenders)
    results = []
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        figures = {name: contenders[name]() for name in order}
        results.append({name: figures[name] for name in names})
    return results


def speeds(question: str, rounds: list[dict[str, Figure]]) -> list[Row]:
    """By contender; the ratio is to fio in the same round, at its setting with the best median."""
    settings = [name for name in rounds[0] if name.startswith("fio")]
    setting = max(settings, key=lambda name: statistics.median(one[name].rate for one in rounds))
    best = [one[setting].rate for one in rounds]
    rows = []
    for name in rounds[0]:
        figures = [one[name] for one in rounds]
        rows.append(
            Row(
                name=f"{question}, {name}",
                unit="GB/s",
                rounds=len(rounds),
                value=Spread.of([figure.rate / 1e9 for figure in figures]),
                ratio=Spread.of(
                    [figure.rate / fios for figure, fios in zip(figures, best, strict=True)]
                ),
                others={
                    "requests_per_second": Spread.of([figure.requests for figure in figures]),
                    "cpu_seconds_per_gb": Spread.of([figure.cpu for figure in figures]),
                },
            )
        )
    return rows


def latencies(question: str, rounds: list[dict[str, dict[str, float]]]) -> list[Row]:
    """By contender."""
    return [
        Row(
            name=f"{question}, {name}",
            unit="ms",
            rounds=len(rounds),
            value=Spread.of([one[name]["p50_ms"] for one in rounds]),
            others={
                "p99_ms": Spread.of([one[name]["p99_ms"] for one in rounds]),
                "reads_count": Spread.of([one[name]["reads"] for one in rounds]),
            },
        )
        for name in rounds[0]
    ]


def main() -> None:
    known = [
        "read",
        "write",
        "mixed",
        "read_ordinary",
        "write_ordinary",
        "random_4k",
        "random_64k",
        "demand",
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size", type=int, default=2 << 30, help="bytes of the file")
    parser.add_argument("--questions", default=",".join(known))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each measurement, after the warm-up"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = options.questions.split(",")
    if unknown := set(asked) - set(known):
        parser.error(
            f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="aio-") as folder:
        path = Path(folder, "file")
        subprocess.run(
            [
                "fio",
                "--name=fill",
                f"--filename={path}",
                "--direct=1",
                "--rw=write",
                "--bs=4M",
                "--ioengine=io_uring",
                "--iodepth=8",
                f"--size={options.size}",
            ],
            check=True,
            capture_output=True,
        )
        questions = Questions(path, options.seconds)
        for name in asked:
            rounds = measure(getattr(questions, name)(), options.rounds)
            rows += latencies(name, rounds) if name == "demand" else speeds(name, rounds)
        questions.host.close()
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=vars(options))
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
