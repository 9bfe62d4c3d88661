"""Uses of a unit's bytes on the compute device. Each begins once and ends once. See [Note: views
that outlive a use] in `sharding/views`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.unit import Unit, unit_of
from infinity.sharding.value import LazyValue
from infinity.sharding.views import GatheredParameter


def place_of(parameter: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit of a parameter of a wrapped model, shown or not, and its index in the unit; None for
    any other tensor."""
    if isinstance(parameter, ShardedParameter):
        source = type(parameter).source
        return unit_of(source), source.index_of(parameter)
    for views in list(GatheredParameter.views):
        index = views.index(parameter)
        if index is not None:
            return unit_of(views.source), index
    return None


def handled(tensor: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit of the parameter that `tensor` is a handle of, and its index in the unit; None if
    `tensor` is no handle of a whole parameter."""
    if isinstance(tensor, LazyValue):
        return unit_of(tensor.source), tensor.place
    if is_dtensor(tensor) or not isinstance(tensor, ShardedParameter):
        return None
    return place_of(tensor)


class Use:
    """One use of a unit's bytes. They stay in place until `end`.

    Only the model's thread may use it. `end` calls `leave(unit)` once.
    """

    def __init__(self, unit: Unit, leave: Callable[[Unit], None]) -> None:
        self.unit = unit
        self._leave: Callable[[Unit], None] | None = leave

    def referenced(self) -> list[str]:
        """The names of parameters that objects outside the model are known to refer to."""
        return []

    def end(self) -> None:
        """Release the bytes. Raises `RuntimeError` if the use has already ended."""
        leave, self._leave = self._leave, None
        if leave is None:
            raise RuntimeError(f"a use of {self.unit.facts.name} was ended twice")
        self._hide()
        leave(self.unit)

    def _hide(self) -> None:
        """Hide the parameters that this use showed."""


class Unpacking(Use):
    """A use for views of parameter `index` that autograd saved. All of them share `window`."""

    def __init__(
        self, unit: Unit, index: int, flat: torch.Tensor, leave: Callable[[Unit], None]
    ) -> None:
        super().__init__(unit, leave)
        self._index = index
        self.window = unit.data.window(flat, index)

    def referenced(self) -> list[str]:
        """The name of the parameter while a view of it exists."""
        return [self.unit.facts.names[self._index]] if self.window.references() else []

    def _hide(self) -> None:
        if self.window.references():  # after an error: references are reported at most once
            self.unit.data.forget_window(self._index)


class Showing(Use):
    """A use that shows the parameters: they point at the bytes until the last `Showing` ends.

    With `writable` the user may change the parameters meanwhile. The caller then writes the new
    content back.
    """

    def __init__(
        self, unit: Unit, flat: torch.Tensor, leave: Callable[[Unit], None], writable: bool = False
    ) -> None:
        super().__init__(unit, leave)
        self._writable = writable
        unit.data.show(flat, writable)

    def referenced(self) -> list[str]:
        """The parameters that objects outside the model refer to. Empty while other uses show them,
        too. Leaves out parameters that have their own memory."""
        data = self.unit.data
        if data.shown != 1:
            return []
        views = data.views
        return [self.unit.facts.names[i] for i in views.referenced() if views.own(i) is None]

    def _hide(self) -> None:
        self.unit.data.hide(self._writable)


def collected(use: Use) -> list[str]:
    """`use.referenced()` after a garbage collection, because cycles of objects keep tensors
    alive."""
    if not use.referenced():
        return []
    gc.collect()
    return use.referenced()


def described(names: Sequence[Any]) -> str:
    """The first of `names`, and the number of further names."""
    return str(names[0]) if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
