"""Loads the compiled extensions; the one place that knows which of them exist."""

from __future__ import annotations

import importlib
import logging
from functools import cache
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


def cpu_adam() -> Any:
    """The CPU optimizer kernels (`native/cpu_adam`)."""
    return _required("_cpu_adam")


def cuda() -> Any | None:
    """The CUDA kernels (`native/cuda`), or None when the package was built without nvcc."""
    return _load("_cuda")
