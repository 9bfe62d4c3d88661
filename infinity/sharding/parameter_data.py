"""What the data of a unit's parameters is: the bytes of the unit while that is shown, else a
guarded placeholder."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.sharding.parameter import guard_for
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tensor_parallel import attach, local
from infinity.sharding.use import GatheredParameter, Views, Window

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit


class UnitState(enum.Enum):
    """What the parameters of a unit point at.

    SHARDED: a one-element placeholder; touching the data raises. UNSHARDED: views of the unit's run
    of the compute arena. Of a DTensor that is its local tensor, always the same object.
    """

    SHARDED = enum.auto()
    UNSHARDED = enum.auto()


class ParameterData:
    """Points the parameters of one unit at data. For the thread that runs the model.

    They hold what they held before until the first `guard`. With `checked` a digest tells of every
    write (`Views`).
    """

    def __init__(self, unit: Unit, checked: bool) -> None:
        self._unit = unit
        self.state = UnitState.UNSHARDED
        self.shown = 0
        """How many uses show the parameters."""
        dtype = unit.dtype
        parameters = unit.parameters
        self._placeholder = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype)
        self._tensors = [torch.empty(0, dtype=dtype) if is_dtensor(p) else p for p in parameters]
        held = {id(t): t for t in (*parameters, *self._tensors)}.values()
        guards = {kind: guard_for(unit, kind) for kind in dict.fromkeys(map(type, held))}
        # With their classes while gathered, and while not.
        self._guarded = [(t, type(t), guards[type(t)]) for t in held]
        self._positions = {
            id(t): i for those in (parameters, self._tensors) for i, t in enumerate(those)
        }
        self.views = Views(parameters, self._tensors, unit.layout.places, checked, unit)
        """The parameters, as they point at the bytes of the unit while that is shown."""
        self._window: Window | None = None

    def place_on(self, device: torch.device) -> None:
        """The placeholder is on `device` from now on."""
        self._placeholder = self._placeholder.to(device)

    def position(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter that `tensor` is, or is the local tensor of; None for any
        other."""
        return self._positions.get(id(tensor))

    def show(self, flat: torch.Tensor, writable: bool = False) -> None:
        """SHARDED -> UNSHARDED: the parameters point at their places in `flat` (numel,); paired
        with `hide`. See `Showing`."""
        if self.shown == 0:
            self._lift_guard()
            self.views.attach(flat)
            for tensor, plain, _ in self._guarded:
                if plain is nn.Parameter:
                    tensor.__class__ = GatheredParameter
            self.state = UnitState.UNSHARDED
        self.shown += 1
        self.views.writers += writable

    def hide(self, writable: bool = False) -> None:
        """End one `show`; after the last UNSHARDED -> SHARDED: the parameters point at a guarded
        placeholder."""
        self.shown -= 1
        self.views.writers -= writable
        if self.shown == 0:
            self.guard()
            self.views.detach()

    def window(self, flat: torch.Tensor) -> Window:
        """The bytes of the unit in `flat` (numel,) as a storage of their own, one for as long as
        they lie there."""
        if self._window is None or self._window.storage.data_ptr() != flat.data_ptr():
            self._window = Window(flat, 0, flat.numel())
        return self._window

    def changed(self) -> list[int]:
        """The parameters that were written to while nobody may, each told once."""
        return self.views.changed() if self.shown else []

    def guard(self) -> None:
        """Point the parameters at the placeholder; what they held is freed if nobody else holds
        it."""
        self._lift_guard()  # it lets nobody touch the data, us included
        for parameter, tensor, place in zip(
            self._unit.parameters, self._tensors, self._unit.layout.places, strict=True
        ):
            tensor.data = self._placeholder.expand(place.shape)
            if is_dtensor(parameter) and local(parameter) is not tensor:
                attach(parameter, tensor)
        for tensor, _, guard in self._guarded:
            tensor.__class__ = guard
        self.shown, self.state = 0, UnitState.SHARDED

    def close(self) -> None:
        """The parameters point at the placeholder for good."""
        self.guard()
        self.views.close()
        self._window = None

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """After `close`: the parameters are plain ones again, with these `values`."""
        self._lift_guard()
        for parameter, value in zip(self._unit.parameters, values, strict=True):
            parameter.data = value

    def _lift_guard(self) -> None:
        for tensor, plain, _ in self._guarded:
            tensor.__class__ = plain

    def grad(self, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`; None once the engine is closed."""
        unit = self._unit
        return unit.listeners.grads.get(unit, index) if unit.tier else None

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`."""
        unit = self._unit
        if unit.tier:
            unit.listeners.grads.set(unit, index, value)
