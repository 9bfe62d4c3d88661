"""The class of the optimizers that engines give."""

from infinity.optim.optimizer import Optimizer as DeepSpeedZeroOptimizer_Stage3

__all__ = ["DeepSpeedZeroOptimizer_Stage3"]
