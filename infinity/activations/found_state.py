"""Keeps the state that a forward of a block finds in its modules. The repeated forward of a
recomputation finds the same state, and its changes are undone.

[Note: state]
State is every object that is reachable from the attributes of the block's modules: parameters,
buffers, submodules, hooks, `training`, numbers and tensors, also in lists, dicts, sets and small
objects of the user. `torch.func.functional_call` and hypernetworks change slots of parameters. A
parent sets attributes of its blocks. `model.eval()` changes a flag. Each of these changes the
numbers of a forward, and none is an input. Random generators are state, too: those among the
attributes, and those of `random` and `numpy.random`. Torch's checkpoint restores torch's own.
Attributes of the modules' classes are state, too. So are the variables of their forwards: closures,
and globals that they name (`activations/variables`). For hooks only numbers and tensors are
restored, because a list of a hook has its records. Variables of functions that forwards and hooks
call are not restored.

[Note: containers]
The state has each container itself, and a shallow copy of it. During the repeated forward the
container itself has the old content. So a list that two modules share stays shared.

[Note: tensors]
The state has a tensor as an alias without its graph. If a block leaves its output in an attribute,
the graph of each step would otherwise keep the graph of the step before. Recomputed values need no
graph, because autograd has the graph of the first forward. A tensor that changes in place must be
copied before the forward. Small tensors are always copied. The first forward copies all tensors, to
find the large tensors that it changes. Later forwards copy only these and small ones. If another
large tensor changes later, the backward is refused once, and the tensor is copied from then on.

[Note: parameters of the wrapped model]
The engine decides which object shows their data. So the state has only their places. It keeps no
view of a parameter, because the bytes leave.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from infinity.activations.generators import common_states, generator_state
from infinity.activations.variables import (
    CONTAINERS,
    NUMBERS,
    Variable,
    is_of_library,
    variables_of,
    variables_of_class,
)
from infinity.errors import ShardedParameterError
from infinity.sharding.use import place_of

SMALL_BYTES = 4 << 10
"""Tensors up to this size are copied before each forward: counters, scales, statistics."""
_MOST_OBJECTS = 1024
"""The most containers and objects in the state, besides those of the block's own modules."""
_MOST_ITEMS = 1024
"""The state has only the length of a longer container."""
_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, type, ModuleType),
        *(torch.dtype, torch.device, torch.Size),
    )
)
_ABSENT = object()
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""How to read and set the switches that choose kernels and dtypes. Torch itself restores
autocast."""

Place = tuple[int, Any]
"""A container by its id, and the key in it."""
Locate = Callable[[torch.Tensor], object]
"""Returns where a tensor lies in the memory of units; None for any other tensor."""


class _Ours(NamedTuple):
    """A parameter of the wrapped model."""

    place: object


class _View(NamedTuple):
    """A view of a parameter of the wrapped model."""

    original: weakref.ref[torch.Tensor]


class _FoundTensor:
    """A tensor as the forward finds it."""

    def __init__(self, tensor: torch.Tensor, where: str) -> None:
        self.where = where
        self.small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
        self.uncounted = False
        """Whether a kernel writes it without a new version."""
        self._original = weakref.ref(tensor)
        self._alias = tensor.detach().requires_grad_() if tensor.grad_fn is not None else tensor
        self._version = _version(tensor)
        self._content: torch.Tensor | None = None
        self._changed_inside = False

    def copy(self) -> None:
        """Copy the content, unless there is a copy."""
        if self._content is None:
            self._content = _copied(self._alias)

    def ended(self, first: bool, known: bool) -> bool:
        """The forward has ended. Drop a copy that is not needed. Returns whether the forward
        changed this large tensor."""
        if self.small:
            return False
        changed = self.uncounted or _version(self._alias) != self._version
        changed = changed or (first and not self._is_as_copied())
        if changed:
            self._changed_inside = self._content is None
        elif not known:
            self._content = None
        return changed

    def lost(self) -> bool:
        """Whether the content has been overwritten without a copy."""
        return self._content is None and _version(self._alias) != self._version

    def restored(self, name: str) -> torch.Tensor:
        """The tensor as it was. Raises `ShardedParameterError` if its content is lost."""
        if self.lost():
            when = "changed" if self._changed_inside else "was followed by a change of"
            raise ShardedParameterError(
                f"the forward of {name} {when} its tensor {self.where!r} in place, which earlier "
                "ones did not, so it cannot be repeated for the backward of the wrapped model; "
                "the next forward can; for this one set Config(recompute='off')"
            )
        original = self._original()
        if self._content is None:
            return self._alias if original is None else original
        same = not self.uncounted and _version(self._alias) == self._version
        if original is not None and same and original.device.type == "cpu" and self._is_as_copied():
            return original
        return _copied(self._content)

    def _is_as_copied(self) -> bool:
        return self._content is None or torch.equal(self._alias.detach(), self._content.detach())


class _Tuple(NamedTuple):
    """A tuple with tensors in it."""

    kind: Callable[[Iterable[Any]], tuple[Any, ...]]
    items: tuple[Any, ...]


class _Kept(NamedTuple):
    """A container, and its content; for a long container, its length."""

    container: Any
    where: str
    content: Any


class _Changing(NamedTuple):
    """The large tensors that change. `known` has the places of tensors that forwards change in
    place; None before the first forward. `late` has the names of tensors that changed after their
    forward."""

    known: set[Place] | None
    late: set[str]

    def has(self, place: Place, tensor: torch.Tensor, where: str) -> bool:
        """Whether `tensor` may change, so that it needs a copy."""
        if where in self.late:
            return True
        return type(tensor) is torch.Tensor if self.known is None else place in self.known


class _Search:
    """Finds the state of `module`, and of modules among its `inputs`, once. `locate` finds views of
    parameters."""

    def __init__(
        self, module: nn.Module, inputs: Iterable[Any], changing: _Changing, locate: Locate
    ) -> None:
        self._changing, self._locate = changing, locate
        self.kept: list[_Kept] = []
        self.empty: list[Any] = []
        self.places: dict[Place, _FoundTensor] = {}
        self.generators = common_states()
        self.variables: list[tuple[Variable, Any]] = []
        self._tensors: dict[int, _FoundTensor] = {}
        own = list(module.modules())
        self._own, self._seen = set(map(id, own)), set[Any]()
        self._near: list[tuple[Any, str]] = [(part, "") for part in reversed(own)]
        self._far: list[tuple[Any, str]] = [
            (each, "") for each in inputs if isinstance(each, nn.Module)
        ]
        for kind in {type(part): part for part in own}.values():
            self._note(variables_of_class(kind))
        self._walk()

    def _walk(self) -> None:
        """Note all reachable objects: first those in the block's modules and their containers."""
        while self._near:
            self._visit(*self._near.pop())
        for _ in range(_MOST_OBJECTS):
            pending = self._near or self._far
            if not pending:
                break
            self._visit(*pending.pop())

    def _visit(self, value: Any, where: str) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        container = value if type(value) in CONTAINERS else vars(value)
        if not container:
            self.empty.append(container)
            return
        if len(container) > _MOST_ITEMS:
            self.kept.append(_Kept(container, where, len(container)))
            return
        content: Any
        if isinstance(container, set):
            content = set(container)
        else:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            content = {
                key: item
                if type(item) in _ATOMS
                else self._noted(item, (id(container), key), key if isinstance(key, str) else where)
                for key, item in pairs
            }
        self.kept.append(_Kept(container, where, content))
        if isinstance(value, _NormBase) and value.training:
            self._copy_statistics(value)

    def _noted(self, value: Any, place: Place, where: str) -> Any:
        """The form of `value` in the state. Objects below it are visited later."""
        if type(value) in CONTAINERS:
            if value:
                self._near.append((value, where))
            else:
                self.empty.append(value)
        elif isinstance(value, torch.Tensor):
            return self._tensor(value, place, where)
        elif id(value) in self._own:
            self._near.append((value, where))
        elif isinstance(value, tuple):
            container, key = place
            items = tuple(
                self._noted(item, (container, (key, index)), where)
                for index, item in enumerate(value)
            )
            if any(now is not before for now, before in zip(items, value, strict=True)):
                return _Tuple(getattr(type(value), "_make", type(value)), items)
        elif isinstance(value, MethodType):
            if not is_of_library(type(value.__self__).__module__):
                self._note(variables_of(value, NUMBERS))
                self._noted(value.__self__, place, where)
        elif isinstance(value, FunctionType):
            self._note(variables_of(value, NUMBERS))
        elif (generator := generator_state(value)) is not None:
            self.generators.append(generator)
        elif isinstance(value, nn.Module) or _is_plain(value):
            self._far.append((value, where))
        return value

    def _note(self, variables: Iterable[Variable]) -> None:
        """Add `variables` to the state."""
        for each in variables:
            if each.place not in self._seen:
                self._seen.add(each.place)
                self.variables.append((each, self._noted(each.read(), each.place, each.where)))

    def _tensor(self, tensor: torch.Tensor, place: Place, where: str) -> Any:
        ours = place_of(tensor)
        if ours is not None:
            return _Ours(ours)
        if type(tensor).__module__.startswith("infinity."):
            return tensor
        found = self._tensors.get(id(tensor))
        if found is None:
            if self._locate(tensor) is not None:
                return _View(weakref.ref(tensor))
            found = self._tensors[id(tensor)] = _FoundTensor(tensor, where)
        if found.small or self._changing.has(place, tensor, found.where):
            found.copy()
        self.places[place] = found
        return found

    def _copy_statistics(self, norm: _NormBase) -> None:
        """Copy the statistics of `norm`: its kernels write them without a new version."""
        for key, buffer in norm._buffers.items():
            if buffer is not None:
                found = self._tensor(buffer, (id(norm._buffers), key), key)
                if isinstance(found, _FoundTensor):
                    found.uncounted = True
                    found.copy()


