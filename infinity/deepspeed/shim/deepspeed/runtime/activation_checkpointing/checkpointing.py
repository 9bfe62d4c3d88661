"""Activation checkpointing."""

from infinity.deepspeed.recomputing import (
    checkpoint,
    configure,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]
