"""Every key of a DeepSpeed configuration, as data: its values, its default, and its treatment.

[Note: treatments]
exact    The engine does what the key says.
mapped   The engine has another mechanism with the same purpose, which `becomes` names.
ignored  The key changes neither numbers nor places, and the engine decides by itself. A notice says
         so.
refused  The key asks for other numbers, or for a feature that the engine does not have.

A default, and a value in `off`, asks only for the engine's normal behavior. So it is `exact` for
every key.

Keys of a block with a switch count if the switch is on. Free blocks have keys that are not listed
here. They are refused or ignored as a whole.

Names, values and defaults follow the documentation of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from infinity.config import Config
from infinity.deepspeed.kinds import (
    ANYTHING,
    DTYPE,
    FLAG,
    SCALE,
    TEXT,
    ValueKind,
    either,
    number,
    one_of,
    one_or_several,
    several,
    whole,
)
from infinity.optim.family import FAMILY
from infinity.optim.optimizer import Optimizer
from infinity.optim.rule import AMOUNT, FINITE, POSITIVE, SWITCH, TWO_RATES, Range
from infinity.optim.rules.adam import Adam


class Treatment(Enum):
    """The treatment of a key; see [Note: treatments]."""

    EXACT = "exact"
    MAPPED = "mapped"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """One key. `path` has dots between blocks."""

    path: str
    kind: ValueKind
    default: Any
    treatment: Treatment
    becomes: str = ""
    """The result of the key. `{value}` stands for its value, `{home}` for that of a device."""
    reason: str = ""
    """The reason why it is ignored or refused."""
    off: tuple[Any, ...] = ()
    """Values besides the default that ask for nothing."""
    auto: Callable[[int], float] | None = None
    """The meaning of "auto" for a model of that hidden size."""
    needs: tuple[str, Any] | None = None
    """Another key and its value, without which this key has no effect."""

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for more than the engine does anyway."""
        return value is not None and value != self.default and value not in self.off


@dataclass(frozen=True)
class FreeBlock:
    """A block that is refused or ignored as a whole. Its keys are not read.

    It counts if a key of `switches` in it is true, or a number above 1, at any depth. Without
    switches it counts if it is not empty, or if `empty_counts`.
    """

    path: str
    treatment: Treatment
    reason: str
    switches: tuple[str, ...] = ("enabled",)
    empty_counts: bool = False


def exact(path: str, kind: ValueKind, default: Any, becomes: str) -> Key:
    """A key that the engine honors exactly."""
    return Key(path, kind, default, Treatment.EXACT, becomes)


def mapped(path: str, kind: ValueKind, default: Any, becomes: str) -> Key:
    """A key for which the engine has another mechanism."""
    return Key(path, kind, default, Treatment.MAPPED, becomes)


def ignored(
    path: str,
    kind: ValueKind,
    default: Any,
    reason: str,
    *off: Any,
    auto: Callable[[int], float] | None = None,
) -> Key:
    """A key that changes nothing. `off` are values that ask for nothing."""
    return Key(path, kind, default, Treatment.IGNORED, reason=reason, off=off, auto=auto)


def refused(path: str, kind: ValueKind, default: Any, reason: str, *off: Any) -> Key:
    """A key that cannot be honored, except for its default and the values `off`."""
    return Key(path, kind, default, Treatment.REFUSED, reason=reason, off=off)


def _under(block: str, *keys: Key) -> tuple[Key, ...]:
    return tuple(replace(key, path=f"{block}.{key.path}") for key in keys)


def _with(other: str, value: Any, *keys: Key) -> tuple[Key, ...]:
    """Keys that have an effect if another key has that value."""
    return tuple(replace(key, needs=(other, value)) for key in keys)


PLANNED = "the engine plans it from the memory budgets"
ALWAYS = "the engine always overlaps I/O, copies and compute"
COMMUNICATION = "the engine has one way to communicate, with the same result"
LEGACY = "it has no effect on what the engine does"
FILES = "the engine writes checkpoints in its own way"
REPORTED = "engine.report() has times, bytes and stalls; log losses from your loop"
NO_EFFECT_HERE = "any optimizer is accepted, and its home decides where it runs"
EXTENSION_ONLY = "set infinity.gpu_memory and infinity.cpu_memory instead"

