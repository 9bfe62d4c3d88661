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
