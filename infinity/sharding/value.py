"""The values of a parameter that is read outside of its module's forward. See [Note: reading
outside of a forward] in `sharding/parameter`."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from infinity.errors import EngineClosedError, ShardedParameterError
from infinity.placement.spec import Kind
from infinity.sharding.facts import UnitFacts
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.on_device import OnDevice
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.states import States

WRITE = (
    "a copy of a parameter was changed in place, which would be lost; change the parameter inside "
    "`with infinity.gathered(parameter, write=True):`"
)


def closed(name: str) -> EngineClosedError:
    """What is wrong with parameter `name` once its engine is closed."""
    return EngineClosedError(
        f"{name} has no data any more, because its engine was closed; save the data first, then "
        "close"
    )


class ParameterListener(Protocol):
    """The object that parameters tell of touches, and ask for what lies above the unit."""

    def touched(self) -> bool:
        """A parameter was touched while its unit is SHARDED: True once it is UNSHARDED."""

    def records_backward(self) -> bool:
        """Whether code of a backward runs now whose graph may outlive the backward."""

    def copied(self, index: int) -> torch.Tensor | None:
        """A copy of parameter `index` inside of a forward or a backward of this thread; None
        outside of both."""

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` when another thread is inside of a forward or backward; `what` the
        caller wants to do."""

    def look(self) -> None:
        """Return when parameters may be read."""

    def get_grad(self, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`."""

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`; None forgets it."""


class ParameterSource(Protocol):
    """The data of the unit of a handle, as `ParameterData`."""

    @property
    def facts(self) -> UnitFacts:
        """Those of the unit."""

    @property
    def listener(self) -> ParameterListener:
        """The object that is told of touches."""

    @property
    def tier(self) -> str:
        """Where the parameters are at home; "" once the engine is closed."""

    def position(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter that `tensor` is, or is the local tensor of; None for any
        other."""

    def index_of(self, parameter: torch.Tensor) -> int:
        """The index of one of these parameters."""

    def name_of(self, parameter: torch.Tensor) -> str:
        """The qualified name of one of these parameters."""

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The object that users have of a parameter."""

    def readable(self, index: int) -> bool:
        """Whether parameter `index` may be read outside of a forward."""

    def read(self, index: int) -> torch.Tensor:
        """A copy of the value of parameter `index`, on its device; waits for pending updates.

        Raises `EngineClosedError` after the end of the engine, and `ShardedParameterError` outside
        of a forward where a rank must not read alone.
        """

    def part(self, index: int) -> torch.Tensor:
        """A copy of the elements that this rank keeps of parameter `index`, (n,)."""

    def grad(self, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`; None once the engine is closed."""

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`."""

    def leaf(self, index: int) -> AbstractContextManager[None]:
        """Inside, parameter `index` is the tensor that autograd accumulates the gradient of."""

    def agree(self, index: int) -> None:
        """`requires_grad` of parameter `index` was set."""

    def note(self, tensor: torch.Tensor) -> None:
        """`tensor` is a handle that has the values of some of these parameters."""

    def make_dense(self) -> None:
        """The parameters are dense tensors, whose data the caller sets."""


class ParameterValues:
    """Reads parameters of one unit that are not shown. For the thread that runs the model."""

    def __init__(
        self, facts: UnitFacts, states: States, on_device: OnDevice, listener: ParameterListener
    ) -> None:
        self._facts, self._states = facts, states
        self._on_device, self._listener = on_device, listener

    def readable(self, index: int) -> bool:
        """Whether parameter `index` may be read outside of a forward."""
        return self._on_device.is_readable and not is_dtensor(self._facts.parameters[index])

    def read(self, index: int) -> torch.Tensor:
        """A copy of the value of parameter `index`, on its device; waits for pending updates.

        Raises `ShardedParameterError` outside of a forward where a rank must not read alone.
        """
        copy = self._listener.copied(index)
        if copy is not None:
            return copy
        name = self._facts.names[index]
        if not self.readable(index):
            raise ShardedParameterError(
                f"{name} of a wrapped model was read outside of its module's forward, "
                "where this rank has a part of it; read it inside of `with "
                "infinity.gathered(model):`"
            )
        self._listener.check_thread(f"{name} was read")
        self._listener.look()
        if not self._facts.shared:
            found = self._states.parameter(Kind.PARAM, index)
            return found.to(self._facts.parameters[index].device)
        place = self._facts.layout.places[index]
        self._on_device.start()
        try:
            flat = self._on_device.wait()
            return flat[place.offset : place.end].view(place.shape).clone()
        finally:
            self._on_device.release()

    def part(self, index: int) -> torch.Tensor:
        """A copy of the elements that this rank keeps of parameter `index`, (n,)."""
        self._listener.look()
        return self._states.part(Kind.PARAM, index)


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
        """That of the parameter."""
        return id(self.source), self.place

    def fetch(self) -> torch.Tensor:
        """A copy of the value."""
        return self.source.read(self.place)

    def check_replace(self) -> None:
        """Refused."""
        raise ShardedParameterError(f"{WRITE} ({self.source.facts.names[self.place]})")

    def detached(self) -> LazyValue:
        """The same again."""
        return LazyValue(self.source, self.place)
