"""The record of an update rule. Every table keyed by optimizer follows from these records.

A rule is one file of `optim/rules/`: its record, and the class that computes its hyper-parameters.
`optim/family.py` lists the classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from infinity.placement.spec import MOMENTS, Kind


class Range(NamedTuple):
    """The values that a hyper-parameter may have."""

    contains: Callable[[Any], bool]
    """Raises `TypeError`, `ValueError` or `RuntimeError` for a value of another kind."""
    kind: str = "a number"


def are_rates(count: int) -> Callable[[Any], bool]:
    """A test that accepts `count` decay rates, each at least 0 and below 1."""

    def contains(values: Any) -> bool:
        rates = tuple(values)
        if len(rates) != count:
            raise ValueError(f"{len(rates)} values")
        return all(0 <= rate < 1 for rate in rates)

    return contains


AMOUNT = Range(lambda value: bool(0 <= value < math.inf))
POSITIVE = Range(lambda value: bool(0 < value < math.inf))
FINITE = Range(math.isfinite)
SWITCH = Range(lambda value: True, "True or False")
TWO_RATES = Range(are_rates(2), "two numbers")


@dataclass(frozen=True)
class Rule:
    """The facts of an update rule for its optimizer, the kernels and other libraries."""

    kernel: str
    """Its name in `native/cpu_adam`."""
    algorithms: Mapping[str, Mapping[str, Any]]
    """The values of `Config.algorithm` that keep the states of this rule. Each maps to the
    settings of an update that uses all of these states."""
    states: Mapping[str, Kind]
    """Its moments, by the names in `state` of torch's optimizer. Masters are not listed here."""
    settings: Mapping[str, Range]
    """The hyper-parameters of a group, in the order of the constructor."""
    torch: type[torch.optim.Optimizer] | None = None
    """Torch's optimizer that computes the same numbers from the same arguments."""
    counts_in_state: bool = False
    """Whether torch keeps the number of updates in `state["step"]`."""
    states_from_start: bool = False
    """Whether the constructor of torch's optimizer makes the states."""
    deepspeed: str | None = None
    """Its `optimizer.type` in a DeepSpeed configuration, in lower case."""
    trainer: Mapping[str, str] = field(default_factory=dict)
    """The names of `TrainingArguments(optim=...)`. Each maps to the `Config.moment_precision` that
    it requires."""

    def states_for(self, algorithm: str) -> dict[str, Kind]:
        """Its moments in a model wrapped with `Config(algorithm=algorithm)`."""
        return {name: kind for name, kind in self.states.items() if kind in MOMENTS[algorithm]}
