#!/usr/bin/env python3
"""What it costs that every step is committed, where states are on NVMe and where host memory caches
them.

A Llama preset in bf16, its states on NVMe. Two engines take turns in every round: `durability`
"off" and "step". The ratio is that of their times, taken within each round. `crc32c_ratio` is the
rate at which one core takes checksums, over that at which it copies the same memory.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity import native
from infinity.bench.summary import Row, Spread, Summary
from infinity.models.source import find_model
from infinity.quantities import parse_bytes

QUESTION = "What does it cost that every step outlives the process?"
LIMIT = 'a step with durability="off", in the same round'
SAMPLE_BYTES = 256 << 20


class Run:
    """A wrapped model on its way, with its own files."""

    def __init__(self, options: argparse.Namespace, folder: Path, durability: str, cache: Any):
        self._options = options
        folder.mkdir()
        config = infinity.Config(
            nvme=folder,
            gpu_memory=options.gpu_memory,
            cpu_memory=options.cpu_memory,
            durability=durability,
            tuning={"cache": cache},
        )
        self._generator = torch.Generator().manual_seed(0)
        source = find_model(options.model, "bf16")
        with infinity.init(exact=False):
            model = source.build(False)
        self.model = infinity.wrap(model, config)
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), max_grad_norm=1.0)
        self._vocabulary = source.config.vocab_size

    def steps(self, count: int) -> float:
        """Seconds of each of them, all their updates included."""
        shape = self._options.batch, self._options.sequence
        begin = time.perf_counter()
        for _ in range(count):
            ids = torch.randint(0, self._vocabulary, shape, generator=self._generator)
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.engine.drain()
        return (time.perf_counter() - begin) / count

    def close(self) -> None:
        self.engine.close()


def checksum_ratio() -> float:
    """The rate of checksums over that of copies, of memory that no cache holds."""
    source = torch.randint(0, 256, (SAMPLE_BYTES,), dtype=torch.uint8)
    target = source.clone()
    begin = time.perf_counter()
    native.aio().crc32c(source.data_ptr(), SAMPLE_BYTES)
    middle = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - middle) / (middle - begin)


def measure(options: argparse.Namespace, folder: Path, cache: Any, name: str) -> Row:
    runs = {
        durability: Run(options, folder / durability, durability, cache)
        for durability in ("off", "step")
    }
    ratios, times, checks = [], [], []
    for run in runs.values():
        run.steps(options.warm_up)
    for number in range(options.rounds):
        order = list(runs)
        random.Random(number).shuffle(order)
        seconds = {each: runs[each].steps(options.steps) for each in order}
        ratios.append(seconds["step"] / seconds["off"])
        times.append(seconds["step"])
        checks.append(checksum_ratio())
    reports = {each: run.engine.report() for each, run in runs.items()}
    for run in runs.values():
        run.close()
    facts = {
        f"{each}_{way}_bytes_per_parameter": value
        for each, report in reports.items()
        for way, value in (
            ("read", report.read_per_parameter),
            ("written", report.written_per_parameter),
        )
    }
    return Row(
        name=name,
        unit="s",
        rounds=options.rounds,
        value=Spread.of(times),
        ratio=Spread.of(ratios),
        others={"crc32c_ratio": Spread.of(checks)},
        facts=facts | {"cached_bytes": reports["step"].cached},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--gpu-memory", type=parse_bytes, default=256 << 20)
    parser.add_argument("--cpu-memory", type=parse_bytes, default=4 << 30)
    parser.add_argument("--caches", nargs="+", default=["0", "700MiB", "auto"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number, cache in enumerate(options.caches):
            place = Path(folder) / str(number)
            place.mkdir()
            name = {"0": "nothing cached", "auto": "all cached"}.get(cache, f"{cache} cached")
            rows.append(measure(options, place, cache, name))
    settings = {key: str(value) for key, value in vars(options).items()}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
