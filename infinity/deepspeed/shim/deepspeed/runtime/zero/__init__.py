"""ZeRO-3: contexts for parameters that are not in memory."""

from deepspeed.runtime.zero import partition_parameters
from infinity.deepspeed.generation import unwrap_model_for_generation
from infinity.deepspeed.tiling import TiledLinear, TiledLinearReturnBias
from infinity.deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
