"""Configurations of 16 bits."""

from infinity.deepspeed.blocks import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    get_bfloat16_config,
)

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config"]
