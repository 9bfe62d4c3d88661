"""The learning rate over the steps of a run."""

from __future__ import annotations

import math

LOWEST = 0.1
"""The last learning rate, as a share of the highest."""


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """The share of the highest learning rate for `step` (from 0): linear warm-up, then a cosine
    down to `LOWEST`."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))
