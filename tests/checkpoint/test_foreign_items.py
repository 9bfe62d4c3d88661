"""Items of checkpoints that somebody else has written: read with the same bits, or refused, in
memory that is a small multiple of their size."""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import resource
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.checkpoint.inert import DEPTH, pack_item, read_item
from infinity.errors import CheckpointError


def item(pickled: bytes, method: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/version", "3\n")
        archive.writestr("x/byteorder", "little")
        for name, part in parts.items():
            archive.writestr(f"x/data/{name}", part)
    return stream.getvalue()


class Call:
    """Pickled as a call of what `module` calls `name`, and perhaps of `__setstate__`."""

    def __init__(self, module: str, name: str, *args: Any, state: Any = None) -> None:
        self.called = getattr(importlib.import_module(module), name)
        self.args, self.state = args, state


class Storage:
    """Pickled as a storage of `count` floats, in part `key`."""

    def __init__(self, count: int, key: str = "a") -> None:
        self.count, self.key = count, key


class Writer(pickle.Pickler):
    """As torch.save writes, but calls and storages as they are told."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return "storage", torch.FloatStorage, obj.key, "cpu", obj.count
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Call):
            return NotImplemented
        return (obj.called, obj.args) + (() if obj.state is None else (obj.state,))


def written(value: Any, **parts: bytes) -> bytes:
    stream = io.BytesIO()
    Writer(stream, 2).dump(value)
    return item(stream.getvalue(), **parts)


def tensor(storage: Any, offset: int, size: tuple[Any, ...], stride: tuple[Any, ...]) -> Call:
    hooks = Call("collections", "OrderedDict", ())
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, size, stride, False, hooks)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> Any:
    value: Any = [1]
    for _ in range(times):
        value = [value, value]
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def overlapping() -> bytes:
    """A directory of parts that are all of the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(1, 2))
        archive.writestr("x/data/a", b"a" * 1000)
        for name in "bcdefgh":
            twin = zipfile.ZipInfo("x/data/a")
            vars_of = archive.getinfo("x/data/a")
            twin.header_offset, twin.CRC = vars_of.header_offset, vars_of.CRC
            twin.file_size = twin.compress_size = 1000
            twin.filename = f"x/data/{name}"
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
    return stream.getvalue()


TEXT = "a" * 4000
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a large number of an object": (lambda: item(b"\x80\x02Nr\xff\xff\xff\x03."), "numbers an obj"),
    "the same in decimal": (lambda: item(b"Np50000000\n."), "numbers an object"),
    "bytes that are not there": (
        lambda: item(b"\x80\x05\x96" + b"\xff" * 6 + b"\0\0."), "expected",
    ),
    "compressed": (
        lambda: item(pickle.dumps("a" * 100, 2), zipfile.ZIP_DEFLATED), "is compressed",
    ),
    "overlapping parts": (overlapping, "larger than it is"),
    "bytes by number": (lambda: written(Call("builtins", "bytearray", 1 << 28)), "made of bytes"),
    "texts in another code": (
        lambda: written(Call("_codecs", "encode", TEXT, "utf-32")), "latin1",
    ),
    "copies of a text": (
        lambda: written([Call("_codecs", "encode", TEXT, "latin1") for _ in range(1000)]),
        "more than it is itself",
    ),
    "beyond its storage": (
        lambda: written(tensor(Storage(4), 0, (1 << 26,), (1,)), a=b"1234" * 4), "larger than its",
    ),
    "an offset beyond": (
        lambda: written(tensor(Storage(4), 1 << 26, (4,), (1,)), a=b"1234" * 4), "larger than its",
    ),
    "much larger than its storage": (
        lambda: written(tensor(Storage(4), 0, (1 << 30,), (0,)), a=b"1234" * 4), "much larger",
    ),
    "a negative stride": (
        lambda: written(tensor(Storage(4), 3, (4,), (-1,)), a=b"1234" * 4), "shape of a tensor",
    ),
    "a storage of another size": (
        lambda: written(tensor(Storage(1 << 26), 0, (4,), (1,)), a=b"1234" * 4), "storage a is not",
    ),
    "no storage": (lambda: written(tensor([], 0, (4,), (1,))), "has no storage"),
    "a state of a tensor": (
        lambda: written(
            Call(
                "torch._utils", "_rebuild_tensor_v2",
                *tensor(Storage(4), 0, (4,), (1,)).args,
                state=(Storage(4), 0, (1 << 26,), (1,)),
            ),
            a=b"1234" * 4,
        ),
        "has no state",
    ),
    "deep": (lambda: written(nested(DEPTH + 2)), "nested more than"),
    "endless": (lambda: written(endless()), "inside of itself"),
    "in many places": (lambda: written(doubled(60)), "too many places"),
    "a function": (lambda: written(Call("os", "system", "true")), "does not belong there"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_more_than_it_brings_is_refused(name: str) -> None:
    make, text = HOSTILE[name]
    content = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Exception, match=text) as caught:
        read_item(content)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def legal() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "numbers": [1, 1.5, True, None, 2**80, complex(1, 2), -(2**31)],
        "texts": ("x", "é", b"abc", bytearray(b"q"), {1, 2}),
        "dicts": collections.OrderedDict(a=1, b={"c": collections.Counter("aab")}),
        "state of a module": torch.nn.Linear(2, 2).state_dict(),
        "dtype": torch.float32,
        "parts": torch.arange(12.0).view(3, 4).t()[1:],
        "expanded": torch.ones(4).expand(3, 4),
        "kinds": [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.uint16, torch.bool)],
        "empty": torch.empty(0, 3),
        "one": torch.tensor(1.0),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "same": [(shared := torch.ones(3)), shared],
        "list of lists": nested(DEPTH // 2),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        dense = [each.to_dense() if each.is_sparse else each for each in (one, other)]
        return one.dtype == other.dtype and torch.equal(*dense)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_what_is_packed_is_read() -> None:
    found = read_item(pack_item("it", legal()).getvalue())
    assert same(legal(), found)
    assert found["same"][0] is found["same"][1]
    assert found["parts"].stride() == legal()["parts"].stride()


@pytest.mark.parametrize("value", [nested(DEPTH + 2), endless(), doubled(60), object()])
def test_what_would_not_be_read_is_not_packed(value: Any) -> None:
    with pytest.raises(CheckpointError, match="it may have numbers, texts and tensors"):
        pack_item("it", value)
