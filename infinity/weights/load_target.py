"""Stand-ins for parameters while torch loads a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.sharding.parameter import METADATA

_DATA = {"data", "detach"}
"""Attributes and methods whose result shares the memory of the parameter."""


class _TargetValue:
    """The tensor that a load has for `parameter`; None before it comes."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.tensor: torch.Tensor | None = None

    def current(self) -> torch.Tensor:
        """The parameter. Once a tensor came for it, a copy of that, which then is the one that the
        load has."""
        if self.tensor is None:
            return self.parameter
        with torch.no_grad():
            self.tensor = torch.empty_like(self.tensor, dtype=self.parameter.dtype).copy_(
                self.tensor
            )
        return self.tensor


class LoadTarget(torch.Tensor):
    """Stands for a parameter, or its `.data`, while torch loads a state dict. It keeps the tensor
    that is copied or assigned into it. Any other function gets that tensor, or the parameter before
    one came."""

    given: _TargetValue
    _is_param: bool  # for `isinstance(target, nn.Parameter)`

    @classmethod
    def of(cls, parameter: torch.Tensor, given: _TargetValue | None = None) -> LoadTarget:
        """A target for `parameter`. With the `given` value of another target, the target stands
        for the `.data` of `parameter`."""
        some = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        target = some.expand(parameter.shape).as_subclass(cls)
        target.requires_grad_(given is None and parameter.requires_grad)
        target._is_param = given is None
        target.given = given or _TargetValue(parameter)
        return target

    def current(self) -> torch.Tensor:
        """The tensor that the target stands for now."""
        current = self.given.current()
        return current if self._is_param else current.detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        accessor = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", accessor)
        target = args[0] if args and isinstance(args[0], LoadTarget) else None
        if target is not None:
            value: Any = args[1] if len(args) > 1 else None
            assigns = name == "data" and accessor == "__set__" and value.shape == target.shape
            if name == "copy_" or assigns:
                if isinstance(value, LoadTarget):  # its present values
                    value = value.current().detach().clone()
                target.given.tensor = value
                return target
            if name in _DATA and accessor != "__set__":
                return cls.of(target.given.parameter, target.given)
            if name == "module_load":  # with `set_swap_module_params_on_conversion`
                return value.detach()
            if name in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_current, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _current(value: Any) -> Any:
    return value.current() if isinstance(value, LoadTarget) else value


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
        is_target = isinstance(parameter, LoadTarget)
        if name not in targets:
            held[name] = parameter.given.parameter if is_target else parameter
        elif not is_target:
            found.append(Loaded(kept[name], parameter.detach(), assigned=True))
        elif parameter.given.tensor is not None:
            found.append(Loaded(kept[name], parameter.given.tensor, assigned=False))
    return found
