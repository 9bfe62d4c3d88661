"""ZeRO-3: contexts for parameters that are not in memory."""

from deepspeed.runtime.zero import partition_parameters
from infinity.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
