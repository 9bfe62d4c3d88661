"""Pickles that run nothing.

[Note: a pickle that runs nothing]
A pickle calls what it finds by module and name. Here each pair must be on an exact list, without
dots in the name, and gives a new class of its own. Calling that class stores the arguments, and
nothing else happens. No object of torch or Python is reached, so none can be called or changed.

`unpickle` is all that reads `.metadata` of version 1. Items of a checkpoint are files of
torch.save. They are gone through in the same way, by the list `NAMES`, and then read by torch.load
with `weights_only`: types that a program has declared safe for itself are not taken from a
checkpoint.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection
from typing import Any

import torch

from infinity.errors import CheckpointError

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._kinds: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return self._kinds.setdefault((module, name), type(name, (Record,), {}))

    def persistent_load(self, pid: Any) -> None:
        """A storage, which lies beside the pickle."""


def unpickle(data: bytes, names: Collection[tuple[str, str]]) -> Any:
    """What the pickle `data` is made of, with a `Record` for each object. Raises `UnpicklingError`
    for a pair not in `names`."""
    return _Unpickler(data, names).load()


def read_item(content: bytes) -> Any:
    """What torch.save wrote as `content`, on the host. Raises some `Exception`, in one line, for
    what has other types."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        if len(set(names)) != len(names):
            raise ValueError("a part of it is there twice")
        for name in names:
            if name.endswith(".pkl"):
                unpickle(archive.read(name), NAMES)
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(str(error).partition("\n")[0]) from error


def pack_item(what: str, content: Any) -> io.BytesIO:
    """`content` as torch.save writes it; raises `CheckpointError` for what `read_item` could not
    read again."""
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
        read_item(stream.getvalue())
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{what} may have numbers, texts and tensors in dicts, lists and tuples only: {reason}"
        ) from error
    return stream
