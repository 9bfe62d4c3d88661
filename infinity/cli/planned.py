"""Answers a question to `infinity plan`: on a terminal, as JSON, as a trace, and as a drawing."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.finetune import finetune
from infinity.cli.history import History
from infinity.cli.knobs import KNOBS, as_options, options_of
from infinity.cli.options import FinetuneOptions
from infinity.cli.perfetto import write_trace
from infinity.cli.plan_table import (
    print_answer,
    print_command,
    print_gains,
    print_head,
    write_chart,
)
from infinity.config import Config
from infinity.plan.advice import advise, gains
from infinity.plan.forecast import Forecast, placed, plan, summary, timed
from infinity.plan.hardware import Hardware
from infinity.plan.memory import Training
from infinity.plan.model import PlannedModel
from infinity.plan.pace import Pace


@dataclass(frozen=True)
class SameRun:
    """A run of `infinity finetune`: its model, its `durability`, the tokens of a window that it
    takes where no option says so, the rank of its adapters, if it has any, and their base."""

    model: str
    durability: int | str
    usual_length: int
    lora: int | None
    base: str | None


@dataclass(frozen=True)
class PlanCase:
    """A question to `infinity plan`. `without` is a configuration without commits, to be taken if
    `config` does not fit. `run` is the same question to `infinity finetune`, if it takes the
    model."""

    model: PlannedModel
    hardware: Hardware
    training: Training
    config: Config
    without: Config | None
    run: SameRun | None

    def with_endurance(self, endurance: int) -> PlanCase:
        """The case with so many bytes that may be written to each drive."""
        drives = tuple(replace(each, endurance=float(endurance)) for each in self.hardware.drives)
        return replace(self, hardware=self.hardware.replace(drives=drives))

    def placed(self) -> Forecast:
        """The memory that it takes."""
        found = placed(self.model, self.hardware, self.training, self.config)
        if found.fits or self.without is None:
            return found
        other = placed(self.model, self.hardware, self.training, self.without)
        return other if other.fits else found


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that `what` is at work."""
    with Console(stderr=True).status(what):
        yield


def answer(case: PlanCase, delivery: Delivery, timeline: Path | None, chart: Path | None) -> bool:
    """Print the plan of `case` and write its files. The bytes are printed before the step is
    simulated. Returns whether it fits."""
    with working("placing the states"):
        forecast = case.placed()
    console = delivery.console
    if console is not None:
        print_head(console, forecast)
    with working("simulating a step"):
        forecast = timed(forecast)
    better, found = None, []
    with working("looking for the smallest change" if not forecast.fits else "trying changes"):
        advice = advise(forecast)
        if advice is None:
            found = gains(forecast)
        else:
            changed = advice.case
            better = plan(case.model, changed.hardware, changed.training, changed.config)
    if timeline is not None:
        _write_timeline(timeline, forecast.pace)
    if chart is not None:
        write_chart(chart, forecast)
    result = summary(forecast, None if advice is None else as_options(advice.words), found)
    command = _command(forecast if better is None else better, case.run)
    result["command"] = command

    def print_rest(console: Console) -> None:
        print_answer(console, forecast, advice, better)
        print_gains(console, forecast, found)
        print_command(console, forecast if better is None else better, command)

    delivery.deliver(result, str, print_rest)
    return forecast.fits


def _write_timeline(path: Path, pace: Pace | None) -> None:
    if pace is None:
        say(f"{path} is not written: the plan does not fit")
    else:
        write_trace(path, pace.spans, History(pace.tokens))


def _command(forecast: Forecast, run: SameRun | None) -> str | None:
    """The line of `infinity finetune` that runs the plan, without its data. None if that command
    cannot, or if it does not fit."""
    hardware, training, config = forecast.hardware, forecast.training, forecast.config
    # "auto" commits each step where that fits, as this plan does.
    config = config.model_copy(update={"durability": "off"})
    words = options_of(config, lambda nbytes: nbytes * hardware.gpus)
    options = inspect.signature(finetune).parameters
    unknown = [w for w in words if w.startswith("--") and _parameter(w) not in options]
    if run is None or unknown or not forecast.fits:
        return None
    usual = FinetuneOptions
    values: dict[str, Any] = {
        "batch-size": (training.batch * hardware.ranks, usual.batch_size),
        "accumulate": (training.accumulate, usual.accumulate),
        "sequence-length": (training.length, run.usual_length),
        "durability": (run.durability, usual.durability),
        "lora": (run.lora, usual.lora),
        "base": (run.base, usual.base),
    }
    found = [] if run.model == usual.model else ["--model", run.model]
    for option, (value, default) in values.items():
        found += [f"--{option}", str(value)] if value != default else []
    if not training.recomputes:
        found.append("--no-checkpoint-activations")
    start = ["infinity", "finetune"]
    if hardware.ranks > 1:
        nodes = ["--nnodes", str(hardware.nodes)] if hardware.nodes > 1 else []
        start = ["torchrun", *nodes, "--nproc-per-node", str(hardware.gpus), "-m", *start]
    return shlex.join([*start, *found, *words])


def _parameter(option: str) -> str:
    name = option.removeprefix("--").replace("-", "_")
    return name.removeprefix("no_") if name.removeprefix("no_") in KNOBS else name
