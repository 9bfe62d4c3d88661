"""Every name of the package `deepspeed` of `infinity run`, as data.

Modules are named without `deepspeed.`, and "" is the package itself. `infinity.deepspeed.package`
makes modules from this table. Modules and names follow DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.keys import MIXTURES, SCHEDULERS

VERSION = "0.19.8"

_ENGINE = "infinity.deepspeed.engine"
_COMMUNICATION = "infinity.deepspeed.communication"
_COLLECTIVES = "infinity.deepspeed.collectives"
_TOOLS = "infinity.deepspeed.tools"
_ZERO = "infinity.deepspeed.zero"
_BLOCKS = "infinity.deepspeed.blocks"
_PARSED = "infinity.deepspeed.parsed"
_ERRORS = "infinity.deepspeed.errors"
_GROUPS = "infinity.deepspeed.groups"
_BUILDERS = "infinity.deepspeed.builders"
_CLIENTS = "infinity.deepspeed.clients"
_ACCELERATOR = "infinity.deepspeed.accelerator"
_EXPERTS = "infinity.deepspeed.experts"
_RECOMPUTING = "infinity.deepspeed.recomputing"
_CONSOLIDATION = "infinity.deepspeed.consolidation"
_KINDS = "infinity.deepspeed.optimizer_kinds"

_LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
)
_FRAGMENTS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)
_HP = (
    "get_full_hp_param set_full_hp_param get_full_hp_grad=safe_get_full_grad "
    "set_full_hp_grad=safe_set_full_grad"
)
_OFFLOADS = "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"
_DEVICES = {"infinity.deepspeed.offload_devices": "OffloadDeviceEnum OffloadStateTypeEnum"}
_TILES = {"infinity.deepspeed.tiling": "TiledLinear TiledLinearReturnBias"}

BACKED: dict[str, dict[str, str]] = {
    "": {
        _ACCELERATOR: "get_accelerator",
        _COMMUNICATION: "init_distributed",
        _CLIENTS: "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        _ENGINE: "DeepSpeedEngine",
        _ERRORS: "DeepSpeedConfigError",
        _KINDS: "DeepSpeedOptimizer",
        _PARSED: "DeepSpeedConfig",
        _TOOLS: "OnDevice log_dist logger",
        "infinity.deepspeed.arguments": "add_config_arguments",
        "infinity.deepspeed.initialize": "initialize",
    },
    "accelerator": {
        _ACCELERATOR: "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported"
    },
    "accelerator.abstract_accelerator": {_ACCELERATOR: "DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {
        _ACCELERATOR: "get_accelerator is_current_accelerator_supported"
    },
    "checkpoint.utils": {_TOOLS: "clone_tensors_for_torch_save"},
    "comm": {
        _COMMUNICATION: "get_local_rank get_rank get_world_size init_distributed is_initialized "
        "log_summary",
        _COLLECTIVES: "configure all_gather_coalesced get_all_ranks_from_group get_global_rank "
        "has_all_gather_into_tensor=has_it has_all_reduce_coalesced=has_it "
        "has_coalescing_manager=has_it has_comm_data has_reduce_scatter_tensor=has_it "
        "inference_all_reduce=all_reduce allgather_fn=all_gather_into_tensor "
        "reduce_scatter_fn=reduce_scatter_tensor reset_log *",
        _GROUPS: "get_world_group=all_ranks",
    },
    "compression.helper": {_TOOLS: "recursive_getattr recursive_setattr"},
    "git_version_info": {_BUILDERS: "installed_ops=COMPATIBLE"},
    "launcher.runner": {
        "infinity.deepspeed.launching": "DEEPSPEED_ENVIRONMENT_NAME EXPORT_ENVS main"
    },
    "moe.utils": {
        _EXPERTS: "has_moe_layers is_moe_param is_moe_param_group "
        "split_params_into_different_moe_groups_for_optimizer"
    },
    "monitor.monitor": {"infinity.deepspeed.monitor": "Monitor MonitorMaster=Monitor"},
    "ops": {_BUILDERS: "__compatible_ops__=COMPATIBLE"},
    "ops.adagrad": {_CLIENTS: "DeepSpeedCPUAdagrad"},
    "ops.adam": {_CLIENTS: "DeepSpeedCPUAdam FusedAdam"},
    "ops.aio": {_BUILDERS: "AsyncIOBuilder"},
    "ops.lion": {_CLIENTS: "DeepSpeedCPULion FusedLion"},
    "ops.op_builder": {
        _BUILDERS: "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
        "FusedAdamBuilder FusedLambBuilder FusedLionBuilder InferenceBuilder OpBuilder"
    },
    "runtime.activation_checkpointing.checkpointing": {
        _RECOMPUTING: "checkpoint configure is_configured model_parallel_cuda_manual_seed "
        "non_reentrant_checkpoint reset"
    },
    "runtime.base_optimizer": {_KINDS: "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.bf16_optimizer": {_KINDS: "BF16_Optimizer"},
    "runtime.config": {
        _BLOCKS: "get_gradient_clipping",
        _ERRORS: "DeepSpeedConfigError",
        _PARSED: "DeepSpeedConfig",
    },
    "runtime.config_utils": {_TOOLS: "get_dict_param get_list_param get_scalar_param"},
    "runtime.dataloader": {_TOOLS: "RepeatingLoader"},
    "runtime.engine": {
        _CLIENTS: "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        _ENGINE: "DeepSpeedEngine",
    },
    "runtime.fp16.fused_optimizer": {_KINDS: "FP16_Optimizer"},
    "runtime.fp16.unfused_optimizer": {_KINDS: "FP16_UnfusedOptimizer"},
    "runtime.lr_schedules": {
        "infinity.deepspeed.schedulers": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR "
        "WarmupLR"
    },
    "runtime.precision_config": {
        _BLOCKS: "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config"
    },
    "runtime.utils": {
        _TOOLS: "clip_grad_norm_ copy_to_device empty_cache ensure_directory_exists "
        "has_inf_or_nan is_model_parallel_parameter=is_not_spread move_to_device "
        "noop_decorator=as_it_is partition_uniform see_memory_usage set_random_seed",
    },
    "runtime.zero": {
        _ZERO: "GatheredParameters Init ZeroParamStatus register_external_parameter "
        "unregister_external_parameter",
        "infinity.deepspeed.generation": "unwrap_model_for_generation",
        **_TILES,
    },
    "runtime.zero.config": {
        _BLOCKS: f"DeepSpeedZeroConfig DeepSpeedZeroLeafModuleConfig {_OFFLOADS} ZeroStageEnum",
        "infinity.deepspeed.offload_devices": "OffloadDeviceEnum",
    },
    "runtime.zero.leaf_module_config": {_BLOCKS: "DeepSpeedZeroLeafModuleConfig"},
    "runtime.zero.offload_config": {_BLOCKS: _OFFLOADS, **_DEVICES},
    "runtime.zero.partition_parameters": {
        _ACCELERATOR: "get_accelerator",
        _ZERO: "GatheredParameters Init ZeroParamStatus register_external_parameter "
        "unregister_external_parameter",
        "torch": "_orig_torch_arange=arange",
    },
    "runtime.zero.stage3": {_KINDS: "DeepSpeedZeroOptimizer_Stage3"},
    "runtime.zero.stage_1_and_2": {_KINDS: "DeepSpeedZeroOptimizer"},
    "runtime.zero.tiling": _TILES,
    "runtime.zero.utils": {"infinity.errors": "ZeRORuntimeException=InfinityError"},
    "utils": {
        _TOOLS: "OnDevice RepeatingLoader instrument_w_nvtx log_dist logger see_memory_usage "
        "recursive_getattr recursive_setattr set_log_level_from_string log_dist_once",
        _ZERO: _LEAVES,
        "infinity.deepspeed.fragments": f"{_FRAGMENTS} {_HP}",
    },
    "utils.groups": {
        _COMMUNICATION: "_get_data_parallel_rank=get_rank get_data_parallel_rank=get_rank "
        "_get_data_parallel_world_size=get_world_size get_data_parallel_world_size=get_world_size "
        "_get_sequence_data_parallel_world_size=get_world_size "
        "_get_sequence_data_parallel_rank=get_rank",
        _GROUPS: "_get_data_parallel_group=all_ranks get_data_parallel_group=all_ranks "
        "_get_sequence_parallel_world_size=one _get_sequence_parallel_rank=zero "
        "_get_sequence_data_parallel_group=all_ranks "
        "_get_data_parallel_group_ranks=all_numbers _get_broadcast_src_rank=zero "
        "_zero_param_parallel_is_initialized=no _get_zero_param_intra_parallel_group=nothing "
        "_get_model_parallel_world_size=one get_model_parallel_world_size=one "
        "get_model_parallel_rank=zero get_tensor_model_parallel_world_size=one "
        "get_tensor_model_parallel_rank=zero",
    },
    "utils.logging": {
        _TOOLS: "get_current_level get_log_level_from_string log_dist log_dist_once "
        "log_levels=LOG_LEVELS logger print_dist set_log_level_from_string should_log_le "
        "warning_once"
    },
    "utils.nvtx": {_TOOLS: "instrument_w_nvtx"},
    "utils.tensor_fragment": {"infinity.deepspeed.fragments": f"{_FRAGMENTS} {_HP}"},
    "utils.timer": {
        "infinity.deepspeed.timers": "NoopTimer SynchronizedWallClockTimer ThroughputTimer"
    },
    "utils.torch": {_TOOLS: "required_torch_version"},
    "utils.z3_leaf_module": {_ZERO: _LEAVES},
    "utils.zero_to_fp32": {
        _CONSOLIDATION: "convert_zero_checkpoint_to_fp32_state_dict get_model_state_file "
        "get_model_state_files "
        "get_fp32_state_dict_from_zero_checkpoint get_optim_files "
        "load_state_dict_from_zero_checkpoint"
    },
}
"""By module: the sources of names. `theirs=ours` renames. `*` stands for all other names of a
module."""

_SCHEDULE_KEYS = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_min_mom cycle_max_mom "
    "decay_mom_rate warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps "
    "warmup_min_ratio cos_min_ratio"
)

_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"]
_TIMERS = {
    "forward_micro": "fwd_microstep",
    "forward_global": "fwd",
    "backward_micro": "bwd_microstep",
    "backward_global": "bwd",
    "backward_inner_micro": "bwd_inner_microstep",
    "backward_inner_global": "bwd_inner",
    "backward_reduce_micro": "bwd_allreduce_microstep",
    "backward_reduce_global": "bwd_allreduce",
    "step_micro": "step_microstep",
    "step_global": "step",
}

CONSTANTS: dict[str, dict[str, Any]] = {
    "": {
        "__version__": VERSION,
        "__version_major__": 0,
        "__version_minor__": 19,
        "__version_patch__": 8,
        "__git_hash__": "infinity",
        "__git_branch__": "infinity",
        "version": VERSION,
        "git_hash": "infinity",
        "git_branch": "infinity",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    },
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
        "CROSS_RANK": "CROSS_RANK",
        "CROSS_SIZE": "CROSS_SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
    },
    "git_version_info": {
        "version": VERSION,
        "git_hash": "infinity",
        "git_branch": "infinity",
        "accelerator_name": "",
        # Nothing was built against a version, so versions are those at run time.
        "torch_info": {
            "version": "0.0",
            "bf16_support": True,
            "cuda_version": "0.0",
            "nccl_version": "0.0",
            "hip_version": "0.0",
        },
    },
    "runtime.config": {
        **{f"{name.upper()}_OPTIMIZER": name for name in _OPTIMIZERS},
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
        "DEEPSPEED_OPTIMIZERS": _OPTIMIZERS,
        "TORCH_ADAM_PARAM": "torch_adam",
    },
    "utils.groups": {"mesh_device": None, "mpu": None},
    "utils.timer": {name.upper() + "_TIMER": text for name, text in _TIMERS.items()},
    "runtime.lr_schedules": {
        "VALID_LR_SCHEDULES": list(SCHEDULERS),
        "LR_RANGE_TEST": "LRRangeTest",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_LR": "WarmupLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LINEAR_RATE": "linear",
        **{name.upper(): name for name in _SCHEDULE_KEYS.split()},
    },
    "runtime.swap_tensor": {
        # In DeepSpeed, states of this size go to the drive. Here smaller ones do, too.
        "MIN_SWAPPABLE_BYTES": 1 << 20
    },
    "runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": list(MIXTURES),
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "runtime.zero.partition_parameters": {
        # transformers replaces it, to keep the dtype of `torch.arange`. Nothing changes that here.
        "zero_wrapper_for_fp_tensor_constructor": None
    },
}
"""By module: names with their values."""

_STAGES = "LayerSpec PipelineModule TiedLayerSpec"
_MIXTURE = "MOELayer TopKGate"
_EXPERT_GROUPS = (
    "_create_expert_and_data_parallel _create_expert_data_and_model_parallel "
    "_get_expert_data_parallel_group _get_expert_data_parallel_rank "
    "_get_expert_data_parallel_world_size _get_expert_parallel_group _get_expert_parallel_rank "
    "_get_expert_parallel_world_size _get_max_expert_size"
)

REFUSED: dict[str, str] = {
    "": "InferenceEngine PipelineEngine PipelineModule init_inference tp_model_init",
    "accelerator": "set_accelerator",
    "accelerator.real_accelerator": "set_accelerator",
    "checkpoint.utils": "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
    "moe.experts": "Experts",
    "moe.layer": "MoE",
    "moe.sharded_moe": _MIXTURE,
    "ops.op_builder": "EvoformerAttnBuilder FPQuantizerBuilder GDSBuilder PinMemoryBuilder "
    "QuantizerBuilder RaggedOpsBuilder RandomLTDBuilder SpatialInferenceBuilder "
    "StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
    "pipe": _STAGES,
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "profiling.flops_profiler.profiler": "FlopsProfiler get_model_profile",
    "runtime.checkpoint_engine": "TorchCheckpointEngine",
    "runtime.checkpoint_engine.torch_checkpoint_engine": "TorchCheckpointEngine",
    "runtime.config_utils": "DeepSpeedConfigModel",
    "runtime.engine": "MoE",
    "runtime.pipe": _STAGES,
    "runtime.pipe.engine": "PipelineEngine",
    "runtime.pipe.module": _STAGES,
    "runtime.pipe.topology": "PipeDataParallelTopology PipeModelDataParallelTopology "
    "PipelineParallelGrid ProcessTopology",
    "runtime.sequence_parallel.ulysses_sp": "AutogradComputeMLP SequenceTiledCompute "
    "TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter "
    "sequence_tiled_compute",
    "runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "runtime.zero.partition_parameters": "InsertPostInitMethodToModuleSubClasses",
    "sequence.layer": "DistributedAttention",
    "utils.groups": f"_get_sequence_parallel_group {_EXPERT_GROUPS}",
}
"""By module: classes and functions that can be imported, and raise the reason when they are
used."""

ALIASES = {
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "dist": "comm",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "ops.lion.cpu_lion": "ops.lion",
    "ops.lion.fused_lion": "ops.lion",
    "zero": "runtime.zero",
}
"""Other names of modules."""

PROGRAMS = {
    "launcher.runner": "infinity.deepspeed.launching",
    "utils.zero_to_fp32": "infinity.deepspeed.zero_to_fp32",
}
"""By module that `python -m` runs: the module with its `main`."""

_EXPERTS_WHY = (
    "experts are not spread over ranks; use the mixture of experts of the model, whose weights are "
    "sharded as all others"
)
_PIPELINE_WHY = "there is no pipeline parallelism; build the model as one module"
_SEQUENCE_WHY = (
    "there is no sequence parallelism; give each rank whole sequences, with "
    'Config(recompute=True, activations="cpu") for long ones'
)
_TENSOR_WHY = "call parallelize_module of torch before infinity.wrap, with the same DeviceMesh"
_INFERENCE_WHY = (
    "this engine trains; call generate() on a model that infinity.wrap returned, or infinity "
    "generate"
)
_COMPILE_WHY = "call torch.compile on the model, or engine.compile()"
_CHECKPOINT_WHY = (
    "the engine writes checkpoints in its own way, for any number of ranks; use "
    "engine.save_checkpoint, engine.load_checkpoint and deepspeed.utils.zero_to_fp32"
)
_REPORT_WHY = "log losses from your loop; engine.report() has times, bytes and stalls"
_INTERNAL_WHY = (
    "it is part of how DeepSpeed's engine works inside; use the engine that "
    "deepspeed.initialize returns"
)
_DATA_WHY = "it changes what is trained; choose samples in a loader of your own"
_DRIVE_WHY = "infinity.nvme reads and writes tensors, and `infinity bench io` measures drives"

_FORECAST = "`infinity plan` says what a model takes of each tier, and what fits"
_ESTIMATES = [
    f"{module}.estimate_zero{stage}_model_states_mem_needs{kind}"
    for module, stage in (("stage_1_and_2", 2), ("stage3", 3))
    for kind in ("", "_all_live", "_all_cold")
]

MISSING = {
    "": "it has what scripts use to train; see docs/deepspeed.md",
    "InferenceEngine": _INFERENCE_WHY,
    "PipelineEngine": _PIPELINE_WHY,
    "PipelineModule": _PIPELINE_WHY,
    "init_inference": _INFERENCE_WHY,
    "tp_model_init": _TENSOR_WHY,
    "accelerator": "the compute device is that of torch.accelerator, or Tuning(device=...)",
    "autotuning": "the engine plans by itself; `infinity plan` says what fits",
    "checkpoint": _CHECKPOINT_WHY,
    "comm": "communicate through torch.distributed",
    "compat": _INTERNAL_WHY,
    "compile": _COMPILE_WHY,
    "compression": "compression changes the numbers; leave it out",
    "constants": _INTERNAL_WHY,
    "datastates": _CHECKPOINT_WHY,
    "elasticity": "DeepSpeed has removed it; the number of ranks is fixed in a run",
    "env_report": "`infinity doctor` says what this machine offers",
    "git_version_info": "nothing of DeepSpeed was built; see deepspeed.__version__",
    "git_version_info_installed": "nothing of DeepSpeed was built; see deepspeed.__version__",
    "inference": _INFERENCE_WHY,
    "io": _DRIVE_WHY,
    "launcher": "start ranks with torchrun, or with `infinity run deepspeed --num_gpus N SCRIPT`",
    "linear": "train adapters of PEFT",
    "model_implementations": _INFERENCE_WHY,
    "module_inject": _TENSOR_WHY,
    "moe": _EXPERTS_WHY,
    "monitor": _REPORT_WHY,
    "nvme": _DRIVE_WHY,
    "ops": "the kernels of this engine need no builder; optimizers are in deepspeed.ops.adam, "
    "deepspeed.ops.adagrad and deepspeed.ops.lion",
    "ops.aio": _DRIVE_WHY,
    "ops.gds": _DRIVE_WHY,
    "ops.random_ltd": _DATA_WHY,
    "ops.sparse_attention": "DeepSpeed has removed it; use attention of torch",
    "ops.transformer": _INFERENCE_WHY,
    "pipe": _PIPELINE_WHY,
    "profiling": "engine.report() has times, bytes and stalls, and FlopCounterMode of "
    "torch.utils.flop_counter counts operations",
    "runtime": _INTERNAL_WHY,
    "runtime.activation_checkpointing": "use checkpoint of deepspeed.checkpointing, or "
    "torch.utils.checkpoint",
    "runtime.checkpoint_engine": _CHECKPOINT_WHY,
    "runtime.compiler": _COMPILE_WHY,
    "runtime.config_utils": "use a model of pydantic",
    "runtime.constants": "write the key of the configuration itself",
    "runtime.data_pipeline": _DATA_WHY,
    "runtime.domino": _TENSOR_WHY,
    "runtime.engine.MoE": _EXPERTS_WHY,
    "runtime.hybrid_engine": _INFERENCE_WHY,
    "runtime.hybrid_engine_graph": _INFERENCE_WHY,
    "runtime.model_checkpointing": _CHECKPOINT_WHY,
    "runtime.pipe": _PIPELINE_WHY,
    "runtime.rollout": _INFERENCE_WHY,
    "runtime.sequence_parallel": _SEQUENCE_WHY,
    "runtime.superoffload": 'Tuning(update="speculative") has the same effect',
    "runtime.swap_tensor": "the device of offload_param and offload_optimizer says what lives on "
    "NVMe",
    "runtime.tensor_parallel": _TENSOR_WHY,
    **{f"runtime.zero.{name}": _FORECAST for name in _ESTIMATES},
    "runtime.zenflow": "updates that leave out gradients change the numbers; leave it out",
    "sequence": _SEQUENCE_WHY,
    "utils": "it is a tool of DeepSpeed's own code; use a tool of torch or Python",
    "utils.groups": "all ranks share one model; use deepspeed.comm.get_rank and get_world_size",
    "utils.groups._get_sequence_parallel_group": _SEQUENCE_WHY,
    **{f"utils.groups.{name}": _EXPERTS_WHY for name in _EXPERT_GROUPS.split()},
    "utils.zero_to_fp32": _CHECKPOINT_WHY,
}
"""By the start of a dotted name: the reason why it is missing, and the replacement."""


def sentence(path: str) -> str:
    """The reason why there is no `deepspeed.<path>`, and the replacement, by the longest start of
    the path."""
    start = path
    while start not in MISSING:
        start = start.rpartition(".")[0]
    return f"deepspeed.{path} is not in the package of `infinity run`: {MISSING[start]}"
