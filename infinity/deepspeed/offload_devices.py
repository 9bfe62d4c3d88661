"""The values of `offload_param.device` and `offload_optimizer.device`, as scripts write them."""

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """A place of states. Its members are equal to their texts, also in a configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
