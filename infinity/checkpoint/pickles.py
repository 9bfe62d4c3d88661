"""Reads pickles without running code.

[Note: a pickle that runs nothing]
A pickle calls objects that it names by module and name. Here each pair must be on an exact list,
without dots in the name. Each pair gives a new class of its own. A call of that class stores its
arguments and has no other effect. The pickle reaches no object of torch or Python, so it can
neither call nor change one.

`checkpoint/inert` reads items of a checkpoint this way.

[Note: a pickle that takes no more than it brings]
Python's unpickler trusts numbers in a pickle before it has the bytes. It allocates a list up to the
highest object number, and buffers of the given lengths. So `check_operations` reads the operations
first, without their effects. Each argument must be present, and each object number must be smaller
than the length of the pickle.
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
"""Operations that refer to data outside the pickle."""
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
"""(module, name) of the types in items: dicts, lists, tuples, sets, numbers, texts, bytes and
tensors."""


class Record:
    """Stands for any object that a pickle makes. `args` has the arguments of the call, and `state`
    the attributes that the pickle sets."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Does nothing, because a record is no dict."""

    def append(self, value: Any) -> None:
        """Does nothing, because a record is no list."""

    def extend(self, values: Any) -> None:
        """Does nothing, because a record is no list."""


class InertUnpickler(pickle.Unpickler):
    """Makes a `Record` for each object."""

    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._kinds: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        """The class that stands for `module.name`. Raises `UnpicklingError` if it is not on the
        list."""
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        if (module, name) not in self._kinds:
            self._kinds[module, name] = self.kind(name)
        return self._kinds[module, name]

    def kind(self, name: str) -> type[Record]:
        """Create a class called `name`."""
        return type(name, (Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        """The storage beside the pickle. Here None."""


def check_operations(data: bytes) -> None:
    """Raise `UnpicklingError` or `ValueError` before any object is made. See [Note: a pickle that
    takes no more than it brings]."""
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _FOREIGN:
            raise pickle.UnpicklingError(f"{operation.name} does not belong there")
        if operation.name in _NUMBERED and int(argument or 0) >= len(data):
            raise pickle.UnpicklingError(f"it numbers an object {argument}, and is smaller")
