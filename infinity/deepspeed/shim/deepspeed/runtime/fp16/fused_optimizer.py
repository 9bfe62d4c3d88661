"""The class of the optimizers that engines give."""

from infinity.optim.optimizer import Optimizer as FP16_Optimizer

__all__ = ["FP16_Optimizer"]