_DEVICE = one_of("none", "cpu", "nvme")
_PATHS = either(TEXT, several(TEXT))

# Batch size, gradients and precision

_BATCH = (
    exact("train_batch_size", whole(1), None, "micro batch * accumulation * ranks"),
    exact("train_micro_batch_size_per_gpu", whole(1), None, "samples of one forward of a rank"),
    exact("gradient_accumulation_steps", whole(1), None, "forwards of a rank for each step"),
    exact("managed_gradient_accumulation", FLAG, True, "who says where a step ends"),
    exact("dataloader_drop_last", FLAG, False, "whether a last, smaller batch is left out"),
)
_GRADIENTS = (
    exact("gradient_clipping", number(), 1.0, "max_grad_norm={value} of the optimizer"),
    exact("gradient_allreduce_op", one_of("mean", "sum"), "mean", "how ranks reduce"),
    exact("data_types.buffer_dtype", DTYPE, None, "buffers of floating point are cast to it"),
    mapped("data_types.param_dtype", DTYPE, None, "Config(precision=...)"),
    ignored("data_types.keep_in_fp32_modules", ANYTHING, "auto", "buffers keep their dtype"),
    mapped("communication_data_type", DTYPE, None, "Tuning(gradient_precision=...)"),
    mapped("data_types.grad_accum_dtype", DTYPE, None, "Tuning(gradient_precision=...)"),
    ignored("prescale_gradients", FLAG, False, COMMUNICATION),
    ignored("gradient_predivide_factor", number(), 1.0, COMMUNICATION),
    ignored("seq_parallel_communication_data_type", DTYPE, "fp32", "there is no such collective"),
    ignored("disable_allgather", FLAG, False, COMMUNICATION),
    ignored("sparse_gradients", FLAG, False, COMMUNICATION),
)
_PRECISION = (
    *_under(
        "bf16",
        exact("enabled", FLAG, False, 'Config(precision="bf16")'),
        *_with(
            "bf16.enabled",
            True,
            mapped("bf16_optimizer_states", FLAG, False, 'Config(moment_precision="bf16")'),
            mapped(
                "bf16_master_weights_and_grads",
                FLAG,
                False,
                "masters in fp32, which take 2 bytes per parameter beside bf16 weights",
            ),
            ignored("immediate_grad_update", FLAG, False, ALWAYS),
            exact("check_grad_overflow", FLAG, True, "skip_nonfinite={value} of the optimizer"),
        ),
    ),
    *_under(
        "fp16",
        exact("enabled", FLAG, False, 'Config(precision="fp16")'),
        *_with(
            "fp16.enabled",
            True,
            exact("auto_cast", FLAG, False, "inputs of the model are cast to fp16"),
            exact("loss_scale", SCALE, 0, "a fixed loss scale; 0 is a dynamic one"),
            exact("initial_scale_power", whole(0, 32), 16, "LossScaler(initial=2**{value})"),
            exact("loss_scale_window", whole(1), 1000, "LossScaler(window={value})"),
            exact("hysteresis", whole(1), 2, "LossScaler(hysteresis={value})"),
            exact("min_loss_scale", number(0, 2.0**32), 1, "LossScaler(minimum={value})"),
            exact(
                "consecutive_hysteresis",
                FLAG,
                False,
                "whether every finite step, not only a window of them, restores the hysteresis",
            ),
            mapped(
                "fp16_master_weights_and_grads",
                FLAG,
                False,
                "masters in fp32, where small updates are not lost",
            ),
        ),
    ),
    *_under(
        "torch_autocast",
        exact("enabled", FLAG, False, "the forward runs under torch.autocast"),
        *_with(
            "torch_autocast.enabled",
            True,
            exact("dtype", DTYPE, "bf16", "torch.autocast(dtype={value})"),
            ignored(
                "lower_precision_safe_modules",
                several(TEXT),
                None,
                "it chooses dtypes of communication, which do not change here",
            ),
        ),
    ),
)

