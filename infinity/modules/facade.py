"""What the methods of a wrapped module do that would touch all of its data.

[Note: facade]
The parameters of a wrapped model have no data outside of their use, so some methods of `nn.Module`
cannot do what torch wrote. Each module of the model has a `Facade`, whose methods stand in for them
as attributes of the module. So they hold for the model, for its parts, and inside a module that
somebody puts around it. The class of a module stays what it is.

| call | what it does |
|---|---|
| `to`, `cuda`, `half` and their kin | nothing where parameters stay as they are, else it raises |
| `pickle`, `torch.save(model)`, `copy.deepcopy` | raises a sentence that names the way out |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.errors import ShardedParameterError
from infinity.sharding.parameter import COPIED, MOVED, SAVED, ShardedParameter

_METHODS = ("_apply", "__reduce_ex__", "__deepcopy__")


class Facade:
    """Stands in for methods of one module of a wrapped model, from `attach` to `detach`. See
    [Note: facade]."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)

    @classmethod
    def attach(cls, model: nn.Module) -> None:
        """Give every module of `model` a facade."""
        for module in model.modules():
            facade = cls(module)
            vars(module).update((name, getattr(facade, name)) for name in _METHODS)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """The modules of `model` have their own methods again."""
        for module in model.modules():
            for name in _METHODS:
                vars(module).pop(name, None)

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        if module is None:
            raise ShardedParameterError("the module of this method is gone")
        return module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """What `to`, `cuda`, `half` and their kin call. Refused before anything is changed where a
        parameter would change; buffers change as torch does it."""
        module = self._module
        for parameter in module.parameters(recurse):
            if isinstance(parameter, ShardedParameter) and fn(parameter) is not parameter:
                name = type(parameter).unit.name_of(parameter)
                raise ShardedParameterError(f"{name} would be replaced; {MOVED}")
        held = module._parameters
        others = {
            name: parameter
            for name, parameter in held.items()
            if not isinstance(parameter, ShardedParameter)
        }
        vars(module)["_parameters"] = others
        try:
            type(module)._apply(module, fn, recurse)
        finally:
            held.update(others)
            vars(module)["_parameters"] = held
        return module

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """What `pickle` and `torch.save` ask a module for."""
        raise ShardedParameterError(self._refused("pickled", SAVED))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """What `copy.deepcopy` asks a module for."""
        raise ShardedParameterError(self._refused("copied", COPIED))

    def _refused(self, what: str, way: str) -> str:
        return (
            f"this {type(self._module).__name__} is part of a wrapped model, whose data the engine "
            f"keeps, so it cannot be {what}; {way}"
        )
