"""Stored tensors by name: of files, a directory, an index, the cache of the hub, or a state dict. A
tensor is read only when it is requested.

[Note: shards are mapped for reading]
All shards of a model are open at once. `safe_open` makes a writable private mapping of each for
torch. Under `RLIMIT_DATA` or strict overcommit that counts as memory of the process: as much as the
model. So files are mapped read-only here. If `nvme/safetensors` refuses the header of a file,
`safe_open` reads it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from infinity.errors import ConfigError, WeightsError, reason
from infinity.nvme import safetensors
from infinity.nvme.safetensors import DTYPES, Entry
from infinity.tiers.originals import OriginalFile, StoredBytes

log = logging.getLogger("infinity")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_IN_A_DIRECTORY = (INDEX, SINGLE, f"{_PICKLED}.index.json", _PICKLED)
"""The files that are searched for, in this order."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Source = str | Path | Mapping[str, torch.Tensor]
"""The type of `weights` in `infinity.wrap`."""


class _MappedFile:
    """A safetensors file that is mapped read-only. Raises `WeightsError` if it is damaged."""

    def __init__(self, file: OriginalFile) -> None:
        with os.fdopen(file.open(), "rb") as opened:
            self._entries = {entry.name: entry for entry in _entries_in(opened, file)}
            memory = mmap.mmap(opened.fileno(), file.nbytes, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it is never written
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def read(self, name: str, bounds: tuple[slice, ...]) -> torch.Tensor:
        """Tensor `name`, or the part of it within `bounds`. A write to it ends the process."""
        entry = self._entries[name]
        flat = self._bytes[entry.begin : entry.end]
        if flat.storage_offset() % entry.dtype.itemsize:
            flat = flat.clone()
        tensor = flat.view(entry.dtype).view(entry.shape)
        return tensor[bounds] if bounds else tensor


class _OtherFile:
    """A safetensors file that `safe_open` reads. Raises `SafetensorError` if it is damaged."""

    def __init__(self, path: Path) -> None:
        self._opened: Any = safe_open(str(path), framework="pt")

    def keys(self) -> Iterable[str]:
        return self._opened.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = str(self._opened.get_slice(name).get_dtype())
        return DTYPES[code] if code in DTYPES else self._opened.get_tensor(name).dtype

    def read(self, name: str, bounds: tuple[slice, ...]) -> torch.Tensor:
        opened = self._opened
        return opened.get_slice(name)[bounds] if bounds else opened.get_tensor(name)


class _Sliced:
    """A tensor that another library reads when it is indexed, such as one of a GGUF file."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._given.shape)

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype. Reads the tensor."""
        return self.read(name, ()).dtype

    def read(self, name: str, bounds: tuple[slice, ...]) -> torch.Tensor:
        found: torch.Tensor = self._given[...]
        return found[bounds]


class Tensors:
    """The tensors of one source. Errors call it `where`. Tensors of safetensors files are read when
    they are requested. Files of `torch.save` are mapped."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._files: dict[str, _MappedFile | _OtherFile | _Sliced] = {}  # by names of tensors
        self._originals: dict[str, OriginalFile] = {}  # the same files, by names of tensors
        self._entries: dict[OriginalFile, Mapping[str, Entry]] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def names(self) -> set[str]:
        return {*self._files, *self._tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._tensors:
            return tuple(self._tensors[name].shape)
        return self._files[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._tensors:
            return self._tensors[name].dtype
        return self._files[name].dtype(name)

    def read(self, name: str, bounds: tuple[slice, ...] = ()) -> torch.Tensor:
        """Tensor `name`, or the part of it within `bounds`. It must not be written."""
        if name in self._tensors:
            return self._tensors[name][bounds] if bounds else self._tensors[name]
        return self._files[name].read(name, bounds)

    def stored(self, name: str) -> StoredBytes | None:
        """The place of tensor `name` in a safetensors file. None if it lies in no such file, or if
        `nvme/safetensors` refuses the header.

        Raises `WeightsError` if the file has changed since it was opened.
        """
        file = self._originals.get(name)
        if file is None or name in self._tensors:
            return None
        if file not in self._entries:
            self._entries[file] = _entries_of(file)
        entry = self._entries[file].get(name)
        return None if entry is None else StoredBytes(file, entry.begin, entry.nbytes)

    def add(self, path: Path) -> None:
        """Add the tensors of the file `path`. Raises `ConfigError` if it cannot be read."""
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            self.give(_load(path), str(path))
            return
        try:
            file = OriginalFile.of(path)
            opened = _opened(path, file)
            self._files.update(dict.fromkeys(opened.keys(), opened))
            self._originals.update(dict.fromkeys(opened.keys(), file))
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {reason(error)}") from error

    def give(self, tensors: Mapping[Any, Any], where: str) -> None:
        """Add the tensors of a state dict, which errors call `where`. Raises `ConfigError` if a key
        is no string or a value is no tensor."""
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"{where} is not a state dict: {name!r} is a {type(tensor).__name__}, and "
                    "tensors by name are needed"
                )
            self._tensors[name] = tensor.detach()

    def offer(self, sliced: Mapping[str, Any]) -> None:
        """Add tensors that have a `shape` and are read when they are indexed."""
        self._files.update({name: _Sliced(each) for name, each in sliced.items()})


def _opened(path: Path, file: OriginalFile) -> _MappedFile | _OtherFile:
    """The safetensors file at `path`, which is `file`. Raises `SafetensorError` if it is
    damaged."""
    try:
        return _MappedFile(file)
    except WeightsError as error:  # safetensors may read it, or explain the error
        log.debug("%s is left to safetensors: %s", path, error)
        return _OtherFile(path)


def _entries_of(file: OriginalFile) -> Mapping[str, Entry]:
    """The entries in the header of `file`, by name. Empty if the header is damaged."""
    with os.fdopen(file.open(), "rb") as opened:
        try:
            entries = _entries_in(opened, file)
        except WeightsError as error:  # safetensors reads it
            log.debug("%s is copied: %s", file.path, error)
            return {}
    return {entry.name: entry for entry in entries}


def _entries_in(opened: BinaryIO, file: OriginalFile) -> list[Entry]:
    """The entries in the header of `file`, which was `opened`. Raises `WeightsError` if it is
    damaged."""
    length = opened.read(safetensors.LENGTH_BYTES)
    start = safetensors.data_start(length, file.nbytes, str(file.path))
    header = opened.read(start - len(length))
    return safetensors.parse(header, file.nbytes, str(file.path))


def open_tensors(source: Source) -> Tensors:
    """The tensors of `source`: a safetensors file or one of `torch.save`, an index or a directory
    with them, the id of a model in the cache of the hub, or a state dict.

    Raises `ConfigError` if there are none, or if they cannot be read.
    """
    if isinstance(source, Mapping):
        tensors = Tensors("the state dict")
        tensors.give(source, "the mapping given as weights")
        return tensors
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"weights is a {type(source).__name__}; give a file, a directory, the id of a model of "
            "the hub, or a state dict"
        )
    path = _located(source)
    tensors = Tensors(str(path))
    for file in _files_of(path):
        tensors.add(file)
    return tensors


def open_files(files: Iterable[str | Path]) -> Tensors:
    """The tensors of `files`. Raises `ConfigError` if a file cannot be read."""
    paths = [Path(file) for file in files]
    tensors = Tensors(str(paths[0] if len(paths) == 1 else paths[0].parent))
    for path in paths:
        tensors.add(path)
    return tensors


def cached(name: str) -> Path | None:
    """The directory of the model with the hub id `name` in the cache. None if it is not there, or
    if `name` is an existing path."""
    if Path(name).exists() or not _HUB_ID.fullmatch(name):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _located(source: str | Path) -> Path:
    """The path of `source`, which may be in the cache of the hub. Raises `ConfigError` if it may be
    a hub id but is not in the cache."""
    path = Path(source)
    found = cached(str(source))
    if found is None and not path.exists() and _HUB_ID.fullmatch(str(source)):
        raise ConfigError(
            f"{source} is neither a path nor a model in the cache of the hub; if it is the id of a "
            f"model there, download it first: hf download {source}"
        )
    return found or path


def _files_of(path: Path) -> list[Path]:
    """The files with the tensors of `path`. Raises `ConfigError` if there are none, or several
    without an index."""
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.is_file():
        return [path]
    for name in _IN_A_DIRECTORY:
        if (path / name).is_file():
            return _files_of(path / name)
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        some = ", ".join(each.name for each in others[:3])
        raise ConfigError(
            f"{path} has {len(others)} safetensors files ({some}) and no {INDEX}, so it is open "
            "which belong together; give one file"
        )
    raise ConfigError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _indexed(path: Path) -> list[Path]:
    try:
        index = json.loads(path.read_text())
        return [path.parent / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not an index of safetensors files: {type(error).__name__}: {reason(error)}"
        ) from error


def _load(path: Path) -> Mapping[Any, Any]:
    """The state dict that `torch.save` wrote to `path`, mapped. Runs no code of the file. Raises
    `ConfigError` if it has no state dict."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{path} cannot be mapped as a file of torch.save with tensors alone: {reason}"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} is not a state dict: it holds a {type(found).__name__}")
    return found
