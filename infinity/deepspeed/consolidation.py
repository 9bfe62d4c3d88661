"""`deepspeed.utils.zero_to_fp32`: the weights of a checkpoint in fp32, without an engine."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.contents import Contents, StoredTensor
from infinity.checkpoint.export import everything, export, target_dtype, trained_only
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.latest import LATEST, read_latest
from infinity.directories.drafts import replacing
from infinity.engine import ATTRIBUTE
from infinity.quantities import parse_bytes

_FILE = "pytorch_model.bin"
_MODEL_STATES = "*_model_states.pt"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a checkpoint of `save_checkpoint`, floating-point ones in fp32, in
    host memory. Tied parameters are one tensor under each of their names. `lazy_mode` changes
    nothing. `exclude_frozen_parameters` leaves only trained ones.

    Raises `ValueError` without a tag and a file `latest`, and `CheckpointError` if it is no
    checkpoint of this engine.
    """
    contents = Contents(_tagged(Path(checkpoint_dir), tag))
    wanted = _selection(contents, exclude_frozen_parameters).rename
    state = {
        weight.name: _read(contents, weight) for weight in contents.weights() if wanted(weight.name)
    }
    return state | {name: state[first] for name, first in contents.tied.items() if first in state}


def get_optim_files(checkpoint_dir: str | Path) -> Sequence[str | io.BytesIO]:
    """Inputs of `torch.load` in place of the files of optimizer states in the directory of a tag:
    one, with the stage of the save. `engine.load_checkpoint` reads states. In a directory of
    DeepSpeed these are its files, by their numbers."""
    theirs = _of_deepspeed(checkpoint_dir, "*_optim_states.pt")
    if theirs:
        return theirs
    stage = Contents(Path(checkpoint_dir)).extra(0).get("zero_stage", 0)
    return [_in_memory({"optimizer_state_dict": {"zero_stage": stage}})]


def get_model_state_files(checkpoint_dir: str | Path) -> Sequence[str | io.BytesIO]:
    """Inputs of `torch.load` in place of the files of model states; see `get_model_state_file` and
    `get_optim_files`."""
    return _of_deepspeed(checkpoint_dir, _MODEL_STATES) or [get_model_state_file(checkpoint_dir, 0)]


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str | io.BytesIO:
    """The input of `torch.load` in place of the first rank's file of model states: the counters and
    the `client_state`, without weights. In a directory of DeepSpeed it is the file at `zero_stage`.
    Raises `FileNotFoundError` if the directory has another stage."""
    if _of_deepspeed(checkpoint_dir, _MODEL_STATES):
        rank = "zero_pp_rank_0_" if zero_stage == 3 else ""
        file = Path(checkpoint_dir) / f"{rank}mp_rank_00_model_states.pt"
        if not file.exists():
            raise FileNotFoundError(f"can't find model states file at '{file}'")
        return str(file)
    extra = Contents(Path(checkpoint_dir)).extra(0)
    return _in_memory({**extra.get("counters", {}), **extra.get("client_state", {})})


def _of_deepspeed(directory: str | Path, pattern: str) -> list[str]:
    """Files of DeepSpeed, in the order of the numbers in their names."""

    def by_numbers(path: str) -> list[tuple[int, str]]:
        return [(int(each or 0), text) for text, each in re.findall(r"(\D*)(\d*)", path)]

    return sorted(map(str, Path(directory).glob(pattern)), key=by_numbers)


def _in_memory(values: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load these weights into `model`, and return it. Without an engine it is moved to the host."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if ATTRIBUTE not in vars(model):
        model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights to `output_dir`. By default this is `pytorch_model.bin`, one file of
    `torch.save`. With `safe_serialization` it is safetensors, written piece by piece, in files of
    at most `max_shard_size`, with tied weights under one name, as in transformers."""
    output = Path(output_dir)
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        )
        output.mkdir(parents=True, exist_ok=True)
        with replacing(output.absolute() / _FILE, "directory of weights") as path:
            torch.save(state, path)
        return
    contents = Contents(_tagged(Path(checkpoint_dir), tag))
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    selection = _selection(contents, exclude_frozen_parameters)
    most = sys.maxsize if max_shard_size is None else parse_bytes(max_shard_size)
    export(contents, output, selection, torch.float32, shard_bytes=most)


def _tagged(directory: Path, tag: str | None) -> Path:
    if tag is None:
        tag = read_latest(directory)
        if tag is None:
            raise DeepSpeedConfigError(f"{directory} has no file {LATEST}; give a tag")
    return directory / str(tag)


def _selection(contents: Contents, without_frozen: bool) -> Any:
    return trained_only(contents) if without_frozen else everything(contents)


def _read(contents: Contents, weight: StoredTensor) -> torch.Tensor:
    dtype = target_dtype(weight.dtype, torch.float32)
    values = torch.empty(weight.numel, dtype=dtype)
    for run in contents.read(weight):
        values[run.begin : run.begin + run.values.numel()] = run.values
    return values.view(weight.shape)
