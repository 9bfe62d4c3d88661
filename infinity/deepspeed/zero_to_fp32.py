#!/usr/bin/env python
"""Writes the weights of a checkpoint in fp32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR

A copy of this file lies in every directory of checkpoints that an engine of `infinity.initialize`
saves. It needs torch alone. `infinity export` also checks the digest of every tensor.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

FILE = "pytorch_model"
_INDEX = "infinity.json"
_FRAME = re.compile(rb'\{"content":(.*),"sha256":"([0-9a-f]{64})"\}\n', re.DOTALL)
_VERSIONS = (2, 3)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those of floating point in fp32, in host memory. Tied parameters are
    one tensor under each of their names.

    `checkpoint_dir` has the directory `tag`, by default the tag in its file `latest`. Raises
    `ValueError` if it is no whole checkpoint.
    """
    directory = Path(checkpoint_dir)
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            raise ValueError(f"{directory} has no file latest; give a tag")
        tag = latest.read_text().strip()
    return _Checkpoint(directory / str(tag)).weights(exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Load these weights into `model`, on the host, and return it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights to `output_dir`, in files of at most `max_shard_size` with an index, as
    transformers loads them: by torch.save, or as safetensors, each tensor under one name."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    suffix = "bin"
    save: Callable[[dict[str, torch.Tensor], Path], object] = torch.save
    stem = FILE
    if safe_serialization:
        from safetensors.torch import save_file

        stem, suffix, save = "model", "safetensors", save_file
        first = {id(value): name for name, value in reversed(state.items())}
        state = {name: value for name, value in state.items() if first[id(value)] == name}
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    parts = _parts(state, max_shard_size)
    for number, names in enumerate(parts, 1):
        name = f"{stem}.{suffix}"
        if len(parts) > 1:
            name = f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}"
        save({each: state[each] for each in names}, output / name)
        _say(f"wrote {output / name}")
    if len(parts) > 1:
        places = {
            each: f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}"
            for number, names in enumerate(parts, 1)
            for each in names
        }
        total = sum(value.nbytes for value in {id(v): v for v in state.values()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (output / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2))


class _Checkpoint:
    """The directory of one tag; see docs/internals/checkpoints.md of infinity."""

    def __init__(self, directory: Path) -> None:
        path = directory / _INDEX
        if not path.is_file():
            theirs = any(directory.glob("*_states.pt"))
            raise ValueError(
                f"{directory} is no checkpoint of infinity: it has no {_INDEX}"
                + "; it is one of DeepSpeed, whose own zero_to_fp32.py reads it" * theirs
            )
        frame = _FRAME.fullmatch(path.read_bytes())
        if frame is None or hashlib.sha256(frame[1]).hexdigest().encode() != frame[2]:
            raise ValueError(f"{path} is damaged: its digest is wrong")
        content = json.loads(frame[1])
        if content["version"] not in _VERSIONS:
            raise ValueError(
                f"{path} has version {content['version']}, which another zero_to_fp32.py reads; "
                "take that of the infinity that saved it"
            )
        self._directory, self._tensors = directory, content["tensors"]
        self._items: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for item in content["items"]:
            self._items[item["key"]].append(item)
        for name, length in content["files"].items():
            file = directory / name
            found = file.stat().st_size if file.is_file() else "no"
            if found != length:
                raise ValueError(f"{file} has {found} bytes, not {length}: it is not whole")

    def weights(self, without_frozen: bool) -> dict[str, torch.Tensor]:
        """The weights by name, optionally without those that no optimizer of the checkpoint
        updates."""
        header = self._read(self._items["infinity"][0])
        wanted = set(header["shapes"]) - set(header.get("frozen", ()))
        if without_frozen:
            groups = [names for each in header["optimizers"] for names in each["names"]]
            wanted &= {name for group in groups for name in group}
        state = {
            name: self._tensor(name, tuple(shape))
            for name, shape in header["shapes"].items()
            if name in wanted
        }
        tied: Mapping[str, str] = header.get("tied", {})
        return state | {name: state[first] for name, first in tied.items() if first in state}

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter or buffer from its pieces. Missing pieces are zero."""
        entry = self._tensors.get(f"model.{name}")
        if entry is None:
            if math.prod(shape):
                raise ValueError(f"{self._directory} is not whole: there is no {name}")
            return torch.zeros(shape)
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        whole = torch.zeros(
            entry["size"], dtype=torch.float32 if dtype.is_floating_point else dtype
        )
        for item in self._items[f"model.{name}"]:
            places = zip(item["offsets"], item["sizes"], strict=True)
            whole[tuple(slice(at, at + size) for at, size in places)] = self._read(item)
        return whole.view(shape)

    def _read(self, item: dict[str, Any]) -> Any:
        with (self._directory / item["file"]).open("rb") as file:
            file.seek(item["offset"])
            content = io.BytesIO(file.read(item["length"]))
        return torch.load(content, map_location="cpu", weights_only=True)


def _parts(state: Mapping[str, torch.Tensor], most: str | None) -> list[list[str]]:
    """Names of `state` in parts of at most `most` bytes, such as "5GB", or of one tensor."""
    limit = math.inf if most is None else _nbytes(most)
    parts: list[list[str]] = [[]]
    size = 0
    for name, value in state.items():
        if parts[-1] and size + value.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += value.nbytes
    return parts


def _nbytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]I?B)?", str(text).upper())
    if found is None:
        raise ValueError(f"max_shard_size={text!r} is no size such as 5GB")
    return int(found[1]) * _UNITS[found[2] or ""]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> None:
    """The command line of DeepSpeed's script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("checkpoint_dir", help="the directory with the file latest")
    add("output_dir", help="where the weights are written")
    add("--max_shard_size", default="5GB", help="the largest file, as 5GB")
    add("--safe_serialization", action="store_true", help="write safetensors")
    add("-t", "--tag", help="the checkpoint; by default the one that latest names")
    add("--exclude_frozen_parameters", action="store_true", help="leave frozen ones out")
    add("-d", "--debug", action="store_true", help="changes nothing")
    asked = parser.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            asked.checkpoint_dir,
            asked.output_dir,
            asked.max_shard_size,
            asked.safe_serialization,
            asked.tag,
            asked.exclude_frozen_parameters,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"zero_to_fp32.py: {error}")


if __name__ == "__main__":
    main()
