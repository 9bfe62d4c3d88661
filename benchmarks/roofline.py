#!/usr/bin/env python3
"""A training step beside its roofline: compute, drives, link and update, each measured alone in the
same run.

The model trains on synthetic tokens, with its states on NVMe or in host memory. The longest of the
times that the devices need alone is the limit. `infinity/bench/step` measures; `infinity bench
step` has all options of the engine.

    benchmarks/roofline.py [--model llama-100m] [--nvme DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from infinity.bench.step.measure import measure
from infinity.bench.step.train import Workload, find_source
from infinity.bench.summary import Row, Spread, Summary
from infinity.config import Config
from infinity.quantities import parse_bytes

QUESTION = "How near does a training step come to its roofline?"
LIMIT = "the longest time that one device under the step needs alone"
SEED = 0


def row_of(result: dict[str, Any]) -> Row:
    """The step, with what each device needs for it."""
    facts = {
        f"{device}_alone_seconds": seconds
        for device, seconds in result["roofline"]["seconds"].items()
    }
    facts |= {f"{name}_bytes": nbytes for name, nbytes in result["bytes_per_step"].items()}
    return Row(
        name=f"{result['model']}, bound by {result['roofline']['bound']}",
        unit="s",
        rounds=result["steps_count"],
        value=Spread(**result["step_seconds"]),
        ratio=Spread(**result["roofline"]["step_over_bound_ratio"]),
        others={"tokens_per_second": Spread(**result["tokens_per_second"])},
        facts=facts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-100m", help="a preset, a Hugging Face directory or a config.json"
    )
    parser.add_argument(
        "--nvme", type=Path, action="append", help="where the states are (default: in host memory)"
    )
    parser.add_argument("--gpu-memory", type=parse_bytes, default=1 << 30)
    parser.add_argument("--cpu-memory", type=parse_bytes, default=2 << 30)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--discard", type=int, default=2, help="steps before them that are not timed"
    )
    parser.add_argument(
        "--probe-bytes", type=parse_bytes, default=256 << 20, help="what a link is measured with"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tier = "nvme" if options.nvme else "cpu"
    config = Config(
        nvme=tuple(options.nvme or ()),
        gpu_memory=options.gpu_memory,
        cpu_memory=options.cpu_memory,
        device=options.device,
        precision="bf16",
        parameters=tier,
        optimizer=tier,
        gradients="cpu",
    )
    source = find_source(options.model, "bf16")
    source.check_length(options.length)
    work = Workload(
        source,
        config,
        options.length,
        options.batch,
        options.accumulate,
        vertical=False,
        recomputes=True,
        steps=options.steps,
        discard=options.discard,
        most_seconds=1e9,
        lr=1e-4,
        seed=SEED,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    result = measure(work, options.probe_bytes, say)
    settings = {
        key: value for key, value in vars(options).items() if key not in ("nvme", "device")
    } | {"states": tier}
    summary = Summary.of(
        __file__,
        QUESTION,
        LIMIT,
        [row_of(result)],
        seeds=[SEED],
        settings=settings,
        device=result["device"],
    )
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
