"""Optimizers of torch as optimizers of this family: other tools make the first kind, and a wrapped
model needs the second."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from infinity.errors import ConfigError, in_words
from infinity.optim.adam import Adam, AdamW
from infinity.optim.foreign import adapt
from infinity.optim.optimizer import UNSUPPORTED, Optimizer
from infinity.optim.rules import SGD, Adagrad, Lion

_OURS: dict[type[torch.optim.Optimizer], Callable[..., Optimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.Adagrad: Adagrad,
    torch.optim.SGD: SGD,
}
"""What computes the same numbers with kernels."""


def algorithm_of(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> str:
    """The `Config.algorithm` under which a model is wrapped for an optimizer of class `kind`, of
    torch or of infinity, with these hyper-parameters."""
    if not _has_kernels(kind, settings):
        return "other"
    for name, kinds in (("adam", (Adam, torch.optim.Adam)), ("lion", (Lion,))):
        if issubclass(kind, kinds):
            return name
    if issubclass(kind, (SGD, torch.optim.SGD)):
        return "momentum" if settings.get("momentum") else "sgd"
    return "adagrad"


def algorithm_for(optimizer: torch.optim.Optimizer) -> str:
    """`algorithm_of` all groups of `optimizer`."""
    kind = type(optimizer)
    found = {algorithm_of(kind, optimizer.defaults | group) for group in optimizer.param_groups}
    return next(name for name in ("other", "momentum", *found) if name in found)


def _has_kernels(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> bool:
    """Whether the kernels compute what `kind` does. A subclass may compute something else."""
    if issubclass(kind, Optimizer):
        return kind.by_kernels
    unsupported = (*UNSUPPORTED, "differentiable", "initial_accumulator_value")
    return kind in _OURS and not any(settings.get(name) for name in unsupported)


def converted(optimizer: torch.optim.Optimizer, **options: Any) -> Optimizer:
    """An optimizer of infinity that does to parameters of a wrapped model what `optimizer` does to
    plain ones.

    AdamW, Adam, Adagrad and SGD of torch get the kernels, any other the slow path of
    `infinity.adapt`. The parameter groups are the same dicts, so that a scheduler that holds them
    goes on. States that `optimizer` has are taken over. `options` are those of
    `infinity.optim.optimizer.Optimizer`, such as `max_grad_norm`. An optimizer of infinity is
    returned as it is.

    Raises `ConfigError` for what is no optimizer, and where the model was wrapped for another
    algorithm.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{in_words(optimizer)} is no optimizer; give one of infinity or torch")
    kind = type(optimizer)
    has_kernels = algorithm_for(optimizer) != "other"
    make: Callable[..., Optimizer] = _OURS[kind] if has_kernels else partial(adapt, kind)
    known = inspect.signature(_OURS[kind] if has_kernels else kind).parameters
    numbers = {name: value for name, value in optimizer.defaults.items() if name in known}
    made = make(optimizer.param_groups, **numbers, **options)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    # Schedulers that nobody redirects go by it.
    made.register_step_post_hook(lambda *_: vars(optimizer).update(_opt_called=True))
    return made


def redirect(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """`scheduler`, made for the optimizer `old` that became `new`, drives `new`; so do those inside
    of it. It finds that `step` is called before its own, as torch checks."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for value in vars(scheduler).values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, LRScheduler) and getattr(each, "optimizer", None) is old:
                redirect(each, old, new)
    ConstantLR(new, factor=1.0, total_iters=0)  # has torch count the steps of `new`
