"""Reads a checkpoint without an engine, for `infinity inspect` and `infinity export`.

Neither command needs a GPU or process groups. Memory holds one piece of a tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from infinity.checkpoint.files import ENGINE, is_whole, open_plain
from infinity.checkpoint.loading import CheckpointReader
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.state import HEADER, in_words
from infinity.errors import CheckpointError

MOST_EXTRA_BYTES = 64 << 20
"""The largest `extra` of a rank that `Contents.extra_keys` reads."""
_MOST_DIGITS = 9
"""The largest number of digits in a rank number."""


class StoredTensor(NamedTuple):
    """A tensor of the model: its name and shape in the model, and its key, dtype and chunks in the
    checkpoint."""

    name: str
    shape: tuple[int, ...]
    key: str
    dtype: torch.dtype
    chunks: tuple[ChunkStorageMetadata, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the checkpoint."""
        return self.numel * self.dtype.itemsize


class Run(NamedTuple):
    """Consecutive elements of a tensor: the flat index of the first element, and values of shape
    (n,)."""

    begin: int
    values: torch.Tensor


class Damage(NamedTuple):
    """The result of `Contents.verify`: items and bytes read, and one error text per damaged
    item."""

    items: int
    nbytes: int
    errors: list[str]


class Contents:
    """One checkpoint, opened for reading. The constructor reads the index and the header, and
    checks the length and the first bytes of every file.

    `left_out` has the names of frozen parameters that the save left out. `tied` maps each other
    name of a tied parameter to its name in `weights`. Raises `CheckpointError` if the directory is
    no checkpoint, is incomplete, or has another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = CheckpointReader(directory)
        self._reader.open_files()
        index = MetadataIndex(HEADER)
        if index not in self.manifest.places:
            raise CheckpointError(f"{directory} was not written by save_checkpoint of infinity")
        with in_words(f"{directory} cannot be read"):
            self.header: dict[str, Any] = self._reader.read(index)
            self.left_out = frozenset(self.header.get("frozen", ()))
            tied = self.header.get("tied", {})
            self.tied = {str(name): str(first) for name, first in tied.items()}
            self._weights = [
                self._stored(str(name), tuple(map(int, shape)))
                for name, shape in self.header["shapes"].items()
                if name not in self.left_out
            ]

    @property
    def manifest(self) -> Manifest:
        """The index of all items."""
        return self._reader.manifest

    def weights(self) -> list[StoredTensor]:
        """The parameters and buffers in the checkpoint, in the order of the model."""
        return self._weights

    def trained(self) -> frozenset[str]:
        """The names of the parameters that optimizers update. Raises `CheckpointError` if the
        checkpoint was saved without an optimizer."""
        optimizers = self.header["optimizers"]
        if not optimizers:
            raise CheckpointError(
                f"{self.directory} was saved without an optimizer, so it does not say which "
                "parameters are trained; export all of it"
            )
        with in_words(f"{self.directory} cannot be read"):
            return frozenset(
                name for each in optimizers for group in each["names"] for name in group
            )

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        key = f"model.{name}"
        found = self.manifest.tensors.get(key)
        if found is None:
            if math.prod(shape):
                raise CheckpointError(f"{self.directory} is not whole: there is no {key}")
            return StoredTensor(name, shape, key, torch.float32, ())
        here = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        if not here == math.prod(found.size) == math.prod(shape):
            raise CheckpointError(
                f"{self.directory} is not whole: {key} has {here} of {math.prod(shape)} elements"
            )
        return StoredTensor(name, shape, key, found.properties.dtype, tuple(found.chunks))

    def read(self, tensor: StoredTensor) -> Iterator[Run]:
        """Read `tensor` piece by piece, as `Run`s of values in the stored dtype. Raises
        `CheckpointError` if the digest of a piece is wrong."""
        size = self.manifest.tensors[tensor.key].size if tensor.chunks else torch.Size()
        for chunk in tensor.chunks:
            index = MetadataIndex(tensor.key, chunk.offsets)
            yield from _runs(self._reader.read(index), chunk.offsets, size)

    def extra_keys(self) -> dict[int, list[str] | None]:
        """The keys of the `extra` of each rank, by rank. The value is None if `extra` is no mapping
        or has more than `MOST_EXTRA_BYTES`."""
        found: dict[int, list[str] | None] = {}
        for index, place in self.manifest.places.items():
            kind, _, rank = index.fqn.partition(".")
            is_rank = rank.isdecimal() and len(rank) <= _MOST_DIGITS
            if kind != "extra" or place.sizes is not None or not is_rank:
                continue
            small = place.length <= MOST_EXTRA_BYTES
            value = self._reader.read(index) if small else None
            found[int(rank)] = list(map(str, value)) if isinstance(value, Mapping) else None
        return dict(sorted(found.items()))

    def extra(self, rank: int) -> Mapping[str, Any]:
        """The `extra` of a rank. Empty if there is none or it is no mapping."""
        index = MetadataIndex(f"extra.{rank}")
        value = self._reader.read(index) if index in self.manifest.places else None
        return value if isinstance(value, Mapping) else {}

    def verify(self) -> Damage:
        """Read every item and compare its digest."""
        errors, nbytes = [], 0
        for index, place in self.manifest.places.items():
            nbytes += place.length
            try:
                self._reader.read(index)
            except CheckpointError as error:
                errors.append(str(error))
        return Damage(len(self.manifest.places), nbytes, errors)


def _runs(values: torch.Tensor, offsets: Sequence[int], size: Sequence[int]) -> Iterator[Run]:
    """Split a piece at `offsets` of a tensor of shape `size` into runs of consecutive elements."""
    if len(size) == 2 and values.shape[1] < size[1]:  # columns of a tensor parallel rank
        for number, row in enumerate(values):
            yield Run((offsets[0] + number) * size[1] + offsets[1], row)
    else:
        yield Run(offsets[0] * math.prod(size[1:]) if size else 0, values.reshape(-1))


def latest(directory: Path) -> Path:
    """The newest checkpoint in the directory of a run. A checkpoint itself is returned as it is.

    In the directory of a run, a file `latest` names the checkpoint. Without that file, it is
    `step-<number>` or `checkpoint-<number>` with the highest number. In the directory of a Trainer,
    it is the checkpoint of the engine. Without any checkpoint, it is `directory` itself.
    """
    if not directory.is_dir():
        return directory
    if (own := _of_engine(directory)) is not None:
        return own
    named = directory / "latest"
    if named.is_file() and not named.is_symlink():
        with open_plain(named) as file:
            name = file.read(256).decode(errors="replace").strip()
        if name and Path(name).name == name and is_whole(directory / name):
            return directory / name
    steps = [
        (int(number), own)
        for path in directory.iterdir()
        for prefix, _, number in [path.name.partition("-")]
        if prefix in ("step", "checkpoint") and number.isdecimal()
        if (own := _of_engine(path)) is not None
    ]
    return max(steps)[1] if steps else directory


def _of_engine(directory: Path) -> Path | None:
    """The checkpoint that `directory` is or has; None without one."""
    return next((each for each in (directory, directory / ENGINE) if is_whole(each)), None)
