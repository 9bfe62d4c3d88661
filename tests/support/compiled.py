"""Native modules that tests bring with them, built once for each version of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

_TORCH = Path(torch.__file__).parent
INCLUDES = (
    *("-isystem", str(_TORCH / "include")),  # pybind11 is there, too
    *("-isystem", str(_TORCH / "include/torch/csrc/api/include")),
    *("-isystem", sysconfig.get_path("include")),
)


def module(
    name: str, sources: Iterable[Path], command: Callable[[Path], list[str]]
) -> tuple[Any, Path]:
    """The module that `command(target)` compiles of what `sources` are, and its path.

    One process builds it, and the others wait.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    digest.update(" ".join(command(Path())).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir(), f"infinity{name}-{digest.hexdigest()[:16]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            draft = built.with_suffix(".draft")
            done = subprocess.run(command(draft), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} does not compile:\n{done.stderr}")
            draft.rename(built)
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made, built
