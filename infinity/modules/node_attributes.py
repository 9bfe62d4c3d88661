"""Views of parameters that nodes of custom autograd functions keep as attributes.

[Note: attributes of nodes]
`ctx.save_for_backward` passes the hooks on saved tensors, and `ctx.weight = weight.view(...)` does
not. Some functions do the latter, such as the 4-bit product of bitsandbytes. So when a call of a
hooked module has ended and something still refers to the bytes of its units, the graph that the
call has made is walked, the nearest nodes first, until nothing does. Each view that an attribute of
a custom function's node holds is replaced by its place in the unit. A hook of the node brings the
views before its backward, and another one puts the places back. A graph may run again, also after a
backward that failed.

Containers are replaced by copies, because other code may hold them. The parameter itself stays
where it is: it is touched in the backward as anywhere else.

Example: `ctx.tensors = (None, weight.t())` becomes `(None, _KeptView(...))` when the block ends.

[Note: views that have a place in the graph]
A function that is given a view of a parameter may keep that very tensor. The backward gets its
bytes. The gradient of a gradient would have to go on from the tensor to the parameter, and a tensor
that was brought has no such way. So a backward that is recorded is refused.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from infinity.errors import ShardedParameterError
from infinity.modules.packing import PackedView, Packer

_MOST_OBJECTS = 1 << 12
"""In which views are looked for, of each attribute."""


class _KeptView(NamedTuple):
    """What a node keeps in the place of a view."""

    view: PackedView
    requires_grad: bool


_OPAQUE = (
    *(torch.Tensor, torch.Size, torch.dtype, torch.device, torch.Generator, _KeptView, PackedView),
    *(nn.Module, ModuleType, type, BuiltinFunctionType, str, bytes, int, float, complex),
)
"""Kinds of values that hold no views, or whose views belong to others."""


def sequence_number() -> int:
    """The number that autograd gives to the next node that this thread makes; later ones have
    higher numbers."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def pack_attributes(
    outputs: Iterable[torch.Tensor],
    begin: int,
    packer: Packer,
    referenced: Callable[[], bool],
) -> None:
    """Take views out of the nodes behind `outputs` that were made since the sequence number
    `begin`, until nothing is `referenced` any more. See [Note: attributes of nodes]."""
    nodes = deque(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None)
    seen: set[Any] = set()  # the nodes, because the numbers of dead objects are given again
    while nodes and referenced():
        node: Any = nodes.popleft()
        if node in seen or node._sequence_nr() < begin:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            _NodeViews.pack(node, packer)
        nodes.extend(following for following, _ in node.next_functions if following is not None)


class _NodeViews:
    """The attributes of a node that have views of parameters, as they are while no backward runs
    the node."""

    def __init__(self, node: Any, attributes: Mapping[str, Any], packer: Packer) -> None:
        self._node = weakref.ref(node)  # which has the hooks
        self._attributes, self._packer = attributes, packer
        self._put_back()
        node.register_prehook(self._bring)
        node.register_hook(self._put_back)

    @classmethod
    def pack(cls, node: Any, packer: Packer) -> None:
        """Take the views out of the attributes of `node`."""
        places: dict[int, Any] = {}  # two names of one tensor stay that

        def place(tensor: torch.Tensor) -> Any:
            if id(tensor) not in places:
                places[id(tensor)] = _place_of(tensor, packer)
            return places[id(tensor)]

        found = {
            name: changed
            for name, value in vars(node).items()
            if (changed := replaced(value, torch.Tensor, place)) is not value
        }
        if found:
            cls(node, found, packer)

    def _bring(self, gradients: Any) -> None:
        brought: dict[int, torch.Tensor] = {}

        def view(place: _KeptView) -> torch.Tensor:
            if id(place) not in brought:
                brought[id(place)] = _brought(place, self._packer)
            return brought[id(place)]

        self._set({n: replaced(value, _KeptView, view) for n, value in self._attributes.items()})

    def _put_back(self, *gradients: Any) -> None:
        self._set(self._attributes)

    def _set(self, attributes: Mapping[str, Any]) -> None:
        node = self._node()
        for name, value in attributes.items():
            setattr(node, name, value)


def _place_of(tensor: torch.Tensor, packer: Packer) -> Any:
    """The place of a view of a parameter; any other tensor itself."""
    found = packer.locate(tensor)
    if found is None or any(tensor is parameter for parameter in found[0].parameters):
        return tensor
    packed = packer.pack(tensor, None, recomputing=False, passes=False, keeps=False)
    return _KeptView(packed, tensor.requires_grad)


def _brought(place: _KeptView, packer: Packer) -> torch.Tensor:
    """The view at `place`. See [Note: views that have a place in the graph]."""
    unit, index = place.view.unit, place.view.place()[0]
    if place.requires_grad and torch.is_grad_enabled():
        raise ShardedParameterError(
            f"a custom autograd function keeps a view of {unit.names[index]} as an attribute, "
            "through which gradients of gradients do not go; keep it by ctx.save_for_backward"
        )
    view = packer.unpack(place.view)
    with torch.no_grad():
        return view.requires_grad_() if place.requires_grad else view


# Containers


def replaced(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to what is of `kind` in it: in tuples, lists, dicts, functions
    and attributes of objects. Where nothing changes it is `value` itself, else a copy."""
    return _Replacing(kind, change).of(value)


class _Replacing:
    """One call of `replaced`. A function that calls itself would be a cycle with all that it has
    seen, views among that."""

    def __init__(self, kind: type, change: Callable[[Any], Any]) -> None:
        self._kind, self._change = kind, change
        self._seen: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """`value`, or its copy."""
        if isinstance(value, self._kind):
            return self._change(value)
        if value is None or isinstance(value, _OPAQUE):
            return value
        seen = self._seen
        if id(value) in seen or len(seen) >= _MOST_OBJECTS:
            return seen.get(id(value), value)
        seen[id(value)] = value  # of a cycle, or shared
        parts = dict(_parts(value))
        changed = {key: new for key, old in parts.items() if (new := self.of(old)) is not old}
        if changed:
            seen[id(value)] = _with(value, parts, changed)
        return seen[id(value)]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What `value` holds, each with what it is found by."""
    if isinstance(value, (tuple, list, deque)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            with suppress(ValueError):  # of an empty cell
                yield index, cell.cell_contents
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from {"func": value.func, "args": value.args, "keywords": value.keywords}.items()
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).items()


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _with(value: Any, parts: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """A copy of `value`, which holds `parts`, with those that have `changed`."""
    new = {**parts, **changed}
    if isinstance(value, tuple):
        kind: Any = type(value)
        return kind(*new.values()) if hasattr(value, "_fields") else kind(new.values())
    if isinstance(value, FunctionType):
        cells = [*(value.__closure__ or ())]
        for index, part in changed.items():
            cells[index] = CellType(part)
        code, names, defaults = value.__code__, value.__globals__, value.__defaults__
        made = FunctionType(code, names, value.__name__, defaults, tuple(cells))
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    if isinstance(value, MethodType):
        return MethodType(value.__func__, new["self"])
    if isinstance(value, functools.partial):
        return functools.partial(new["func"], *new["args"], **new["keywords"])
    try:
        made = copy.copy(value)
    except (TypeError, copy.Error):  # it stays, and so does the view
        return value
    for key, part in changed.items():
        if isinstance(value, (list, deque, dict)):
            made[key] = part
        else:
            object.__setattr__(made, key, part)
    return made
