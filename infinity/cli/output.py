"""Writes the output directory of a run, which plain `transformers` loads. It is checked before
training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.checkpoint.files import METRICS
from infinity.directories.directory import Directory, check_length
from infinity.directories.drafts import drafting, remove_leftovers
from infinity.errors import naming
from infinity.models.shards import weight_files, write_weights
from infinity.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

RUN_NAME = "infinity-run.json"
"""The run file of the directory; see `infinity.cli.run_file`."""
_OF_A_MODEL = ("config.json", "generation_config.json")
OWN_NAMES = {RUN_NAME, METRICS, "runs"}
"""The files of a run that come before its model. Those of TensorBoard are in `runs`."""


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
    with Directory(directory, "--output") as place:  # transformers would load them, too
        _remove(place, (name for name in place.names() if name.startswith("adapter_")))
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
        _remove(place, (*weight_files(place), *_OF_A_MODEL))  # of an earlier run


def _remove(place: Directory, names: Iterable[str]) -> None:
    for name in set(names).intersection(place.names()):
        place.remove(name)


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


def write_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: temporary file, fsync, rename.

    Characters that UTF-8 cannot encode, as in paths of other encodings, are written with
    backslashes.
    """
    with Directory(path.parent) as place, drafting(place) as drafts:
        drafts.write(path.name, text.encode("utf-8", "backslashreplace"))
        drafts.publish(path.name)
