"""What an optimizer does, as facts that the ranks compare in each step.

A step of ranks whose optimizers differ would be a mixture: each rank updates its own shards by its
own rule. The first sum of a step carries a digest of these facts, so that comparing costs no
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

_MOST_NUMBERS = 16  # of a hyper-parameter that is a tensor


class ComparedClipping(Protocol):
    """What an optimizer does with its gradients, as ranks compare it."""

    max_grad_norm: float | None
    clip: str
    skip_nonfinite: bool
    error_if_nonfinite: bool
    scaler: LossScaler | None


class ComparedOptimizer(Protocol):
    """An optimizer, as ranks compare it."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def clipping(self) -> ComparedClipping:
        """What it does with its gradients."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that it may update."""

    def facts_so_far(self) -> list[tuple[str, object]]:
        """What its steps so far have brought, which is the same on all ranks."""


class ComparedStep(NamedTuple):
    """What an optimizer brings to a step, for `Updater.settle`: 32 bits that differ where `facts`
    do, as a rule."""

    digest: int
    facts: Callable[[], Facts]
    """The class, the settings, and every group with its hyper-parameters and parameters."""


class StepComparer:
    """Makes the `ComparedStep` of each step of one optimizer, which it does not refer to. Used by
    the thread that runs the model."""

    def __init__(self) -> None:
        self._groups: Sequence[tuple[int, int]] = ()
        self._members = ""  # a digest of the parameters of `_groups`

    def step(self, optimizer: ComparedOptimizer) -> ComparedStep:
        """The step of `optimizer` that begins."""
        # Lists of parameters change with `add_param_group`; thousands of names take a while.
        groups = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if groups != self._groups:
            self._groups, self._members = groups, digest_of(_parameters(optimizer))
        digest = zlib.crc32((digest_of(_settings(optimizer)) + self._members).encode())
        return ComparedStep(digest, lambda: [*_settings(optimizer), *_parameters(optimizer)])


def shared_settings(clipping: ComparedClipping) -> list[Fact]:
    """Those that stages of a pipeline have in common, whose norms are one."""
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
        for name, parameter in zip(unit.names, unit.parameters, strict=True)
        if id(parameter) in group_of
    ]


def _in_words(value: Any) -> str:
    """A hyper-parameter; what is no number, text or list of these is its type."""
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
