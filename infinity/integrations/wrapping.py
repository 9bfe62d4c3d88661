"""Wraps a model for existing optimizers, and converts these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.build import wrap
from infinity.config import Config
from infinity.errors import ConfigError, in_words
from infinity.optim.conversion import algorithm_for, converted, redirect
from infinity.sharding.parameter import ShardedParameter


def wrap_for(
    model: nn.Module,
    config: Config,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    resume: bool = False,
) -> None:
    """Wrap `model` for `optimizers`, with the algorithm that they need unless `config` sets one.
    Then update their parameters, because `wrap` creates new parameters for a model without
    memory."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    wrap(model, _config_for(config, optimizers), resume=resume)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                parameters[names[id(p)]] if id(p) in names else p for p in group["params"]
            ]


def convert(
    optimizer: torch.optim.Optimizer, schedulers: Iterable[Any] = ()
) -> torch.optim.Optimizer:
    """Convert `optimizer` to an infinity optimizer if it has parameters of a wrapped model; else
    return it unchanged. Schedulers that drive it are redirected.

    Raises `ConfigError` for parameters without memory, which `wrap` has replaced.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
        made = converted(optimizer)
        for scheduler in schedulers if made is not optimizer else ():
            redirect(scheduler, optimizer, made)
        return made
    if any(parameter.is_meta for parameter in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} has parameters without memory, of before the model was "
            "wrapped; give the model and its optimizers in one call"
        )
    return optimizer


def with_device(config: Config, device: torch.device) -> Config:
    """`config` with `device` as its device, unless it sets one. Raises `ConfigError` if `config` is
    no `Config`."""
    if not isinstance(config, Config):
        raise ConfigError(
            f"infinity_config is {in_words(config)}; give an infinity.Config, such as "
            'infinity.Config(nvme="/mnt/nvme0")'
        )
    if config.tuning.device != "auto":
        return config
    tuning = config.tuning.model_copy(update={"device": device.type})
    return config.model_copy(update={"tuning": tuning})


def scaled(loss: torch.Tensor, optimizers: Sequence[Any]) -> torch.Tensor:
    """`loss`, scaled by the first of `optimizers` that has a loss scaler. Optimizers of fp16
    parameters have one."""
    scaling = [each for each in optimizers if getattr(each, "loss_scaler", None) is not None]
    return scaling[0].scale(loss) if scaling else loss


def _config_for(config: Config, optimizers: Sequence[torch.optim.Optimizer]) -> Config:
    if "algorithm" in config.model_fields_set or not optimizers:
        return config
    found = {algorithm_for(optimizer) for optimizer in optimizers}
    if len(found) > 1:
        raise ConfigError(
            "the optimizers need different states, and all parameters of a model have the same; "
            "use optimizers of one kind"
        )
    return config.model_copy(update={"algorithm": found.pop()})
