"""Which files of DeepSpeed's tests/unit are run, and why tests of them do not pass here."""

from __future__ import annotations

from collections.abc import Mapping

PATHS = [
    f"tests/unit/{folder}/test_{name}.py"
    for folder, names in {
        "checkpoint": "convert_checkpoint latest_checkpoint lr_scheduler moe_checkpoint "
        "other_optimizer pipeline shared_weights sparse tag_validation",
        "ops/adagrad": "cpu_adagrad",
        "ops/adam": "adamw cpu_adam hybrid_adam",
        "ops/lion": "cpu_lion lion",
        "ops/muon": "muon muon_partial_training",
        "runtime": "data data_efficiency ds_config_dict ds_config_model ds_initialize "
        "lr_schedulers multi_output_model multiple_models no_sync_ctxt "
        "precision_config_dynamic_scale precision_config_loss_scale runtime_utils",
        "runtime/half_precision": "dynamic_loss_scale fp16 zero_optim_overflow",
        "runtime/zero": "ignore_unused_parameters unwrap_model zero_config zero_context "
        "zero_context_ancestry zero_context_return zero_dynamic_class zero_grad_clip "
        "zero_leaf_module zero_nesting_init "
        "zero_allreduce_fetch_params zero_hook_attribute_delegation zero_offloadpp "
        "zero_tensor_fragment zero_tiled",
        "utils": "get_optim_files init_on_device partition_balanced",
    }.items()
    for name in names.split()
]
"""Files about what scripts use."""

FOLDER = "tests/unit"
_NOT_THERE = " is not in the package of `infinity run`"


def why_not_imported(error: str) -> tuple[str, str]:
    """A word and a reason for a file whose import ends with the line `error`."""
    sentence = error.removeprefix("E ").strip().partition(": ")[2]
    name, found, _ = sentence.partition(_NOT_THERE)
    return ("refused", f"{name}{found}") if found else ("layout", sentence)


_OWN = "asks for the class or identity of an optimizer; `initialize` returns one of the engine"
_MODEL = "deepspeed.runtime.config_utils.DeepSpeedConfigModel: use a model of pydantic"
_SCALE = "in words of its own, some only by `initialize`"
_GROUPS = "deepspeed.utils.groups: experts are not spread over ranks"
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
    **{
        f"{name}": ("internals", reason)
        for name, reason in (
            ("checkpoint/test_sparse.py::TestSparseCheckpoint", "sparse_tensor_module_names"),
            ("ops/adam/test_adamw.py::TestAdamConfigs", _OWN),
            ("ops/lion/test_lion.py::TestLionConfigs", _OWN),
            ("ops/muon/test_muon.py::TestMuonConfigs", f"{_OWN}; or keeps momentum elsewhere"),
            (
                "ops/muon/test_muon.py::TestMuonZero12NumericalCorrectness",
                "deepspeed.runtime.zero.muon",
            ),
            (
                "ops/adam/test_cpu_adam.py::TestCPUAdamSubgroup",
                "step_subgroup and rollback_subgroup of an optimizer",
            ),
            (
                "runtime/half_precision/test_zero_optim_overflow.py::TestZeROFloat16",
                "cur_iter of the loss scaler",
            ),
            ("runtime/test_multiple_models.py::TestMultipleModels", "_backward_epilogue"),
            ("runtime/test_runtime_utils.py::test_call_to_str", "the function"),
            (
                "runtime/test_runtime_utils.py"
                "::test_count_used_parameters_enables_grad_for_grad_acc_lookup",
                "the function",
            ),
            (
                "runtime/zero/test_zero_allreduce_fetch_params.py::TestAllReduceFetchParamsPadded",
                "_orig_torch_empty",
            ),
            (
                "runtime/zero/test_zero_hook_attribute_delegation.py::TestHookAttributeDelegation",
                "attributes that DeepSpeed pastes onto modules",
            ),
            ("utils/test_partition_balanced.py::test_partition_balanced", "the function"),
        )
    },
    **{
        f"{name}": ("refused", reason)
        for name, reason in (
            (
                "checkpoint/test_moe_checkpoint.py::TestMoECheckpoint",
                "deepspeed.moe.layer.MoE: experts are not spread over ranks",
            ),
            (
                "checkpoint/test_pipeline.py::TestPipelineCheckpoint",
                "deepspeed.pipe.PipelineModule: there is no pipeline parallelism",
            ),
            (
                "ops/adam/test_cpu_adam.py::test_zenflow_adam_cross_process",
                "CPUAdamBuilder.load(): it has no functions for scripts",
            ),
            *(
                (f"runtime/test_ds_config_model.py::test_config_base{name}", _MODEL)
                for name in ("", "_aliasfield", "_deprecatedfield", "_literalfail")
            ),
            (
                "runtime/test_lr_schedulers.py"
                "::test_warmup_cosine_lr_unknown_warmup_type_falls_back_to_log",
                "a warmup_type that does not exist",
            ),
            (
                "runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_engine_step",
                "in words of its own",
            ),
            *(
                (
                    f"runtime/test_precision_config_dynamic_scale.py::test_fp16_dynamic_scale_{name}",
                    _SCALE,
                )
                for name in (
                    "ignored_when_fp16_disabled",
                    "ignored_with_static_loss_scale",
                    "rejects_bool",
                    "rejects_non_integer",
                    "rejects_nonpositive_when_dynamic",
                )
            ),
            *(
                (
                    f"runtime/test_precision_config_loss_scale.py::test_fp16_loss_scale_{name}",
                    _SCALE,
                )
                for name in (
                    "accepts_valid_values",
                    "invalid_type_has_clear_error",
                    "rejects_invalid_values",
                )
            ),
            ("runtime/test_runtime_utils.py::TestCheckOverflow", _GROUPS),
            ("runtime/test_runtime_utils.py::TestClipGradNorm", _GROUPS),
        )
    },
    **{
        f"ops/{name}GPUError": ("CUDA", "wants an error for a parameter on the GPU")
        for name in (
            "adagrad/test_cpu_adagrad.py::TestCPUAdagrad",
            "adam/test_cpu_adam.py::TestCPUAdam",
            "lion/test_cpu_lion.py::TestCPULion",
        )
    },
    "ops/adam/test_cpu_adam.py::TestCPUAdamBf16OptimizerStates": (
        "more",
        "states are fp32 without fp32_optimizer_states, too",
    ),
    **{
        f"runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_{name}": (
            "more",
            "no_sync works at every stage, and inside of itself",
        )
        for name in ("reentry", "zero_stage")
    },
    "ops/muon/test_muon.py::TestMuonRejectsReduceScatter": (
        "more",
        "reduce_scatter and offloaded states of Muon go together",
    ),
    **dict.fromkeys(
        (
            "checkpoint/test_lr_scheduler.py::TestLRSchedulerCheckpoint",
            "ops/adam/test_cpu_adam.py::TestCPUAdam",
            "ops/adam/test_hybrid_adam.py::TestHybridAdam",
            "ops/lion/test_cpu_lion.py::TestCPULion",
            "runtime/test_data_efficiency.py::TestDataEfficiency",
            "runtime/test_data_efficiency.py::TestLegacyCurriculumScheduler",
            "runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentGet",
            "runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentSet",
            "runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentUpdate",
            *(
                f"runtime/zero/test_zero_tiled.py::test_tiled_{name}"
                for name in ("forward", "backward", "returnbias_backward")
            ),
        ),
        ("skipped", "by the suite, on CPUs"),
    ),
}
"""By file, class and test of DeepSpeed's tests/unit, or a part of that from the start."""
