"""Counts of bytes: ours, the planner's and the kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

import infinity

STEADY = 3  # steps until the trace, the accumulation count and what is resident repeat themselves


def check_traffic(model: nn.Module, accumulation: int = 1) -> None:
    """The last step of `model` moved what the planner states, to the byte, and the report says
    so."""
    engine = infinity.engine(model)
    plan, report = engine.plan(), engine.report()
    count = report.parameters
    assert round(report.read_per_parameter * count) == plan.read
    assert round(report.written_per_parameter * count) == plan.update_written
    assert round(report.planned_read_per_parameter * count) == plan.read
    assert round(report.planned_written_per_parameter * count) == plan.update_written


def counted(names: tuple[str, ...]) -> tuple[int, ...]:
    """The kernel's counters of bytes that this process made the storage layer move."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return tuple(int(lines[name]) for name in names)


def is_what_the_kernel_counts(moved: Sequence[int], kernel: Sequence[int]) -> bool:
    """Whether the kernel counts the bytes `moved`, and at most a few pages of the file system's own
    tables beside them."""
    return all(0 <= counted - ours <= 64 << 10 for ours, counted in zip(moved, kernel, strict=True))
