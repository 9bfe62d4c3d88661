"""ZeRO-3: contexts for parameters that are not in memory."""

from deepspeed.runtime.zero import partition_parameters
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
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
