"""The class of the optimizers that engines give."""

from infinity.optim.optimizer import Optimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
