"""Converts optimizers of torch, made by other tools, to optimizers for a wrapped model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from infinity.errors import ConfigError, in_words
from infinity.optim.family import FAMILY
from infinity.optim.foreign import adapt
from infinity.optim.groups import UNSUPPORTED
from infinity.optim.optimizer import Optimizer
from infinity.optim.rules.adam import Adam, AdamW

_OURS = {kind.rule.torch: kind for kind in FAMILY if kind.rule.torch is not None}
"""The optimizer with kernels for each class of torch that computes the same numbers."""

Settings = Mapping[str, Any]
"""The hyper-parameters of one parameter group."""


def kernels_for(
    kind: type[torch.optim.Optimizer], groups: Sequence[Settings]
) -> type[Optimizer] | None:
    """The optimizer with kernels that computes the same numbers as class `kind`, of torch or of
    infinity, with these groups. None if no optimizer does.

    A subclass of a torch optimizer may compute other numbers. If kernels compute its numbers, its
    attribute `computed_by` must be the optimizer of infinity.
    """
    if issubclass(kind, Optimizer):
        return kind if kind.by_kernels else None
    ours = getattr(kind, "computed_by", None) or _OURS.get(kind)
    unsupported = (*UNSUPPORTED, "initial_accumulator_value")
    if any(group.get(name) for name in unsupported for group in groups):
        return None
    if ours is Adam:  # torch.optim.Adam may compute AdamW
        decoupled = [bool(group.get("decoupled_weight_decay")) for group in groups]
        ours = AdamW if all(decoupled) else None if any(decoupled) else Adam
    return ours


def algorithm_of(kind: type[torch.optim.Optimizer], *groups: Settings) -> str:
    """The `Config.algorithm` under which a model is wrapped for an optimizer of class `kind`, of
    torch or of infinity, with these groups."""
    ours = kernels_for(kind, groups)
    if ours is None:
        return "other"
    first, *others = [ours.algorithms(group) for group in groups or [{}]]
    return next(name for name in first if all(name in other for other in others))


def groups_of(optimizer: torch.optim.Optimizer) -> list[Settings]:
    """The hyper-parameters of each group of `optimizer`."""
    return [optimizer.defaults | group for group in optimizer.param_groups]


def algorithm_for(optimizer: torch.optim.Optimizer) -> str:
    """`algorithm_of` all groups of `optimizer`."""
    return algorithm_of(type(optimizer), *groups_of(optimizer))


def converted(optimizer: torch.optim.Optimizer, **options: Any) -> Optimizer:
    """An optimizer of infinity that updates parameters of a wrapped model in the way in which
    `optimizer` updates plain parameters.

    AdamW, Adam, Adagrad and SGD of torch use the kernels. Other optimizers use the slow path of
    `infinity.adapt`. The parameter groups are the same dicts, so a scheduler that holds them
    still works. The states of `optimizer` are copied. `options` are keyword arguments of
    `infinity.optim.optimizer.Optimizer`, such as `max_grad_norm`. An optimizer of infinity is
    returned unchanged.

    Raises `ConfigError` if `optimizer` is no optimizer, or if the model was wrapped for another
    algorithm.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{in_words(optimizer)} is no optimizer; give one of infinity or torch")
    ours = kernels_for(type(optimizer), groups_of(optimizer))
    make: Callable[..., Optimizer] = ours or partial(adapt, type(optimizer))
    known = inspect.signature(ours or type(optimizer)).parameters
    numbers = {name: value for name, value in optimizer.defaults.items() if name in known}
    made = make(optimizer.param_groups, **numbers, **options)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    # Schedulers that are not redirected read `_opt_called`.
    made.register_step_post_hook(lambda *_: vars(optimizer).update(_opt_called=True))
    return made


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper, such as that of accelerate."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def redirect(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Make `scheduler`, and each scheduler inside of it, drive `new` instead of `old`.

    Torch checks that the optimizer steps before its scheduler. This check finds steps of `new`."""
    pending, seen = [scheduler], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if unwrapped(getattr(each, "optimizer", None)) is old:
            each.optimizer = new
        for value in getattr(each, "__dict__", {}).values():
            several = value if isinstance(value, (list, tuple)) else [value]
            pending += [one for one in several if isinstance(one, LRScheduler)]
    ConstantLR(new, factor=1.0, total_iters=0)  # has torch count the steps of `new`
