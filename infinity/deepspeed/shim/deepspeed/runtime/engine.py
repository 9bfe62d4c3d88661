"""The engine."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from infinity.deepspeed.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"]
