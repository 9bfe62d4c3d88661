"""Writes a checkpoint as safetensors, for `from_pretrained` and other programs.

[Note: how much memory an export takes]
The checkpoint gives all names, dtypes and shapes, so each file starts with its final header. Each
piece of a tensor goes straight to its place in its file. Memory holds one piece, of at most 16 MiB
in fp32, and the bytes of that piece as they were read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity.checkpoint.contents import Contents, StoredTensor
from infinity.directories.drafts import Drafts, drafting_directory
from infinity.errors import CheckpointError, ConfigError, naming
from infinity.nvme import safetensors
from infinity.sharding.codec import round_to

SHARD_BYTES = 4 << 30
"""The default limit of tensor bytes in one file. A larger tensor gets a file of its own."""


class Selection(NamedTuple):
    """The tensors of an export. `rename` maps the name of a tensor to its name in the files, or to
    None to leave it out."""

    stem: str
    """Files are called `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors`."""

    rename: Callable[[str], str | None]
    is_sharded: bool = True


class Exported(NamedTuple):
    """The result of an export. `nbytes` counts the elements of tensors."""

    directory: Path
    files: list[str]
    tensors: int
    nbytes: int


def everything(contents: Contents) -> Selection:
    """All parameters and buffers. Raises `CheckpointError` if the save left out frozen
    parameters."""
    if contents.left_out:
        raise CheckpointError(
            f"{contents.directory} was saved without its {len(contents.left_out)} frozen "
            "parameters, so it is no whole model; give --trainable-only or --adapters-only"
        )
    return Selection("model", lambda name: name)


def trained_only(contents: Contents) -> Selection:
    """The parameters that optimizers update. Raises `CheckpointError` if the checkpoint was saved
    without an optimizer."""
    names = contents.trained()
    return Selection("model", lambda name: name if name in names else None)


def adapters_only(contents: Contents, adapter: str) -> Selection:
    """The parameters of PEFT's `adapter`, under the names of PEFT's own files.

    Raises `CheckpointError` if the checkpoint has no such parameters.
    """
    if not any(adapter_name(weight.name, adapter) for weight in contents.weights()):
        raise CheckpointError(
            f"{contents.directory} has no adapter {adapter!r}: no name of a parameter has "
            f".{adapter}. in it, as those of PEFT have"
        )
    # PEFT reads one file only.
    return Selection("adapter_model", lambda name: adapter_name(name, adapter), is_sharded=False)


def adapter_name(name: str, adapter: str) -> str | None:
    """The name of parameter `name` in PEFT's files of `adapter`. None for a parameter of the base
    model.

    Example: `base_model.model.q.lora_A.default.weight` becomes `base_model.model.q.lora_A.weight`.
    """
    parts = name.split(".")
    if adapter not in parts[1:]:
        return None
    at = parts.index(adapter, 1)
    # PEFT names a module that is saved whole `<module>.modules_to_save.<adapter>`.
    begin = at - 1 if parts[at - 1] == "modules_to_save" else at
    return ".".join(parts[:begin] + parts[at + 1 :])


def export(
    contents: Contents,
    out: Path,
    selection: Selection,
    dtype: torch.dtype | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the tensors of `selection` to the new directory `out`.

    `dtype`: the new dtype of floating-point tensors of 16 bits and more; None keeps their dtypes.
    `files`: the content of additional files, by name. `overwrite` allows replacing a directory of
    plain files. `shard_bytes`: the limit of tensor bytes in one file.

    Raises `ConfigError` if `out` cannot be created, and `CheckpointError` if the checkpoint is
    damaged. After an error `out` is unchanged.
    """
    check_target(out, contents.directory, overwrite)
    wanted = []
    for weight in contents.weights():
        name = selection.rename(weight.name)
        if name is not None:
            wanted.append((name, weight, target_dtype(weight.dtype, dtype)))
    shards = _shards(wanted, shard_bytes if selection.is_sharded else None)
    names = _file_names(selection.stem, len(shards))
    # A parent of "name" alone is the current directory.
    with drafting_directory(out.absolute(), "export to") as drafts:
        for name, content in (files or {}).items():
            drafts.write(name, content)
        for name, shard in zip(names, shards, strict=True):
            _write_file(drafts, name, shard, contents)
        if len(shards) > 1:
            drafts.write(f"{selection.stem}.safetensors.index.json", _index(names, shards))
        written = drafts.names()
    nbytes = sum(_nbytes(each) for each in wanted)
    return Exported(out, written, len(wanted), nbytes)


