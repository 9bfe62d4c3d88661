"""`deepspeed.checkpointing`: activation checkpointing of torch under its names.

Saved activations go where `Config(activations=...)` says.
`activation_checkpointing.cpu_checkpointing` sets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

log = logging.getLogger("infinity")


def checkpoint(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`function(*args, **named)`, which is recomputed in the backward.

    As in DeepSpeed, the function gets all named arguments.
    """
    return torch_checkpoint(partial(function, **named), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Does nothing: the configuration of the engine decides where activations go. Logs the options
    that are on."""
    on = [name for name, value in options.items() if value]
    if on:
        log.info(
            "checkpointing.configure(%s): ignored; Config(activations=...) says where activations "
            "go",
            ", ".join(on),
        )


def is_configured() -> bool:
    """True, because nothing has to be configured."""
    return True


def reset() -> None:
    """Does nothing: no buffer is kept."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed all generators. There is no tensor parallelism."""
    torch.manual_seed(seed)
