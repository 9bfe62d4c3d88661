"""The values of a parameter that is read outside of its module's forward. See [Note: reading
outside of a forward] in `sharding/parameter`."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from infinity.errors import EngineClosedError, ShardedParameterError
from infinity.sharding.facts import UnitFacts
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.listeners import UnitListeners

WRITE = (
    "a copy of a parameter was changed in place, which would be lost; change the parameter inside "
    "`with infinity.gathered(parameter, write=True):`"
)


def closed(name: str) -> EngineClosedError:
    """The error for parameter `name` after its engine was closed."""
    return EngineClosedError(
        f"{name} has no data any more, because its engine was closed; save the data first, then "
        "close"
    )


class ParameterSource(Protocol):
    """The methods of `ParameterData` that a handle calls. `owner` is the unit, for `unit_of`."""

    @property
    def facts(self) -> UnitFacts: ...
    @property
    def listeners(self) -> UnitListeners: ...
    @property
    def owner(self) -> object: ...
    @property
    def tier(self) -> str: ...
    def position(self, tensor: torch.Tensor) -> int | None: ...
    def index_of(self, parameter: torch.Tensor) -> int: ...
    def name_of(self, parameter: torch.Tensor) -> str: ...
    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def readable(self, index: int) -> bool: ...
    def read(self, index: int) -> torch.Tensor: ...
    def part(self, index: int) -> torch.Tensor: ...
    def grad(self, index: int) -> torch.Tensor | None: ...
    def set_grad(self, index: int, value: torch.Tensor | None) -> None: ...
    def leaf(self, index: int) -> AbstractContextManager[None]: ...
    def agree(self, index: int) -> None: ...
    def note(self, tensor: torch.Tensor) -> None: ...
    def make_dense(self) -> None: ...


class LazyValue(LazyTensor):
    """The value of parameter `index` of a unit, detached. Each operator reads it again."""

    way = WRITE

    @staticmethod
    def __new__(cls, source: ParameterSource, index: int) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            parameter = source.facts.parameters[index]
            return cls.without_data(parameter.shape, parameter.dtype, parameter.device)

    def __init__(self, source: ParameterSource, index: int) -> None:
        self.source, self.place = source, index

    @property
    def memory(self) -> Hashable:
        return id(self.source), self.place

    def fetch(self) -> torch.Tensor:
        return self.source.read(self.place)

    def check_replace(self) -> None:
        raise ShardedParameterError(f"{WRITE} ({self.source.facts.names[self.place]})")

    def detached(self) -> LazyValue:
        return LazyValue(self.source, self.place)
