"""The index of a checkpoint, in a file that cannot run code: `infinity.json`.

[Note: one digest over everything]
`infinity.json` is written last. It holds `{"content":{...},"sha256":"..."}`, with the digest of the
bytes of `content`. `content` has the length of every data file, and the key, place and digest of
every item. So each item is bound to its key. The digest of an item is CRC32C, which runs at memory
speed. Every data file begins with `Stamp.head`: the run, the save and its own name. The items fill
the rest without gaps. So the digests cover every byte of a checkpoint, and a load refuses a file of
another save before it reads its items.

Moments that are zeros are not written. `absent` lists their keys. Any other missing item is an
error.

`.metadata` is written for the tools of torch.distributed.checkpoint. It is a pickle, and this
package never reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from infinity.checkpoint import digest
from infinity.checkpoint.files import DATA_NAME
from infinity.checkpoint.pickles import DTYPES
from infinity.errors import CheckpointError

VERSION = 3
_FRAME = re.compile(rb'\{"content":(.*),"sha256":"([0-9a-f]{64})"\}\n', re.DOTALL)
_ID = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r".*", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{8}")


class Stamp(NamedTuple):
    """Identifies a save: random ids of the engine's run and of the save, and the number of
    steps."""

    run: str = ""
    save: str = ""
    step: int = 0

    def head(self, name: str) -> bytes:
        """The first bytes of the data file `name`."""
        return (
            f"infinity checkpoint\nrun {self.run}\nsave {self.save}\nstep "
            f"{self.step}\nfile {name}\n"
        ).encode()


class ItemPlace(NamedTuple):
    """The bytes of an item in its file. `sizes` is the shape of a tensor, and None for an
    object."""

    file: str
    offset: int
    length: int
    sizes: tuple[int, ...] | None = None
    digest: str = ""


class Manifest(NamedTuple):
    """The index of a checkpoint."""

    version: int
    stamp: Stamp
    files: Mapping[str, int]
    """The length of each data file, in bytes."""

    tensors: Mapping[str, TensorStorageMetadata]
    """By key."""

    places: Mapping[MetadataIndex, ItemPlace]
    absent: frozenset[str]
    """The keys that are not saved, or not saved in full. The missing elements are zeros."""


def tensor_metadata(
    dtype: torch.dtype, size: Iterable[int], chunks: Iterable[ChunkStorageMetadata]
) -> TensorStorageMetadata:
    """DCP's metadata of a tensor."""
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), list(chunks))


def encode(manifest: Manifest) -> bytes:
    """The content of `infinity.json`."""
    items = []
    for index, place in manifest.places.items():
        item = {
            "key": index.fqn,
            "file": place.file,
            "offset": place.offset,
            "length": place.length,
            digest.ALGORITHM: place.digest,
        }
        if place.sizes is not None:
            item |= {"offsets": list(index.offset or ()), "sizes": list(place.sizes)}
        items.append(item)
    content = {
        "version": manifest.version,
        **manifest.stamp._asdict(),
        "files": dict(manifest.files),
        "tensors": {
            key: {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "size": list(tensor.size),
            }
            for key, tensor in manifest.tensors.items()
        },
        "absent": sorted(manifest.absent),
        "items": items,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return b'{"content":%b,"sha256":"%b"}\n' % (text, hashlib.sha256(text).hexdigest().encode())


def decode(data: bytes) -> Manifest:
    """The manifest that `encode` was given. Raises `CheckpointError` for another version, and an
    `Exception` such as `ValueError` for damaged data."""
    frame = _FRAME.fullmatch(data)
    if frame is None or hashlib.sha256(frame[1]).hexdigest().encode() != frame[2]:
        raise ValueError("its digest is wrong")
    content = json.loads(frame[1])
    version = _number(content["version"])
    if version != VERSION:
        wanted = "a newer infinity" if version > VERSION else "the infinity that wrote it"
        raise CheckpointError(
            f"it has version {version}, and this infinity reads version {VERSION}; use {wanted}"
        )
    run, save = (_text(content[name], _ID) for name in ("run", "save"))
    files = {_text(name, DATA_NAME): _number(length) for name, length in content["files"].items()}
    tensors = {
        key: tensor_metadata(DTYPES[tensor["dtype"]], _numbers(tensor["size"]), ())
        for key, tensor in content["tensors"].items()
    }
    places: dict[MetadataIndex, ItemPlace] = {}
    for item in content["items"]:
        index, place = _decode_item(item, files, tensors)
        if index in places:
            raise ValueError(f"{index.fqn} is there twice")
        places[index] = place
    return Manifest(
        version,
        Stamp(run, save, _number(content["step"])),
        files,
        tensors,
        places,
        frozenset(_text(key, _KEY) for key in content["absent"]),
    )


def _decode_item(
    item: Mapping[str, Any],
    files: Mapping[str, int],
    tensors: Mapping[str, TensorStorageMetadata],
) -> tuple[MetadataIndex, ItemPlace]:
    """The index and place of an item. The chunk of a tensor is added to `tensors`."""
    key, offsets, sizes = _text(item["key"], _KEY), None, None
    if "sizes" in item:
        offsets, sizes = _numbers(item["offsets"]), _numbers(item["sizes"])
        whole = tensors[key].size
        if len(offsets) != len(whole) or any(
            a + n > end for a, n, end in zip(offsets, sizes, whole, strict=True)
        ):
            raise ValueError(f"a part of {key} lies outside of it")
        tensors[key].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    place = ItemPlace(
        _text(item["file"], DATA_NAME),
        _number(item["offset"]),
        _number(item["length"]),
        sizes,
        _text(item[digest.ALGORITHM], _DIGEST),
    )
    if place.offset + place.length > files[place.file]:
        raise ValueError(f"{key} lies outside of {place.file}")
    return MetadataIndex(key, offsets), place


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is no length or count")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_number, values))


def _text(value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError(f"{value!r:.40} is no name or id of ours")
    return value
