"""Modules that are one unit each."""

from infinity.deepspeed.blocks import DeepSpeedZeroLeafModuleConfig
from infinity.deepspeed.keys import MIXTURES

DEFAULT_LEAF_MODULE_CLASSES = list(MIXTURES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
]