# ZeRO

_PINNED = "host memory is pinned where there is a GPU"
_OFFLOAD_PARAM = _under(
    "zero_optimization.offload_param",
    exact("device", _DEVICE, "none", "Config(parameters={home!r})"),
    *_with(
        "zero_optimization.offload_param.device",
        "nvme",
        exact("nvme_path", _PATHS, None, "Config(nvme={value!r})"),
        mapped("max_in_cpu", number(), None, "Tuning(cache=...), in bytes"),
    ),
    ignored("buffer_count", number(), None, PLANNED),
    ignored("buffer_size", number(), None, PLANNED),
    ignored("pin_memory", FLAG, True, _PINNED),
)
_OFFLOAD_OPTIMIZER = _under(
    "zero_optimization.offload_optimizer",
    exact("device", _DEVICE, "none", "Config(optimizer={home!r})"),
    *_with(
        "zero_optimization.offload_optimizer.device",
        "nvme",
        exact("nvme_path", _PATHS, None, "Config(nvme={value!r})"),
    ),
    ignored("buffer_count", number(), None, PLANNED),
    ignored("buffer_size", number(), None, PLANNED),
    ignored("pin_memory", FLAG, True, _PINNED),
    ignored("pipeline_read", FLAG, None, ALWAYS, True),
    ignored("pipeline_write", FLAG, None, ALWAYS, True),
    ignored("pipeline", FLAG, None, ALWAYS, True),
    ignored("fast_init", FLAG, None, "no buffer is made for the first states", True),
    ignored("ratio", number(0, 1), 1.0, 'Tuning(gpu_cache="auto") keeps on the GPU what pays'),
    ignored("super_offload", FLAG, False, 'Tuning(update="speculative") has the same effect'),
    ignored("cpuadam_cores_perc", number(0, 1), 0.8, "Tuning(threads=...) sets it"),
)
_QUANTIZED = "quantized communication changes the numbers"
MIXTURES = tuple(
    f"transformers.models.{name}.modeling_{name}.{kind}SparseMoeBlock"
    for name, kind in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
    )
)
"""Mixtures of experts of transformers, in which ranks take different paths."""
_ZERO = (
    *_under(
        "zero_optimization",
        exact("stage", whole(0, 3), 0, "Config(stage={value})"),
        exact(
            "stage3_gather_16bit_weights_on_model_save",
            FLAG,
            False,
            "whether save_16bit_model gathers shards",
        ),
        exact("ignore_unused_parameters", FLAG, True, "False: a step without a gradient fails"),
        exact(
            "leaf_module.classes",
            one_or_several(TEXT),
            MIXTURES,
            "one unit for each module of these",
        ),
        exact("leaf_module.names", one_or_several(TEXT), (), "one unit for each module of these"),
        exact(
            "leaf_module.name_suffixes",
            one_or_several(TEXT),
            (),
            "one unit for each module of these",
        ),
        mapped("enable_sanity_checks", FLAG, False, "Tuning(poison={value})"),
    ),
    *_OFFLOAD_PARAM,
    *_OFFLOAD_OPTIMIZER,
    *_under(
        "zero_optimization",
        ignored("sub_group_size", number(), None, PLANNED),
        ignored("stage3_prefetch_bucket_size", number(), None, PLANNED, auto=lambda h: 0.9 * h * h),
        ignored(
            "stage3_param_persistence_threshold", number(), None, PLANNED, auto=lambda h: 10 * h
        ),
        ignored("stage3_model_persistence_threshold", number(), None, PLANNED),
        ignored("stage3_max_live_parameters", number(), None, PLANNED),
        ignored("stage3_max_reuse_distance", number(), None, PLANNED),
        ignored("stage3_module_granularity_threshold", number(), 0, PLANNED),
        ignored("stage3_use_all_reduce_for_fetch_params", FLAG, False, COMMUNICATION),
        ignored("stage3_allgather_sequential", FLAG, False, COMMUNICATION),
        ignored("reduce_bucket_size", number(), None, PLANNED, auto=lambda h: h * h),
        ignored("allgather_bucket_size", number(), None, PLANNED),
        ignored("allgather_partitions", FLAG, True, COMMUNICATION),
        ignored("reduce_scatter", FLAG, True, COMMUNICATION),
        ignored("use_multi_rank_bucket_allreduce", FLAG, True, COMMUNICATION),
        ignored("overlap_comm", FLAG, None, ALWAYS, True),
        ignored("contiguous_gradients", FLAG, True, "gradients always are"),
        ignored("round_robin_gradients", FLAG, False, PLANNED),
        ignored("parameter_alignment", FLAG, False, PLANNED),
        ignored("compute_grad_norm", FLAG, True, "a norm is computed where something needs it"),
        ignored("load_from_fp32_weights", FLAG, True, "masters are always in a checkpoint"),
        ignored("elastic_checkpoint", FLAG, False, "every checkpoint loads on any ranks"),
        ignored("legacy_stage1", FLAG, False, LEGACY),
        ignored("grad_hooks", FLAG, True, ALWAYS),
        ignored("pipeline_loading_checkpoint", FLAG, False, LEGACY),
        ignored("override_module_apply", FLAG, True, LEGACY),
        ignored("memory_efficient_linear", FLAG, True, LEGACY),
        ignored("log_trace_cache_warnings", FLAG, False, "a changed order of modules is no fault"),
        ignored("zero_hpz_partition_size", whole(1), 1, "only where copies lie would change"),
        refused("zero_quantized_weights", FLAG, False, _QUANTIZED),
        refused("zero_quantized_nontrainable_weights", FLAG, False, _QUANTIZED),
        refused("zero_quantized_gradients", FLAG, False, _QUANTIZED),
        refused("mics_shard_size", whole(-1), -1, "a DeviceMesh (replicate, shard) does it", 0),
        ignored("mics_hierarchical_params_gather", FLAG, False, COMMUNICATION),
        refused(
            "save_muon_momentum_buffer_in_memory",
            FLAG,
            False,
            "offload_optimizer says where momentum lies",
        ),
    ),
)

