#!/usr/bin/env python3
"""How near `infinity plan` comes: the predicted step over the measured one.

Each round goes through all settings. For each it measures this machine as `infinity plan` does,
plans, trains for `--steps` steps with the same configuration, and measures and plans again: a
shared machine is not as fast now as it was a moment ago. The prediction is the mean of both plans.
It knows nothing of the training run. No step clips; with `update="exact"` steps run as if each one
did.

    python benchmarks/plan.py --nvme DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

import infinity
from infinity.bench.step.train import Workload, train
from infinity.bench.summary import Row, Spread, Summary
from infinity.models.source import ModelSource
from infinity.plan.forecast import plan
from infinity.plan.measure import measured
from infinity.plan.memory import Training
from infinity.plan.model import of_source
from infinity.plan.pace import Pace

QUESTION = "How near does the predicted step come to the measured one?"
LIMIT = "the measured step, in the same round"


class Size(NamedTuple):
    """A Llama."""

    layers: int
    hidden: int
    inside: int
    length: int
    batch: int


SMALL, LARGE = Size(8, 512, 1408, 256, 2), Size(12, 768, 2048, 256, 2)


class Setting(NamedTuple):
    """A model and where its states live."""

    name: str
    size: Size
    precision: str
    fields: dict[str, Any]
    tuning: dict[str, Any]


MEMORY = {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"}
HOST = {"parameters": "cpu", "optimizer": "cpu"}
UNCACHED = {"cache": 0}
SETTINGS = (
    Setting("small, fp32, in memory", SMALL, "fp32", MEMORY, {}),
    Setting("small, fp32, host memory", SMALL, "fp32", HOST, {}),
    Setting("small, fp32, NVMe", SMALL, "fp32", {}, UNCACHED),
    Setting("large, bf16, in memory", LARGE, "bf16", MEMORY, {}),
    Setting("large, bf16, host memory", LARGE, "bf16", HOST, {}),
    Setting("large, bf16, NVMe", LARGE, "bf16", {}, UNCACHED),
    Setting("large, bf16, NVMe, exact updates", LARGE, "bf16", {}, UNCACHED | {"update": "exact"}),
    Setting("large, bf16, half of NVMe cached", LARGE, "bf16", {}, {"cache": "500MiB"}),
    Setting("large, bf16, activations on NVMe", LARGE, "bf16", {"activations": "nvme"}, UNCACHED),
)


def source_of(setting: Setting) -> ModelSource:
    """Its model, with new weights."""
    size = setting.size
    config = AutoConfig.for_model(
        "llama",
        hidden_size=size.hidden,
        intermediate_size=size.inside,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        vocab_size=16_000,
        max_position_embeddings=size.length,
    )
    config.dtype = {"bf16": "bfloat16", "fp32": "float32"}[setting.precision]
    return ModelSource(setting.name, config, None)


def config_of(setting: Setting, folder: Path) -> infinity.Config:
    """In memory there is room for everything, and on NVMe for a part of the parameters."""
    on_nvme = setting.fields.get("parameters", "nvme") == "nvme"
    budgets = {
        "gpu_memory": "128MiB" if on_nvme else "6GiB",
        "cpu_memory": "2GiB" if on_nvme else "4GiB",
    }
    return infinity.Config(
        nvme=folder,
        precision=setting.precision,  # type: ignore[arg-type]
        tuning=infinity.Tuning(**setting.tuning),
        **{**budgets, **setting.fields},
    )


class Outcome(NamedTuple):
    """Of one setting in one round: the plans before and after, and the seconds that were
    measured."""

    plans: tuple[Pace, Pace]
    parameters: int
    seconds: float

    @property
    def predicted(self) -> float:
        """Seconds."""
        return statistics.fmean(pace.seconds for pace in self.plans)

    def busy(self, lane: str) -> float:
        """Seconds of one lane, as predicted."""
        return statistics.fmean(pace.busy.get(lane, 0.0) for pace in self.plans)


def compare(setting: Setting, folder: Path, steps: int, say: Callable[[str], None]) -> Outcome:
    """Plan, then train."""
    size, source, config = setting.size, source_of(setting), config_of(setting, folder)
    training = Training(size.length, size.batch, 1, recomputes=False)
    model = of_source(source, config)

    def planned() -> Pace:
        hardware = measured(model, source, training, config, config.nvme, say)
        forecast = plan(model, hardware, training, config)
        if forecast.pace is None:
            raise SystemExit(f"{setting.name} does not fit: {forecast.problems}")
        return forecast.pace

    before = planned()
    work = Workload(
        source, config, size.length, size.batch, 1, False, False, steps, 3, 1e9, 1e-4, 0, None
    )
    trained = train(work, say)
    return Outcome((before, planned()), model.parameters, statistics.median(trained.seconds))


def row_of(setting: Setting, outcomes: list[Outcome]) -> Row:
    """All rounds of one setting."""
    last = outcomes[-1].plans[-1]
    busy = {lane: Spread.of([each.busy(lane) for each in outcomes]) for lane in last.busy}
    return Row(
        name=setting.name,
        unit="s",
        rounds=len(outcomes),
        value=Spread.of([outcome.seconds for outcome in outcomes]),
        ratio=Spread.of([outcome.predicted / outcome.seconds for outcome in outcomes]),
        others={
            "predicted_seconds": Spread.of([outcome.predicted for outcome in outcomes]),
            **{f"{lane.replace(' ', '_')}_seconds": each for lane, each in busy.items()},
        },
        facts={
            "parameters_count": outcomes[0].parameters,
            "bottleneck": last.bottleneck,
            "updates": last.mode,
        },
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", type=Path, default=None, help="directory for the states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="that are timed, after three")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    settings = [setting for setting in SETTINGS if options.only in setting.name]
    found: dict[str, list[Outcome]] = {setting.name: [] for setting in settings}
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        for _ in range(options.rounds):
            for setting in settings:
                outcome = compare(setting, Path(folder), options.steps, lambda text: None)
                found[setting.name].append(outcome)
                lanes = (f"{lane} {outcome.busy(lane):.2f}" for lane in outcome.plans[0].busy)
                print(
                    f"{setting.name}: predicted {outcome.predicted:.3f} s, measured "
                    f"{outcome.seconds:.3f} s, {outcome.plans[0].mode}; {', '.join(lanes)}",
                    flush=True,
                )
    rows = [row_of(setting, found[setting.name]) for setting in settings]
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=vars(options))
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
