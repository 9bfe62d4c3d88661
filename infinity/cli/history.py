"""The history of a run, step by step. The trainer fills it, and progress, summary and report
read it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from infinity.quantities import format_bytes
from infinity.report import Report
from infinity.tier import TIERS

WORST_WAITS = 5


def format_seconds(seconds: float) -> str:
    """`seconds` with three significant digits, in milliseconds below one second: 0.0123 -> "12.3
    ms"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:,.1f} s"


def format_loss(loss: float | None, form: str = ".4f") -> str:
    """`loss` in the format `form`; "-" for None."""
    return "-" if loss is None else format(loss, form)


class StepRecord(NamedTuple):
    """One optimizer step. `number` counts from 1. `start` and `end` are seconds of
    `time.perf_counter`.

    `loss_scale` is the scale of the next loss. `grad_norm` is None if the gradients were not
    finite.
    """

    number: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    start: float
    end: float
    loss_scale: float | None = None


class Sample(NamedTuple):
    """Bytes in use per tier at one moment (seconds of `time.perf_counter`)."""

    time: float
    used: dict[str, int]


class Validation(NamedTuple):
    """The mean loss over held-out windows after step `step`."""

    step: int
    loss: float


@dataclass
class History:
    """The record of one run, which the trainer fills. After a resume it begins with the earlier
    steps."""

    tokens_per_step: int
    """Tokens of data in a step on average, of all ranks together. Padding does not count."""
    unified_memory: bool = False
    """Whether the CPU computes, and there is no GPU."""
    steps: list[StepRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    signal: int | None = None
    """The signal that ended the run early."""

    def add(self, entry: Mapping[str, Any], end: float) -> None:
        """Add the step or the validation of `entry` of a trainer's log, which ended at `end`
        (seconds of `time.perf_counter`). Other entries are left out."""
        if "loss" in entry:
            self.steps.append(
                StepRecord(
                    entry["step"],
                    entry["loss"],
                    entry["learning_rate"],
                    entry.get("grad_norm"),
                    end - entry["step_seconds"],
                    end,
                    entry.get("loss_scale"),
                )
            )
        elif "eval_loss" in entry:
            self.validations.append(Validation(entry["step"], entry["eval_loss"]))

    def restore(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Begin with the entries of an earlier log, as if its steps had just ended."""
        self.steps.clear()
        self.validations.clear()
        end = time.perf_counter() - sum(entry.get("step_seconds", 0.0) for entry in entries)
        for entry in entries:
            end += entry.get("step_seconds", 0.0)
            self.add(entry, end)

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return self.steps[-1].number if self.steps else 0

    def speed(self, seconds: float, steps: int = 1) -> float:
        """Tokens of data per second, if `steps` steps took `seconds`."""
        return steps * self.tokens_per_step / seconds if seconds > 0 else 0.0

    def tokens_per_second(self) -> float:
        """The `speed` of all steps, without evaluation. The first step (planning, warm-up) counts
        only if it is alone.

        Each step includes the wait for the update of the step before, so steps 2 to N include N - 1
        updates.
        """
        steps = self.steps[1:] or self.steps
        return self.speed(sum(step.end - step.start for step in steps), len(steps))

    def losses(self) -> dict[str, float | None]:
        """The first and the last training loss, and the last validation loss with its step."""
        first, last = (self.steps[0], self.steps[-1]) if self.steps else (None, None)
        held_out = self.validations[-1] if self.validations else None
        return {
            "first": first and first.loss,
            "last": last and last.loss,
            "validation": held_out.loss if held_out and math.isfinite(held_out.loss) else None,
            "validation_step": held_out and held_out.step,
        }


def cached_text(cached: dict[str, int]) -> str:
    """The part of the bytes on NVMe that is cached in host memory. If each step also writes some of
    it to NVMe, the text says so.

    Example: {"bytes": 1 << 20, "of": 1 << 30} gives "1 MiB of 1 GiB".
    """
    through = cached.get("written_through", 0)
    also = f"; each step writes {format_bytes(through)} of it" if through else ""
    return f"{format_bytes(cached['bytes'])} of {format_bytes(cached['of'])}{also}"


def labels_of(summary: dict[str, Any]) -> dict[str, str]:
    """The tiers by name, as people call them on the machine of a summary."""
    return {name: tier.label_on(summary["unified_memory"]) for name, tier in TIERS.items()}


def budget_of_a_rank(summary: dict[str, Any], tier: str) -> int | None:
    """The budget of one rank on `tier` in bytes, from a summary. None without a limit."""
    budget: int | None = summary["memory"][tier]["budget"]
    return budget and budget // shared_by(tier, summary["ranks_per_node"])


def budget_text(summary: dict[str, Any], tier: str, before: str) -> str:
    """The budget of a rank on `tier`, after `before`. Empty without a budget.

    With 1 GiB of host memory for two ranks: " of 512 MiB (1 GiB for the 2 ranks of a node)".
    """
    budget = summary["memory"][tier]["budget"]
    own = budget_of_a_rank(summary, tier)
    sharing = summary["ranks_per_node"]
    if not own:
        return ""
    whole = f" ({format_bytes(budget)} for the {sharing} ranks of a node)" if own != budget else ""
    return f"{before}{format_bytes(own)}{whole}"


def shared_by(tier: str, per_node: int) -> int:
    """The number of ranks that share the budget of `tier`, of `per_node` ranks. Each rank has its
    own compute device."""
    return 1 if TIERS[tier].is_device else per_node


_MOVED = (
    "cached",
    "written_through",
    "on_nvme",
    "gpu_resident",
    "copied_to_device",
    "copied_from_device",
    "read_again",
    "updated",
    "activations_offloaded",
    "activations_not_offloaded",
    "activations_written",
    "activations_read",
    "activations_partitioned",
    "activations_parts",
)


def combine(reports: Sequence[Report], per_node: int) -> Report:
    """One report of all ranks, from the report of each in the order of ranks. Bytes are sums over
    ranks, and peaks are maxima. Budgets are those of a node with `per_node` ranks. Times and counts
    are those of the first rank."""
    if len(reports) == 1:
        return reports[0]
    first = reports[0]
    sums = (
        "read_per_parameter",
        "written_per_parameter",
        "planned_read_per_parameter",
        "planned_written_per_parameter",
    )
    summed = {name: sum(getattr(report, name) for report in reports) for name in (*sums, *_MOVED)}
    highest = max(report.activations_peak for report in reports)
    peaks = {tier: max(report.peaks[tier] for report in reports) for tier in first.peaks}
    budgets = {tier: budget * shared_by(tier, per_node) for tier, budget in first.limits.items()}
    return replace(first, peaks=peaks, budgets=budgets, activations_peak=highest, **summed)


def summarize(
    model: str,
    history: History,
    report: Report,
    output: Path | None,
    files: dict[str, str],
    ranks: int = 1,
    per_node: int = 1,
) -> dict[str, Any]:
    """The run of `ranks` ranks, `per_node` of them on each node, as one object ready for JSON.
    Times are in seconds, sizes in bytes.

    `files` names further files of the run. A peak is that of one rank. A budget is that of the
    ranks that share it (`shared_by`).
    """
    worst = sorted(report.waits.items(), key=lambda item: -item[1])[:WORST_WAITS]
    budgets = report.limits
    return {
        "model": model,
        "parameters": report.parameters,
        "unified_memory": history.unified_memory,
        "ranks": ranks,
        "ranks_per_node": per_node,
        "steps": history.done,
        "steps_skipped": report.skipped_steps,
        "loss_scale": history.steps[-1].loss_scale if history.steps else None,
        "signal": history.signal,
        "loss": history.losses(),
        "tokens_per_second": history.tokens_per_second(),
        "nvme_bytes_per_parameter_per_step": {
            "read": {
                "measured": report.read_per_parameter,
                "planned": report.planned_read_per_parameter,
            },
            "written": {
                "measured": report.written_per_parameter,
                "planned": report.planned_written_per_parameter,
            },
        },
        "speculative_updates": {
            "kept": report.updates_kept,
            "rolled_back": report.updates_rolled_back,
        },
        "seconds": dict(report.seconds),
        "worst_waits": [{"unit": unit, "seconds": seconds} for unit, seconds in worst],
        "cached": {
            "bytes": report.cached,
            "of": report.on_nvme,
            "written_through": report.written_through,
        },
        "gpu_resident": report.gpu_resident,
        "activations": {
            "offloaded": report.activations_offloaded,
            "not_offloaded": report.activations_not_offloaded,
            "written_to_nvme": report.activations_written,
            "peak": report.activations_peak,
        },
        "memory": {
            tier: {"peak": report.peaks[tier], "budget": budgets.get(tier)}
            for tier in TIERS
            if tier in report.peaks
        },
        "budget_sources": dict(report.budget_sources),
        "output": str(output) if output else None,
        **files,
    }
