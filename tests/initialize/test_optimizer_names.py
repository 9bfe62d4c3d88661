"""Attributes of DeepSpeed's optimizers, on the optimizer that `initialize` returns: right values,
changes that count, else a sentence."""

from __future__ import annotations

import ast
import copy
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from pickle import dumps, loads
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import infinity
from infinity.deepspeed import optimizer_kinds
from infinity.deepspeed.clients import DeepSpeedCPUAdam
from infinity.deepspeed.engine_names import OTHERS
from infinity.deepspeed.optimizer_names import Inner, Scaler
from infinity.deepspeed.refused import Refused
from infinity.errors import ConfigError
from support.deepspeed import batch, configuration, net

Start = Callable[..., tuple[Any, Any, Any, Any]]
NORM, SCALE = "_global_grad_norm", "_get_loss_scale"
FP16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}


def loss(engine: Any, number: int = 0) -> Any:
    x, labels = batch(number)
    return engine(x.to(engine.get_data_types()[0]), labels)


def train(engine: Any, steps: int = 1) -> None:
    for number in range(steps):
        engine.backward(loss(engine, number))
        engine.step()


def test_its_class_is_still_that_of_infinity(start: Start) -> None:
    _, optimizer, *_ = start(model=net(), config=configuration())
    assert isinstance(optimizer, infinity.AdamW) and type(optimizer).__name__ == "AdamW"
    assert not hasattr(infinity.AdamW, "set_lr")


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [
        (0, "fp16", optimizer_kinds.FP16_Optimizer),
        (0, "bf16", optimizer_kinds.BF16_Optimizer),
        (2, "bf16", optimizer_kinds.DeepSpeedZeroOptimizer),
        (3, "fp16", optimizer_kinds.DeepSpeedZeroOptimizer_Stage3),
    ],
)
def test_it_is_one_of_the_class_of_its_stage(
    start: Start, stage: int, precision: str, kind: type
) -> None:
    stages = {"zero_optimization": {"stage": stage}}
    _, optimizer, *_ = start(
        model=net(), config=configuration(**{precision: {"enabled": True}}, **stages)
    )
    every = [each for each in vars(optimizer_kinds).values() if isinstance(each, Refused)]
    found = {each.__name__ for each in every if isinstance(optimizer, each)}
    zero = {"ZeROOptimizer"} if stage else set()
    assert found == {"DeepSpeedOptimizer", kind.__name__} | zero
    assert not isinstance(torch.optim.SGD(net().parameters()), kind)
    with pytest.raises(ConfigError, match=f"^{kind.__name__} cannot be made: deepspeed.initialize"):
        kind(optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_values_that_scripts_and_loggers_read(start: Start, precision: str) -> None:
    blocks: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        blocks = {"fp16": FP16}
    config = configuration(**blocks, gradient_clipping=0.5, gradient_accumulation_steps=2)
    engine, optimizer, *_ = start(model=net(), config=config)
    is_scaled, scale = precision == "fp16", 16.0 if precision == "fp16" else 1.0
    for place in (optimizer, optimizer.loss_scaler, optimizer.loss_scale_config):
        assert (place.loss_scale, place.cur_scale) == (scale, scale)
    assert getattr(optimizer, SCALE)() == scale
    assert optimizer.loss_scaler.dynamic is optimizer.needs_scaler() is is_scaled
    assert optimizer.loss_scale_config.use_grad_scaling is is_scaled
    assert optimizer.external_loss_scale is None and not optimizer.custom_loss_scaler
    assert optimizer.dtype is engine.get_data_types()[0]
    assert (optimizer.clip_grad, optimizer.norm_type, optimizer.get_lr()) == (0.5, 2, 1e-2)
    assert (optimizer.gradient_accumulation_steps, optimizer.mpu) == (2, None)
    assert optimizer.bit16_groups == [list(engine.module.parameters())]
    assert optimizer.real_dp_process_group is optimizer.dp_process_group is dist.group.WORLD
    assert optimizer.param_names[engine.module.last.bias] == "last.bias"
    assert not optimizer.is_gradient_accumulation_boundary
    train(engine, 2)
    assert getattr(optimizer, NORM) == engine.get_global_grad_norm() > 0
    if is_scaled:
        scaler = optimizer.loss_scaler
        assert (scaler.scale_window, scaler.delayed_shift, scaler.min_scale) == (2, 1, 1)
        assert (scaler.scale_factor, scaler.consecutive_hysteresis) == (2, False)


def test_an_overflow_shows_everywhere(start: Start) -> None:
    engine, optimizer, *_ = start(model=net(), config=configuration(fp16=FP16))
    engine.backward(loss(engine) * math.inf)
    engine.step()
    assert optimizer.overflow and getattr(optimizer, NORM) == math.inf
    assert optimizer.cur_scale == optimizer.loss_scaler.loss_scale == 8


def weights(engine: Any) -> list[torch.Tensor]:
    return list(engine.module_state_dict().values())


def test_a_loss_scale_that_is_set_is_used(start: Start) -> None:
    fixed = {"enabled": True, "loss_scale": 64}
    expected, *_ = start(model=net(), config=configuration(fp16=fixed))
    engine, optimizer, *_ = start(
        model=net(), config=configuration(fp16={"enabled": True, "initial_scale_power": 2})
    )
    optimizer.loss_scale = 64
    assert optimizer.loss_scaler.loss_scale == 64
    train(engine)
    train(expected)
    assert all(map(torch.equal, weights(engine), weights(expected)))
    with pytest.raises(ConfigError, match="loss_scale is set to 3; it must be a power of two"):
        optimizer.cur_scale = 3
    for wrong in (math.inf, math.nan, -1, True, 10**400):
        with pytest.raises(ConfigError, match=r"loss_scale is set to .*; it must be a power"):
            optimizer.loss_scale = wrong
    for change in (
        lambda: optimizer.override_loss_scale(2.0),
        lambda: setattr(optimizer, "external_loss_scale", 2.0),
    ):
        with pytest.raises(ConfigError, match=r"is to be 2.0 beside that of fp16; give"):
            change()
    _, plain, *_ = start(model=net(), config=configuration())
    with pytest.raises(ConfigError, match="nothing scales the loss outside of fp16"):
        plain.loss_scaler.loss_scale = 2


def test_a_run_goes_on_at_the_smallest_scale(start: Start) -> None:
    """As scripts have it that set `raise_error_at_min_scale`."""
    smallest = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    engine, optimizer, *_ = start(model=net(), config=configuration(fp16=smallest))
    before = [value.clone() for value in weights(engine)]
    optimizer.loss_scaler.raise_error_at_min_scale = False
    for _ in range(2):
        engine.backward(loss(engine) * math.inf)
        engine.step()
        assert optimizer.overflow and optimizer.loss_scaler.cur_scale == 1
    assert all(map(torch.equal, weights(engine), before))
    optimizer.loss_scaler.raise_error_at_min_scale = True
    engine.backward(loss(engine) * math.inf)
    with pytest.raises(infinity.NonFiniteError, match="at the smallest loss scale"):
        engine.step()
    with pytest.raises(
        ConfigError, match=r"^optimizer.loss_scaler.scale_window is set to 5; of it"
    ):
        optimizer.loss_scaler.scale_window = 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: loads(dumps(each))])
