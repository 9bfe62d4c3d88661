"""Tensors that lie side by side, as one tensor: the gradient of a weight in tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.sharding.lazy_tensor import LazyTensor, brought

_ATEN: Any = torch.ops.aten


class JoinedTensor(LazyTensor):
    """`parts`, lazy or plain tensors of one dtype, joined along `dimension`. A write to it writes
    to the parts."""

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor], dimension: int) -> Any:
        first = parts[0]
        shape = list(first.shape)
        shape[dimension] = sum(part.shape[dimension] for part in parts)
        return cls.without_data(shape, first.dtype, first.device)

    def __init__(self, parts: Sequence[torch.Tensor], dimension: int) -> None:
        self.parts = tuple(parts)
        """The tensors."""
        self.dimension = dimension
        """The dimension along which the tensors lie."""

    @property
    def called(self) -> str:
        first = self.parts[0]
        return first.called if isinstance(first, LazyTensor) else super().called

    def fetch(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([brought(part).detach() for part in self.parts], self.dimension)

    def detached(self) -> JoinedTensor:
        return JoinedTensor(self.parts, self.dimension)

    def check_replace(self) -> None:
        """Raise if one of the parts refuses new values."""
        for part in self.parts:
            if isinstance(part, LazyTensor):
                part.check_replace()

    def replace(self, values: torch.Tensor) -> None:
        """Copy `values` into the parts."""
        with torch.no_grad():
            for part, value in zip(self.parts, self.divided(values), strict=True):
                part.copy_(value)

    def assign(self, values: Any) -> None:
        """`.data = values`: the parts adopt the memory of `values`."""
        if values.shape != self.shape or values.dtype is not self.dtype:
            super().assign(values)
        same = isinstance(values, JoinedTensor) and values.is_split_as(self.parts, self.dimension)
        divided = values.parts if same else self.divided(values)
        for part, value in zip(self.parts, divided, strict=True):
            if isinstance(part, LazyTensor):
                part.assign(value)
            else:
                part.data = value

    def divided(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of `values`, one for each part. `values` has the shape of this tensor."""
        sizes = [part.shape[self.dimension] for part in self.parts]
        return values.split(sizes, self.dimension)

    def is_split_as(self, parts: Sequence[torch.Tensor], dimension: int) -> bool:
        """Whether its parts have the shapes of these."""
        mine, theirs = [part.shape for part in self.parts], [part.shape for part in parts]
        return mine == theirs and self.dimension == dimension


def _each(func: Any, tensor: Any, *args: Any) -> Any:
    """An elementwise in-place operator, applied to each part."""
    if not isinstance(tensor, JoinedTensor) or any(
        isinstance(value, torch.Tensor) and value.dim() for value in args
    ):
        return NotImplemented
    args = tuple(map(brought, args))
    with torch.no_grad():
        for part in tensor.parts:
            func(part, *args)
    return tensor


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN.mul_.Tensor: _each,
    _ATEN.mul_.Scalar: _each,
    _ATEN.zero_.default: _each,
}
JoinedTensor.answers = _ANSWERS
