"""Finds the variables that the forward of a module may read: those of its closure, globals that it
names, and attributes of its class. A counter of calls is often such a variable."""

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
"""Packages. Their functions, classes and objects keep no state of a model."""
CONTAINERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, set, deque))
NUMBERS: Set[type] = frozenset((bool, int, float, complex, torch.Tensor))
"""The types of variables of hooks that are restored, such as counters. A container of a hook has
its records, and stays."""
_VALUES: Set[type] = CONTAINERS | {type(None), bool, int, float, complex, str, tuple, torch.Tensor}


class Variable(NamedTuple):
    """How to read and set a variable. `place` identifies it, and `where` is its name in errors."""

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
    """The variables of a function or method of the user: its closure, and the globals that it
    names, if they are of these `kinds`. Other callables have none."""
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