class FoundState:
    """The state of `module`, and of modules among its `inputs`, at the start of a forward. Used by
    the thread that runs the model. `known` and `late` are those of `_Changing`, `locate` finds
    views of parameters."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Iterable[Any],
        known: set[Place] | None,
        late: set[str],
        locate: Locate,
    ) -> None:
        self._changing = _Changing(known, late)
        self.mixed = False
        """Whether other micro-batches ran during a forward that found this state."""
        self._name, self._differs = "", False
        self._switches = [read() for read, _ in _SWITCHES]
        found = _Search(module, inputs, self._changing, locate)
        self._kept, self._empty, self._places = found.kept, found.empty, found.places
        self._generators, self._variables = found.generators, found.variables

    def ended(self) -> set[Place]:
        """The forward has ended. Returns the places of large tensors that forwards change."""
        known, late = self._changing
        first, known = known is None, set(known or ())
        for place, held in self._places.items():
            if held.ended(first, place in known or held.where in late):
                known.add(place)
        self._generators = [each for each in self._generators if each.was_used()]
        return known

    def lost(self) -> set[str]:
        """The names of large tensors that have changed and have no copy."""
        return {held.where for held in self._places.values() if held.lost()}

    def check_mixed(self) -> None:
        """Raise `ShardedParameterError` if other micro-batches would see, or have seen, a restored
        state that differs from the present one."""
        if self.mixed and self._differs:
            raise ShardedParameterError(
                f"the forward of {self._name} depends on what its modules have and on what "
                "micro-batches changed there, which run together, so it cannot be repeated for the "
                "backward of the wrapped model; use infinity.accumulate(..., order='horizontal') "
                "or Config(recompute='off')"
            )

    def _change(self, stack: ExitStack, container: Any, now: Any, before: Any) -> None:
        """Give `container` the content of `before`, and that of `now` at the end of `stack`."""
        self._differs = True
        self.check_mixed()
        stack.callback(_undo, container, now)
        _fill(container, before)

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Inside the context, the modules of block `name` have the state that the forward found.
        Then they get their present state again. Raises `ShardedParameterError` if the found state
        is lost."""
        self._name, self._differs = name, False
        with ExitStack() as stack:
            values: dict[int, torch.Tensor] = {}
            for container, where, content in self._kept:
                if isinstance(content, int):
                    if len(container) != content:
                        raise ShardedParameterError(_another(name, where))
                elif not isinstance(container, set):
                    self._put_back(stack, container, content, values)
                elif container != content:
                    self._change(stack, container, set(container), content)
            for variable, kept in self._variables:
                current = variable.read()
                value = _value(kept, current, name, variable.where, values)
                if value is not current:
                    self._differs = True
                    self.check_mixed()
                    stack.callback(variable.write, current)
                    variable.write(value)
            for container in filter(None, self._empty):
                self._change(stack, container, container.copy(), type(container)())
            for generator in self._generators:
                self._differs = True
                self.check_mixed()
                stack.callback(generator.write, generator.read())
                generator.write(generator.state)
            for (read, write), before in zip(_SWITCHES, self._switches, strict=True):
                now = read()
                if now != before:
                    stack.callback(write, now)
                    write(before)
            yield

    def _put_back(
        self,
        stack: ExitStack,
        container: Any,
        content: dict[Any, Any],
        values: dict[int, torch.Tensor],
    ) -> None:
        """Give `container` its `content` until the end of `stack`."""
        is_dict = isinstance(container, dict)
        now = container if is_dict else dict(enumerate(container))
        before = {
            key: value
            if now.get(key, _ABSENT) is value
            else _value(value, now.get(key), self._name, str(key), values)
            for key, value in content.items()
        }
        if (
            len(now) != len(before)
            or any(map(operator.is_not, now.values(), before.values()))
            or any(map(operator.ne, now, before))
        ):
            if is_dict:
                self._change(stack, container, dict(now), before)
            else:
                self._change(stack, container, list(now.values()), list(before.values()))


