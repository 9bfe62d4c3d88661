"""The directory a run leaves behind: checked before training, written so that plain `transformers` loads it."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.tokenizer import Tokenizer
from infinity.files import make_durable
from infinity.modules.load import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30
"""Most bytes of weights held in memory, and written to one file, at a time (one larger tensor has a file of its own)."""
_OLD_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.partial)?|model-\d+\.partial")


def prepare_output(directory: Path, source: Path | None, overwrite: bool) -> None:
    """Create `directory` and make sure, before training starts, that the result can be written there.

    Raises `ValueError` when it is the directory of the model itself or, without `overwrite`, not empty, and `OSError` when
    it cannot be created or written.
    """
    if source is not None and directory.exists() and directory.samefile(source):
        raise ValueError(f"--output {directory} is the directory of the model itself; choose another one")
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--output {directory} is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ValueError(f"--output {directory} is not empty; choose another one, or give --overwrite")
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".infinity-write-test"
    try:
        probe.write_bytes(b"")
    except OSError as error:
        raise PermissionError(f"--output {directory} cannot be written: {error.strerror}") from None
    probe.unlink()


def save_model(
    directory: Path, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], tokenizer: Tokenizer
) -> None:
    """Write config, weights and tokenizer of a `transformers` model to `directory`.

    `weights` gives full tensors by the model's names and is read once, as a stream; persistent buffers it leaves out are
    taken from `model`.
    """
    from transformers import PretrainedConfig

    dtypes: dict[str, int] = {}
    write_weights(directory, _count_dtypes(_with_buffers(model, weights), dtypes))
    config: Any = copy.deepcopy(model.config)
    assert isinstance(config, PretrainedConfig)
    config.architectures = [type(model).__name__]
    if dtypes:
        config.dtype = max(dtypes, key=lambda name: dtypes[name])
    config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    tokenizer.save(directory)


def _with_buffers(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    written: set[str] = set()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if name not in module._non_persistent_buffers_set and full not in written:
                yield full, buffer


def _count_dtypes(weights: Iterable[tuple[str, torch.Tensor]], dtypes: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on and add up in `dtypes` how many values of each floating-point dtype they hold."""
    for name, tensor in weights:
        if tensor.is_floating_point():
            key = str(tensor.dtype).removeprefix("torch.")
            dtypes[key] = dtypes.get(key, 0) + tensor.numel()
        yield name, tensor


def write_weights(directory: Path, weights: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write a stream of tensors as safetensors shards of at most `shard_bytes`; returns the files.

    Every file is complete and on disk before any gets its final name, and one shard is in memory at a time.
    """
    written: list[Path] = []
    names: list[list[str]] = []
    total = 0
    try:
        for shard in _shards(weights, shard_bytes):
            written.append(directory / f"model-{len(written) + 1:05d}.partial")
            names.append(list(shard))
            total += sum(tensor.nbytes for tensor in shard.values())
            _write_shard(written[-1], shard)
        for old in directory.iterdir():
            if old not in written and (_OLD_SHARD.fullmatch(old.name) or old.name == INDEX):
                old.unlink()
        count = len(written)
        final = [directory / (f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE) for i in range(1, count + 1)]
        for path, to in zip(written, final, strict=True):
            path.rename(to)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    if count > 1:
        where = {name: path.name for path, shard_names in zip(final, names, strict=True) for name in shard_names}
        write_file(directory / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
    make_durable(directory)
    return final


def _shards(weights: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().clone().contiguous()  # the source may be a view of memory that is reused
        size += tensor.nbytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # what the umask gives; safetensors makes files for the owner alone
    save_file(shard, path, metadata={"format": "pt"})
    path.chmod(mode)
    make_durable(path)


def write_file(path: Path, text: str) -> None:
    """Write `text` so that `path` is either as before or complete: temporary file, fsync, rename."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        make_durable(partial)
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
