"""The block `zero_optimization`."""

from infinity.deepspeed.blocks import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroLeafModuleConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    ZeroStageEnum,
)
from infinity.deepspeed.offload_devices import OffloadDeviceEnum

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]
