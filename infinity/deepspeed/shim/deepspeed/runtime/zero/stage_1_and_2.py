"""The class of the optimizers that engines give."""

from infinity.optim.optimizer import Optimizer as DeepSpeedZeroOptimizer

__all__ = ["DeepSpeedZeroOptimizer"]
