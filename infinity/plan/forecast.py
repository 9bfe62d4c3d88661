"""A plan: the memory that a model takes on a machine, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infinity.config import Config, Tuning
from infinity.errors import BudgetError, ConfigError
from infinity.plan.hardware import Hardware
from infinity.plan.memory import (
    MemoryPlan,
    Training,
    fitting,
    memory_plan,
    shortages,
    totals,
)
from infinity.plan.model import PlannedModel
from infinity.plan.pace import Pace, pace, rates_of
from infinity.tier import TIERS

ASSUMED_ENDURANCE = 600e12
"""Bytes that may be written to a drive of which nothing is known: what makers warrant for 1 TB of a
consumer drive."""


@dataclass(frozen=True)
class Wear:
    """The bytes per day that training writes to the drives of a node, the bytes that may be written
    to all of these, and whether that is assumed for one of them."""

    bytes_per_day: float
    endurance: float
    is_assumed: bool

    @property
    def days(self) -> float:
        """The days until the endurance is used."""
        return self.endurance / self.bytes_per_day


@dataclass(frozen=True)
class Forecast:
    """The answer. `problems` are empty if the plan fits. `memory` and `pace` are None if there is
    no placement."""

    model: PlannedModel
    hardware: Hardware
    training: Training
    config: Config
    problems: tuple[str, ...]
    memory: MemoryPlan | None = None
    pace: Pace | None = None

    @property
    def fits(self) -> bool:
        """Whether it would run."""
        return not self.problems

    @property
    def wear(self) -> Wear | None:
        """The wear of the drives. None if nothing is written to them."""
        if self.pace is None or not self.pace.written_per_day:
            return None
        known = [drive.endurance for drive in self.hardware.drives]
        total = sum(ASSUMED_ENDURANCE if each is None else each for each in known)
        return Wear(self.pace.written_per_day, total, None in known)


def plan(model: PlannedModel, hardware: Hardware, training: Training, config: Config) -> Forecast:
    """The memory that `model` would take on `hardware`, and the seconds of a step of `training`.

    A plan that does not fit is an answer, too. Its `problems` say why.
    """
    return timed(placed(model, hardware, training, config))


def placed(model: PlannedModel, hardware: Hardware, training: Training, config: Config) -> Forecast:
    """The forecast of the memory alone."""
    model, memory, problems = place(model, hardware, training, config)
    return Forecast(model, hardware, training, config, problems, memory)


def timed(forecast: Forecast) -> Forecast:
    """`forecast` with the seconds of a step, if it fits."""
    if forecast.memory is None or not forecast.fits:
        return forecast
    step = pace(forecast.model, forecast.training, forecast.memory, forecast.hardware)
    return replace(forecast, pace=step)


def place(
    model: PlannedModel, hardware: Hardware, training: Training, config: Config
) -> tuple[PlannedModel, MemoryPlan | None, tuple[str, ...]]:
    """The model in the units that `wrap` would make, the place of everything, and the problems. The
    memory plan is None if `wrap` would refuse the model."""
    on_nvme = _on_nvme(config)
    if on_nvme and not hardware.drives:
        return model, None, (f"{' and '.join(on_nvme)} on nvme, but the machine has no drives",)
    try:
        model = fitting(model, config, hardware)
        rates = rates_of(model, config, hardware)
        memory = memory_plan(model, training, config, hardware, rates)
    except (BudgetError, ConfigError) as error:
        return model, None, (str(error),)
    return model, memory, tuple(shortages(memory, hardware))


def _on_nvme(config: Config) -> list[str]:
    states = ("parameters", "gradients", "optimizer", "activations")
    return [state for state in states if TIERS[getattr(config, state)].is_drive]


def config_text(config: Config) -> str:
    """`config` as Python code: the fields that differ from their defaults."""
    plain = Config(nvme=config.nvme) if config.nvme else Config()
    found = _arguments(config, plain, without=("tuning", "nvme"))
    if config.nvme:
        paths = [str(path) for path in config.nvme]
        found.insert(0, f"nvme={paths[0]!r}" if len(paths) == 1 else f"nvme={paths!r}")
    tuning = _arguments(config.tuning, Tuning(), without=())
    if tuning:
        found.append(f"tuning=infinity.Tuning({', '.join(tuning)})")
    return f"infinity.Config({', '.join(found)})".replace("'", '"')


def _arguments(value: Any, plain: Any, without: Sequence[str]) -> list[str]:
    return [
        f"{name}={getattr(value, name)!r}"
        for name in type(value).model_fields
        if name not in without and getattr(value, name) != getattr(plain, name)
    ]


def summary(
    forecast: Forecast, advice: str | None, gains: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
    """The forecast as JSON: every number has its unit in its key. `gains` are changes, with the
    tokens per second after each."""
    model, hardware, memory, step = (
        forecast.model,
        forecast.hardware,
        forecast.memory,
        forecast.pace,
    )
    found: dict[str, Any] = {
        "model": model.name,
        "parameters_count": model.parameters,
        "trainable_count": model.trainable,
        "machine": hardware.name,
        "ranks_count": hardware.ranks,
        "tokens_per_step_count": forecast.training.tokens * hardware.ranks,
        "fits": forecast.fits,
        "problems": list(forecast.problems),
        "advice": advice,
        "gains": [{"change": words, "tokens_per_second": rate} for words, rate in gains],
        "config": config_text(forecast.config),
        "tiled": list(model.tiled),
    }
    if memory is not None:
        parts = memory.activations
        found["memory"] = {
            "per_rank_bytes": memory.allocated,
            "states_bytes": memory.states,
            "states_total_bytes": totals(memory.states),
            "budgets_bytes": memory.choice.budgets._asdict(),
            "activations": {
                "saved_bytes": parts.saved,
                "working_bytes": parts.working,
                "logits_bytes": parts.logits,
                "quantization_bytes": memory.statistics,
                "offloaded_bytes": memory.offloaded[0],
                "on_nvme_bytes": memory.offloaded[1],
            },
        }
        if memory.auto is not None:
            names = ("all_recomputed_bytes", "none_recomputed_bytes", "room_bytes")
            found["memory"]["auto"] = dict(zip(names, memory.auto, strict=True))
    if step is not None:
        wear = forecast.wear
        found["step"] = {
            "seconds": step.seconds,
            "tokens_per_second": step.tokens_per_second,
            "bottleneck": step.bottleneck,
            "updates": step.mode,
            "busy_seconds": step.busy,
            "nvme_read_bytes": step.traffic.read + step.spilled,
            "nvme_written_bytes": round(step.written),
            "tokens_that_hide_the_drives_count": step.hiding_tokens,
            "written_per_day_bytes": wear.bytes_per_day if wear else 0.0,
            "endurance_bytes": wear.endurance if wear else None,
            "endurance_is_assumed": wear.is_assumed if wear else None,
            "drives_last_days": wear.days if wear else None,
        }
    return found
