"""Gradients as objects that users keep, apart from their parameters.

[Note: one gradient, some places]
In PyTorch `.grad` refers to an object of its own: here a `GradientObject`. It usually has one
place, its parameter. `a.grad = b.grad` gives it two places, and writes go to both. When `a.grad` is
set to another gradient, code that still holds the old one gets its values. After the gradient was
forgotten, uses of the old object raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from infinity.errors import ShardedParameterError
from infinity.optim.lazy_norm import NormSource, NormTaken
from infinity.optim.step import UnitShare
from infinity.sharding.facts import UnitFacts
from infinity.sharding.unit import Unit


class GradientStore(NormSource, Protocol):
    """Keeps the gradients of all parameters of an engine."""

    def fetch(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """A copy of the gradient of parameter `index`; None if there is none."""

    def write(self, unit: Unit, index: int, values: torch.Tensor) -> None:
        """Replace it by `values`, in place."""

    def alias(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """It shares the memory of `value` from now on."""

    def share(self, unit: Unit, index: int, gradient: GradientObject | None) -> None:
        """`gradient` belongs to several parameters, of which this is one. None: no longer."""

    def take_norm(self, unit: Unit, index: int) -> NormTaken:
        """Its current L2 norm."""

    def scale(self, shares: Sequence[UnitShare], factor: float) -> None:
        """Multiply these gradients by `factor`, as a clip does."""

    def zero(self, shares: Sequence[UnitShare]) -> None:
        """Set these gradients to zeros."""


class GradientPlace(NamedTuple):
    """The gradient of one parameter, until it is forgotten or replaced."""

    answers: GradientStore
    unit: Unit
    position: int
    generation: int

    @property
    def share(self) -> UnitShare:
        return UnitShare(self.unit, (self.position,))

    @property
    def valid(self) -> bool:
        """Whether it was not forgotten."""
        gradients = self.unit.gradients
        return gradients.ledger.generation(
            self.position
        ) == self.generation and gradients.ledger.has(self.position)

    def fetch(self) -> torch.Tensor:
        """A copy on the device of the plain model's gradient."""
        found = self.answers.fetch(self.unit.facts, self.position)
        if found is None:
            raise ShardedParameterError(forgotten(self.unit.facts.names[self.position]))
        return found.to(self.answers.device)


class GradientObject:
    """A gradient as PyTorch knows it. See [Note: one gradient, some places]."""

    def __init__(self) -> None:
        self._places: list[GradientPlace] = []
        self.name = ""
        """The name of a parameter that has or had it."""
        self.values: torch.Tensor | None = None
        """The values, if no parameter has it any more."""

    def places(self) -> list[GradientPlace]:
        """The parameters that have it."""
        self._places = [place for place in self._places if place.valid]
        return self._places

    def is_at(self, unit: Unit, index: int) -> bool:
        """Whether it is the gradient of this parameter."""
        return any(place.unit is unit and place.position == index for place in self.places())

    def enter(self, answers: GradientStore, unit: Unit, index: int) -> None:
        """It is the gradient of this parameter, too, whose gradient has its values."""
        self._places.append(
            GradientPlace(answers, unit, index, unit.gradients.ledger.generation(index))
        )
        self.name, self.values = unit.facts.names[index], None

    def leave(self, unit: Unit, index: int) -> None:
        """It is no longer the gradient of this parameter. Called while that still has its
        values."""
        places = self.places()
        if len(places) == 1:
            self.values = places[0].fetch()
        self._places = [p for p in places if (p.unit, p.position) != (unit, index)]

    def like(self) -> torch.Tensor:
        """A tensor of its shape, dtype and device, of one element of memory."""
        if self.values is not None:
            return self.values
        answers, unit, index, _ = self.places()[0]
        some = torch.empty((), dtype=dtype_of(unit, index), device=answers.device)
        return some.expand(unit.facts.parameters[index].shape)

    @property
    def place(self) -> GradientPlace | None:
        """The only parameter that has it; None if none or several have it. Raises
        `ShardedParameterError` if it was forgotten."""
        places = self.places()
        if not places and self.values is None:
            raise ShardedParameterError(forgotten(self.name))
        return places[0] if len(places) == 1 else None

    def fetch(self) -> torch.Tensor:
        """A copy of it on its device."""
        if self.place is None and self.values is not None:
            return self.values.clone()
        return self.places()[0].fetch()

    def replace(self, values: torch.Tensor) -> None:
        """Replace it by `values`."""
        if self.place is None and self.values is not None:
            self.values = values.clone()
        for answers, unit, index, _ in self.places():
            answers.write(unit, index, values)


def dtype_of(unit: Unit, index: int) -> torch.dtype:
    """The dtype of a gradient, as users see it."""
    return (
        unit.facts.gradient_dtype if unit.gradients.ledger.scale_of(index) == 1.0 else torch.float32
    )


def forgotten(name: str) -> str:
    """The error text for a lazy gradient that its parameter does not have any more."""
    return (
        f"the gradient of {name} was forgotten since .grad was read; keep a copy (.clone()) from "
        "before zero_grad()"
    )
