"""What scripts ask about mixtures of experts."""

from infinity.deepspeed.experts import (
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_different_moe_groups_for_optimizer",
]