# Drives, activations, checkpoints, tools

_MEASURED = "the engine chooses how it submits; `infinity bench io` measures"
_AIO = _under(
    "aio",
    ignored("block_size", whole(1), None, _MEASURED),
    ignored("queue_depth", whole(1), None, _MEASURED),
    ignored("intra_op_parallelism", whole(1), None, _MEASURED),
    ignored("single_submit", FLAG, None, _MEASURED),
    ignored("overlap_events", FLAG, None, _MEASURED, True),
    mapped("use_gds", FLAG, None, "Tuning(gpu_direct=...)"),
)
_ACTIVATIONS = _under(
    "activation_checkpointing",
    mapped("cpu_checkpointing", FLAG, False, 'Config(activations="cpu")'),
    ignored(
        "partition_activations",
        FLAG,
        False,
        "without tensor parallel ranks, which initialize does not take, there is one partition; "
        "beside infinity.wrap it is Tuning(partition_activations=True)",
    ),
    ignored("contiguous_memory_optimization", FLAG, False, PLANNED),
    ignored("number_checkpoints", whole(), None, PLANNED),
    ignored("synchronize_checkpoint_boundary", FLAG, False, LEGACY),
    ignored("profile", FLAG, False, REPORTED),
)
_CHECKPOINT = _under(
    "checkpoint",
    exact("tag_validation", one_of("ignore", "warn", "fail"), "warn", "{value} where tags differ"),
    ignored("load_universal", FLAG, False, "every checkpoint loads on any ranks"),
    ignored("use_node_local_storage", FLAG, False, FILES),
    ignored("checkpoint_serialization", FLAG, None, FILES),
    ignored("parallel_write.pipeline_stage", FLAG, False, FILES),
)
_TOOLS = (
    ignored("steps_per_print", number(1), None, REPORTED, float("inf")),
    ignored("wall_clock_breakdown", FLAG, False, REPORTED),
    ignored("memory_breakdown", FLAG, False, REPORTED),
    ignored("dump_state", FLAG, False, REPORTED),
    ignored("timers.throughput.enabled", FLAG, None, REPORTED),
    ignored("timers.throughput.synchronized", FLAG, None, REPORTED),
    ignored("zero_allow_untested_optimizer", FLAG, None, NO_EFFECT_HERE, True),
    ignored("zero_force_ds_cpu_optimizer", FLAG, None, NO_EFFECT_HERE, False),
    ignored("disable_python_gc", FLAG, False, "call gc.disable() yourself"),
    ignored("vocabulary_size", whole(1), None, LEGACY),
    ignored("log_level", ANYTHING, None, 'set that of the logger "infinity"'),
    refused("sequence_parallel_size", whole(), 1, "there is no sequence parallelism", 0),
    refused("use_data_before_expert_parallelism", FLAG, False, "experts are not spread"),
)

