"""Stand-ins for parameters while torch loads a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class LoadTarget(torch.Tensor):
    """Stands for a parameter while torch loads a state dict. It has its shape, and keeps the tensor
    that is copied into it."""

    _is_param = True  # for `isinstance(target, nn.Parameter)`
    given: torch.Tensor | None = None
    """The tensor that was copied into it."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> LoadTarget:
        """A target for `parameter`."""
        some = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        target = some.expand(parameter.shape).as_subclass(cls)
        target.requires_grad_(parameter.requires_grad)
        return target

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], LoadTarget):
            args[0].given = args[1]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Loaded(NamedTuple):
    """The `value` that a load has for `parameter`. If it is `assigned`, it replaces the
    parameter."""

    parameter: torch.Tensor
    value: torch.Tensor
    assigned: bool


def load_into_targets(
    module: nn.Module, kept: Mapping[str, torch.Tensor], load: Callable[[], object]
) -> list[Loaded]:
    """Run `load` of a state dict into `module`, with targets in the place of the parameters that
    are `kept`, by name. Returns the values for these. `load` writes the other parameters."""
    held = module._parameters
    targets: dict[str, Any] = {name: LoadTarget.of(each) for name, each in kept.items()}
    vars(module)["_parameters"] = after = {**targets, **held, **targets}
    try:
        load()
    finally:
        vars(module)["_parameters"] = held
    found = []
    for name, parameter in after.items():
        target = targets.get(name)
        if target is None:
            held[name] = parameter
        elif parameter is not target:
            found.append(Loaded(kept[name], parameter.detach(), assigned=True))
        elif target.given is not None:
            found.append(Loaded(kept[name], target.given, assigned=False))
    return found
