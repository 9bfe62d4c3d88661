"""Checkpoints as earlier versions wrote them, made from one of this version."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from infinity.checkpoint.loading import CheckpointReader
from infinity.checkpoint.manifest import ItemPlace, encode
from infinity.checkpoint.state import HEADER


def write_earlier(source: Path, target: Path, version: int) -> None:
    """Write the checkpoint `source` to the new directory `target` in version 1 or 2.

    Both had tensors as torch.save writes them, with checksums of its own. Version 2 had an index
    with SHA-256, version 1 had no index.
    """
    reader = CheckpointReader(source)
    reader.open_files()
    content = reader.manifest
    target.mkdir()
    places: dict[MetadataIndex, ItemPlace] = {}
    files: dict[str, int] = {}
    for name in content.files:
        data = bytearray(content.stamp.head(name))
        for index, place in content.places.items():
            if place.file == name:
                item = _saved(reader.read(index), index, version)
                digest = hashlib.sha256(item).hexdigest()
                places[index] = ItemPlace(name, len(data), len(item), place.sizes, digest)
                data += item
        (target / name).write_bytes(data)
        files[name] = len(data)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.storage_data = {
        index: _StorageInfo(place.file, place.offset, place.length)
        for index, place in places.items()
    }
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    if version > 1:
        whole = content._replace(version=version, files=files, places=places)
        (target / "infinity.json").write_bytes(encode(whole))


def _saved(value: Any, index: MetadataIndex, version: int) -> bytes:
    """As torch.save writes it; the header has the version."""
    if index == MetadataIndex(HEADER):
        value = value | {"version": version}
    if isinstance(value, torch.Tensor):
        value = value.clone()  # not the memory of all that it is a part of
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
