#!/usr/bin/env python3
"""A training step over the longer of its compute and its I/O, as the model grows.

Llamas of 30 million to 5 billion parameters in bf16, with parameters, gradients and optimizer
states on NVMe, so that the memory it takes does not grow with the number of layers. They get random
values through `infinity.init`: no model is ever whole in memory.

Compute is the forward and the backward of plain PyTorch in the same run. It is measured of models
of one and of two blocks and extrapolated in depth, for every size: large ones do not fit. I/O is
the bytes that the engine counted in these steps, over the rates of the drive before and after them:
reading alone, writing alone, and both at once, whichever takes longest. A ratio of 1 hides all of
the shorter one, and has no overhead. Where the CPU is the compute device, the kernels of the update
take cores from compute; their time is stated apart.

A size for which the drive has no room is left out, with a line that says how much it takes.

    benchmarks/overhead.py --nvme DIR [--sizes 30M 100M 300M 1B 3B 5B] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from infinity.bench.step.measure import measure
from infinity.bench.step.train import Workload, find_source
from infinity.bench.summary import Row, Spread, Summary
from infinity.config import Config, Tuning
from infinity.quantities import format_bytes, parse_bytes

QUESTION = "What does a step cost beside its compute and its I/O as the model grows?"
LIMIT = "the longer of compute and I/O, each measured alone in the same run"
SEED = 0
VOCABULARY = 32_000
SIZES = {
    "30M": (384, 1024, 10, 6),
    "100M": (768, 2048, 11, 12),
    "300M": (1024, 2816, 21, 16),
    "1B": (2048, 5632, 18, 16),
    "3B": (2560, 6912, 37, 20),
    "5B": (3072, 8192, 43, 24),
}
"""Width, inner width, layers and heads."""
MASTER_AND_PARAMETER, GRADIENT = 4, 2
MOMENTS = {"fp32": 8, "bf16": 4, "int8": 2}
SPARE = 1 << 30
"""Bytes that are left free on the drive."""


def description(size: str) -> dict[str, Any]:
    """config.json of a Llama of that size."""
    width, inner, layers, heads = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def parameters_of(size: str) -> int:
    """How many parameters it has."""
    width, inner, layers, _ = SIZES[size]
    return VOCABULARY * width + layers * (4 * width**2 + 3 * width * inner + 2 * width) + width


def drive_bytes(size: str, options: argparse.Namespace) -> int:
    """What its states take on the drive, about."""
    states = MASTER_AND_PARAMETER + MOMENTS[options.moment_precision]
    each = states * (2 if options.copy_on_write else 1) + GRADIENT
    return round(1.05 * parameters_of(size) * each) + 2 * options.probe_bytes


def row_of(size: str, options: argparse.Namespace, folder: Path) -> tuple[Row, str]:
    """The row of one size, and the compute device."""
    path = folder / "config.json"
    path.write_text(json.dumps(description(size)))
    config = Config(
        nvme=(folder / "states",),
        gpu_memory=options.gpu_memory,
        cpu_memory=options.cpu_memory,
        precision="bf16",
        parameters="nvme",
        optimizer="nvme",
        gradients="nvme",
        moment_precision=options.moment_precision,
        tuning=Tuning(device=options.device, copy_on_write=options.copy_on_write),
    )
    (folder / "states").mkdir()
    work = Workload(
        find_source(str(path), "bf16"),
        config,
        options.length,
        options.batch,
        accumulate=1,
        vertical=False,
        recomputes=True,
        steps=options.steps,
        discard=options.discard,
        most_seconds=1e9,
        lr=1e-4,
        seed=SEED,
    )
    found = measure(work, options.probe_bytes, lambda text: print(text, file=sys.stderr))
    seconds, nbytes = found["roofline"]["seconds"], found["bytes_per_step"]
    limit = max(seconds["compute"], seconds["nvme"])
    took = found["step_seconds"]
    facts: dict[str, Any] = {
        "parameters_count": found["parameters_count"],
        "layers_count": found["layers_count"],
        "compute_seconds": seconds["compute"],
        "io_seconds": seconds["nvme"],
        "limit": "compute" if limit == seconds["compute"] else "I/O",
        "nvme_read_bytes": nbytes["nvme_read"],
        "nvme_write_bytes": nbytes["nvme_write"],
        "peak_process_bytes": found["peak_process_bytes"],
    }
    facts |= {f"{name}_seconds": seconds[name] for name in ("adam", "clipped") if name in seconds}
    facts |= {
        f"{name}_gb_per_second": rate["median"]
        for name, rate in found["link_gb_per_second"].items()
        if name.startswith("nvme")
    }
    row = Row(
        name=size,
        unit="s",
        rounds=found["steps_count"],
        value=Spread(**took),
        ratio=Spread(**{name: value / limit for name, value in took.items()}),
        facts=facts,
    )
    return row, found["device"]


def main() -> None:
    """Measure and print; the JSON is written after each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", type=Path, required=True, help="directory for the states")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--gpu-memory", type=parse_bytes, default=2 << 30)
    parser.add_argument("--cpu-memory", type=parse_bytes, default=2 << 30)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--moment-precision", choices=MOMENTS, default="fp32")
    parser.add_argument(
        "--copy-on-write",
        action="store_true",
        help="new states beside the old ones: twice the room, and updates begin in the backward",
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--discard", type=int, default=2, help="steps that are not timed")
    parser.add_argument(
        "--probe-bytes", type=parse_bytes, default=256 << 20, help="what a link is measured with"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for size in options.sizes:
        needed, free = drive_bytes(size, options) + SPARE, shutil.disk_usage(options.nvme).free
        if needed > free:
            print(
                f"{size} is left out: it takes {format_bytes(needed)}, free are "
                f"{format_bytes(free)}",
                file=sys.stderr,
            )
            continue
        with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
            row, device = row_of(size, options, Path(folder))
        rows.append(row)
        summary = Summary.of(
            __file__,
            QUESTION,
            LIMIT,
            rows,
            seeds=[SEED],
            settings=vars(options),
            device=device,
        )
        summary.write(options.json)
    if not rows:
        raise SystemExit("no size fits")
    for line in summary.table():
        print(line)


if __name__ == "__main__":
    main()
