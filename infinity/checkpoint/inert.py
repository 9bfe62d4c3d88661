"""Items of checkpoints and records: Python objects and tensors, as torch.save writes them.

[Note: an item takes no more than it brings]
An item may come from an untrusted source. Before torch reads it with `weights_only`, this module
walks through it without effects (see `checkpoint/pickles`). It refuses everything that turns a few
bytes into unlimited memory or time:

| refused | why |
|---|---|
| compressed parts, parts that share bytes | parts are larger than the file |
| an object of a type outside `NAMES` | its constructor could do anything |
| `bytearray(n)`, texts in other encodings, copies of copies | a call makes more than it is given |
| a tensor beyond its storage, a storage of another size | torch makes the storage larger |
| a tensor many times as large as its storage | the first copy of it |
| nesting deeper than `DEPTH`, cycles | code that walks through it recurses |
| objects that appear in many places | code that walks through it visits each place |

torch gets the parts in a new archive, because its zip reader differs from Python's.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from infinity.checkpoint.pickles import DTYPES, NAMES, InertUnpickler, Record, check_operations
from infinity.errors import CheckpointError

DEPTH = 100
"""The deepest allowed nesting of objects."""
_LEAST = 1 << 20
_TIMES = 16
"""An item may make up to `_TIMES` times its own size, or `_LEAST`, in bytes and in objects."""
_STORAGES: Mapping[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()


class _Spending:
    """The number of elements that all calls in one pickle may still make."""

    def __init__(self, most: int) -> None:
        self.left = most

    def take(self, count: int) -> None:
        """Raises `UnpicklingError` if fewer than `count` are left."""
        self.left -= count
        if self.left < 0:
            raise pickle.UnpicklingError("it makes much more than it is itself")


class _Storage:
    """A part of the archive, with elements of `dtype`."""

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        self.nbytes, self.dtype = nbytes, dtype


class _Called(Record):
    """The result of a call in the pickle. `size` is its number of elements."""

    spending: _Spending
    size = 0

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.size = 1 + sum(map(_size, args))
        self.spending.take(self.size)
        check = _CHECKS.get(type(self).__name__)
        if check is not None:
            check(self)

    def __setstate__(self, state: Any) -> None:
        if type(self).__name__ != "OrderedDict":  # the state dict of a module sets one
            raise pickle.UnpicklingError(f"{type(self).__name__} has no state")
        self.state = state


def _size(value: Any) -> int:
    if isinstance(value, _Called):
        return value.size
    return len(value) if hasattr(value, "__len__") else 1


def _check_bytes(made: _Called) -> None:
    if not all(isinstance(each, (bytes, Record)) for each in made.args):
        raise pickle.UnpicklingError("bytes are made of bytes")


def _check_encoded(made: _Called) -> None:
    if len(made.args) != 2 or made.args[1] != "latin1":
        raise pickle.UnpicklingError("bytes are written as latin1")


def _check_tensor(made: _Called) -> None:
    storage, offset, size, stride, *rest = made.args
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    element = storage.dtype.itemsize
    if type(made).__name__ == "_rebuild_tensor_v3":
        element = DTYPES[rest[2].__name__].itemsize
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("the shape of a tensor is none")
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    if all(size) and reach * element > storage.nbytes:
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    if math.prod(size) * element > max(_TIMES * storage.nbytes, _LEAST):
        raise pickle.UnpicklingError("a tensor is much larger than its storage")


_CHECKS = {
    "bytearray": _check_bytes,
    "encode": _check_encoded,
    "_rebuild_tensor_v2": _check_tensor,
    "_rebuild_tensor_v3": _check_tensor,
}


class _ItemUnpickler(InertUnpickler):
    def __init__(self, data: bytes, parts: Mapping[str, bytes]) -> None:
        super().__init__(data, NAMES)
        self._parts = parts
        total = len(data) + sum(map(len, parts.values()))
        self._spending = _Spending(max(_TIMES * total, _LEAST))

    def kind(self, name: str) -> type[Record]:
        return type(name, (_Called,), {"spending": self._spending})

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage in its own part of the archive. Raises `UnpicklingError` if that part has
        another size."""
        what, kind, key, _, count = pid
        name = kind.__name__
        dtype = torch.uint8 if name == "UntypedStorage" else _STORAGES[name]
        nbytes = len(self._parts[f"data/{key}"])
        if what != "storage" or type(count) is not int or count * dtype.itemsize != nbytes:
            raise pickle.UnpicklingError(f"storage {key} is not in the archive")
        return _Storage(nbytes, dtype)


def _check_objects(value: Any, most: int) -> None:
    """Raise `UnpicklingError` if `value` contains more than `most` objects, is nested too deep, or
    contains itself. An object counts once for each place where it appears."""
    counts: dict[int, int | None] = {}

    def count(value: Any, depth: int) -> int:
        inner = _inner(value)
        if inner is None:
            return 1
        if depth > DEPTH:
            raise pickle.UnpicklingError(f"its objects are nested more than {DEPTH} deep")
        if id(value) in counts:
            known = counts[id(value)]
            if known is None:
                raise pickle.UnpicklingError("an object is inside of itself")
            return known
        counts[id(value)] = None
        found = 1 + sum(count(each, depth + 1) for each in inner)
        if found > most:
            raise pickle.UnpicklingError("its objects appear in too many places")
        counts[id(value)] = found
        return found

    count(value, 0)


def _inner(value: Any) -> Iterable[Any] | None:
    """The objects inside an object. None for an object that has no content."""
    if isinstance(value, Record):
        return (*value.args, value.state)
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, (list, tuple, set, frozenset)) else None


def _parts_of(content: bytes) -> dict[str, bytes]:
    """The parts of an archive of torch.save, by their names below its directory. Raises
    `ValueError`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in found):
            raise ValueError("a part of it is compressed")
        if sum(each.file_size for each in found) > len(content):
            raise ValueError("its parts are larger than it is")
        for each in found:
            del each.CRC  # torch ignores it, and `frame` leaves it 0
        names = [each.filename.partition("/")[2] for each in found]
        if len(set(names)) != len(names):
            raise ValueError("a part of it is there twice")
        return {name: archive.read(each) for name, each in zip(names, found, strict=True)}


def _archive(parts: Mapping[str, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, part in parts.items():
            archive.writestr(f"item/{name}", part)
    stream.seek(0)
    return stream


def read_item(content: bytes) -> Any:
    """Read `content`, which torch.save wrote, with tensors on the host.

    Raises an `Exception` with a one-line text if it has other types, or if it takes much more
    memory than its own size. See [Note: an item takes no more than it brings].
    """
    parts = _parts_of(content)
    data = parts["data.pkl"]
    check_operations(data)
    try:
        made = _ItemUnpickler(data, parts).load()
        _check_objects(made, max(_TIMES * len(data), _LEAST))
        return torch.load(_archive(parts), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(str(error).partition("\n")[0]) from error


def pack_item(what: str, content: Any) -> io.BytesIO:
    """`content` as torch.save writes it. Raises `CheckpointError` if `read_item` could not read it
    again."""
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