# Two blocks with parameters that depend on a type

_SAME_NUMBERS = "torch chooses by it how to compute the same numbers"
_OTHER_NUMBERS = "the kernels do not have it; give an optimizer of torch that has"
CLIP = refused(
    "optimizer.params.max_grad_norm", number(), 0.0, "gradient_clipping is the key for it"
)
"""A parameter that no optimizer takes, of any type."""
_OPTIMIZER_PARAMS = (
    exact("lr", number(), None, "lr={value}"),
    exact("weight_decay", number(), 0.0, "weight_decay={value}"),
    ignored("fused", FLAG, None, _SAME_NUMBERS, False),
    ignored("foreach", FLAG, None, _SAME_NUMBERS, False),
    ignored("capturable", FLAG, None, _SAME_NUMBERS, False),
    ignored("set_grad_none", FLAG, True, LEGACY),
    refused("amsgrad", FLAG, False, _OTHER_NUMBERS),
    refused("maximize", FLAG, False, _OTHER_NUMBERS),
    mapped("fp32_optimizer_states", FLAG, True, "moments of bf16 parameters are bf16"),
)
_ADAM = (
    exact("torch_adam", FLAG, False, "whether weight_decay is by default that of torch: {value}"),
    exact("bias_correction", FLAG, True, "whether the first updates are corrected: {value}"),
)


