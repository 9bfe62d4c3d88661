"""The parameters that `ctx.saved_tensors` gives to a custom autograd function.

[Note: a parameter that comes back]
In plain PyTorch `ctx.saved_tensors` gives the parameter itself. Here the engine brings its bytes,
and autograd makes a tensor of them. Libraries read attributes of parameters from that tensor: its
class, names of DeepSpeed, attributes of their own. A `LentParameter` has these, and the bytes.
Autograd keeps the class of a tensor only if its operators arrive in `__torch_dispatch__`. So they
arrive here, and run on the plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.sharding.compiled import DETACHING
from infinity.sharding.zero_names import ZeroNames, ZeroStatus


class LentParameter(nn.Parameter, ZeroNames):
    """The bytes of a parameter, as a plain tensor, while a backward needs them."""

    ds_status = ZeroStatus.AVAILABLE
    _parameter: torch.Tensor
    _plain_values: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor, values: torch.Tensor) -> LentParameter:
        """The bytes of `parameter` are `values`."""
        make: Any = torch.Tensor._make_subclass
        made: LentParameter = make(cls, values)
        made._parameter, made._plain_values = parameter, values
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self._plain_values!r}"

    @property
    def ds_id(self) -> int:
        """The number of the parameter."""
        return id(self._parameter)

    def __getattr__(self, name: str) -> Any:
        """Attributes that were set on the parameter."""
        if not name.startswith("_") and name in vars(self._parameter):
            return vars(self._parameter)[name]
        raise AttributeError(f"a saved parameter has no attribute {name!r}")

    def numpy(self, *, force: bool = False) -> Any:
        """As of a plain tensor. Torch refuses it to classes with a `__torch_dispatch__`."""
        with torch.no_grad():
            plain = self._plain_values.detach()
        return plain.requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self._plain_values.tolist()

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in DETACHING:
            return cls.of(args[0]._parameter, args[0]._plain_values)
        given, named = tree_map(_plain, (tuple(args), kwargs or {}))
        return func(*given, **named)


def _plain(value: Any) -> Any:
    return value._plain_values if isinstance(value, LentParameter) else value
