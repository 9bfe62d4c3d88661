"""Blocks of a configuration as objects, which scripts build to check or read one.

Names, values and defaults are those of `keys`. Sizes that the engine plans are None by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.keys import KEYS, RENAMED, Key
from infinity.deepspeed.kinds import FLAG
from infinity.deepspeed.offload_devices import OffloadDeviceEnum
from infinity.deepspeed.renamed import modernize
from infinity.deepspeed.rows import AUTO, account


class ZeroStageEnum(int, Enum):
    """The stages of ZeRO. Its members are equal to their numbers."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  # another name of `weights`


class ConfigBlock(SimpleNamespace):
    """The values of one block, as attributes with the names of its keys, old names included.

    Raises `ConfigError` for values that `infinity.initialize` refuses. "auto" is the default.
    """

    path: ClassVar[str]
    inner: ClassVar[Mapping[str, type[ConfigBlock]]] = {}
    """Its inner blocks."""

    def __init__(self, **given: Any) -> None:
        place: dict[str, Any] = {
            name: vars(value) if isinstance(value, ConfigBlock) else value
            for name, value in given.items()
        }
        config = place
        for name in reversed(self.path.split(".")):
            config = {name: config}
        modernize(config)
        rows = account(config, None)
        problems = [row.problem for row in rows if row.problem]
        if problems:
            raise DeepSpeedConfigError("; ".join(problems))
        found = {row.path: row.value for row in rows if row.value != AUTO}
        for path, key in KEYS.items():
            block, _, name = path.rpartition(".")
            if block == self.path:
                setattr(self, name, _value(key, found.get(path)))
        for name, kind in self.inner.items():
            below = place.get(name)
            setattr(self, name, None if below is None else kind(**below))

    def __getattr__(self, name: str) -> Any:
        """The value of a key by its other name. `prefetch_bucket_size` has none with "stage3_"."""
        known = self._today(name)
        if known not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return vars(self)[known]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._today(name), value)

    def _today(self, name: str) -> str:
        path = f"{self.path}.{name}"
        return RENAMED.get(path, path).removeprefix(f"{self.path}.")


_AS_ENUM = {
    "zero_optimization.stage": ZeroStageEnum,
    "zero_optimization.offload_param.device": OffloadDeviceEnum,
    "zero_optimization.offload_optimizer.device": OffloadDeviceEnum,
}


def _value(key: Key, given: Any) -> Any:
    value = key.default if given is None else given
    if value is None and key.kind is FLAG:
        return False
    if key.path in _AS_ENUM:
        return _AS_ENUM[key.path](value)
    return list(value) if isinstance(value, tuple) else value


class DeepSpeedZeroOffloadParamConfig(ConfigBlock):
    """The home of parameters."""

    path = "zero_optimization.offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(ConfigBlock):
    """The home of optimizer states."""

    path = "zero_optimization.offload_optimizer"
    pipeline: bool

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.pipeline |= self.pipeline_read or self.pipeline_write


class DeepSpeedZeroLeafModuleConfig(ConfigBlock):
    """Modules that are one unit each."""

    path = "zero_optimization.leaf_module"


class DeepSpeedZeroConfig(ConfigBlock):
    """The block `zero_optimization`."""

    path = "zero_optimization"
    inner: ClassVar[Mapping[str, type[ConfigBlock]]] = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    }
    leaf_module: DeepSpeedZeroLeafModuleConfig | None

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.leaf_module is None:
            self.leaf_module = DeepSpeedZeroLeafModuleConfig()
        if given.get("overlap_comm") in (None, AUTO):
            self.overlap_comm = self.stage == ZeroStageEnum.weights


class DeepSpeedBF16Config(ConfigBlock):
    """The block `bf16`."""

    path = "bf16"


class DeepSpeedFP16Config(ConfigBlock):
    """The block `fp16`."""

    path = "fp16"


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The block `bf16` of a configuration, also under its old name."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """The largest global norm of gradients in a configuration."""
    return param_dict.get("gradient_clipping", KEYS["gradient_clipping"].default)