_MUON = (
    exact("lr", number(), None, "lr={value}"),
    exact("muon_lr", number(), None, "lr={value} of matrices"),
    exact("adam_lr", number(), None, "lr={value} of what is updated by Adam"),
    exact("weight_decay", number(), 0.0, "weight_decay={value}"),
    exact("momentum", number(0, 1), 0.95, "momentum={value} of matrices"),
    exact("ns_method", one_of("gram", "standard"), "gram", "the Newton-Schulz iteration: {value}"),
    exact("betas", several(number(0, 1), 2), (0.9, 0.95), "betas={value} of Adam"),
    exact("eps", number(), 1e-10, "eps={value} of Adam"),
    exact("adam_w_mode", FLAG, True, "Adam's decay acts on the parameter: {value}"),
    ignored("torch_adam", FLAG, False, "the numbers are the same"),
    refused("per_head_muon", FLAG, False, "whole matrices are orthogonalized"),
    refused("fp32_optimizer_states", FLAG, True, "states of Muon are fp32"),
)


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer of the kernels, or one that only DeepSpeed has."""

    becomes: str
    params: tuple[Key, ...]
    kind: type[Optimizer] | None = None
    """None: it runs by `infinity.adapt`."""


_OF_DEEPSPEED = {
    "adam": (
        *_ADAM,
        exact("adam_w_mode", FLAG, True, "decay acts on the parameter: {value}"),
    ),
    "adamw": (*_ADAM, ignored("adam_w_mode", FLAG, None, "the type says so", True)),
}
"""Parameters that only DeepSpeed has, by type."""
_VALUES: Mapping[Range, ValueKind] = {
    AMOUNT: number(),
    POSITIVE: number(),
    FINITE: number(-float("inf")),
    SWITCH: FLAG,
    TWO_RATES: several(number(0, 1), 2),
}


def _known(kind: type[Optimizer]) -> KnownOptimizer:
    usual, rule = kind.usual_settings(), kind.rule
    own = (
        exact(name, _VALUES[allowed], usual[name], f"{name}={{value}}")
        for name, allowed in rule.settings.items()
        if name not in ("lr", "weight_decay")
    )
    becomes = f"infinity.{kind.__name__}"
    if kind is Adam:
        becomes = "infinity.AdamW; infinity.Adam with adam_w_mode=false"
    extra = _OF_DEEPSPEED.get(rule.deepspeed or "", ())
    return KnownOptimizer(becomes, (*_OPTIMIZER_PARAMS, *own, *extra), kind)


OPTIMIZERS = {kind.rule.deepspeed: _known(kind) for kind in FAMILY if kind.rule.deepspeed} | {
    "muon": KnownOptimizer("DeepSpeed's Muon by infinity.adapt, unit by unit on the host", _MUON)
}
"""By type, in lower case."""
APPROXIMATE = "its updates are approximations of its own"
REFUSED_OPTIMIZERS = {
    "onebitadam": APPROXIMATE,
    "zerooneadam": APPROXIMATE,
    "onebitlamb": APPROXIMATE,
    "lamb": "it needs a norm for each layer",
    "sparseadam": "gradients are dense here",
    "muadam": "it needs the shapes of a base model",
    "muadamw": "it needs the shapes of a base model",
    "musgd": "it needs the shapes of a base model",
}

_LR = either(number(), several(number()))
_MOMENTUM = either(number(0, 1), several(number(0, 1)))
_LAST = exact("last_batch_iteration", whole(-1), -1, "the step before the first one")
_WARMUP = (
    exact("warmup_min_lr", _LR, 0.0, "the rate before the first step"),
    exact("warmup_max_lr", _LR, None, "the rate after the warm-up"),
    exact("warmup_num_steps", whole(), 1000, "steps of the warm-up"),
    exact("warmup_type", one_of("log", "linear"), "log", "the shape of the warm-up"),
    _LAST,
)
SCHEDULERS: dict[str, tuple[Key, ...]] = {
    "LRRangeTest": (
        exact("lr_range_test_min_lr", _LR, 0.001, "the first rate"),
        exact("lr_range_test_step_size", whole(1), 2000, "steps of one range"),
        exact("lr_range_test_step_rate", number(), 1.0, "the growth of the rate in one range"),
        exact("lr_range_test_staircase", FLAG, False, "whether the rate grows in stairs"),
        _LAST,
    ),
    "OneCycle": (
        exact("cycle_min_lr", _LR, None, "the lowest rate of the cycle"),
        exact("cycle_max_lr", _LR, None, "the highest rate of the cycle"),
        exact("decay_lr_rate", number(), 0.0, "the decay of the rate after the cycle"),
        exact("cycle_first_step_size", whole(1), 2000, "steps up"),
        exact("cycle_second_step_size", whole(1), None, "steps down"),
        exact("cycle_first_stair_count", whole(), 0, "stairs up"),
        exact("cycle_second_stair_count", whole(), None, "stairs down"),
        exact("decay_step_size", whole(), 0, "steps of one decay"),
        exact("cycle_momentum", FLAG, True, "whether momentum has a cycle, too"),
        exact("cycle_min_mom", _MOMENTUM, 0.8, "the lowest momentum of the cycle"),
        exact("cycle_max_mom", _MOMENTUM, 0.9, "the highest momentum of the cycle"),
        exact("decay_mom_rate", number(), 0.0, "the growth of momentum after the cycle"),
        _LAST,
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (
        exact("total_num_steps", whole(1), None, "steps until the rate is zero"),
        *_WARMUP,
    ),
    "WarmupCosineLR": (
        exact("total_num_steps", whole(1), None, "steps until the lowest rate"),
        exact("warmup_min_ratio", number(0), 0.0, "the share of the rate before the first step"),
        exact("cos_min_ratio", number(0), 0.0001, "the share of the rate at the end"),
        exact("warmup_num_steps", whole(), 1000, "steps of the warm-up"),
        exact("warmup_type", one_of("log", "linear"), "log", "the shape of the warm-up"),
        _LAST,
    ),
}
"""By type: the keys of its `params`."""

# The block of this engine, and free blocks

_OWN = _under(
    "infinity",
    exact("strict_config", FLAG, True, "whether unknown keys are refused"),
    *(exact(name, ANYTHING, None, f"Config({name}={{value!r}})") for name in Config.model_fields),
)

KEYS: dict[str, Key] = {
    key.path: key
    for key in (
        *_BATCH,
        *_GRADIENTS,
        *_PRECISION,
        *_ZERO,
        *_AIO,
        *_ACTIVATIONS,
        *_CHECKPOINT,
        *_TOOLS,
        exact("optimizer.type", TEXT, None, "{value}"),
        ignored("optimizer.legacy_fusion", FLAG, False, LEGACY),
        exact("scheduler.type", TEXT, None, "{value}"),
        *_OWN,
    )
}
"""All keys with a path of their own. Keys of `optimizer.params` and `scheduler.params` depend on
the type."""

_COMPILE = "call torch.compile on blocks of the model"
_TRAINING = "it changes what is trained"
_REMOVED = "DeepSpeed has removed it"
_TOOL_BLOCKS = ("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet")
_REFUSED_BLOCKS = (
    ("amp", "Apex is not supported; use bf16 or torch_autocast"),
    ("autotuning", "the engine plans by itself"),
    ("compression_training", _REMOVED),
    ("curriculum_learning", _REMOVED),
    ("data_efficiency", _TRAINING),
    ("datastates_ckpt", FILES),
    ("eigenvalue", _REMOVED),
    ("elasticity", "the number of ranks is fixed in a run"),
    ("expert_parallel", "experts are not spread over ranks"),
    ("hybrid_engine", "generate() runs on the wrapped model"),
    ("msamp", "MS-AMP is not supported; use bf16"),
    ("nebula", FILES),
    ("progressive_layer_drop", _REMOVED),
    ("quantize_training", _REMOVED),
)
_REFUSED_WHERE_PRESENT = (
    ("graph_harvesting", _COMPILE),
    ("pipeline", "there is no pipeline parallelism"),
    ("sparse_attention", _REMOVED),
    ("weight_quantization", "it is for inference"),
    ("zero_optimization.zeropp_loco_param", _QUANTIZED),
)
FREE: dict[str, FreeBlock] = {
    block.path: block
    for block in (
        *(FreeBlock(name, Treatment.IGNORED, REPORTED) for name in _TOOL_BLOCKS),
        FreeBlock("checkpoint.writer", Treatment.IGNORED, FILES, ()),
        *(FreeBlock(name, Treatment.REFUSED, reason) for name, reason in _REFUSED_BLOCKS),
        *(FreeBlock(name, Treatment.REFUSED, why, ()) for name, why in _REFUSED_WHERE_PRESENT),
        FreeBlock(
            "zero_optimization.zenflow",
            Treatment.REFUSED,
            "updates that leave out gradients change the numbers",
            (),
            empty_counts=True,  # DeepSpeed uses its defaults
        ),
        FreeBlock("compile", Treatment.REFUSED, _COMPILE, ("enabled", "deepcompile")),
        FreeBlock(
            "tensor_parallel",
            Treatment.REFUSED,
            "apply parallelize_module of torch before",
            ("autotp_size", "tp_size"),
        ),
    )
}

_STAGE3 = (
    "gather_16bit_weights_on_model_save",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.aio": "aio",
    "aio.thread_count": "aio.intra_op_parallelism",
    "aio.num_threads": "aio.intra_op_parallelism",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _STAGE3},
}
"""Old and misplaced names, and names of other tools, with the right names."""


def params_of(block: str, kind: str) -> tuple[Key, ...] | None:
    """The keys of `optimizer.params` or `scheduler.params` for a type. None if they are free."""
    if block == "optimizer":
        known = OPTIMIZERS.get(kind.lower())
        keys: Iterable[Key] | None = known.params if known else None
    else:
        keys = SCHEDULERS.get(kind)
    return None if keys is None else _under(f"{block}.params", *keys)
