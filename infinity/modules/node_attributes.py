"""Views of parameters that nodes of custom autograd functions keep as attributes.

[Note: attributes of nodes]
`ctx.save_for_backward` calls the hooks on saved tensors, but `ctx.weight = weight.view(...)` does
not. Some functions do the latter, such as the 4-bit product of bitsandbytes. If something still
refers to the bytes of a unit when a call of its module has ended, the engine walks the graph of the
call. It takes the nearest nodes first, and stops when nothing refers to these bytes. It replaces
each view in an attribute of a custom function's node by the view's place in the unit. A hook of the
node brings the views before its backward. Another hook puts the places back, because a graph may
run again, also after a failed backward.

Containers are replaced by copies, because other code may hold them. The parameter itself stays
where it is: the backward touches it like any other code.

Example: `ctx.tensors = (None, weight.t())` becomes `(None, _KeptView(...))` when the block ends.

[Note: views that have a place in the graph]
A function may keep the same view of a parameter that its caller passed. The backward gets its
bytes. A gradient of a gradient would have to continue from that view to the parameter, but a view
that was brought has no connection to it. So a recorded backward is refused.
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
"""How many objects of each attribute are searched for views."""


class _KeptView(NamedTuple):
    """The value that a node keeps in the place of a view."""

    view: PackedView
    requires_grad: bool


_OPAQUE = (
    *(torch.Tensor, torch.Size, torch.dtype, torch.device, torch.Generator, _KeptView, PackedView),
    *(nn.Module, ModuleType, type, BuiltinFunctionType, str, bytes, int, float, complex),
)
"""Types that contain no views, or only views that other code manages."""


def sequence_number() -> int:
    """The number that autograd gives to the next node that this thread makes. Later nodes have
    higher numbers."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def pack_attributes(
    outputs: Iterable[torch.Tensor],
    begin: int,
    packer: Packer,
    referenced: Callable[[], bool],
) -> None:
    """Take views out of the nodes behind `outputs` with sequence number `begin` or higher, while
    `referenced()` is true. See [Note: attributes of nodes]."""
    nodes = deque(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None)
    seen: set[Any] = set()  # the nodes, because ids of dead objects are used again
    while nodes and referenced():
        node: Any = nodes.popleft()
        if node in seen or node._sequence_nr() < begin:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            _NodeViews.pack(node, packer)
        nodes.extend(following for following, _ in node.next_functions if following is not None)


class _NodeViews:
    """The attributes of a node that had views of parameters, with their places instead. The node
    has these attributes while no backward runs it."""

    def __init__(self, node: Any, attributes: Mapping[str, Any], packer: Packer) -> None:
        self._node = weakref.ref(node)  # weak, because the node has the hooks
        self._attributes, self._packer = attributes, packer
        self._put_back()
        node.register_prehook(self._bring)
        node.register_hook(self._put_back)

    @classmethod
    def pack(cls, node: Any, packer: Packer) -> None:
        """Take the views out of the attributes of `node`."""
        places: dict[int, Any] = {}  # by id: names of one tensor share a place

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
    """The place of `tensor` if it is a view of a parameter, else `tensor` itself."""
    found = packer.locate(tensor)
    if found is None or any(tensor is parameter for parameter in found[0].facts.parameters):
        return tensor
    packed = packer.pack(tensor, None, recomputing=False, passes=False, keeps=False)
    return _KeptView(packed, tensor.requires_grad)


def _brought(place: _KeptView, packer: Packer) -> torch.Tensor:
    """The view at `place`. Raises `ShardedParameterError` in a recorded backward. See [Note: views
    that have a place in the graph]."""
    unit, index = place.view.unit, place.view.place()[0]
    if place.requires_grad and torch.is_grad_enabled():
        raise ShardedParameterError(
            f"a custom autograd function keeps a view of {unit.facts.names[index]} as an "
            "attribute, through which gradients of gradients do not go; keep it by "
            "ctx.save_for_backward"
        )
    view = packer.unpack(place.view)
    with torch.no_grad():
        return view.requires_grad_() if place.requires_grad else view


# Containers


def replaced(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to each object of `kind` in it: in tuples, lists, dicts,
    functions and attributes of objects. Returns a copy, or `value` itself if nothing changes."""
    return _Replacing(kind, change).of(value)


class _Replacing:
    """One call of `replaced`. An inner function that calls itself would form a reference cycle with
    the views that it has seen."""

    def __init__(self, kind: type, change: Callable[[Any], Any]) -> None:
        self._kind, self._change = kind, change
        self._seen: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return self._change(value)
        if value is None or isinstance(value, _OPAQUE):
            return value
        seen = self._seen
        if id(value) in seen or len(seen) >= _MOST_OBJECTS:
            return seen.get(id(value), value)
        seen[id(value)] = value  # for cycles and shared objects
        parts = dict(_parts(value))
        changed = {key: new for key, old in parts.items() if (new := self.of(old)) is not old}
        if changed:
            seen[id(value)] = _with(value, parts, changed)
        return seen[id(value)]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of `value`, each with its index, key or name."""
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
    """A copy of `value` with its `parts`, some of them replaced by those in `changed`."""
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
    except (TypeError, copy.Error):  # it cannot be copied, so it keeps the view
        return value
    for key, part in changed.items():
        if isinstance(value, (list, deque, dict)):
            made[key] = part
        else:
            object.__setattr__(made, key, part)
    return made
