"""Why tests of other suites do not pass here."""

from __future__ import annotations

from collections.abc import Mapping

from their_suites import of_deepspeed

LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "accelerate/test_deepspeed_alst_ulysses_sp_0": ("refused", "no sequence parallel training"),
    "accelerate/test_deepspeed_alst_ulysses_sp_1": ("refused", "no sequence parallel training"),
    "accelerate/test_zero3_integration": ("CUDA", "asks torch.distributed for nccl"),
    "accelerate/test_train_multiple_models": (
        "layout",
        "looks for its configurations beside the wheel; tests/integrations runs the script",
    ),
    "accelerate/test_peak_memory_usage": ("skipped", "by the suite, since DeepSpeed 0.12.7"),
    "lightning/pytorch/strategies/test_deepspeed.py::test_deepspeed_run_configure_optimizers": (
        "internals",
        "asks for the dtype of a LightningModule, which takes that of its method half()",
    ),
    "lightning/pytorch/strategies/test_deepspeed.py"
    "::test_deepspeed_multigpu_stage_3_resume_training": (
        "internals",
        "fp32_flat_groups in the state_dict of the optimizer",
    ),
    **{
        f"lightning/{library}::test_deepspeed_{name}": ("skipped", "by the suite, without two GPUs")
        for library, names in {
            "pytorch/strategies/test_deepspeed.py": "multigpu stage_3_save_warning "
            "multigpu_stage_3 multigpu_stage_3_manual_optimization multigpu_stage_3_checkpointing "
            "multigpu_stage_2_accumulated_grad_batches multigpu_test multigpu_no_schedulers "
            "multi_save_same_filepath with_bfloat16_precision configure_optimizer_device_set "
            "init_module_with_stage_3 init_module_with_stages_1_2",
            "fabric/strategies/test_deepspeed_integration.py": "multiple_models multigpu_stage_3 "
            "with_bfloat16_precision save_load_checkpoint_zero_3 init_module_with_stage_3 "
            "init_module_with_stages_1_2",
        }.items()
        for name in names.split()
    },
    **{f"DeepSpeed/{name}": why for name, why in of_deepspeed.LEFT_OUT.items()},
    "peft/training 8bit": (
        "refused",
        "bitsandbytes replaces a weight of int8 inside of its first forward",
    ),
    "DeepSpeedExamples/step 3, stage 3, EMA": (
        "refused",
        "the average is written without `modifier_rank`, which DeepSpeed drops",
    ),
    "DeepSpeedExamples/step 3, hybrid engine": (
        "refused",
        "hybrid_engine.enabled=True: generate() runs on the wrapped model",
    ),
    "DeepSpeedExamples/train": ("CUDA", "calls torch.cuda.set_device"),
    **{
        f"DeepSpeedExamples/aio_{what}_cpu_tensor": (
            "refused",
            "AsyncIOBuilder.load(): use infinity.nvme for NVMe",
        )
        for what in ("load", "store")
    },
    "DeepSpeedExamples/deepspeed_save_model": (
        "refused",
        "deepspeed.io: infinity.nvme reads and writes tensors",
    ),
    **{
        f"trl/test_{name}_liger[zero{stage}]": ("skipped", "by the suite, without liger-kernel")
        for name in ("dpo", "kto", "grpo")
        for stage in (2, 3)
    },
    "transformers/test_arange_bf16": (
        "internals",
        "asks for weights in bf16 before initialize, which casts them here",
    ),
    **{
        f"transformers/test_save_checkpoints_{stage}_{precision}": (
            "internals",
            "looks for the names of DeepSpeed's files in a checkpoint",
        )
        for stage in ("zero2", "zero3")
        for precision in ("bf16", "fp16")
    },
    **{
        f"transformers/test_early_get_last_lr_{which}": ("skipped", "by the suite")
        for which in ("zero2_bf16", "zero3_bf16", "zero3_fp16")
    },
    **{
        f"transformers/test_can_resume_training_normal_{stage}_{precision}_hf_optim_hf_scheduler": (
            "skipped",
            "by the suite",
        )
        for stage in ("zero2", "zero3")
        for precision in ("bf16", "fp16")
    },
}
"""A word and its reason, by library and test."""


def reason_of(test: str) -> tuple[str, str] | None:
    """A word and its reason; a test may have that of its class, or of all its parameters."""
    start = test.partition("[")[0]
    names = (test, start, start.rpartition("::")[0])
    return next((LEFT_OUT[name] for name in names if name in LEFT_OUT), None)