@pytest.mark.parametrize("scale", [0, 16])
def test_a_copy_of_the_scaler_has_its_numbers(
    start: Start, copied: Callable[[Any], Any], scale: int
) -> None:
    config = configuration(fp16={**FP16, "loss_scale": scale})
    engine, optimizer, *_ = start(model=net(), config=config)
    kept = copied(optimizer.loss_scaler)
    assert (kept.cur_scale, kept.dynamic, kept.use_grad_scaling) == (16, not scale, True)
    if not scale:
        engine.backward(loss(engine) * math.inf)
        engine.step()
        assert (optimizer.loss_scaler.cur_scale, kept.cur_scale) == (8, 16)
        assert (kept.scale_window, kept.delayed_shift) == (2, 1)
    kept.loss_scale = 4
    assert copied(kept).loss_scale == 4 != optimizer.loss_scale
    with pytest.raises(AttributeError, match="'scale_loss': a copy of optimizer"):
        kept.scale_loss(torch.ones(1))


def test_copies_and_states(start: Start) -> None:
    _, optimizer, *_ = start(model=net(), config=configuration(fp16=FP16))
    for kind in (Scaler, Inner):
        assert not hasattr(kind.__new__(kind), "loss_scale")  # a copy that is not filled yet
    assert repr(optimizer.optimizer) == repr(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"no option 'load_serial'; engine.load_checkpoint has"):
        optimizer.load_state_dict(optimizer.state_dict(), load_serial=True)


