"""Answers about mixtures of experts of `deepspeed.moe`. There are none here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of `deepspeed.moe`, and the number of experts: none."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter belongs to only some ranks: never, because all are sharded alike."""
    return False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a group has such parameters: never."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = None
) -> list[dict[str, Any]]:
    """The unchanged groups, in a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
