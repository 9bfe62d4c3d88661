"""Tensors without data, of which users see shape, dtype and device, and whose values come when an
operator asks for them.

[Note: operators on lazy tensors]
An operator that a class does not answer itself (`LazyTensor.answers`) gets a copy of the values.
What it writes in place replaces them (`LazyTensor.replace`). A view of a copy is a `ReadOnlyCopy`.
Operators over lists take one tensor after the other, so that one copy is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from infinity.sharding.copied import read_only

_ATEN: Any = torch.ops.aten
_LIKE = {
    getattr(_ATEN, name).default
    for name in (
        *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
        *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")),
    )
}
"""Operators that ask for shape, dtype and device alone."""
_WHOLE = {"numpy", "__array__", "tolist", "__format__", "__reduce_ex__", "__deepcopy__"}
"""Methods that read the memory of a tensor past its operators."""


class LazyTensor(torch.Tensor):
    """A tensor without data: shape, dtype and device are those of what `fetch` gives. See [Note:
    operators on lazy tensors]."""

    answers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """Operators that need no data: each is called with the operator and its arguments, and gives
    `NotImplemented` where these need data."""
    way: ClassVar[str]
    """What the error says when a view of a copy is changed in place."""

    @classmethod
    def without_data(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """A new one; `__init__` has yet to run."""
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, tuple(shape), dtype=dtype, device=device)

    def fetch(self) -> torch.Tensor:
        """A copy of the values."""
        raise NotImplementedError

    def replace(self, values: torch.Tensor) -> None:
        """`values` are the values from now on."""
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if attribute == "data" and isinstance(args[0], LazyTensor):
                return args[0].replace(args[1]) if name == "__set__" else args[0].detach()
            if name == "__setitem__" and isinstance(args[0], LazyTensor):
                values = args[0].fetch()
                values[args[1]] = brought(args[2])
                return args[0].replace(values)
            if name in _WHOLE:
                args, kwargs = tree_map(brought, (tuple(args), kwargs))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = {kind for kind in types if issubclass(kind, LazyTensor)}
        for kind in kinds:
            answer = kind.answers.get(func)
            found = NotImplemented if answer is None else answer(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in _LIKE:
            some = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            return func(some.expand(args[0].shape), *args[1:], **kwargs)
        if str(func).startswith("aten._foreach_"):
            return _one_by_one(func, args, kwargs)
        return _on_copies(func, args, kwargs)


def brought(value: Any) -> Any:
    """The values of a lazy tensor; anything else itself."""
    return value.fetch() if isinstance(value, LazyTensor) else value


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator over lists, for one element after the other."""
    number = len(args[0])

    def at(value: Any, place: int) -> Any:
        among = isinstance(value, (list, tuple)) and len(value) == number
        return [value[place]] if among else value

    found: list[Any] = []
    for place in range(number):
        named = {name: at(value, place) for name, value in kwargs.items()}
        found += _on_copies(func, [at(value, place) for value in args], named) or []
    return found or None


def _on_copies(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator on copies; what it writes to replaces what was copied."""
    copies: dict[int, tuple[LazyTensor, torch.Tensor]] = {}

    def bring(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value, value.fetch()
        return copies[id(value)][1]

    given, named = tree_map(bring, (tuple(args), kwargs))
    found = func(*given, **named)
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for value in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(value, LazyTensor):
                    value.replace(copies[id(value)][1])
    origins = {id(copy): lazy for lazy, copy in copies.values()}
    found = tree_map(lambda value: origins.get(id(value), value), found)
    for lazy, copy in copies.values():
        found = read_only(found, [copy], lazy.way)
    return found
