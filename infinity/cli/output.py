"""Writes the output directory of a run, which plain `transformers` loads. It is checked before
training."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.checkpoint.files import METRICS
from infinity.directories.directory import Directory, check_length
from infinity.directories.drafts import Drafts, drafting, remove_leftovers
from infinity.errors import naming
from infinity.models.tokenizer import Tokenizer
from infinity.nvme import safetensors
from infinity.weights.tensors import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

RUN_NAME = "infinity-run.json"
"""The run file of the directory; see `infinity.cli.run_file`."""
OWN_NAMES = {RUN_NAME, METRICS, "runs"}
"""The files of a run that come before its model. Those of TensorBoard are in `runs`."""
SHARD_BYTES = 1 << 30
"""The limit of tensor bytes in one file. A larger tensor has a file of its own."""
_WRITE_BYTES = 64 << 20
_OLD_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.partial)?|model-\d+\.partial")


def prepare_output(directory: Path, source: Path | None, overwrite: bool) -> None:
    """Create `directory`, and check before training that the output can be written there.

    Raises `ValueError` if it is the directory of the model itself, or is not empty without
    `overwrite`. Raises `ConfigError` or `OSError` if it cannot be created or written.
    """
    check_length(directory, "--output")
    if source is not None and directory.exists() and directory.samefile(source):
        raise ValueError(
            f"--output {directory} is the directory of the model itself; choose another one"
        )
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--output {directory} is not a directory")
    if directory.is_dir() and not overwrite:
        with Directory(directory, "--output") as place:
            if set(place.names()) - remove_leftovers(place).keys() - OWN_NAMES:
                raise ValueError(
                    f"--output {directory} is not empty; choose another one, or give --overwrite"
                )
    directory.mkdir(parents=True, exist_ok=True)
    with Directory(directory, "--output") as place, drafting(place):
        pass


def save_model(
    directory: Path,
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Tokenizer,
) -> None:
    """Write config, weights and tokenizer of a `transformers` model to `directory`.

    `weights` yields full tensors by the model's names. It is read once, as a stream. Persistent
    buffers that it leaves out come from `model`.
    """
    dtypes: dict[str, int] = {}
    write_weights(directory, _count_dtypes(_with_buffers(model, weights), dtypes))
    dtype = max(dtypes, key=lambda name: dtypes[name]) if dtypes else None
    save_description(directory, model, tokenizer, dtype)


def save_description(
    directory: Path, model: torch.nn.Module, tokenizer: Tokenizer, dtype: str | None = None
) -> None:
    """Write config and tokenizer of a `transformers` model to `directory`, for `from_pretrained`,
    and the config of its adapters. `dtype` is the dtype of the weights; None keeps that of the
    config."""
    from transformers import PretrainedConfig

    from infinity.models.adapters import base_of  # imports torch

    whole: Any = model
    model = base_of(whole)
    adapters = {} if model is whole else whole.peft_config
    config: Any = copy.deepcopy(model.config)
    assert isinstance(config, PretrainedConfig)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    generation: Any = getattr(model, "generation_config", None)
    with Directory(directory, "--output") as place, drafting(place) as drafts:
        with naming(directory):
            config.save_pretrained(drafts.path)
            if generation is not None:
                generation.save_pretrained(drafts.path)
            for each in adapters.values():
                each.save_pretrained(drafts.path)
            tokenizer.save(drafts.path)
        for name in drafts.names():
            drafts.publish(name)


def save_adapters(
    directory: Path,
    model: torch.nn.Module,
    adapters: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
) -> None:
    """Write the `adapters` of a PEFT model and its tokenizer to `directory`, for
    `PeftModel.from_pretrained`."""
    peft_model: Any = model
    with Directory(directory, "--output") as place, drafting(place) as drafts:
        with naming(directory):
            peft_model.save_pretrained(
                drafts.path, state_dict=adapters, save_embedding_layers=False
            )
            tokenizer.save(drafts.path)
        for name in drafts.names():
            drafts.publish(name)


def _with_buffers(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    written: set[str] = set()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor
        del tensor  # free it before the next unit is gathered
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if name not in module._non_persistent_buffers_set and full not in written:
                yield full, buffer


def _count_dtypes(
    weights: Iterable[tuple[str, torch.Tensor]], dtypes: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights`, and count the elements of each floating-point dtype in `dtypes`."""
    for name, tensor in weights:
        if tensor.is_floating_point():
            key = str(tensor.dtype).removeprefix("torch.")
            dtypes[key] = dtypes.get(key, 0) + tensor.numel()
        yield name, tensor
        del tensor


def write_weights(
    directory: Path, weights: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write a stream of tensors as safetensors shards of at most `shard_bytes`. Returns the files.

    Each tensor is written before the next is taken, and none is kept. Every file is complete and on
    the drive before any gets its final name. A shard also ends before a tensor that would not be
    aligned.
    """
    with Directory(directory, "--output") as place, drafting(place) as drafts:
        shards = _write_shards(drafts, weights, shard_bytes)
        count = len(shards)
        final = [
            f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
            for i in range(1, count + 1)
        ]
        if count > 1:
            total = sum(shard.nbytes for shard in shards)
            where = {
                name: to for to, shard in zip(final, shards, strict=True) for name in shard.names
            }
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
            drafts.write(INDEX, index.encode())
        old = {name for name in place.names() if _OLD_SHARD.fullmatch(name) or name == INDEX}
        for shard, to in zip(shards, final, strict=True):
            drafts.publish(shard.draft, to)
        if count > 1:
            drafts.publish(INDEX)
        for name in old.difference(final, [INDEX] * (count > 1)):
            place.remove(name)
    return [directory / name for name in final]


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


def write_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: temporary file, fsync, rename.

    Characters that UTF-8 cannot encode, as in paths of other encodings, are written with
    backslashes.
    """
    with Directory(path.parent) as place, drafting(place) as drafts:
        drafts.write(path.name, text.encode("utf-8", "backslashreplace"))
        drafts.publish(path.name)
