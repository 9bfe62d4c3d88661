#!/usr/bin/env python3
"""What the state formats do to training: a language model trained on real text from the same start
with each of them.

A Llama with bf16 parameters learns the sources of Python's standard library, byte by byte, from
random initialisation: AdamW with beta2 = 0.999, the hard case for second moments of few bits,
warm-up, cosine and clipping. Seeds differ in initial weights and order of the windows; held-out
windows are the same for all. A split master must give the same bits as an fp32 master, in every
loss and in the final weights and masters; moments of fewer bits must end at a validation loss that
differs from that of fp32 by less than seeds differ among themselves. "nudged" is fp32 with a
learning rate larger by a millionth: it shows how far any change of rounding, however small, moves
the result of one seed.

Every run is a process of its own. With `--runs` each goes to that file when it ends, and one that
is found there is not repeated. States lie in host memory here: placement never changes a number.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.models.data import WindowRequest, load_windows
from infinity.models.source import PRESETS, ModelSource
from infinity.models.tokenizer import BYTE_VOCABULARY, ByteTokenizer
from infinity.placement.spec import Kind

QUESTION = "Does a state format of fewer bytes change what training ends at?"
LIMIT = "the validation loss of fp32 states with the same seed"
FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "nudged": "fp32",
    "split": "fp32",
    "bf16": "bf16",
    "int8": "int8",
}
"""How each run keeps its moments."""
WHOLE_MASTERS = ("fp32", "nudged")
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
}
AT_REST = (Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
Result = dict[str, Any]


def build(seed: int) -> torch.nn.Module:
    """A Llama of 10.9 million parameters, 98% of them in the blocks."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    values = PRESETS["llama-tiny"] | SHAPE | {"vocab_size": BYTE_VOCABULARY}
    return ModelSource(
        "formats", AutoConfig.for_model(values.pop("model_type"), **values), None
    ).build()


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """The share of the highest learning rate for `step` (from 0): a linear warm-up, then a cosine
    to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def train(name: str, seed: int, options: argparse.Namespace) -> Result:
    """Train once; what comes back is plain JSON."""
    torch.set_num_threads(options.threads)
    windows = load_windows(WindowRequest(None, options.length, 0), ByteTokenizer())
    order = dataclasses.replace(windows, seed=seed).order()
    memory = {
        "gpu_memory": "2GiB",
        "cpu_memory": "2GiB",
        "parameters": "gpu",
        "gradients": "gpu",
        "optimizer": "cpu",
    }
    tuning = infinity.Tuning(threads=options.threads, split_master=name not in WHOLE_MASTERS)
    config = infinity.Config(
        **memory, precision="bf16", moment_precision=FORMATS[name], tuning=tuning
    )
    model = infinity.wrap(build(seed), config)
    with infinity.engine(model) as engine:
        lr = options.lr * (1 + 1e-6 * (name == "nudged"))
        optimizer = infinity.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=1.0
        )
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, options.steps, options.steps // 10)
        )

        def loss_of(rows: Any) -> torch.Tensor:
            ids = torch.from_numpy(windows.batch(rows).ids)
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        losses = []
        for _ in range(options.steps):
            loss = loss_of([next(order) for _ in range(options.batch)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            losses.append(loss.item())
        with torch.no_grad():
            sums = [
                (loss_of(rows).item() * len(rows), len(rows))
                for rows in windows.validation_rows(8, options.held_out // 8)
            ]
        digest = hashlib.sha256(np.array(losses).tobytes())
        for _, weights in engine.weights():
            digest.update(weights.contiguous().view(torch.uint8).numpy().tobytes())
        for state in optimizer.state_dict()["state"].values():
            digest.update(state["master"].numpy().tobytes())
        blocks = [
            unit.blocks[kind].nbytes
            for unit in engine.units
            for kind in AT_REST
            if kind in unit.blocks
        ]
        parameters = engine.report().parameters
    return {
        "format": name,
        "seed": seed,
        "parameters": parameters,
        "bytes_per_parameter": sum(blocks) / parameters,
        "validation_loss": sum(total for total, _ in sums) / sum(count for _, count in sums),
        "sha256": digest.hexdigest(),
    }


def rows_of(results: list[Result]) -> list[Row]:
    """What the runs ended at, as spreads over seeds, and their differences to fp32 with the same
    seed."""
    by = {(result["format"], result["seed"]): result for result in results}
    rows = []
    for name in FORMATS:
        seeds = [seed for form, seed in by if form == name and ("fp32", seed) in by]
        if not seeds:
            continue
        mine = [by[name, seed] for seed in seeds]
        base = [by["fp32", seed] for seed in seeds]
        ended, exact = ([run["validation_loss"] for run in runs] for runs in (mine, base))
        rows.append(
            Row(
                name=name,
                unit="nats",
                value=Spread.of(ended),
                ratio=Spread.of([ours / theirs for ours, theirs in zip(ended, exact, strict=True)]),
                others={
                    "minus_fp32_nats": Spread.of(
                        [ours - theirs for ours, theirs in zip(ended, exact, strict=True)]
                    )
                },
                facts={
                    "bytes_per_parameter": mine[0]["bytes_per_parameter"],
                    "mean_nats": statistics.fmean(ended),
                    "same_bits_as_fp32_count": sum(
                        a["sha256"] == b["sha256"] for a, b in zip(mine, base, strict=True)
                    ),
                },
            )
        )
    return rows


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per window")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--held-out", type=int, default=512, help="windows of the validation")
    parser.add_argument("--threads", type=int, default=1, help="of a run")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--runs", type=Path, help="a file that keeps each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--one", nargs=2, metavar=("FORMAT", "SEED"), help="one run in this process; prints JSON"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one[0], int(options.one[1]), options)))
        return
    settings = {
        key: getattr(options, key)
        for key in ("steps", "batch", "length", "lr", "held_out", "threads")
    }
    found = (
        json.loads(options.runs.read_text())
        if options.runs and options.runs.exists()
        else {"settings": settings, "runs": []}
    )
    if found["settings"] != settings:
        parser.error(
            f"{options.runs} has runs with other settings ({found['settings']}); name "
            "another file with --runs"
        )
    runs: list[Result] = found["runs"]
    known = {(run["format"], run["seed"]) for run in runs}
    wanted = [
        (name, seed)
        for seed in options.seeds
        for name in options.formats
        if (name, seed) not in known
    ]
    arguments = [
        part
        for key, value in settings.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]

    def child(run: tuple[str, int]) -> Result:
        command = [sys.executable, __file__, "--one", run[0], str(run[1]), *arguments]
        result: Result = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        )
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(child, wanted):
            runs.append(result)
            print(
                f"{result['format']}, seed {result['seed']}: {result['validation_loss']:.4f} nats",
                file=sys.stderr,
            )
            if options.runs:
                options.runs.write_text(json.dumps(found, indent=1) + "\n")
    parameters = {"parameters": runs[0]["parameters"]} if runs else {}
    summary = Summary.of(
        __file__,
        QUESTION,
        LIMIT,
        rows_of(runs),
        seeds=options.seeds,
        settings=settings | parameters,
    )
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
