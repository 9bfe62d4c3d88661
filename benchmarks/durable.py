#!/usr/bin/env python3
"""What it costs that every step, or every N-th one, is committed, where states are on NVMe and
where host memory caches them.

A Llama preset in bf16, its states on NVMe. Engines take turns in every round: one with `durability`
"off", and one for each of --durabilities. A row has one of these. The ratio is that of its times to
those of "off", taken within each round. A round has as many steps for all as make a whole number of
commits for each. Bytes are those of these steps, on average. `crc32c_ratio` is the rate at which
one core takes checksums, over that at which it copies the same memory.
"""

from __future__ import annotations

import argparse
import random
import statistics
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

    def __init__(self, options: argparse.Namespace, folder: Path, durability: Any, cache: Any):
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

    def bytes_of_steps(self, count: int) -> tuple[float, float]:
        """Bytes per parameter that were read, and written, in each of `count` more steps, on
        average."""
        reports = []
        for _ in range(count):
            self.steps(1)
            reports.append(self.engine.report())
        return (
            statistics.mean(report.read_per_parameter for report in reports),
            statistics.mean(report.written_per_parameter for report in reports),
        )

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


def in_words(durability: Any) -> str:
    """Which steps are committed."""
    if durability == "step":
        return "every step"
    return f"every {durability}{'nd' if durability == 2 else 'th'} step"


def measure(options: argparse.Namespace, folder: Path, cache: Any, name: str) -> list[Row]:
    """A row for each durability."""
    runs = {
        durability: Run(options, folder / str(durability), durability, cache)
        for durability in ("off", *options.durabilities)
    }
    times: dict[Any, list[float]] = {each: [] for each in runs}
    checks = []
    for run in runs.values():
        run.steps(options.warm_up)
    for number in range(options.rounds):
        order = list(runs)
        random.Random(number).shuffle(order)
        for each in order:
            times[each].append(runs[each].steps(options.steps))
        checks.append(checksum_ratio())
    moved = {each: run.bytes_of_steps(options.steps) for each, run in runs.items()}
    cached = {each: run.engine.report().cached for each, run in runs.items()}
    for run in runs.values():
        run.close()
    rows = []
    for each in options.durabilities:
        ratios = [mine / off for mine, off in zip(times[each], times["off"], strict=True)]
        facts: dict[str, Any] = {
            f"{prefix}_{way}_bytes_per_parameter": value
            for prefix, values in (("off", moved["off"]), ("step", moved[each]))
            for way, value in zip(("read", "written"), values, strict=True)
        }
        rows.append(
            Row(
                name=f"{name}, {in_words(each)}",
                unit="s",
                rounds=options.rounds,
                value=Spread.of(times[each]),
                ratio=Spread.of(ratios),
                others={"crc32c_ratio": Spread.of(checks)},
                facts=facts | {"cached_bytes": cached[each]},
            )
        )
    return rows


def durability_of(text: str) -> str | int:
    """ "step", or a number of steps above 1."""
    return text if text == "step" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--gpu-memory", type=parse_bytes, default=256 << 20)
    parser.add_argument("--cpu-memory", type=parse_bytes, default=4 << 30)
    parser.add_argument("--caches", nargs="+", default=["0", "700MiB", "auto"])
    parser.add_argument("--durabilities", type=durability_of, nargs="+", default=["step", 2, 4])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for each in options.durabilities:
        if each != "step" and options.steps % each:
            parser.error(f"--steps {options.steps} is no multiple of {each}, of --durabilities")
    rows = list[Row]()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number, cache in enumerate(options.caches):
            place = Path(folder) / str(number)
            place.mkdir()
            name = {"0": "nothing cached", "auto": "all cached"}.get(cache, f"{cache} cached")
            rows += measure(options, place, cache, name)
    settings = {key: str(value) for key, value in vars(options).items()}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
