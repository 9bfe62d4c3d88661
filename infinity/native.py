"""Loads the compiled extensions; the one place that knows which of them exist."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from infinity.errors import InfinityError

log = logging.getLogger("infinity")


@cache
def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"infinity.{name}")
    except ImportError as error:
        log.debug("native module %s is not available: %s", name, error)
        return None


def _required(name: str) -> Any:
    module = _load(name)
    if module is None:
        raise InfinityError(f"the compiled module infinity.{name} is missing; install the package with `pip install .`")
    return cast(Any, module)


def aio() -> Any:
    """The async-IO extension (`native/aio`)."""
    return _required("_aio")


def make_engine(kind: str, **options: Any) -> Any:
    """A native I/O engine: "io_uring", "posix", or "auto" for the first that this machine allows.

    `options` are those of `_aio.Engine`. Raises `ValueError` for options that cannot be, `RuntimeError` where io_uring was
    asked for and cannot be had.
    """
    return aio().Engine(_best_kind() if kind == "auto" else kind, **options)


@cache
def _best_kind() -> str:
    """Cached, so that what is missing is said once and not for every engine."""
    available, reason = aio().io_uring_available()
    if not available:
        log.warning("io_uring is not available (%s); using POSIX threads for I/O", reason)
    return "io_uring" if available else "posix"


def cufile() -> Any:
    """libcufile with its driver open (`_aio.CuFile`). Raises `RuntimeError` that says why no drive can write to a GPU here."""
    # It would else leave a cufile.log in the working directory.
    os.environ.setdefault("CUFILE_LOGFILE_PATH", str(Path(tempfile.gettempdir(), f"cufile-{os.getuid()}.log")))
    return aio().CuFile(cufile_libraries())


def cufile_libraries() -> list[str]:
    """Where libcufile may be: loaded already or known to the system, in NVIDIA's wheels, in the toolkit."""
    name = "libcufile.so.0"
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(at) for at in wheels.submodule_search_locations or ()] if wheels is not None else []
    found = [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    return [name, *found, f"/usr/local/cuda/lib64/{name}"]


def cpu_adam() -> Any:
    """The CPU optimizer kernels (`native/cpu_adam`)."""
    return _required("_cpu_adam")


def cuda() -> Any | None:
    """The CUDA kernels (`native/cuda`), or None when the package was built without nvcc."""
    return _load("_cuda")
