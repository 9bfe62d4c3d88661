"""Lazy tensors in graphs of torch.compile.

[Note: lazy tensors in graphs]
torch.compile asks a tensor subclass for the plain tensors inside, and makes it again from other
plain tensors (`__tensor_flatten__`, `__tensor_unflatten__`). A lazy tensor has one inside: its
values. While torch makes a graph, another tensor of the class stands for the lazy tensor. It has
values of its own (`values_in_graph`), and no place in an engine. When the graph runs, torch takes
the values of the lazy tensor, gives them to the graph, and gives the gradient to the lazy tensor.

The values are a copy, so a graph must not write to them. torch.compile ends the graph before an
operator that writes, and runs the operator on the lazy tensor itself. With `fullgraph=True` it
raises. A view of the lazy tensor that a graph returns is a copy, too, and read-only. A view that
requires a gradient could be written, so such a graph is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.compilation import call_uncompiled
from infinity.errors import ShardedParameterError
from infinity.sharding.copied import read_only

DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operators that take a tensor out of the graph of autograd. They give the same memory."""
WRITTEN = (
    "a tensor of a wrapped model was changed in place in compiled code, where that would be lost; "
    "change it outside of the code that is compiled"
)
GIVEN = (
    "a compiled function gives a view of a tensor of a wrapped model that requires a gradient, "
    "which would be a copy; give its .clone(), or take the view outside of the function"
)
_GRAD: Any = torch.Tensor.grad
_LATEST: deque[int] = deque(maxlen=64)
"""The addresses of the latest copies of values."""
VALUES = "values_in_graph"
"""The attribute that has the values."""


class InGraphs(torch.Tensor):
    """A tensor that consists of its values in a graph."""

    way: ClassVar[str] = "a copy of a tensor of a wrapped model was changed in place"
    """The text of the error if a copy is changed and the change would be lost."""
    _given: torch.Tensor | None = None
    _is_recorded_view = False

    def copied_values(self) -> torch.Tensor:
        """A copy of the values, outside of the graph of autograd."""
        raise NotImplementedError

    def kept_gradient(self) -> torch.Tensor | None:
        """`.grad`, if another object keeps it for the tensor."""
        return _GRAD.__get__(self)

    @property
    def grad(self) -> torch.Tensor | None:
        """As of any tensor. torch.compile reads it without `__torch_function__`."""
        return call_uncompiled(_gradient_of, self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def values_in_graph(self) -> torch.Tensor:
        """The given values of a tensor that stands for another; else a copy."""
        if self._given is not None:
            return self._given
        # Guards know tensors by their addresses, also freed copies. So a new copy gets a new
        # address.
        taken = [torch.empty(0)]
        while id(taken[-1]) in _LATEST:
            taken.append(torch.empty(0))
        del taken[-1]  # mostly the copy gets this address
        taken.append(self.copied_values())
        while id(taken[-1]) in _LATEST:
            taken.append(self.copied_values())
        _LATEST.append(id(taken[-1]))
        return taken[-1]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        if self._is_recorded_view:  # torch asks for inputs and outputs of a graph only
            raise ShardedParameterError(GIVEN)
        return [VALUES], None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(in a graph, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _stable_hash_for_caching(self) -> str:
        """Its part of a key of torch's cache of graphs."""
        kind, (attrs, _) = type(self), self.__tensor_flatten__()
        known = (kind.__module__, kind.__qualname__, attrs, self.dtype, self.device)
        layout = (tuple(self.shape), self.stride(), self.storage_offset(), self.requires_grad)
        return str((*known, *layout))

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, torch.Tensor], _: None, shape: Sequence[int], stride: Sequence[int]
    ) -> Any:
        values = parts[VALUES]
        if type(values) is torch.Tensor and not makes_graph():
            # A graph that has run returns a view of its input.
            return read_only(values, [values], cls.way)
        return cls.standing_for(values, shape, stride)

    @classmethod
    def standing_for(
        cls, values: torch.Tensor, shape: Sequence[int], stride: Sequence[int]
    ) -> InGraphs:
        """A tensor that stands for one with these `values` while a graph is made."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: InGraphs = make(
            cls,
            shape,
            strides=stride,
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        made._given = values
        return made


def _gradient_of(tensor: InGraphs) -> torch.Tensor | None:
    if not stands_for_another(tensor):
        return tensor.kept_gradient()
    return _GRAD.__get__(tensor)


def on_given(func: Any, args: Any, kwargs: Any, view: type[InGraphs]) -> Any:
    """Run an operator on tensors that stand for others. Views of them are of class `view`. Returns
    `NotImplemented` if no argument stands for another. Raises if the operator writes to one."""
    standing = [value for value in tree_leaves((args, kwargs)) if stands_for_another(value)]
    if not standing:
        return NotImplemented
    functional: Any = torch._subclasses.functional_tensor  # imported, because a graph is made
    last = isinstance(standing[0]._given, functional.FunctionalTensor)
    if any(map(stands_for_another, tree_leaves(list(written(func, args, kwargs))))):
        # At first torch.compile may still run the operator outside of the graph.
        raise ShardedParameterError(WRITTEN) if last else torch._dynamo.exc.Unsupported(WRITTEN)
    found = func(*tree_map(_given, tuple(args)), **tree_map(_given, kwargs))
    if _gives_views(func):
        kind = type(standing[0]) if func in DETACHING else view
        views = tree_map(lambda made: kind.standing_for(made, made.shape, made.stride()), found)
        for each in tree_leaves(views):
            each._is_recorded_view = last and _is_recorded(func, standing[0])
        return views
    return next((value for value in standing if found is value._given), found)


def makes_graph() -> bool:
    """Whether torch.compile makes a graph now, and so calls this code."""
    return call_uncompiled(torch.compiler.is_compiling)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """The arguments that an operator writes to; none if it has no schema."""
    for place, argument in enumerate(getattr(getattr(func, "_schema", None), "arguments", ())):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def _is_recorded(func: Any, standing: torch.Tensor) -> bool:
    """Whether the result of a view function on a tensor requires a gradient."""
    return func is not DETACHING[0] and torch.is_grad_enabled() and standing.requires_grad


def _gives_views(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    aliases = [each.alias_info for each in getattr(schema, "returns", ())]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def stands_for_another(value: Any) -> bool:
    """Whether `value` is a tensor that stands for another while a graph is made."""
    return isinstance(value, InGraphs) and value._given is not None


def _given(value: Any) -> Any:
    return value._given if stands_for_another(value) else value
