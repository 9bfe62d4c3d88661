"""Which files of DeepSpeed's tests/unit are run, and why tests of them do not pass here."""

from __future__ import annotations

from collections.abc import Mapping

PATHS = [
    f"tests/unit/{folder}/test_{name}.py"
    for folder, names in {
        "checkpoint": "convert_checkpoint latest_checkpoint other_optimizer shared_weights "
        "tag_validation",
        "runtime": "ds_config_dict ds_initialize multi_output_model",
        "runtime/half_precision": "dynamic_loss_scale fp16",
        "runtime/zero": "ignore_unused_parameters unwrap_model zero_config zero_context "
        "zero_context_ancestry zero_context_return zero_dynamic_class zero_grad_clip "
        "zero_leaf_module zero_nesting_init",
    }.items()
    for name in names.split()
]
"""Files about what scripts use."""

_OWN = "asks for the class or identity of an optimizer; `initialize` returns one of the engine"
LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "checkpoint/test_latest_checkpoint.py::TestLatestCheckpoint::test_existing_latest": (
        "internals",
        "fp32_partitioned_groups_flat of the optimizer, at the end",
    ),
    "checkpoint/test_other_optimizer.py::TestOtherOptimizerCheckpoint": (
        "skipped",
        "by the suite, on CPUs",
    ),
    "checkpoint/test_other_optimizer.py::TestOtherOptimizerCheckpoint"
    "::test_checkpoint_fp32_optimizer": ("internals", "_get_optimizer_ckpt_name of the engine"),
    "runtime/half_precision/test_dynamic_loss_scale.py::TestFused": (
        "internals",
        "loss_scale_config of the optimizer",
    ),
    "runtime/half_precision/test_dynamic_loss_scale.py::TestUnfused": (
        "skipped",
        "by the suite, without LAMB",
    ),
    **{
        f"runtime/half_precision/test_fp16.py::{name}": ("skipped", "by the suite, without LAMB")
        for name in (
            *("TestLambFP32GradClip", "TestLambFP16"),
            *("TestFP16OptimizerForMoE::test_lamb_gradnorm", "TestLambFP16EmptyGrad"),
        )
    },
    "runtime/half_precision/test_fp16.py::TestFP16OptimizerForMoE": (
        "refused",
        "deepspeed.moe.layer.MoE: experts are not spread over ranks",
    ),
    "runtime/half_precision/test_fp16.py::TestZeroEmptyPartition": ("skipped", "by the suite"),
    "runtime/half_precision/test_fp16.py::TestFP16AdamTypes": (
        "refused",
        "optimizer.torch_adam=True: unknown key",
    ),
    "runtime/half_precision/test_fp16.py::TestZeroStaticScale": (
        "internals",
        "loss_scaler.loss_scale of the optimizer",
    ),
    "runtime/half_precision/test_fp16.py::TestZeroAllowUntestedOptimizer": (
        "more",
        "any optimizer trains",
    ),
    "runtime/test_ds_config_dict.py::TestBatchConfig": (
        "internals",
        "_configure_train_batch_size of DeepSpeedConfig",
    ),
    **{
        f"runtime/test_ds_config_dict.py::test_{name}": ("refused", "in words of its own")
        for name in (
            "invalid_gradient_allreduce_op",
            "sum_gradient_allreduce_rejects_deepcompile",
            "sum_gradient_allreduce_rejects_zenflow",
        )
    },
    "runtime/test_ds_config_dict.py::test_sum_gradient_allreduce_rejects_zero3": (
        "more",
        "sums work at stage 3, too",
    ),
    "runtime/test_ds_config_dict.py::test_quantized_eigenvalue_config_parses": (
        "layout",
        "its file is in a folder of DeepSpeed that was not fetched",
    ),
    "runtime/test_ds_config_dict.py::"
    "test_compression_training_without_legacy_quantize_training_uses_defaults": (
        "refused",
        "compression_training: DeepSpeed has removed it",
    ),
    "runtime/test_ds_config_dict.py::TestInitNoOptimizer": ("skipped", "by the suite, on CPUs"),
    "runtime/test_ds_initialize.py::TestClientOptimizer": ("internals", _OWN),
    "runtime/test_ds_initialize.py::TestConfigOptimizer": ("internals", _OWN),
    "runtime/test_ds_initialize.py::TestBf16ZeRO0UnfusedOptimizer": ("skipped", "by the suite"),
    "runtime/test_ds_initialize.py::TestOptimizerImplementation": (
        "refused",
        "gradients in another dtype than that of parameters or fp32",
    ),
    "runtime/test_ds_initialize.py::TestOptimizerImplementation::test[fp32-fp16-None]": (
        "more",
        "fp16 with gradients in fp32 trains at stage 0, too",
    ),
    **{
        f"runtime/test_ds_initialize.py::TestClientLrScheduler::test[{kind}-_LRScheduler]": (
            "refused",
            "lr_scheduler was built for another optimizer than the one that trains the model",
        )
        for kind in ("None", "Callable")
    },
    **{
        f"runtime/zero/test_zero_context.py::{name}": ("internals", reason)
        for name, reason in (
            ("test_multiple_all_gather_handles_wait_passes_dependency_by_keyword", "the class"),
            ("TestZeroGatheredParametersFree", "parameters keep their shape while they are away"),
            ("TestScatterGather", "parameters keep their shape while they are away"),
            ("TestSerialContext::test_scatter_halftype", "ds_tensor of a parameter"),
            ("TestSerialContext::test_throughput_calculation", "fields of a timer"),
        )
    },
    "runtime/zero/test_zero_context.py::TestMiCSGatheredParametersFree": (
        "refused",
        "deepspeed.runtime.zero.MiCS_Init is not in the package of `infinity run`",
    ),
    "runtime/zero/test_zero_context.py::TestGatheredParametersAllRanksErrorOnModification": (
        "CUDA",
        "makes a tensor on the device 0",
    ),
    "runtime/zero/test_zero_context_return.py::TestReturnParam::test_ext_param_return": (
        "internals",
        "_external_params of a module",
    ),
    "runtime/zero/test_zero_context_return.py::TestReturnParam::test_ext_param_returnobj": (
        "skipped",
        "by the suite",
    ),
    "runtime/zero/test_zero_leaf_module.py::TestSetZ3LeafModule::test_no_grad_input_error": (
        "more",
        "inputs of a leaf module need no gradient",
    ),
    "runtime/zero/test_zero_leaf_module.py::test_default_leaf_module_classes_exist": (
        "skipped",
        "by the suite",
    ),
    "runtime/zero/test_zero_grad_clip.py::TestZeroGradClip": (
        "internals",
        "_get_norm_groups of the optimizer",
    ),
    "runtime/zero/test_unwrap_model.py::TestUnwrapModel": (
        "internals",
        "hooks of the optimizer, which this engine does not need",
    ),
}
"""By file, class and test of DeepSpeed's tests/unit, or a part of that from the start."""
