"""The package `deepspeed` of `infinity run` has the names that frameworks look for, and refuses the
rest in one sentence."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity.deepspeed.blocks import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    get_bfloat16_config,
)
from infinity.deepspeed.clients import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
)
from infinity.deepspeed.keys import MIXTURES
from infinity.deepspeed.pretrained import CHANGED
from infinity.errors import ConfigError
from infinity_command.run import shim

# What accelerate, transformers, PEFT, TRL and Lightning import or touch.
TOUCHED = """
initialize DeepSpeedEngine init_distributed add_config_arguments get_accelerator __version__
zero.Init zero.GatheredParameters zero.register_external_parameter
zero.partition_parameters.ZeroParamStatus
comm.get_rank comm.get_world_size comm.get_local_rank comm.is_initialized comm.init_distributed
comm.all_reduce comm.barrier comm.broadcast comm.new_group comm.ReduceOp comm.inference_all_reduce
accelerator.get_accelerator
ops.adam.DeepSpeedCPUAdam ops.adam.FusedAdam ops.adagrad.DeepSpeedCPUAdagrad
ops.lion.DeepSpeedCPULion ops.lion.FusedLion
checkpointing.checkpoint checkpointing.configure
checkpoint.utils.clone_tensors_for_torch_save
runtime.engine.DeepSpeedEngine runtime.lr_schedules.VALID_LR_SCHEDULES
runtime.lr_schedules.WarmupDecayLR runtime.base_optimizer.DeepSpeedOptimizer
runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor
runtime.zero.partition_parameters._orig_torch_arange
runtime.zero.partition_parameters.get_accelerator
utils.logger utils.logging.logger utils.log_dist utils.groups
utils.safe_get_full_grad utils.safe_get_full_fp32_param utils.safe_set_full_optimizer_state
utils.set_z3_leaf_modules utils.safe_get_local_grad utils.torch.required_torch_version
ops.op_builder.CPUAdamBuilder ops.aio.AsyncIOBuilder runtime.zero.offload_config.OffloadDeviceEnum
runtime.zero.offload_config.OffloadStateTypeEnum utils.set_log_level_from_string
utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
zero.unwrap_model_for_generation zero.TiledLinear runtime.zero.tiling.TiledLinearReturnBias
runtime.lr_schedules.WARMUP_MAX_LR runtime.zero.utils.ZeRORuntimeException
DeepSpeedConfig OnDevice DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable comm.log_summary
runtime.config.DeepSpeedConfig runtime.config.ADAM_OPTIMIZER utils.nvtx.instrument_w_nvtx
moe.utils.is_moe_param moe.utils.has_moe_layers
moe.utils.split_params_into_different_moe_groups_for_optimizer
runtime.zero.config.ZeroStageEnum runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig
runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES
runtime.precision_config.DeepSpeedFP16Config runtime.config.get_gradient_clipping
checkpoint.utils.get_model_ckpt_name_for_rank
"""


def test_it_is_on_no_path_by_default() -> None:
    assert str(shim()) not in sys.path
    assert str(shim()) not in os.environ.get("PYTHONPATH", "")


@pytest.fixture(scope="module")
def package() -> Iterator[Any]:
    before, finders = set(sys.modules), list(sys.meta_path)
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    builders = {name: vars(models)[name] for name in CHANGED} if models else {}
    sys.path.insert(0, str(shim()))
    try:
        yield importlib.import_module("deepspeed")
    finally:
        sys.path.remove(str(shim()))
        sys.meta_path[:] = finders
        for name, builder in builders.items():
            setattr(models, name, builder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "deepspeed":
                del sys.modules[name]


def test_all_modules_import_and_have_what_they_promise(package: Any) -> None:
    names = [each.name for each in pkgutil.walk_packages(package.__path__, "deepspeed.")]
    assert len(names) >= 20
    for name in names:
        module = importlib.import_module(name)
        missing = [each for each in getattr(module, "__all__", ()) if not hasattr(module, each)]
        assert missing == [], name


@pytest.mark.parametrize("path", TOUCHED.split())
def test_frameworks_find(package: Any, path: str) -> None:
    module, _, name = f"deepspeed.{path}".rpartition(".")
    found: Any = package
    for part in path.split(".")[:-1]:
        found = getattr(found, part, None)
    if found is None:  # as `from deepspeed.x import y` does
        found = importlib.import_module(module)
    assert hasattr(found, name)


def test_the_version_is_that_of_its_distribution(package: Any) -> None:
    assert importlib.metadata.version("deepspeed") == package.__version__


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda d: d.init_inference(None), "this engine trains; call generate"),
        (lambda d: d.tp_model_init(None), "call parallelize_module of torch"),
        (lambda d: d.PipelineModule([]), "there is no pipeline parallelism"),
        (lambda _: importlib.import_module("deepspeed.moe.layer").MoE(4), "deepspeed.moe is not"),
        (
            lambda _: importlib.import_module(
                "deepspeed.checkpoint.utils"
            ).get_model_ckpt_name_for_rank("run", "00"),
            "run has no file of a rank",
        ),
        (lambda d: d.ops.adam.FusedAdam([], bias_correction=False), "is not supported"),
    ],
)
def test_what_it_has_not_is_refused_in_one_sentence(package: Any, call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call(package)


def test_other_names_are_missing_in_words(package: Any) -> None:
    with pytest.raises(
        AttributeError, match="package deepspeed of `infinity run` has no 'monitor'"
    ):
        _ = package.monitor


def test_the_accelerator_answers(package: Any) -> None:
    device = package.get_accelerator()
    assert torch.device(device.current_device_name()).type == device.device_name()
    assert device.device_count() >= 1
    with device.device(0):
        device.synchronize()
    assert device.memory_allocated() >= 0
    assert device.on_accelerator(torch.zeros(1, device=device.device_name()))


def test_the_accelerator_knows_its_memory_and_streams(package: Any) -> None:
    device = package.get_accelerator()
    assert 0 < device.available_memory() <= device.total_memory()
    assert device.max_memory_reserved() >= 0 and isinstance(device.memory_stats(), dict)
    with device.stream(device.current_stream()):
        made = device.Stream(), device.Event()
    assert device.device_name() != "cpu" or made == (None, None)
    torch.manual_seed(5)
    assert device.initial_seed() == 5


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_on_device_builds_there_and_in_the_dtype(package: Any, device: str) -> None:
    before = torch.get_default_dtype()
    with package.OnDevice(dtype=torch.half, device=device):
        model = torch.nn.Linear(2, 2)
    with package.OnDevice(dtype=torch.half, device=device, enabled=False):
        plain = torch.nn.Linear(2, 2)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, torch.half)}
    assert {(p.device.type, p.dtype) for p in plain.parameters()} == {("cpu", torch.float32)}
    assert torch.get_default_dtype() is before


def test_a_configuration_is_read_without_an_engine(package: Any) -> None:
    read = package.DeepSpeedConfig({"train_batch_size": 6, "gradient_accumulation_steps": 2})
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu) == (6, 3)
    assert (read.gradient_clipping, read.zero_enabled) == (1.0, False)
    assert read.zero_config == DeepSpeedZeroConfig()
    with pytest.raises(package.DeepSpeedConfigError, match="train_batch_size=5 is not"):
        package.DeepSpeedConfig({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2})


def test_a_block_of_a_configuration_is_an_object() -> None:
    zero = DeepSpeedZeroConfig(stage=3, cpu_offload=True, stage3_prefetch_bucket_size=7)
    assert zero.prefetch_bucket_size == zero.stage3_prefetch_bucket_size == 7
    assert (zero.stage, zero.offload_param, zero.overlap_comm) == (3, None, True)
    assert zero.offload_optimizer == DeepSpeedZeroOffloadOptimizerConfig(device="cpu")
    assert zero.leaf_module.classes == list(MIXTURES)
    zero.max_live_parameters = 5
    assert zero.stage3_max_live_parameters == 5
    plain = DeepSpeedZeroConfig(overlap_comm="auto", leaf_module={"names": "router"})
    assert (plain.overlap_comm, plain.leaf_module.names) == (False, ["router"])
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"stage": 4}, "stage=4: it must be a whole number from 0 to 3"),
        ({"stage3_prefetch_buckt": 1}, "did you mean .*stage3_prefetch_bucket_size?"),
        ({"offload_param": {"devic": "cpu"}}, "did you mean .*offload_param.device?"),
        ({"zero_quantized_weights": True}, "quantized communication changes the numbers"),
    ],
)
def test_a_block_refuses_what_initialize_does(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DeepSpeedZeroConfig(**given)


def test_a_checkpointed_function_gets_what_is_named(package: Any) -> None:
    x: Any = torch.tensor([3.0], requires_grad=True)
    found = package.checkpointing.checkpoint(lambda x, scale: x * x * scale, x, scale=2.0)
    found.backward()
    assert found.item() == 18.0
    assert torch.equal(x.grad, torch.tensor([12.0]))


def test_groups_of_a_model_without_experts_stay(package: Any) -> None:
    experts = importlib.import_module("deepspeed.moe.utils")
    group = {"params": parameter(), "name": "all"}
    assert experts.split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert not experts.is_moe_param(group["params"][0])
    assert experts.has_moe_layers(torch.nn.Linear(1, 1)) == (False, 0)


def test_a_missing_bias_among_gathered_parameters_is_left_out(package: Any) -> None:
    with package.zero.GatheredParameters([*parameter(), None], modifier_rank=0):
        pass


def test_native_parts_are_named_as_scripts_ask_for_them(package: Any) -> None:
    builder = package.ops.op_builder.CPUAdamBuilder
    assert package.ops.__compatible_ops__[builder.NAME]
    assert builder().is_compatible()
    assert not package.ops.__compatible_ops__[package.ops.op_builder.FusedLambBuilder.NAME]


def test_bounds_of_the_version_of_torch(package: Any) -> None:
    required = importlib.import_module("deepspeed.utils.torch").required_torch_version
    assert required(min_version=1.10) and required(min_version=2.1)
    assert not required(max_version=2.0) and not required(min_version=99.1)


# Optimizers that scripts build


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    for number in (1.0, -2.0, 0.5):
        parameter.grad = torch.full_like(parameter, number)
        optimizer.step()
    return parameter.detach()


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, -3.0]))]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            DeepSpeedCPUAdam(parameter(), lr=0.1, weight_decay=0.2),
            torch.optim.AdamW(parameter(), lr=0.1, weight_decay=0.2),
        ),
        (
            DeepSpeedCPUAdam(parameter(), lr=0.1, weight_decay=0.2, adamw_mode=False),
            torch.optim.Adam(parameter(), lr=0.1, weight_decay=0.2),
        ),
        (
            FusedAdam(parameter(), lr=0.1, weight_decay=0.2, adam_w_mode=False),
            torch.optim.Adam(parameter(), lr=0.1, weight_decay=0.2),
        ),
        (
            DeepSpeedCPUAdagrad(parameter(), lr=0.1),
            torch.optim.Adagrad(parameter(), lr=0.1),
        ),
    ],
)
def test_they_update_as_those_of_torch(
    found: torch.optim.Optimizer, expected: torch.optim.Optimizer
) -> None:
    assert torch.equal(stepped(found), stepped(expected))


def test_lion_takes_steps_of_one_length() -> None:
    start = parameter()[0].detach()
    found = stepped(DeepSpeedCPULion(parameter(), lr=0.1))
    # Signs of 0.1, 0.9 * 0.01 - 0.2 and 0.9 * -0.0101 + 0.05.
    assert torch.allclose(found, start - 0.1 + 0.1 - 0.1)
