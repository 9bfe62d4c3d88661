from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
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
    """A copy, or a view of one. It raises `ShardedParameterError` if it is changed in place,
    because the change would be lost. Operators on it give ordinary tensors."""

    way: str
    """The text of the error: the copied object, and the way out."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        copies = [value for value in flattened((args, kwargs)) if isinstance(value, ReadOnlyCopy)]
        changed = flattened(args[:1] if writes(name) else kwargs.get("out"))
        for value in changed:
            if isinstance(value, ReadOnlyCopy):
                raise ShardedParameterError(f"{value.way} (changed by {name})")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            base = getattr(getattr(func, "__self__", None), "__name__", "") == "_base"
            # torch.compile asks for `_base` until it has another class.
            return read_only(found, copies, copies[0].way) if copies and not base else found


class LentArray(np.ndarray[Any, Any]):
    """An array of a copy, or a view of one. It raises `ShardedParameterError` if it is changed,
    because the change would be lost. Functions on it give ordinary arrays."""

    way: str = ""
    """The text of the error: the copied object, and the way out."""

    def __array_finalize__(self, source: Any) -> None:
        self.way = getattr(source, "way", "")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(self)
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        self._check(*named.get("out", ()), *(inputs[:1] if method == "at" else ()))
        plain = [_plain(value) for value in inputs]
        if "out" in named:
            named["out"] = tuple(map(_plain, named["out"]))
        return getattr(ufunc, method)(*plain, **named)

    @staticmethod
    def _check(*changed: Any) -> None:
        for array in changed:
            if isinstance(array, LentArray) and not array.flags.writeable:
                raise ShardedParameterError(array.way)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, LentArray) else value


def lent(array: Any, way: str) -> Any:
    """`array`, of a copy, as a `LentArray` that cannot be written. `way` is the text of its
    error."""
    array.flags.writeable = False
    made = array.view(LentArray)
    made.way = way
    return made


def read_only(value: Any, copies: Iterable[torch.Tensor], way: str) -> Any:
    """`value`, in which tensors that share memory with one of `copies` become `ReadOnlyCopy`. `way`
    is the text of their error."""
    storages = {copy.untyped_storage()._cdata for copy in copies}

    def guarded(found: Any) -> Any:
        plain = type(found) is torch.Tensor and found.layout is torch.strided
        if not plain or found.untyped_storage()._cdata not in storages:
            return found
        made = found.as_subclass(ReadOnlyCopy)
        made.way = way
        return made

    return tree_map(guarded, value)


def flattened(value: Any) -> list[Any]:
    """The objects in `value`, through dicts, lists and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flattened(item)]
    return [value]
