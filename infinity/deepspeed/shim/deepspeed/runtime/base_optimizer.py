"""The class of the optimizers that engines give."""

from infinity.optim.optimizer import Optimizer as DeepSpeedOptimizer
from infinity.optim.optimizer import Optimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
