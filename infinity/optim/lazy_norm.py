"""The L2 norm of a gradient that is not computed yet.

[Note: a norm that is not computed yet]
`clip_grad_norm_` takes the norm of every gradient, and then the norm of these norms. Computed so,
each gradient would be read separately, and each norm rounded. So the norm of one gradient is lazy,
too (`LazyNorm`). The L2 norm of several lazy norms is one pass over the gradients, with the bits of
the engine's own norm: a 0-dimensional tensor in fp64.

A norm belongs to the gradient at the time of the call. So before a gradient changes, the norms that
user code still holds are measured (`NormTaken.freeze`). That needs no other rank. The sum over the
ranks is computed when the norm is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from infinity.optim.step import UnitShare
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.unit import Unit

_ATEN: Any = torch.ops.aten
L2 = 2.0
"""The order of the norms that are lazy."""


class NormSource(Protocol):
    """Computes norms of gradients of an engine."""

    device: torch.device
    """The device of the gradients in the plain model."""

    def squares_here(self, share: UnitShare) -> float:
        """The sum of squares of this rank's part."""

    def over_ranks(self, squares: float) -> float:
        """The sum of `squares` over the ranks. All ranks call it."""

    def norm(self, shares: Sequence[UnitShare]) -> float:
        """The L2 norm over all ranks. All ranks call it."""


class NormTaken:
    """The norm of the gradient of one parameter when this object was made."""

    def __init__(self, answers: NormSource, unit: Unit, index: int) -> None:
        self.answers = answers
        self.share = UnitShare(unit, (index,))
        """The gradient."""
        self._squares: float | None = None

    @property
    def frozen(self) -> bool:
        """Whether the gradient may have changed."""
        return self._squares is not None

    def freeze(self) -> None:
        """The gradient is about to change."""
        if self._squares is None:
            self._squares = self.answers.squares_here(self.share)

    def value(self) -> float:
        """The norm. All ranks make the same calls."""
        if self._squares is None:
            return self.answers.norm([self.share])
        return math.sqrt(self.answers.over_ranks(self._squares))


class LazyNorm(LazyTensor):
    """The L2 norm of one gradient (0-dimensional), or the norms of several (n,). See [Note: a norm
    that is not computed yet]."""

    shares = False

    @staticmethod
    def __new__(cls, taken: Sequence[NormTaken], dtype: torch.dtype, several: bool) -> Any:
        return cls.without_data((len(taken),) if several else (), dtype, taken[0].answers.device)

    def __init__(self, taken: Sequence[NormTaken], dtype: torch.dtype, several: bool) -> None:
        self.taken = tuple(taken)
        """The norms."""
        self.written: torch.Tensor | None = None
        """Values that were written in place of the norms."""

    @property
    def called(self) -> str:
        """The name in errors."""
        return "the norm of a gradient of a wrapped model"

    def fetch(self) -> torch.Tensor:
        """A copy of the norms."""
        if self.written is None:
            norms = [taken.value() for taken in self.taken]
            self.written = torch.tensor(
                norms if self.dim() else norms[0], dtype=self.dtype, device=self.device
            )
        return self.written.clone()

    def replace(self, values: torch.Tensor) -> None:
        """Replace the norms by `values`, the result of an operator in place."""
        self.written = values.clone()


def shares_of(taken: Sequence[NormTaken]) -> list[UnitShare]:
    """The gradients of these norms, unit by unit."""
    positions: dict[Unit, list[int]] = {}
    for each in taken:
        positions.setdefault(each.share.unit, []).extend(each.share.positions)
    return [UnitShare(unit, tuple(sorted(found))) for unit, found in positions.items()]


def is_l2(order: Any) -> bool:
    """Whether norms of this order are lazy."""
    return order is None or (isinstance(order, (int, float)) and float(order) == L2)


def norm_of_norms(tensor: LazyNorm) -> Any:
    """The L2 norm of several norms; `NotImplemented` if one of their gradients has changed."""
    taken, answers = tensor.taken, tensor.taken[0].answers
    distinct = {(each.share.unit, each.share.positions) for each in taken}
    if (
        tensor.written is not None
        or len(distinct) < len(taken)
        or any(each.frozen or each.answers is not answers for each in taken)
    ):
        return NotImplemented
    return torch.tensor(answers.norm(shares_of(taken)), dtype=torch.float64, device=answers.device)


def _norm(func: Any, tensor: Any, order: Any = L2, *rest: Any, **named: Any) -> Any:
    plain = rest or named or not is_l2(order) or not isinstance(tensor, LazyNorm)
    return NotImplemented if plain else norm_of_norms(tensor)


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if any(
        not isinstance(tensor, LazyNorm) or tensor.dim() or tensor.written is not None
        for tensor in tensors
    ):
        return NotImplemented
    taken = [each for tensor in tensors for each in tensor.taken]
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return LazyNorm(taken, dtype, several=True)


ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.norm.Scalar: _norm,
    _ATEN.stack.default: _stack,
}
"""Operators that read no gradient."""
LazyNorm.answers = ANSWERS
