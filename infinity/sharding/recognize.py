"""Recognizes objects of torch's classes that take long to import. `import torch` leaves these
classes out, and most programs never need them.

An object of such a class exists only if the module of the class was imported. So these functions
look for the module and never import it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor: this rank's part or copy of a tensor of several ranks."""
    return isinstance(value, _classes("torch.distributed.tensor", "DTensor"))


def is_dtensor_class(kind: type) -> bool:
    """Whether objects of class `kind` are DTensors."""
    return issubclass(kind, _classes("torch.distributed.tensor", "DTensor"))


def is_fully_sharded(module: object) -> bool:
    """Whether `module` was given to `fully_shard`, and so is an `FSDPModule`."""
    return isinstance(module, _classes("torch.distributed.fsdp", "FSDPModule"))


def _classes(module: str, name: str) -> tuple[type, ...]:
    """The class `name` of `module`; an empty tuple if the module was not imported."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
