"""Weights from safetensors files, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """The tensors of a directory of safetensors files, by name."""

    def __init__(self, directory: Path, files: dict[str, Any]) -> None:
        self.directory, self._files = directory, files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        """All names."""
        return set(self._files)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy tensor `name` into `target`, converting the dtype; raises `ConfigError` on another shape."""
        value = self._files[name].get_tensor(name)
        if value.shape != target.shape:
            raise ConfigError(f"{name} in {self.directory} has shape {tuple(value.shape)}, the model needs {tuple(target.shape)}")
        target.copy_(value)


@contextmanager
def open_weights(directory: str | Path) -> Iterator[Weights]:
    """Open the safetensors files of a Hugging Face directory, or one file; raises `ConfigError` when there are none."""
    path = Path(directory)
    if path.is_file():
        files = [path]
    elif (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text())
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    else:
        raise ConfigError(f"{path} holds neither {SINGLE} nor {INDEX}")
    with ExitStack() as stack:
        names: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
            names.update(dict.fromkeys(opened.keys(), opened))
        yield Weights(path, names)
