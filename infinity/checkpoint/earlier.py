"""Reading `.metadata`, which is all that a checkpoint of version 1 says of itself: a pickle, see
`checkpoint/inert`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from infinity.checkpoint.files import DATA_NAME
from infinity.checkpoint.manifest import ItemPlace, Manifest, Stamp, tensor_metadata
from infinity.checkpoint.pickles import DTYPES, unpickle

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
NAMES = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("builtins", "getattr"),  # by which Python before 3.11.4 pickles members of an enumeration
        *(("torch", name) for name in DTYPES),
    }
)
"""All that `.metadata` of version 1 refers to: (module, name)."""


def decode(data: bytes) -> Manifest:
    """What `.metadata` says. Raises some `Exception` for what is damaged."""
    whole = unpickle(data, NAMES).state
    tensors, places = {}, {}
    for key, record in whole["state_dict_metadata"].items():
        if type(record).__name__ == "TensorStorageMetadata":
            dtype = DTYPES[record.state["properties"].state[0].__name__]
            chunks = [
                ChunkStorageMetadata(
                    torch.Size(_size(chunk.state["offsets"])),
                    torch.Size(_size(chunk.state["sizes"])),
                )
                for chunk in record.state["chunks"]
            ]
            tensors[str(key)] = tensor_metadata(dtype, _size(record.state["size"]), chunks)
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, tensor in tensors.items()
        for chunk in tensor.chunks
    }
    for record, info in whole["storage_data"].items():
        key, offset = str(record.state["fqn"]), record.state.get("offset")
        offsets = None if offset is None else _size(offset)
        name, begin, length = (info.state[part] for part in ("relative_path", "offset", "length"))
        if DATA_NAME.fullmatch(name) is None or not 0 <= int(begin) <= int(begin) + int(length):
            raise ValueError(f"{key} lies in no file of ours")
        shape = None if offsets is None else sizes[key, offsets]
        places[MetadataIndex(key, offsets)] = ItemPlace(name, int(begin), int(length), shape)
    files: dict[str, int] = {}
    for place in places.values():
        files[place.file] = max(files.get(place.file, 0), place.offset + place.length)
    return Manifest(1, Stamp(), files, tensors, places, absent=None)


def _size(record: Any) -> tuple[int, ...]:
    """The numbers of what was a `torch.Size`."""
    return tuple(map(int, record.args[0])) if record.args else ()
