"""Attributes of DeepSpeed's engine besides those of `DeepSpeedEngine` and `Answers`: some values,
and for all others the reason why they are missing."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from infinity.deepspeed.errors import MissingNameError
from infinity.deepspeed.groups import all_ranks
from infinity.deepspeed.keys import KEYS
from infinity.deepspeed.names import MISSING
from infinity.deepspeed.parsed import DeepSpeedConfig

_KEYS = ("dataloader_drop_last", "dump_state", "memory_breakdown", "wall_clock_breakdown")
"""Methods that return the value of the key of their name, at the top of the configuration."""


def _key(name: str, engine: Any) -> Any:
    value = engine.settings.raw.get(name)
    return KEYS[name].default if value is None else value


def _data_types(engine: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of parameters, and the dtype of accumulated gradients."""
    model = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = model[engine.settings.precision]
    narrow = engine.settings.config.tuning.gradient_precision != "fp32"
    return dtype, dtype if narrow else torch.float32


def _of_groups(engine: Any, name: str) -> list[Any]:
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    return [group[name] for group in groups if name in group]


def _optimizer_name(engine: Any) -> str | None:
    """The type of the optimizer in the configuration, or the class of the script's."""
    if engine.settings.optimizer is not None:
        return str(engine.settings.optimizer.type).lower()
    client = engine.client_optimizer
    return None if client is None else type(client).__name__


VALUES: dict[str, Callable[[Any], Any]] = {
    "_config": lambda engine: DeepSpeedConfig(engine.settings.raw),
    "_global_grad_norm": lambda engine: engine.get_global_grad_norm(),
    "basic_optimizer": lambda engine: engine.client_optimizer or engine.optimizer,
    "data_parallel_group": lambda engine: all_ranks(),
    "has_moe_layers": lambda engine: False,
    "is_compiled": lambda engine: engine.module._compiled_call_impl is not None,
    "mp_world_size": lambda engine: 1,
    "seq_data_parallel_group": lambda engine: all_ranks(),
    "seq_dp_world_size": lambda engine: engine.world_size,
    "sequence_parallel_size": lambda engine: 1,
    "sparse_tensor_module_names": lambda engine: set(),
}
"""By name: a function from the engine to the value."""

METHODS: dict[str, Callable[[Any], Any]] = {
    "amp_enabled": lambda engine: False,
    "bfloat16_enabled": lambda engine: engine.settings.precision == "bf16",
    # Gradients are reduced unit by unit anyway.
    "coalesce_grad_reduction": lambda engine: nullcontext(),
    "dynamic_loss_scale": lambda engine: (
        engine.settings.loss_scale is not None and engine.settings.loss_scale.static is None
    ),
    "empty_partition_cache": lambda engine: None,  # the memory of the compute device is planned
    "fp16_enabled": lambda engine: engine.settings.precision == "fp16",
    "get_batch_info": lambda engine: dataclasses.astuple(engine.settings.batches),
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    "get_data_types": _data_types,
    "get_lr": lambda engine: _of_groups(engine, "lr"),
    "get_model_parallel_rank": lambda engine: 0,
    "get_mom": lambda engine: _of_groups(engine, "betas") or _of_groups(engine, "momentum"),
    "get_tensor_parallel_rank": lambda engine: 0,
    "gradient_clipping": lambda engine: engine.settings.gradient_clipping,
    "managed_gradient_accumulation": lambda engine: engine.settings.managed_accumulation,
    "optimizer_name": _optimizer_name,
    "scheduler_name": lambda engine: getattr(engine.settings.scheduler, "type", None),
    "steps_per_print": lambda engine: engine.settings.raw.get("steps_per_print") or 10,
    "torch_autocast_dtype": lambda engine: engine.settings.autocast,
    "torch_autocast_enabled": lambda engine: engine.settings.autocast is not None,
    "zero_gather_16bit_weights_on_model_save": lambda engine: (
        engine.settings.gather_16bit_weights_on_save
    ),
    "zero_optimization": lambda engine: engine.zero_optimization_stage() > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.zero_optimization_stage() >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.zero_optimization_stage() >= 3,
    **{name: functools.partial(_key, name) for name in _KEYS},
}
"""By name: a function from the engine to the result of a method without arguments."""

CONFIGURATION = DeepSpeedConfig.instead
COMMUNICATION = "gradients are reduced unit by unit; communicate through deepspeed.comm"
INTERNAL = "it is internal to DeepSpeed's engine; docs/deepspeed.md says what this one has"
"""Reasons of several patterns."""

Reasons = Sequence[tuple[str, str]]
"""Patterns, each with the reason why attributes with it in their names are missing. The first one
counts."""
REASONS: Reasons = (
    ("expert|moe|gate_modules|all_to_all|autoep", MISSING["moe"]),
    ("autotuning", MISSING["autotuning"]),
    ("zenflow|^update_interval$", MISSING["runtime.zenflow"]),
    ("flops|timer|monitor|summary_events|breakdown|_progress|duration", MISSING["monitor"]),
    ("^losses$|compile_time", MISSING["monitor"]),
    ("compile", MISSING["compile"]),
    ("curriculum|random_ltd|data_efficiency|data_sampling|post_process", MISSING["ops.random_ltd"]),
    ("autotp|tensor_parallel|model_parallel|mesh|parallelization", MISSING["module_inject"]),
    ("sequence|seq_|autosp", MISSING["sequence"]),
    ("pipeline|^(train|eval)_batch$|activation_shape", MISSING["pipe"]),
    ("ckpt|checkpoint|zero_param_shapes|frozen_param", MISSING["checkpoint"]),
    ("^(zero|fp16|bf16|torch_autocast|optimizer|scheduler|gradient|client)_", CONFIGURATION),
    ("allreduce|all_gather|reduce_|_reduction|ds_comm|dist_backend|partition_gr", COMMUNICATION),
    ("_(enabled|config|params|scale|args|gradients|level|storage|states|perc)$", CONFIGURATION),
    ("optimized_linear|super_offload|data_type$|configuration$", CONFIGURATION),
    ("^_|^(un)?flatten$|^is_.*_dataset$|^module_forward|^(first|training|inside|warn)_", INTERNAL),
    ("^(collate_fn|collect_python_gc|dont_change_device|get_type|param_names|scale_)", INTERNAL),
)
OTHERS = "docs/deepspeed.md says what it has"


def reason_for(name: str, reasons: Reasons) -> str:
    """The reason why there is no attribute `name`."""
    found = (reason for pattern, reason in reasons if re.search(pattern, name))
    return next(found, OTHERS)


def missing(model: Any, name: str) -> MissingNameError:
    """The error for an attribute that neither the engine nor its model has."""
    return MissingNameError(
        f"neither the engine of infinity nor {type(model).__name__} has {name!r}: "
        f"{reason_for(name, REASONS)}"
    )
