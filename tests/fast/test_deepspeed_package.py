"""The package `deepspeed` of `infinity run` has the names that frameworks look for, and refuses the
rest in one sentence."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
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
from infinity.deepspeed.names import ALIASES, CONSTANTS, MISSING
from infinity.deepspeed.package import MODULES
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
compression.helper.recursive_getattr compression.helper.recursive_setattr
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


def dotted(name: str) -> str:
    return f"deepspeed.{name}".rstrip(".")


def test_all_modules_import_and_have_what_they_promise(package: Any) -> None:
    assert len(MODULES) >= 60
    for name in sorted(MODULES):
        module = importlib.import_module(dotted(name))
        missing = [each for each in module.__all__ if not hasattr(module, each)]
        assert missing == [], name
        assert set(module.__all__) <= set(dir(module))


def test_classes_and_functions_are_pickled_by_name(package: Any) -> None:
    for name in ["", *sorted(MODULES)]:
        module = importlib.import_module(dotted(name))
        for each in (getattr(module, word) for word in module.__all__):
            if isinstance(each, (type, FunctionType)):
                assert pickle.loads(pickle.dumps(each)) is each


def test_modules_are_attributes_of_their_packages(package: Any) -> None:
    """As after a plain `import deepspeed` of 0.19.8."""
    for name in sorted(MODULES):
        found = package
        for part in name.split("."):
            found = getattr(found, part)
        assert found is importlib.import_module(dotted(name)), name


def test_other_names_of_a_module_are_the_same_module(package: Any) -> None:
    inner = {"zero.partition_parameters": "runtime.zero.partition_parameters"}
    for other, name in (ALIASES | inner).items():
        assert importlib.import_module(dotted(other)) is importlib.import_module(dotted(name))


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
        (lambda d: d.ops.op_builder.AsyncIOBuilder().load(), "AsyncIOBuilder.load.. is not"),
        (
            lambda d: d.get_accelerator().create_graph(),
            "no 'create_graph'; use torch.acc",
        ),
    ],
)
def test_what_it_has_not_is_refused_in_one_sentence(package: Any, call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call(package)


def test_other_names_are_missing_in_words(package: Any) -> None:
    expected = re.escape(
        "deepspeed.autotuning is not in the package of `infinity run`: the engine plans by itself; "
        "`infinity plan` says what fits"
    )
    with pytest.raises(AttributeError, match=f"^{expected}$"):
        _ = package.autotuning
    with pytest.raises(ImportError, match=f"^{expected}$"):
        importlib.import_module("deepspeed.autotuning")
    with pytest.raises(ImportError, match=f"^{expected}$"):
        exec("from deepspeed import autotuning")
    assert not hasattr(package, "autotuning")


@pytest.mark.parametrize(
    ("program", "arguments", "text"),
    [
        ("utils.zero_to_fp32", ["--help"], "usage: "),
        ("launcher.runner", ["--help"], "usage: deepspeed "),
    ],
)
def test_its_programs_run_with_python_m(
    package: Any,
    program: str,
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(dotted(program), run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(text)


@pytest.mark.parametrize(
    ("module", "text"),
    [("comm", "is a package and cannot be"), ("env_report", "`infinity doctor` says what this")],
)
def test_other_modules_do_not_run(package: Any, module: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        runpy.run_module(dotted(module), run_name="__main__")


def test_a_missing_name_of_a_module_is_said_by_every_import(package: Any) -> None:
    text = re.escape("deepspeed.runtime.utils.get_weight_norm is not in the package of")
    module = importlib.import_module("deepspeed.runtime.utils")
    with pytest.raises(ImportError, match=f"^{text}"):
        exec("from deepspeed.runtime.utils import get_weight_norm")
    with pytest.raises(AttributeError, match=f"^{text}"):
        _ = module.get_weight_norm
    exec("from deepspeed.runtime.utils import *")
    with pytest.raises(ImportError, match=r"^deepspeed\.comm\.all_reduc is not in"):
        exec("from deepspeed.comm import all_reduc")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", "no sequence parallelism"),
        ("sequence.layer.DistributedAttention", "there is no sequence parallelism"),
        ("moe.layer.MoE", "experts are not spread over ranks"),
        ("utils.groups._get_expert_parallel_group", "experts are not spread over ranks"),
        ("pipe.PipelineModule", "there is no pipeline parallelism; build the model as one module"),
        ("ops.op_builder.UtilsBuilder", "the kernels of this engine need no builder"),
    ],
)
def test_names_that_import_are_refused_where_they_are_used(
    package: Any, path: str, problem: str
) -> None:
    module, _, name = dotted(path).rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    assert not isinstance(torch.nn.Linear(1, 1), found)
    own = type("Own", (found,), {})
    for used in (found, own, lambda *_: found.register_with_transformers()):
        with pytest.raises(
            ConfigError, match=f"^deepspeed.{re.escape(path)} is not .*: .*{problem}"
        ):
            used(1)
    assert not hasattr(found, "register_with_transformers")


def test_groups_that_nothing_divides(package: Any) -> None:
    for name, number in (
        ("_get_sequence_parallel_world_size", 1),
        ("_get_sequence_parallel_rank", 0),
        ("_get_data_parallel_world_size", 1),
    ):
        assert getattr(package.utils.groups, name)() == number


def test_tools_of_scripts(package: Any) -> None:
    tools = importlib.import_module("deepspeed.runtime.utils")
    assert tools.partition_uniform(7, 3) == [0, 3, 5, 7]
    assert tools.partition_uniform(2, 3) == [0, 1, 2, 2]
    x = torch.ones(2)
    moved = tools.move_to_device([{"x": x}, (x,)], "meta")
    assert moved[0]["x"].is_meta and moved[1][0].is_meta and not x.is_meta
    timer = importlib.import_module("deepspeed.utils.timer").SynchronizedWallClockTimer()
    timer("step").start()
    timer("step").stop()
    assert timer("step").elapsed(reset=False) == timer("step").mean() > 0
    with pytest.raises(RuntimeError, match="the timer step has not been started"):
        timer("step").stop()
    assert not importlib.import_module("deepspeed.monitor.monitor").MonitorMaster(None).enabled
    helper = importlib.import_module("deepspeed.compression.helper")
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert helper.recursive_getattr(model, "0.0") is model[0][0]
    helper.recursive_setattr(model, "0.0", torch.nn.Tanh())
    helper.recursive_setattr(model, "last", torch.nn.ReLU())
    assert [type(each).__name__ for each in (model[0][0], model.last)] == ["Tanh", "ReLU"]
    with pytest.raises(AttributeError, match="has no attribute '1'"):
        helper.recursive_getattr(model, "0.1")


INSTALLED = """
import importlib, json, sys
import deepspeed
found = {}
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(f"deepspeed.{name}".rstrip("."))
    found[name] = [each for each in json.loads(sys.argv[1])[name] if not hasattr(module, each)]
