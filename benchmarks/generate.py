#!/usr/bin/env python3
"""How fast a model generates whose weights do not fit on the compute device.

The model has the shape of a Llama, and random weights in bf16 in sharded safetensors files. The
engine has room for the units in use and the next one, and nothing is cached: every token reads all
weights that do not stay there for a moment by chance. All prompts of a batch share a read.

The limit of weights on NVMe is what the drive gives in the same round to `infinity bench io`, with
direct I/O in the same directory, over the bytes of all weights. The limit of weights in host memory
is plain transformers in the same round. `over_longer_ratio` is beside the longer of the two:
reading may hide behind compute, or compute behind reading. Tokens are compared with those of plain
transformers, and have to be equal. The first token of each batch, whose forward has the whole
prompt, does not count. GB = 1e9 bytes.

    benchmarks/generate.py --directory DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import infinity
from infinity.bench.io import patterns
from infinity.bench.io.rig import PIECE_BYTES, Drive, Rig
from infinity.bench.io.search import Setting
from infinity.bench.io.workspace import workspace
from infinity.bench.summary import Row, Spread, Summary
from infinity.device import HostMemory
from infinity.quantities import parse_bytes

QUESTION = "How near does generation come to the drive, and to plain transformers?"
LIMIT = (
    "bytes of all weights over the rate of the drive in the same round; for weights in host memory "
    "plain transformers in the same round"
)
WAYS: dict[str, dict[str, Any]] = {
    "nvme": {"parameters": "nvme", "cpu_memory": "64MiB"},
    "host memory": {"parameters": "cpu", "cpu_memory": "2GiB"},
}


class Run(NamedTuple):
    """One batch that was continued: its tokens, seconds from the first new token to the last one,
    and bytes that were read meanwhile."""

    tokens: torch.Tensor
    seconds: float
    read_bytes: int


class Clock:
    """A stopping criterion that never stops: when each token came, and what had been read."""

    def __init__(self, engine: infinity.Engine | None) -> None:
        self._engine = engine
        self.times: list[float] = []
        self.read_bytes: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        counters = {} if self._engine is None else self._engine.recorder.counters()
        self.times.append(time.perf_counter())
        self.read_bytes.append(counters.get("nvme bytes read", 0))
        return torch.zeros(len(ids), dtype=torch.bool)


def save_model(options: argparse.Namespace, directory: Path) -> Any:
    """Write a Llama with random weights to `directory`; returns what is loaded from there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 256,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory, max_shard_size="200MB")
    return LlamaForCausalLM.from_pretrained(directory).eval()


@contextmanager
def wrapped(way: str, options: argparse.Namespace, directory: Path) -> Iterator[Any]:
    """The model of `directory`, with its weights where `way` says."""
    from transformers import AutoModelForCausalLM

    with infinity.init():
        model = AutoModelForCausalLM.from_pretrained(directory)
    tuning = {"cache": 0, "gpu_cache": 0, "device": "cpu"}
    config = infinity.Config(
        inference=True, gpu_memory=options.gpu_memory, tuning=tuning, **WAYS[way]
    )
    infinity.wrap(model.eval(), config)
    with infinity.engine(model):
        yield model


def generate(
    model: Any, rows: int, options: argparse.Namespace, engine: infinity.Engine | None = None
) -> Run:
    """Continue a batch of random prompts."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, options.vocabulary, (rows, options.prompt), generator=generator)
    clock = Clock(engine)
    tokens = model.generate(
        ids, max_new_tokens=options.new, do_sample=False, stopping_criteria=[clock]
    )
    seconds = clock.times[-1] - clock.times[0]
    return Run(tokens, seconds, clock.read_bytes[-1] - clock.read_bytes[0])


def read_rate(drive: Drive, setting: Setting, seconds: float) -> float:
    """Bytes per second of sequential direct reads."""
    with Rig([drive], setting) as rig:
        return (
            rig.stream(
                lambda size: patterns.sequential("read", size, PIECE_BYTES), PIECE_BYTES, seconds
            ).gb_per_second
            * 1e9
        )


def prepare(drive: Drive, setting: Setting) -> None:
    """Write the file of the drive once: what was never written is read from nowhere."""
    count = -(-drive.size // PIECE_BYTES)
    with Rig([drive], setting) as rig:
        rig.stream(
            lambda size: itertools.islice(patterns.sequential("write", size, PIECE_BYTES), count),
            PIECE_BYTES,
        )
    drive.file.sync()


def measure(
    plain: Any, directory: Path, drive: Drive, setting: Setting, options: argparse.Namespace
) -> list[Row]:
    """A row for each way and batch."""
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    steps, rows = options.new - 1, []
    for way, size in itertools.product(WAYS, options.batches):
        values: list[float] = []
        ratios: list[float] = []
        others: dict[str, list[float]] = {
            "over_longer_ratio": [],
            "plain_tokens_per_second": [],
            "drive_gb_per_second": [],
        }
        with wrapped(way, options, directory) as model:
            engine = infinity.engine(model)
            generate(model, 1, options, engine)  # warms up
            for _ in range(options.rounds):
                before = read_rate(drive, setting, options.seconds)
                found = generate(model, size, options, engine)
                after = read_rate(drive, setting, options.seconds)
                expected = generate(plain, size, options)
                if not torch.equal(found.tokens, expected.tokens):
                    raise RuntimeError(f"{way}, batch {size}: other tokens than transformers")
                rate = statistics.mean((before, after))
                plain_value = size * steps / expected.seconds
                values.append(size * steps / found.seconds)
                limit = size * rate / weights if way == "nvme" else plain_value
                ratios.append(values[-1] / limit)
                others["over_longer_ratio"].append(values[-1] / min(limit, plain_value))
                others["plain_tokens_per_second"].append(plain_value)
                others["drive_gb_per_second"].append(rate / 1e9)
        rows.append(
            Row(
                name=f"{way}, batch {size}",
                unit="tokens/s",
                rounds=options.rounds,
                value=Spread.of(values),
                ratio=Spread.of(ratios),
                others={name: Spread.of(figures) for name, figures in others.items()},
                facts={
                    "weights_bytes": weights,
                    "read_bytes_per_token": found.read_bytes / steps / size,
                    "tokens_are_equal": True,
                },
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
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=18, help="18 of 1024: 337 M parameters")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--gpu-memory", default="160MiB")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=8, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=6, help="tokens that are made for each")
    parser.add_argument("--size", type=parse_bytes, default=512 << 20, help="the file of the drive")
    parser.add_argument("--engine", choices=["io_uring", "posix"], default="io_uring")
    parser.add_argument("--requests", type=int, default=16, help="requests in flight there")
    parser.add_argument("--request-bytes", type=parse_bytes, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=1.0, help="each measurement of the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default=None, help="what else ran on the machine")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    setting = Setting(options.engine, options.requests, options.request_bytes, options.requests)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        plain = save_model(options, folder / "model")
        (folder / "drive").mkdir()
        with workspace([folder / "drive"], options.size, 0) as (file,):
            memory = HostMemory(64 << 20)
            memory.tensor.view(torch.int64).random_()
            drive = Drive(file, options.size, memory)
            prepare(drive, setting)
            rows = measure(plain, folder / "model", drive, setting, options)
            memory.close()
    settings = vars(options) | {"parameters": sum(p.numel() for p in plain.parameters())}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
