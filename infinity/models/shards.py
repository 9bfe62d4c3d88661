"""Writes a stream of tensors as safetensors shards, as transformers names them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.directories.directory import Directory
from infinity.directories.drafts import Drafts, drafting
from infinity.errors import naming
from infinity.nvme import safetensors
from infinity.weights.tensors import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30
"""The limit of tensor bytes in one file. A larger tensor has a file of its own."""
_WRITE_BYTES = 64 << 20
_OLD_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.partial)?|model-\d+\.partial")


def write_weights(
    directory: Path, weights: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write a stream of tensors as safetensors shards of at most `shard_bytes`. Returns the files.

    Each tensor is written before the next is taken, and none is kept. Every file is complete and on
    the drive before any gets its final name. A shard also ends before a tensor that would not be
    aligned.
    """
    with Directory(directory, "--output") as place, drafting(place) as drafts:
        names = draft_weights(drafts, weights, shard_bytes)
        old = set(weight_files(place))
        for name in names:
            drafts.publish(name)
        for name in old.difference(names):
            place.remove(name)
    return [directory / name for name in names if name != INDEX]


def weight_files(place: Directory) -> list[str]:
    """The names of the files in `place` that `write_weights` writes."""
    return [name for name in place.names() if _OLD_SHARD.fullmatch(name) or name == INDEX]


def draft_weights(
    drafts: Drafts, weights: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write the files of `write_weights` as drafts with their final names. Returns the names, that
    of an index last."""
    shards = _write_shards(drafts, weights, shard_bytes)
    count = len(shards)
    names = [
        f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
        for i in range(1, count + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        drafts.folder.rename(shard.draft, name)
    if count > 1:
        total = sum(shard.nbytes for shard in shards)
        where = {
            key: name for name, shard in zip(names, shards, strict=True) for key in shard.names
        }
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        drafts.write(INDEX, index.encode())
        names.append(INDEX)
    return names


def _write_shards(
    drafts: Drafts, weights: Iterable[tuple[str, torch.Tensor]], most: int
) -> list[_Shard]:
    shards: list[_Shard] = []
    with ExitStack() as stack:
        for name, tensor in weights:
            fits = shards and (shards[-1].nbytes == 0 or shards[-1].nbytes + tensor.nbytes <= most)
            if not fits or not shards[-1].write(name, tensor):
                if shards:
                    shards[-1].close()
                shards.append(stack.enter_context(_Shard(drafts, f"shard-{len(shards)}", name)))
                shards[-1].write(name, tensor)
            del tensor  # free it before the next tensor comes
        if not shards:
            shards.append(stack.enter_context(_Shard(drafts, "shard-0", "")))
        shards[-1].close()
    return shards


class _Shard:
    """A safetensors file that is being written. After an exception in a `with` block it stays
    incomplete."""

    def __init__(self, drafts: Drafts, draft: str, first: str) -> None:
        """`first` is the name of the first tensor. The header has room for it."""
        self.draft, self._path = draft, drafts.folder.path / draft
        self.names: list[str] = []
        self.nbytes = 0
        self._header = safetensors.Growing({"format": "pt"}, safetensors.header_bytes(first))
        self._file: Any = os.fdopen(drafts.folder.create(draft, 0o666), "wb", buffering=0)

    def write(self, name: str, tensor: torch.Tensor) -> bool:
        """Write the bytes of `tensor`. Returns False, and writes nothing, if it does not fit into
        this file."""
        entry = self._header.add(name, tensor.dtype, tensor.shape)
        if entry is None:
            return False
        self.names.append(name)
        self.nbytes += entry.nbytes
        if entry.nbytes:
            import torch

            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            with naming(self._path):
                self._file.seek(entry.begin)
                while data:
                    data = data[self._file.write(data[:_WRITE_BYTES]) :]
        return True

    def close(self) -> None:
        """Write the header, and return when the file is on the drive."""
        with naming(self._path):
            self._file.seek(0)
            self._file.write(self._header.head())
            self._file.truncate(self._header.end)
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