def check_target(out: Path, checkpoint: Path, overwrite: bool) -> None:
    """Raise `ConfigError` if an export must not replace `out`, or cannot create it."""
    if not os.path.lexists(out):
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"{out} cannot be made: {out.absolute().parent} does not exist")
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"{out} is there and not a directory; choose another name")
    names = [path.name for path in out.iterdir()]
    if not names:
        return
    inside = checkpoint.resolve()
    if out.resolve() in (inside, *inside.parents):
        raise ConfigError(f"{out} holds the checkpoint itself; choose another name")
    if not overwrite:
        raise ConfigError(f"{out} is not empty; choose another name, or give --overwrite")
    if any(path.is_dir() for path in out.iterdir()):
        raise ConfigError(
            f"{out} has directories in it, so it is no earlier export and not replaced; choose "
            "another name"
        )


def target_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in the export. Quantized values and integers keep theirs."""
    return dtype if dtype and stored.is_floating_point and stored.itemsize > 1 else stored


Wanted = tuple[str, StoredTensor, torch.dtype]
"""The name of a tensor in the export, the stored tensor, and its new dtype."""


def _nbytes(wanted: Wanted) -> int:
    return wanted[1].numel * wanted[2].itemsize


def _shards(wanted: Sequence[Wanted], most: int | None) -> list[list[Wanted]]:
    """Fill one file after the other, in the given order, up to `most` bytes each."""
    shards: list[list[Wanted]] = [[]]
    held = 0
    for each in wanted:
        if shards[-1] and most is not None and held + _nbytes(each) > most:
            shards.append([])
            held = 0
        shards[-1].append(each)
        held += _nbytes(each)
    return shards


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(names: Sequence[str], shards: Sequence[Sequence[Wanted]]) -> bytes:
    """The JSON index that maps each tensor to its file."""
    total = sum(_nbytes(each) for shard in shards for each in shard)
    where = {each[0]: name for name, shard in zip(names, shards, strict=True) for each in shard}
    content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": where}
    return json.dumps(content, indent=2).encode()


def _write_file(drafts: Drafts, name: str, shard: Sequence[Wanted], contents: Contents) -> None:
    """Write one file piece by piece, and return when it is on the drive."""
    tensors = {called: (dtype, weight.shape) for called, weight, dtype in shard}
    if len(tensors) < len(shard):
        raise CheckpointError(f"{contents.directory} has two tensors that would have one name")
    head, entries = safetensors.pack(tensors, {"format": "pt"})
    places = {entry.name: entry for entry in entries}
    descriptor = drafts.folder.create(name, 0o666)
    try:
        with naming(drafts.folder.path / name):
            _write(descriptor, 0, memoryview(head))
            for called, weight, dtype in shard:
                begin = places[called].begin
                for run in contents.read(weight):
                    data = _rounded(run.values, dtype).view(torch.uint8).numpy().data
                    _write(descriptor, begin + run.begin * dtype.itemsize, data)
                    del run, data  # free the piece before the next read
            os.ftruncate(descriptor, max([len(head), *(entry.end for entry in entries)]))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert `values` to `dtype`, with the same rounding from fp32 as the engine's own
    parameters."""
    if values.dtype != torch.float32 or dtype == torch.float32:
        return values.to(dtype).contiguous()
    target = torch.empty_like(values, dtype=dtype)
    round_to(target, values)
    return target


def _write(descriptor: int, at: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(descriptor, data, at)
        data = data[done:]
        at += done