def _value(kept: Any, now: Any, name: str, where: str, values: dict[int, torch.Tensor]) -> Any:
    """The value for `kept` of the state. The container has `now`."""
    if isinstance(kept, _FoundTensor):
        if id(kept) not in values:
            values[id(kept)] = kept.restored(name)
        return values[id(kept)]
    if isinstance(kept, _Ours):
        if not isinstance(now, torch.Tensor) or place_of(now) != kept.place:
            raise ShardedParameterError(_another(name, where))
        return now
    if isinstance(kept, _View):
        if now is None or kept.original() is not now:
            raise ShardedParameterError(_another(name, where))
        return now
    if isinstance(kept, _Tuple):
        others = now if isinstance(now, tuple) and len(now) == len(kept.items) else None
        items = [
            _value(item, others and others[index], name, where, values)
            for index, item in enumerate(kept.items)
        ]
        same = others is not None and all(a is b for a, b in zip(items, others, strict=True))
        return now if same else kept.kind(items)
    return kept


def _another(name: str, where: str) -> str:
    return (
        f"{where!r} of {name} is another one than in the forward, so the forward cannot be "
        "repeated for the backward of the wrapped model; change it after the backward, or set "
        "Config(recompute='off')"
    )


def _undo(container: Any, before: Any) -> None:
    """Give `container` the content of `before`. If both have the same parameter of the wrapped
    model, the present object stays: the engine may show the parameter in another object by now."""
    if isinstance(container, dict):
        before = {
            key: container[key]
            if isinstance(value, torch.Tensor)
            and (place := place_of(value)) is not None
            and isinstance(now := container.get(key), torch.Tensor)
            and place_of(now) == place
            else value
            for key, value in before.items()
        }
    _fill(container, before)


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            container[key] = value
        if list(container) != list(content):
            container.clear()
            for key, value in content.items():
                container[key] = value
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor without a graph."""
    found = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, tensor.requires_grad)
    return found.requires_grad_() if tensor.requires_grad else found


def _is_plain(value: Any) -> bool:
    """Whether the attributes of an object belong to the state."""
    if type(value) is SimpleNamespace:
        return True
    plain = type(getattr(value, "__dict__", None)) is dict
    return plain and not is_of_library(type(value).__module__)
