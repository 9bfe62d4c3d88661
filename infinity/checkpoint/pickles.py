"""Pickles that run nothing.

[Note: a pickle that runs nothing]
A pickle calls what it finds by module and name. Here each pair must be on an exact list, without
dots in the name, and gives a new class of its own. Calling that class stores the arguments, and
nothing else happens. No object of torch or Python is reached, so none can be called or changed.

Items of a checkpoint are read so by `checkpoint/inert`.

[Note: a pickle that takes no more than it brings]
Python's unpickler allocates what a pickle says before it has the bytes: for the number of an
object (a list of all numbers below), and for lengths. So the operations are read first, without
their effects: each argument must be there, and numbers be smaller than the pickle is long.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection
from typing import Any

import torch

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NUMBERED = {"PUT", "BINPUT", "LONG_BINPUT"}
_FOREIGN = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
"""Refer to what is not in the pickle."""
NAMES = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch.serialization", "_get_layout"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "Size"),
        ("torch", "device"),
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        *(
            (module, name)
            for module in ("builtins", "__builtin__")
            for name in ("set", "complex", "bytearray")
        ),
        ("_codecs", "encode"),  # bytes
        *(("torch", name) for name in DTYPES),
        *(
            ("torch", kind.__name__)
            for kind in torch._storage_classes
            if kind.__module__ == "torch"
        ),
    }
)
"""(module, name) of the types of items: dicts, lists, tuples, sets, numbers, texts, bytes and
tensors."""


class Record:
    """Stands for whatever a pickle makes. `args`: what it was called with; `state`: what its
    attributes were set to."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing: it is no dict."""

    def append(self, value: Any) -> None:
        """Nothing: it is no list."""

    def extend(self, values: Any) -> None:
        """Nothing: it is no list."""


class InertUnpickler(pickle.Unpickler):
    """Makes a `Record` for each object."""

    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._kinds: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        """The class that stands for one; raises `UnpicklingError` for one that is not expected."""
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        if (module, name) not in self._kinds:
            self._kinds[module, name] = self.kind(name)
        return self._kinds[module, name]

    def kind(self, name: str) -> type[Record]:
        """A new class of that name."""
        return type(name, (Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        """A storage, which lies beside the pickle."""


def check_operations(data: bytes) -> None:
    """Raise `UnpicklingError` or `ValueError` before anything is made. See [Note: a pickle that
    takes no more than it brings]."""
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _FOREIGN:
            raise pickle.UnpicklingError(f"{operation.name} does not belong there")
        if operation.name in _NUMBERED and int(argument or 0) >= len(data):
            raise pickle.UnpicklingError(f"it numbers an object {argument}, and is smaller")
