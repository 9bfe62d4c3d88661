"""The record of the gradients of one unit in the step under way: which parameters have one, its
place, and the factors by which it differs from `.grad` of torch. It holds no bytes.

[Note: the same on all ranks]
A rank knows the gradients that its own backward brought. `Gradients.settle` agrees on the gradients
of all ranks. Until then a rank must not conclude from its own record that a unit has none, because
another rank may have some.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import torch

from infinity.sharding.facts import UnitFacts


class GradientState(enum.Enum):
    """The state of the gradients of a unit in the step under way.

    EMPTY: there are none on this rank. COLLECTING: a backward brings them. SETTLED: final, averaged
    over the ranks and at home. SPENT: SETTLED, and an update reads them until it ends.
    """

    EMPTY = enum.auto()
    COLLECTING = enum.auto()
    SETTLED = enum.auto()
    SPENT = enum.auto()


class Where(enum.Enum):
    """The place of the gradient of one parameter.

    NOWHERE: there is none. If gradients need no buffer, its part of the gradient block may hold any
    bytes; else it holds zeros once other gradients of the unit are at home. BUFFER: in the
    `GradientBuffer` only. HOME: in the gradient block, and the buffer may hold more of it.
    FORGOTTEN: there is none, but its bytes are still in the block. ZEROED: there is none, and zeros
    have replaced its bytes.
    """

    NOWHERE = enum.auto()
    BUFFER = enum.auto()
    HOME = enum.auto()
    FORGOTTEN = enum.auto()
    ZEROED = enum.auto()

    @property
    def present(self) -> bool:
        """Whether there is a gradient."""
        return self in (Where.BUFFER, Where.HOME)

    @property
    def filled(self) -> bool:
        """Whether the step has written to the part of the parameter in the gradient block."""
        return self in (Where.HOME, Where.FORGOTTEN, Where.ZEROED)


class GradientEntry(NamedTuple):
    """The record of the gradient of one parameter."""

    where: Where = Where.NOWHERE
    clip: float = 1.0
    """The factor by which an update multiplies it."""
    unscaled: bool = False
    """Whether it was assigned, and so was not multiplied by the loss scale."""


class GradientLedger:
    """The record of the gradients of a unit, by index of the parameter.

    `Gradients` and `GradientNorm` write it on the thread that runs the model. The thread of the
    exchange notes squares.
    """

    def __init__(self, facts: UnitFacts) -> None:
        self._facts = facts
        parameters = len(facts.parameters)
        self.entries = [GradientEntry()] * parameters
        self.state = GradientState.EMPTY
        self.loss_scale = 1.0
        """The factor of the loss, and so of the gradients, in the backward."""
        self.collected = 0
        """The number of gradients of single parameters that the step under way has brought."""
        self.expected = 0
        """The number that the last step had brought."""
        self.is_apart = False
        """Whether some of those at home are not averaged over the replicas yet
        (`Engine.no_sync`)."""
        self._generations = [0] * parameters
        self._measured: tuple[int, float | None] = 0, None

    def present(self) -> list[int]:
        """The parameters with a gradient; after `settle`, those with one on any rank."""
        return [index for index, entry in enumerate(self.entries) if entry.where.present]

    def has(self, index: int) -> bool:
        """Whether there is a gradient of the parameter."""
        return self.entries[index].where.present

    def at_home(self, index: int) -> bool:
        """Whether the gradient block has the gradient of the parameter, or a part of it."""
        return self.entries[index].where is Where.HOME

    def is_filled(self) -> bool:
        """Whether the step has written to the gradient block."""
        return any(entry.where.filled for entry in self.entries)

    @property
    def came_all(self) -> bool:
        """Whether there are as many gradients as in the last step."""
        return self.collected == self.expected

    def scale_of(self, index: int) -> float:
        """The factor by which the loss scale has multiplied the gradient of the parameter."""
        return 1.0 if self.entries[index].unscaled else self.loss_scale

    def clip_of(self, index: int) -> float:
        """The product of the clip factors so far."""
        return self.entries[index].clip

    def factor(self, index: int, further: float = 1.0) -> float:
        """The factor by which an update multiplies the gradient, if it is clipped by `further`,
        too."""
        return self.entries[index].clip * further / self.scale_of(index)

    def generation(self, index: int) -> int:
        """A number that changes when the gradient of the parameter is forgotten."""
        return self._generations[index]

    def age(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters are forgotten."""
        for index in indices:
            self._generations[index] += 1

    def measured(self) -> float | None:
        """The sum of squares of all gradients, as they lie in the block; None if it is not
        known."""
        collected, squares = self._measured
        return squares if collected == self.collected else None

    def note_squares(self, squares: float | None, collected: int | None = None) -> None:
        """Note the sum of squares of all gradients, as they lie in the block, when the step had
        brought `collected` of them (default: now)."""
        self._measured = self.collected if collected is None else collected, squares

    def forget_squares(self) -> None:
        """The gradients change, so their sum of squares is unknown."""
        self._measured = 0, None

    def summary(self) -> list[float]:
        """The numbers that the ranks add up for `Gradients.settle`."""
        flags = [float(entry.where.present) for entry in self.entries]
        collects = self.state is GradientState.COLLECTING
        scaled = self.has_scaled()
        return [*flags, scaled, self.loss_scale * scaled, self.is_apart, collects]

    def has_scaled(self) -> bool:
        """Whether there is a gradient that was multiplied by the loss scale."""
        return any(entry.where.present and not entry.unscaled for entry in self.entries)

    def scaled(self, values: torch.Tensor) -> torch.Tensor | None:
        """`values`, multiplied by the loss scale, in fp32. None if there is no loss scale, or if
        the product has no finite value in the dtype of the gradients."""
        if self.loss_scale == 1.0:
            return None
        scaled = values.float() * self.loss_scale
        most = torch.finfo(self._facts.gradient_dtype).max
        return scaled if bool((scaled.abs() <= most).all()) else None

    def set(self, indices: Iterable[int], where: Where) -> None:
        """The gradients of these parameters are at `where`."""
        for index in indices:
            self.entries[index] = self.entries[index]._replace(where=where)

    def expect(self, *states: GradientState) -> None:
        """Raise `RuntimeError` unless the gradients are in one of `states`."""
        if self.state not in states:
            raise RuntimeError(f"the gradients of {self._facts.name} are {self.state.name}")

    def clear(self) -> None:
        """There are no gradients any more."""
        self.state = GradientState.EMPTY
        self.entries = [GradientEntry()] * len(self.entries)
        self.age(range(len(self.entries)))
        self.loss_scale, self.collected, self.is_apart = 1.0, 0, False
