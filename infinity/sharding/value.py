"""The values of a parameter that is read outside of its module's forward.

[Note: reading outside of a forward]
Where this rank keeps all of a parameter (one rank, and stages 0 to 2), code outside of a forward
may read it. It gets a copy of the current value. A write raises, because it would change the copy:
use `gathered(write=True)`. So does a write to a view of a copy, which is a `ReadOnlyCopy`.

`parameter.data` and `parameter.detach()` are a `LazyValue`, which tells shape, dtype and device
without reading. With autograd on, a parameter that requires a gradient is read through `_Read`, so
that a loss built outside of a forward (weight decay, for example) has the gradients of plain torch.

With stages 1 and 2 the ranks post a gather of what they write when they write it (`Unit.renew`), so
one of them may read alone. Where ranks have shards (stage 3), and of DTensors, reading raises: all
ranks would have to read alike, and a script that prints on the first one would hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from infinity.errors import ShardedParameterError
from infinity.placement.spec import Kind
from infinity.sharding.copied import read_only
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.recognize import is_dtensor

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit

_ATEN: Any = torch.ops.aten
_WRITE = (
    "a copy of a parameter was changed in place, which would be lost; change the parameter inside "
    "`with infinity.gathered(parameter, write=True):`"
)


def readable(unit: Unit, index: int) -> bool:
    """Whether a parameter may be read outside of a forward."""
    return unit.is_readable and not is_dtensor(unit.parameters[index])


def read(unit: Unit, index: int) -> torch.Tensor:
    """A copy of the value of parameter `index`, on its device; waits for pending updates."""
    unit.listeners.border.check_thread(f"{unit.names[index]} was read")
    unit.listeners.updates.look()
    if not unit.shared:
        return unit.states.parameter(Kind.PARAM, index).to(unit.parameters[index].device)
    place = unit.layout.places[index]
    unit.start()
    try:
        return unit.wait()[place.offset : place.end].view(place.shape).clone()
    finally:
        unit.release()


class LazyValue(LazyTensor):
    """The value of parameter `index` of `unit`, detached. Each operator reads it again."""

    way = _WRITE

    @staticmethod
    def __new__(cls, unit: Unit, index: int) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            parameter = unit.parameters[index]
            return cls.without_data(parameter.shape, parameter.dtype, parameter.device)

    def __init__(self, unit: Unit, index: int) -> None:
        self._unit = unit
        self._place = index

    def fetch(self) -> torch.Tensor:
        """A copy of the value."""
        return read(self._unit, self._place)

    def replace(self, values: torch.Tensor) -> None:
        """Refused."""
        raise ShardedParameterError(f"{_WRITE} ({self._unit.names[self._place]})")

    def detached(self) -> LazyValue:
        """The same again."""
        return LazyValue(self._unit, self._place)


def _detach(func: Any, tensor: LazyValue) -> LazyValue:
    return tensor.detached()


LazyValue.answers = {_ATEN.detach.default: _detach, _ATEN.alias.default: _detach}


class _Read(torch.autograd.Function):
    """A copy of a parameter whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
        return read(unit, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


class _Same(_Read):
    """The value of a parameter, read when it is needed, right after the parameter in the graph."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
        return LazyValue(unit, index)


def same(parameter: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
    """What `parameter.view_as(parameter)` gives outside of a forward.

    Callers want the node that accumulates the gradient: `.grad_fn.next_functions[0][0]` of the
    view, as torch.distributed.pipelining asks for. Nothing is read for that.
    """
    with torch._C.DisableTorchFunctionSubclass():
        view: torch.Tensor = _Same.apply(parameter, unit, index)  # type: ignore[no-untyped-call]
        return view


def on_values(
    func: Callable[..., Any], args: Any, kwargs: Any, place_of: Callable[[Any], Any]
) -> Any:
    """`func` on the values of the parameters among its arguments: `place_of` gives unit and index
    of one, and None for anything else."""
    copies: list[torch.Tensor] = []

    def value(given: Any) -> Any:
        place = place_of(given)
        if place is None:
            return given
        with torch._C.DisableTorchFunctionSubclass():
            tracked = torch.is_grad_enabled() and given.requires_grad
            if not tracked:
                return LazyValue(*place)
            copies.append(_Read.apply(given, *place))  # type: ignore[no-untyped-call]
        return copies[-1]

    args, kwargs = tree_map(value, (tuple(args), kwargs or {}))
    return read_only(func(*args, **kwargs), copies, _WRITE)
