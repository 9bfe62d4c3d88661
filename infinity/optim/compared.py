"""The facts of an optimizer that the ranks compare in each step.

If the optimizers of two ranks differed, each rank would update its shards by its own rule. The
first sum of a step carries a digest of these facts, so that comparing costs no
collective (`Exchange.sum_alike`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infinity.optim.scaler import LossScaler
from infinity.sharding.alike import Fact, Facts, digest_of, facts_of
from infinity.sharding.unit import Unit

_MOST_NUMBERS = 16  # elements of a tensor hyper-parameter that are compared


class ComparedClipping(Protocol):
    """The settings for gradients that ranks compare."""

    max_grad_norm: float | None
    clip: str
    skip_nonfinite: bool
    error_if_nonfinite: bool
    scaler: LossScaler | None


class ComparedOptimizer(Protocol):
    """The parts of an optimizer that ranks compare."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def clipping(self) -> ComparedClipping:
        """Its settings for gradients."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that it may update."""

    def facts_so_far(self) -> list[tuple[str, object]]:
        """Facts about its earlier steps. They are equal on all ranks."""


class ComparedStep(NamedTuple):
    """The facts of a step for `Updater.settle`, and a digest of them with 32 bits. Different facts
    nearly always have different digests."""

    digest: int
    facts: Callable[[], Facts]
    """The class, the settings, and every group with its hyper-parameters and parameters."""


class StepComparer:
    """Makes the `ComparedStep` of each step of one optimizer, without a reference to the optimizer.
    Used by the thread that runs the model."""

    def __init__(self) -> None:
        self._groups: Sequence[tuple[int, int]] = ()
        self._members = ""  # a digest of the parameters of `_groups`

    def step(self, optimizer: ComparedOptimizer) -> ComparedStep:
        """The facts of the step that `optimizer` begins."""
        # Only `add_param_group` changes these lists. A digest of thousands of names is slow.
        groups = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if groups != self._groups:
            self._groups, self._members = groups, digest_of(_parameters(optimizer))
        digest = zlib.crc32((digest_of(_settings(optimizer)) + self._members).encode())
        return ComparedStep(digest, lambda: [*_settings(optimizer), *_parameters(optimizer)])


def shared_settings(clipping: ComparedClipping) -> list[Fact]:
    """The settings that all stages of a pipeline must share, because they share one norm."""
    names = ("max_grad_norm", "clip", "skip_nonfinite", "error_if_nonfinite")
    found = [(name, _in_words(getattr(clipping, name))) for name in names]
    return facts_of([*found, ("loss_scaler", "none" if clipping.scaler is None else "given")])


def _settings(optimizer: ComparedOptimizer) -> list[Fact]:
    found: list[tuple[str, object]] = [
        ("the optimizer", getattr(optimizer, "kind", type(optimizer)).__name__),
        *shared_settings(optimizer.clipping),
        *optimizer.facts_so_far(),
        ("the number of groups", len(optimizer.param_groups)),
    ]
    scaler = optimizer.clipping.scaler
    if scaler is not None:
        names = ("window", "hysteresis", "minimum")
        found += [(f"{name} of loss_scaler", getattr(scaler, name)) for name in names]
        found += [(f"{key} of loss_scaler", value) for key, value in scaler.state_dict().items()]
    for number, group in enumerate(optimizer.param_groups):
        found += [
            (f"{name} of group {number}", _in_words(group[name]))
            for name in optimizer.defaults
            if name in group
        ]
    return facts_of(found)


def _parameters(optimizer: ComparedOptimizer) -> list[Fact]:
    group_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return [
        Fact(f"the group of {name}", str(group_of[id(parameter)]))
        for unit in optimizer.units
        for name, parameter in zip(unit.facts.names, unit.facts.parameters, strict=True)
        if id(parameter) in group_of
    ]


def _in_words(value: Any) -> str:
    """A hyper-parameter as text. Only its type if it is no number, text, or list of these."""
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.numel() <= _MOST_NUMBERS else type(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_words, value))})"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    try:
        return repr(float(value))
    except (TypeError, ValueError):
        return type(value).__name__
