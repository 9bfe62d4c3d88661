"""Items of checkpoints and records: objects of Python and tensors, as torch.save writes them.

[Note: an item takes no more than it brings]
An item may come from anywhere. Before torch reads it, with `weights_only`, it is gone through
without effects (see `checkpoint/pickles`). These are refused, because a few bytes of them take any
amount of memory or time:

| what | why |
|---|---|
| compressed parts, parts of the same bytes | parts are larger than the file |
| an object of a type that is not in `NAMES` | it could do anything |
| `bytearray(n)`, texts in other codes, copies of copies | a call makes more than it is given |
| a tensor beyond its storage, a storage of another size | torch makes the storage larger |
| a tensor many times as large as its storage | the first copy of it |
| nesting deeper than `DEPTH`, cycles | code that goes through it calls itself |
| objects that appear in many places | code that goes through it goes through each place |

torch gets the parts in an archive that is written here, for its reader of archives is another one.
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
"""Objects inside of objects."""
_LEAST = 1 << 20
_TIMES = 16
"""An item may be taken for so many times as large as it is, or `_LEAST`, in bytes and objects."""
_STORAGES: Mapping[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()


class _Spending:
    """What calls in one pickle may make in all, in elements."""

    def __init__(self, most: int) -> None:
        self.left = most

    def take(self, count: int) -> None:
        """Raises `UnpicklingError` when that is more than is left."""
        self.left -= count
        if self.left < 0:
            raise pickle.UnpicklingError("it makes much more than it is itself")


class _Storage:
    """A part of the archive that has elements of `dtype`."""

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        self.nbytes, self.dtype = nbytes, dtype


class _Called(Record):
    """An object that a call makes. `size` is how many elements it has."""

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
        if type(self).__name__ != "OrderedDict":  # of which a state dict of modules has one
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
        """The storage that lies in a part of its own. Raises `UnpicklingError` where that has
        another size."""
        what, kind, key, _, count = pid
        name = kind.__name__
        dtype = torch.uint8 if name == "UntypedStorage" else _STORAGES[name]
        nbytes = len(self._parts[f"data/{key}"])
        if what != "storage" or type(count) is not int or count * dtype.itemsize != nbytes:
            raise pickle.UnpicklingError(f"storage {key} is not in the archive")
        return _Storage(nbytes, dtype)


def _check_objects(value: Any, most: int) -> None:
    """Raise `UnpicklingError` where `value` has more objects than `most`, each counted in all
    places where it appears, or they are nested too deep, or without end."""
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
    """What is inside of an object; None where nothing can be."""
    if isinstance(value, Record):
        return (*value.args, value.state)
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, (list, tuple, set, frozenset)) else None


def _parts_of(content: bytes) -> dict[str, bytes]:
    """The parts of an archive of torch.save, by their names below its directory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in found):
            raise ValueError("a part of it is compressed")
        if sum(each.file_size for each in found) > len(content):
            raise ValueError("its parts are larger than it is")
        for each in found:
            del each.CRC  # which torch does not look at; `frame` has none
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
    """What torch.save wrote as `content`, on the host. Raises some `Exception`, in one line, for
    what has other types, or takes much more memory than it has bytes. See [Note: an item takes no
    more than it brings]."""
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
