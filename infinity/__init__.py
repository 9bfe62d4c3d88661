"""infinity: train models larger than GPU memory, and larger than RAM, with their states on GPU,
host memory and NVMe."""

from importlib import import_module
from typing import Any

from infinity import nvme
from infinity.access import get_state as get
from infinity.access import set_state as set
from infinity.accumulation import accumulate, no_sync
from infinity.build import wrap
from infinity.config import Config, Tuning
from infinity.engine import Engine, engine, snapshot
from infinity.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    CorruptStateError,
    EngineClosedError,
    InfinityError,
    NonFiniteError,
    NvmeError,
    PathInUseError,
    ShardedParameterError,
    WeightsError,
)
from infinity.losses.chunked_loss import chunked_loss
from infinity.modules.gathered import gathered
from infinity.optim.foreign import adapt
from infinity.optim.rules.adagrad import Adagrad
from infinity.optim.rules.adam import Adam, AdamW
from infinity.optim.rules.ademamix import AdEMAMix
from infinity.optim.rules.lion import Lion
from infinity.optim.rules.sgd import SGD
from infinity.optim.scaler import LossScaler
from infinity.own_engines import close_engines
from infinity.tiles.tiling import tile
from infinity.version import __version__ as __version__
from infinity.weights.init import init

__all__ = [
    "SGD",
    "AdEMAMix",
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptStateError",
    "Engine",
    "EngineClosedError",
    "InfinityError",
    "Lion",
    "LossScaler",
    "NonFiniteError",
    "NvmeError",
    "PathInUseError",
    "ShardedParameterError",
    "Tuning",
    "WeightsError",
    "accumulate",
    "adapt",
    "chunked_loss",
    "close_engines",
    "engine",
    "gathered",
    "get",
    "init",
    "no_sync",
    "nvme",
    "set",
    "snapshot",
    "tile",
    "wrap",
]

_LATER = {
    "quantize": ("infinity.models.quantization", "quantize"),
    "initialize": ("infinity.deepspeed.initialize", "initialize"),
    "zero": ("infinity.deepspeed.zero", None),
}
"""Names that are imported at their first use: the module, and the name in it unless it is the
module."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, inside = _LATER[name]
    module = import_module(path)
    return module if inside is None else getattr(module, inside)
