"""The variables of functions and classes that the forward of a module may read: those of its
closure, globals that it names, and attributes of its class. A counter of calls is often one."""

from __future__ import annotations

import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Set
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "infinity"}
"""Packages whose functions, classes and objects keep no state of a model."""
CONTAINERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, set, deque))
NUMBERS: Set[type] = frozenset((bool, int, float, complex, torch.Tensor))
"""Of hooks: what they count. A container of a hook is what it has seen, which stays."""
_VALUES: Set[type] = CONTAINERS | {type(None), bool, int, float, complex, str, tuple, torch.Tensor}


class Variable(NamedTuple):
    """How to read and set a variable; `place` says which it is, and `where` names it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    place: tuple[int, Any]
    where: str


@cache
def is_of_library(name: str) -> bool:
    """Whether a module of Python belongs to `LIBRARIES`."""
    return name.partition(".")[0] in LIBRARIES


def variables_of_class(module: nn.Module) -> Iterator[Variable]:
    """The attributes of the classes of `module`, and the variables of its forward."""
    for kind in type(module).__mro__:
        if is_of_library(kind.__module__):
            continue
        for key, value in vars(kind).items():
            if type(value) in _VALUES and not key.startswith("__"):
                read = partial(vars(kind).get, key)
                yield Variable(read, partial(setattr, kind, key), (id(kind), key), key)
    yield from variables_of(type(module).forward)


def variables_of(function: Any, kinds: Set[type] = _VALUES) -> Iterator[Variable]:
    """The variables of a function of the user, or of a method: its closure, and the globals that it
    names, where they are of these kinds. None of what else can be called."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    names = function.__globals__
    if is_of_library(names.get("__name__", "")):
        return
    code = function.__code__
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read = partial(getattr, cell, "cell_contents", None)
        if type(read()) in kinds:
            yield Variable(read, partial(setattr, cell, "cell_contents"), (id(cell), key), key)
    for key in code.co_names:
        if key in names and type(names[key]) in kinds and not key.startswith("__"):
            write = partial(operator.setitem, names, key)
            yield Variable(partial(names.get, key), write, (id(names), key), key)
