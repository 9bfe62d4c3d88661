"""Configurations as users of DeepSpeed write them, from its documented keys."""

from __future__ import annotations

from typing import Any

NVME = "/local_nvme"

ADAMW = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 100}}
AIO = {
    "block_size": 262144,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}

PLAIN: dict[str, dict[str, Any]] = {
    "zero1": {
        "train_batch_size": 16,
        "steps_per_print": 100,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 3e-7}},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    },
    "zero2": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "initial_scale_power": 12,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": ADAMW,
        "scheduler": WARMUP,
    },
    "zero3": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.3,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu", "pin_memory": False},
        },
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 1000, "warmup_max_lr": 2e-5, "warmup_num_steps": 100},
        },
    },
    "nvme": {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": NVME,
                "pin_memory": True,
                "buffer_count": 4,
                "fast_init": False,
                "pipeline_read": True,
                "pipeline_write": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": NVME,
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": AIO,
    },
    "old names": {
        "train_batch_size": 8,
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "cpu_offload": True,
            "stage3_gather_fp16_weights_on_model_save": True,
            "aio": {"block_size": 1048576, "thread_count": 2, "single_submit": "false"},
        },
    },
    "activation checkpointing": {
        "train_batch_size": 1,
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    },
    "autocast": {
        "train_batch_size": 2,
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        },
        "zero_optimization": {"stage": 3},
    },
    "tools": {
        "train_batch_size": 4,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "flops_profiler": {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True},
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "run"},
        "wandb": {"enabled": False, "project": "p"},
        "csv_monitor": {"enabled": False, "output_path": "out"},
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
    },
    "what is off": {
        "train_batch_size": 4,
        "fp16": {"enabled": False, "loss_scale": 128},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "autotuning": {"enabled": False},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "data_efficiency": {"enabled": False, "seed": 1234},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
    },
    "lion": {
        "train_batch_size": 4,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_first_step_size": 10},
        },
    },
    "range test": {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 1e-4,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        },
    },
    "cosine": {
        "train_batch_size": 4,
        "optimizer": {"type": "adagrad", "params": {"lr": 0.01}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 10, "cos_min_ratio": 0.1},
        },
    },
}
"""By what they show."""

_AUTO_BLOCKS = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
AUTO: dict[str, dict[str, Any]] = {
    "trainer, zero2": {
        **_AUTO_BLOCKS,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": True,
        },
    },
    "trainer, zero3": {
        **_AUTO_BLOCKS,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "trainer, nvme": {
        **_AUTO_BLOCKS,
        "zero_optimization": PLAIN["nvme"]["zero_optimization"],
        "aio": AIO,
    },
}
"""As for the Trainer of transformers, which replaces "auto"."""
