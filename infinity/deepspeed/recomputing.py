"""`deepspeed.checkpointing`: activation checkpointing of torch under its names.

What is kept for backward goes where `Config(activations=...)` says, which
`activation_checkpointing.cpu_checkpointing` becomes.
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
    """`function(*args, **named)`, which is done again in backward instead of keeping what it needs.

    As in DeepSpeed, the function gets all that is named.
    """
    return torch_checkpoint(partial(function, **named), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Nothing: the configuration of the engine says where activations go. Options that are on are
    named in the log."""
    on = [name for name, value in options.items() if value]
    if on:
        log.info(
            "checkpointing.configure(%s): ignored; Config(activations=...) says where activations "
            "go",
            ", ".join(on),
        )


def is_configured() -> bool:
    """Always: nothing has to be configured."""
    return True


def reset() -> None:
    """Nothing: no buffer is kept."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed all generators; there is no tensor parallelism."""
    torch.manual_seed(seed)
