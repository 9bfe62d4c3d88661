#!/usr/bin/env python3
"""What `run_all` should find on machines that are likely to be had, by `infinity.plan`: the table
of README.md, so that the first hour compares.

  benchmarks/gpu/expected.py [--json FILE]

The rates of the machines are round figures for such parts, not measured; `infinity plan --machine`
takes a file with those that `run_all` found.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import sizes

from infinity.plan.forecast import Forecast, plan
from infinity.plan.hardware import DriveSpec, Hardware
from infinity.plan.memory import Training
from infinity.plan.model import find_source, of_source

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
DRIVE_BYTES = 60 * GIB
DRIVES = (1e9, 3e9, 7e9)


class Gpu(NamedTuple):
    """Bytes, and rates per second that programs reach: operations in a block of a transformer,
    bytes of its memory, and of its link."""

    total: int
    flops: float
    bandwidth: float
    link: float


GPUS = {"H100": Gpu(79 * GIB, 430e12, 2.8e12, 50e9), "H200": Gpu(139 * GIB, 440e12, 4e12, 50e9)}
HOST = {"host_memory": 124 * GIB, "host_total": 128 * GIB, "memory_bandwidth": 150e9}
"""16 cores, and what CPU Adam reaches of the memory's bandwidth with them."""


class Case(NamedTuple):
    """A part of `run_all`: its model, how states are placed, windows, their length, and how many
    forward passes a step has."""

    name: str
    model: str
    placed: Any
    batch: int
    length: int
    accumulate: int


CASES = (
    Case("peers-8b, host memory", "llama-3-8b", sizes.in_host_memory, 4, 2048, 8),
    Case("peers-8b, NVMe", "llama-3-8b", sizes.states_on_drive, 4, 2048, 8),
    Case("peers-3b, NVMe", "llama-3.2-3b", sizes.states_on_drive, 4, 2048, 8),
    Case("step-13b", "llama-2-13b", lambda m, g: sizes.over_three_tiers(m, g, "fp32"), 8, 2048, 1),
    Case("step-largest", "llama-33b", sizes.largest, 4, 1024, 1),
)


def forecast(case: Case, gpu: Gpu, drive: float) -> tuple[sizes.Plan, Forecast]:
    """Where states lie, and how long a step is."""
    path = HERE / "configs" / f"{case.model}.json"
    shape = json.loads(path.read_text())
    working = sizes.working(shape, case.batch * case.length)
    placed = case.placed(shape, sizes.left(gpu.total, HOST["host_memory"], DRIVE_BYTES, working))
    hardware = Hardware(
        "expected",
        flops=gpu.flops,
        gpu_memory=gpu.total - GIB,
        gpu_bandwidth=gpu.bandwidth,
        link=gpu.link,
        drives=(DriveSpec(drive, drive, DRIVE_BYTES),),
        **HOST,
    )
    config = placed.config("/mnt/nvme0")
    source = find_source(str(path), "bf16")
    source.config.num_hidden_layers = placed.model["num_hidden_layers"]
    training = Training(case.length, case.batch, case.accumulate, True)
    return placed, plan(of_source(source, config), hardware, training, config)


def row(name: str, case: Case, gpu: Gpu, drive: float) -> dict[str, Any]:
    """One line of the table."""
    placed, found = forecast(case, gpu, drive)
    facts: dict[str, Any] = {
        "machine": name,
        "drive_bytes_per_second": drive,
        "part": case.name,
        "parameters_count": placed.parameters,
        "moments": placed.options["moment-precision"],
    }
    if found.pace is None:
        return facts | {"does_not_fit": list(found.problems)}
    per_second = found.pace.tokens / found.pace.seconds
    return facts | {
        "seconds": found.pace.seconds,
        "tokens_per_second": per_second,
        "model_flops_per_second": 6 * placed.parameters * per_second,
        "busy_seconds": found.pace.busy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        row(name, case, gpu, drive)
        for name, gpu in GPUS.items()
        for case in CASES
        for drive in (DRIVES if "host memory" not in case.name else DRIVES[:1])
    ]
    print("| machine | drive, GB/s | part | moments | step, s | tokens/s | TFLOP/s | busiest, s |")
    print("|---|---|---|---|---|---|---|---|")
    for each in rows:
        head = f"| {each['machine']} | {each['drive_bytes_per_second'] / 1e9:.0f} | {each['part']} "
        head += f"({each['parameters_count'] / 1e9:.1f}B) | {each['moments']} "
        if "seconds" not in each:
            print(f"{head}| does not fit: {'; '.join(each['does_not_fit'])} | | | |")
            continue
        busy = sorted(each["busy_seconds"].items(), key=lambda lane: -lane[1])[:3]
        lanes = ", ".join(f"{lane} {seconds:.1f}" for lane, seconds in busy)
        print(
            f"{head}| {each['seconds']:.1f} | {each['tokens_per_second']:,.0f} "
            f"| {each['model_flops_per_second'] / 1e12:.0f} | {lanes} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
