"""Code that torch.compile must not look into."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NO_GRAPH = (
    "the parameters of a wrapped model come in hooks, unit by unit, and a hook cannot be part of a "
    "graph: compile block after block, or leave out fullgraph=True; export an unwrapped copy"
)


_MODES = ("FakeTensorMode", "ProxyTorchDispatchMode")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and the frames that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_traced() -> bool:
    """Whether torch.jit.trace, torch.export, make_fx or FakeTensorMode follows what runs now."""
    return (
        torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
        or any(
            type(mode).__name__ in _MODES  # by name: their modules take long to import
            for mode in _get_current_dispatch_mode_stack()
        )
    )


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, with a frame of torch's around it: torch.compile does not look into it.

    It imports torch._dynamo, which takes long. So it is for objects of a wrapped model, not for
    classes and functions, which are made when this file is imported.
    """
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        # Errors that it catches meanwhile stay in cycles with the frames of all callers, and so
        # with the model and what its parameters held before.
        gc.collect()
    return torch.compiler.disable(hook, reason=NO_GRAPH)


def call_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, into which torch.compile does not look, where anything of it has been
    imported."""
    if "torch._dynamo" not in sys.modules:
        return function(*args)
    return _uncompiled_call()(function, *args)


@functools.cache
def _uncompiled_call() -> Callable[..., Any]:
    return uncompiled(_call)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