print(json.dumps(found))
"""


FOUND = importlib.util.find_spec("deepspeed")
DOCUMENTED = {"runtime.zero": ["unregister_external_parameter"], "utils": ["see_memory_usage"]}
"""Names that DeepSpeed's pages have, and its modules have elsewhere."""


@pytest.mark.skipif(FOUND is None, reason="DeepSpeed 0.19.8 is not on the path")
def test_the_table_has_the_names_of_deepspeed(package: Any) -> None:
    """Every name that is there is one of DeepSpeed's, and of every module that is missing a
    sentence of its own says why."""
    assert FOUND is not None and FOUND.origin is not None
    root = Path(FOUND.origin).parents[1]
    theirs = {
        ".".join(path.relative_to(root / "deepspeed").with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
        for path in (root / "deepspeed").rglob("*.py")
    }
    assert len(theirs) > 700
    assert MODULES - set(ALIASES) <= theirs
    ours = {name: importlib.import_module(dotted(name)).__all__ for name in ["", *MODULES]}
    ours |= {name: [*ours[name], *CONSTANTS.get(name, ())] for name in ours}
    asked = {name: ours[name] for name in ours if name not in ALIASES}
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, json.dumps(asked)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: missing for name, missing in found.items() if missing} == DOCUMENTED
    for name in sorted(theirs - MODULES - {""}):
        with pytest.raises(
            ImportError, match=r"is not in the package of `infinity run`: "
        ) as error:
            importlib.import_module(dotted(name))
        assert MISSING[""] not in str(error.value), name


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


@pytest.mark.parametrize("name", ["step_subgroup", "rollback_subgroup"])
def test_an_adam_takes_whole_steps(name: str) -> None:
    optimizer = copy.deepcopy(DeepSpeedCPUAdam(parameter()))
    text = (
        f"^DeepSpeedCPUAdam of infinity has no '{name}': step\\(\\) updates all of its parameters"
    )
    with pytest.raises(ConfigError, match=text):
        getattr(optimizer, name)(0)


def test_lion_takes_steps_of_one_length() -> None:
    start = parameter()[0].detach()
    found = stepped(DeepSpeedCPULion(parameter(), lr=0.1))
    # Signs of 0.1, 0.9 * 0.01 - 0.2 and 0.9 * -0.0101 + 0.05.
    assert torch.allclose(found, start - 0.1 + 0.1 - 0.1)
