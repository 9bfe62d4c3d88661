"""The values of `offload_param.device` and `offload_optimizer.device`, and those that
`engine.offload_states` takes, as scripts write them."""

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """A place of states. Its members are equal to their texts, also in a configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What `engine.offload_states` may be asked to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
