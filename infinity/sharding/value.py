"""The values of a parameter that is read outside of its module's forward. See [Note: reading
outside of a forward] in `sharding/parameter`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from infinity.errors import EngineClosedError, ShardedParameterError
from infinity.placement.spec import Kind
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.recognize import is_dtensor

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit

WRITE = (
    "a copy of a parameter was changed in place, which would be lost; change the parameter inside "
    "`with infinity.gathered(parameter, write=True):`"
)


def readable(unit: Unit, index: int) -> bool:
    """Whether a parameter may be read outside of a forward."""
    return unit.is_readable and not is_dtensor(unit.parameters[index])


def closed(name: str) -> EngineClosedError:
    """What is wrong with parameter `name` once its engine is closed."""
    return EngineClosedError(
        f"{name} has no data any more, because its engine was closed; save the data first, then "
        "close"
    )


def read(unit: Unit, index: int) -> torch.Tensor:
    """A copy of the value of parameter `index`, on its device; waits for pending updates.

    Raises `EngineClosedError` after the end of the engine, and `ShardedParameterError` outside of a
    forward where a rank must not read alone.
    """
    if not unit.tier:
        raise closed(unit.names[index])
    if unit.data.shown:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return unit.parameters[index].detach().clone()
    copy = unit.listeners.border.copied(unit, index)
    if copy is not None:
        return copy
    if not readable(unit, index):
        raise ShardedParameterError(
            f"{unit.names[index]} of a wrapped model was read outside of its module's forward, "
            "where this rank has a part of it; read it inside of `with infinity.gathered(model):`"
        )
    unit.listeners.border.check_thread(f"{unit.names[index]} was read")
    unit.listeners.updates.look()
    if not unit.facts.shared:
        return unit.states.parameter(Kind.PARAM, index).to(unit.parameters[index].device)
    place = unit.layout.places[index]
    unit.start()
    try:
        return unit.wait()[place.offset : place.end].view(place.shape).clone()
    finally:
        unit.release()


class LazyValue(LazyTensor):
    """The value of parameter `index` of `unit`, detached. Each operator reads it again."""

    way = WRITE

    @staticmethod
    def __new__(cls, unit: Unit, index: int) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            parameter = unit.parameters[index]
            return cls.without_data(parameter.shape, parameter.dtype, parameter.device)

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit, self.place = unit, index

    @property
    def memory(self) -> Hashable:
        """That of the parameter."""
        return id(self.unit), self.place

    def fetch(self) -> torch.Tensor:
        """A copy of the value."""
        return read(self.unit, self.place)

    def check_replace(self) -> None:
        """Refused."""
        raise ShardedParameterError(f"{WRITE} ({self.unit.names[self.place]})")

    def detached(self) -> LazyValue:
        """The same again."""
        return LazyValue(self.unit, self.place)
