"""The package `deepspeed` that scripts see inside of `infinity run`: names of DeepSpeed over those
of `infinity`. It holds no code of its own."""

from typing import Any

from deepspeed import accelerator, checkpoint, comm, ops, pipe, runtime, utils
from deepspeed.runtime import zero
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedOptimizerCallable, DeepSpeedSchedulerCallable
from deepspeed.utils import OnDevice, log_dist, logger
from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.arguments import add_config_arguments
from infinity.deepspeed.communication import init_distributed
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.initialize import initialize
from infinity.deepspeed.parsed import DeepSpeedConfig
from infinity.deepspeed.pretrained import load_streamed
from infinity.deepspeed.refused import PipelineModule, init_inference, tp_model_init
from infinity.optim.optimizer import Optimizer as DeepSpeedOptimizer

__version__ = "0.19.8"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = "infinity"
version, git_hash, git_branch = __version__, __git_hash__, __git_branch__

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "OnDevice",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "pipe",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]

load_streamed()


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the package deepspeed of `infinity run` has no {name!r}")