def test_a_clip_and_a_rate_that_are_set_are_used(start: Start) -> None:
    slow = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    config = configuration(gradient_clipping=1e-3, optimizer=slow)
    expected, *_ = start(model=net(), config=config)
    engine, optimizer, *_ = start(model=net(), config=configuration())
    optimizer.clip_grad = 1e-3
    optimizer.set_lr(1e-3)
    train(engine, 2)
    train(expected, 2)
    assert all(map(torch.equal, weights(engine), weights(expected)))
    with pytest.raises(ConfigError, match="clip_grad is set to -1; it must be a norm, or 0"):
        optimizer.clip_grad = -1
    optimizer.clip_grad = 0
    assert optimizer.max_grad_norm == math.inf


def test_its_own_backward_is_that_of_the_engine(start: Start) -> None:
    expected, *_ = start(model=net(), config=configuration(fp16=FP16))
    engine, optimizer, *_ = start(model=net(), config=configuration(fp16=FP16))
    assert optimizer.scale_if_loss(torch.ones(2)).tolist() == [1, 1]
    optimizer.backward(loss(engine))
    engine.step()
    optimizer.scale_if_loss(loss(engine)).backward()
    engine.step()
    optimizer.loss_scaler.backward(loss(engine))
    engine.step()
    for _ in range(3):
        expected.backward(loss(expected))
        expected.step()
    assert all(map(torch.equal, weights(engine), weights(expected)))


def test_fp32_values_and_states_of_a_parameter(start: Start) -> None:
    engine, optimizer, *_ = start(model=net(), config=configuration(bf16={"enabled": True}))
    train(engine)
    bias = engine.module.last.bias
    engine.backward(loss(engine, 1))
    new = torch.full_like(optimizer.get_full_hp_param(bias), 0.3)
    optimizer.set_full_hp_param(new, bias)
    assert torch.equal(infinity.get(bias, "master"), new)
    optimizer.set_full_hp_param(new, bias, "exp_avg")
    assert torch.equal(optimizer.get_full_hp_param(bias, "exp_avg"), new)
    optimizer.set_fp32_grad_for_param(new, bias)
    assert torch.equal(optimizer.get_fp32_grad_for_param(bias), new.bfloat16())
    assert torch.equal(optimizer.get_local_fp32_param(bias), new)
    with infinity.zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias.fill_(2)
    optimizer.refresh_fp32_params()
    assert torch.equal(optimizer.get_full_hp_param(bias), torch.full_like(new, 2))


