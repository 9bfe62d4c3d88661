"""A lazy tensor that is nothing else: its values are in a tensor of the test's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from infinity.sharding.lazy_tensor import LazyTensor

_ATEN: Any = torch.ops.aten


class Handle(LazyTensor):
    """A lazy tensor over the values in `home`, which counts how often they were copied."""

    home: torch.Tensor
    fetched: list[int]

    @staticmethod
    def __new__(
        cls, home: torch.Tensor, requires_grad: bool = False, fetched: list[int] | None = None
    ) -> Any:
        made = cls.without_data(home.shape, home.dtype, home.device, home.stride())
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_(requires_grad)
        made.home = home
        made.fetched = [0] if fetched is None else fetched
        return made

    def fetch(self) -> torch.Tensor:
        self.fetched[0] += 1
        return self.home.clone()

    def replace(self, values: torch.Tensor) -> None:
        self.home.copy_(values)

    @property
    def memory(self) -> Hashable:
        return id(self.home)


def _detach(func: Any, handle: Any) -> Any:
    return Handle(handle.home, fetched=handle.fetched) if type(handle) is Handle else NotImplemented


Handle.answers = {_ATEN.detach.default: _detach, _ATEN.alias.default: _detach}


class FixedHandle(Handle):
    """One that refuses to be changed."""

    def check_replace(self) -> None:
        raise ValueError("fixed")
