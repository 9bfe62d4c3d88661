"""Copies of what the engine keeps, which nobody may mistake for the original."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from infinity.errors import ShardedParameterError

_IN_PLACE = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")),
}
_HARMLESS = {"requires_grad_", "detach_"}


def writes(name: str) -> bool:
    """Whether the function `name` of torch changes its first argument."""
    ends = name.endswith("_") and not name.endswith("__")
    return name in _IN_PLACE or (ends and name not in _HARMLESS)


class ReadOnlyCopy(torch.Tensor):
    """A copy, or a view of one, that raises `ShardedParameterError` when it is changed in place:
    the change would be lost. What is computed from it is an ordinary tensor."""

    way: str
    """What was copied, and what to do instead."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        copies = [value for value in _flat((args, kwargs)) if isinstance(value, ReadOnlyCopy)]
        changed = _flat(args[:1] if writes(name) else kwargs.get("out"))
        for value in changed:
            if isinstance(value, ReadOnlyCopy):
                raise ShardedParameterError(f"{value.way} (changed by {name})")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            return read_only(found, copies, copies[0].way) if copies else found


def read_only(value: Any, copies: Iterable[torch.Tensor], way: str) -> Any:
    """`value`, in which tensors that share memory with one of `copies` are `ReadOnlyCopy`; `way` is
    what their error says."""
    storages = {copy.untyped_storage()._cdata for copy in copies}

    def guarded(found: Any) -> Any:
        if type(found) is not torch.Tensor or found.untyped_storage()._cdata not in storages:
            return found
        made = found.as_subclass(ReadOnlyCopy)
        made.way = way
        return made

    return tree_map(guarded, value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