def test_the_inner_optimizer_is_the_same_one(start: Start) -> None:
    model = net()
    client = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, optimizer, *_ = start(model=model, optimizer=client, config=configuration())
    inner = optimizer.optimizer
    assert isinstance(inner, infinity.AdamW) and inner == optimizer and inner in {optimizer}
    assert not hasattr(inner, "optimizer") and not hasattr(inner, "bit16_groups")
    assert inner.param_groups is optimizer.param_groups
    LambdaLR(inner, lambda step: 0.5)
    assert optimizer.get_lr() == 0.05
    plateau = ReduceLROnPlateau(inner, patience=0, factor=0.2)
    for _ in range(2):
        plateau.step(1.0)
    assert optimizer.get_lr() == pytest.approx(0.01)
    train(engine)
    assert inner.state[model.last.bias]["step"] == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, DeepSpeedCPUAdam])
def test_the_inner_optimizer_is_one_of_the_class_of_the_client(start: Start, kind: Any) -> None:
    model = net()
    client = kind(model.parameters(), lr=0.1)
    _, optimizer, *_ = start(model=model, optimizer=client, config=configuration())
    inner = optimizer.optimizer
    assert isinstance(inner, kind) and isinstance(inner, type(optimizer))
    assert inner.__class__.__name__ == type(optimizer).__name__
    assert not isinstance(inner, torch.optim.RMSprop)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_only_sgd_of_a_configuration_is_that_of_torch(start: Start, name: str) -> None:
    block = {"type": name, "params": {"lr": 0.1}}
    _, optimizer, *_ = start(model=net(), config=configuration(optimizer=block))
    assert isinstance(optimizer.optimizer, torch.optim.SGD) is (name == "SGD")
    assert not isinstance(optimizer.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fp32_partitioned_groups_flat", "deepspeed.utils.safe_get_full_fp32_param"),
        ("single_partition_of_fp32_groups", "deepspeed.utils.safe_get_full_fp32_param"),
        ("averaged_gradients", "deepspeed.utils.safe_get_full_grad and safe_set_full_grad"),
        ("_get_norm_groups", "engine.get_global_grad_norm() has the norm"),
        ("check_overflow", "optimizer.overflow says whether the last step was left out"),
        ("overlap_comm", "engine.config is the configuration as it came"),
        ("tokens", "docs/deepspeed.md says what this one has"),
    ],
)
def test_an_attribute_that_is_missing_says_why(start: Start, name: str, reason: str) -> None:
    _, optimizer, *_ = start(model=net(), config=configuration())
    text = f"^AdamW of infinity has no '{name}': .*{re.escape(reason)}"
    with pytest.raises(AttributeError, match=text) as error:
        getattr(optimizer, name)
    assert isinstance(error.value, ConfigError)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match="loss_scaler of infinity has no 'cur_iter': "):
        _ = optimizer.loss_scaler.cur_iter


FOUND = importlib.util.find_spec("deepspeed")
CLASSES = {
    "runtime/zero/stage3.py": "DeepSpeedZeroOptimizer_Stage3",
    "runtime/zero/stage_1_and_2.py": "DeepSpeedZeroOptimizer",
    "runtime/bf16_optimizer.py": "BF16_Optimizer",
    "runtime/fp16/fused_optimizer.py": "FP16_Optimizer",
    "runtime/fp16/unfused_optimizer.py": "FP16_UnfusedOptimizer",
    "runtime/base_optimizer.py": "ZeROOptimizer",
}


@pytest.mark.skipif(FOUND is None, reason="DeepSpeed 0.19.8 is not on the path")
def test_every_attribute_of_deepspeed_is_there_or_has_a_reason(start: Start) -> None:
    assert FOUND is not None and FOUND.origin is not None
    names = set()
    for file, kind in CLASSES.items():
        for node in ast.walk(ast.parse((Path(FOUND.origin).parent / file).read_text())):
            if isinstance(node, ast.ClassDef) and node.name == kind:
                names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                names |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }
    assert len(names) > 480
    _, optimizer, *_ = start(model=net(), config=configuration())
    for name in sorted(each for each in names if not each.startswith("__")):
        try:
            getattr(optimizer, name)
        except AttributeError as error:
            assert str(error).startswith("AdamW of infinity has no "), name
            assert OTHERS not in str(error), name
