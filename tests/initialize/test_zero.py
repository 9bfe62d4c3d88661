"""`infinity.zero`, and DeepSpeed's functions for the states of one parameter."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.deepspeed.generation import unwrap_model_for_generation
from infinity.deepspeed.tiling import TiledLinear, TiledLinearReturnBias
from infinity.deepspeed.zero import ZeroParamStatus
from support.deepspeed import Net, batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD = "_load_from_state_dict"
"""What transformers calls of a module, as torch does."""
Start = Callable[..., tuple[Any, Any, Any, Any]]


def step(engine: Any, number: int = 0) -> None:
    x, labels = batch(number)
    engine.backward(engine(x.to(next(engine.parameters()).dtype), labels))
    engine.step()


# Init


@pytest.mark.parametrize("nested", [True, False])
def test_a_model_built_inside_init_has_the_values_of_its_constructors(
    start: Start, tmp_path: Path, nested: bool
) -> None:
    config = configuration(tmp_path)
    torch.manual_seed(0)
    with infinity.zero.Init(config_dict_or_path=config):
        if nested:
            with infinity.zero.Init(config_dict_or_path=config, enabled=True):
                model = Net()
        else:
            model = Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=config)
    for name, value in net().state_dict().items():
        assert torch.equal(engine.module_state_dict()[name], value)
    step(engine)


def test_a_model_is_initialized_inside_init(start: Start, tmp_path: Path) -> None:
    """What is built after that has no memory, either."""
    torch.manual_seed(0)
    with infinity.zero.Init():
        engine, *_ = start(model=Net(), config=configuration(tmp_path))
        later = Net()
    assert all(parameter.is_meta for parameter in later.parameters())
    assert torch.equal(engine.module_state_dict()["first.weight"], net().first.weight)
    step(engine)
    other, *_ = start(model=later, config=configuration(tmp_path))
    step(other)


def test_a_change_before_initialize_needs_a_rank() -> None:
    with infinity.zero.Init():
        model = Net()
    weight = model.first.weight
    with infinity.zero.GatheredParameters(weight), torch.no_grad():
        assert weight.abs().sum() > 0
    with (
        pytest.raises(RuntimeError, match="in-place modification of a parameter"),
        infinity.zero.GatheredParameters(weight),
        torch.no_grad(),
    ):
        weight.add_(0.0)
    with infinity.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.zero_()


def test_init_may_be_off() -> None:
    with infinity.zero.Init(enabled=False):
        model = net()
    assert not model.first.weight.is_meta
    with infinity.zero.Init(module=model):
        assert not net().first.weight.is_meta


# Parameters of an engine


def test_parameters_have_their_names_in_deepspeed(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    parameters = list(engine.parameters())
    weight = engine.module.first.weight
    assert len({parameter.ds_id for parameter in parameters}) == len(parameters)
    assert weight.ds_shape == weight.shape == (16, 8) and weight.ds_numel == 128
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert weight.partition_numel() == weight.ds_tensor.numel() == 128
    assert torch.equal(weight.ds_tensor.view(16, 8), net().first.weight)
    with infinity.zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE and weight.ds_numel == 128


def test_gathered_parameters_are_read_and_changed(start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration(tmp_path))
    model = engine.module
    with infinity.zero.GatheredParameters([model.first.weight, model.last.bias]):
        assert torch.equal(model.first.weight, net().first.weight)
    with infinity.zero.GatheredParameters(model.last.bias, modifier_rank=0), torch.no_grad():
        model.last.bias.fill_(3.0)
    with infinity.zero.GatheredParameters(model):
        assert torch.equal(model.last.bias, torch.full((4,), 3.0))
    with (
        pytest.raises(infinity.ShardedParameterError, match="changed inside"),
        infinity.zero.GatheredParameters(model.last.bias),
    ):
        model.last.bias.data.zero_()
    with infinity.zero.GatheredParameters(model.last.bias, enabled=False):
        assert model.last.bias.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with infinity.zero.GatheredParameters(net().first.weight, modifier_rank=0):
        pass
    with pytest.raises(infinity.ConfigError, match="GatheredParameters takes a module"):
        infinity.zero.GatheredParameters("first.weight")


def test_external_parameters_need_nothing(start: Start) -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            infinity.zero.register_external_parameter(self, self.first.weight)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (
                nn.functional.linear(self.second(self.first(x)), self.first.weight).square().mean()
            )

    engine, *_ = start(model=Outside(), config=configuration())
    step(engine)
    infinity.zero.unregister_external_parameter(engine.module, engine.module.first.weight)
    with pytest.raises(infinity.ConfigError, match="an external parameter is one of a module"):
        infinity.zero.register_external_parameter(None, engine.module.first.weight)
    with pytest.raises(infinity.ConfigError, match="is a parameter, not 3"):
        infinity.zero.register_external_parameter(engine.module, 3)


def test_leaf_modules_are_marked_and_unmarked() -> None:
    zero, model = infinity.zero, nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert zero.set_z3_leaf_modules(model, [nn.Linear, "ReLU"]) == [model[0], model[1][0]]
    assert zero.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert zero.unset_z3_leaf_modules(model, [nn.Linear]) == [model[0]]
    assert zero.set_z3_leaf_modules_by_name(model, ["1"]) == ([model[1]], [])
    assert zero.set_z3_leaf_modules_by_suffix(model, ["1.0", "0"]) == ([model[1][0], model[0]], [])
    zero.set_z3_leaf_module(model[1], False)
    assert not zero.z3_leaf_module(model[1])
    with pytest.raises(infinity.ConfigError, match="no module of Sequential is meant"):
        zero.set_z3_leaf_modules(model, [nn.Conv2d])
    assert zero.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    assert zero.set_z3_leaf_modules_by_name(model, ["0", "x"], False, False) == ([model[0]], ["x"])
    assert zero.get_z3_leaf_modules(model) == [model[1][0]]
    with pytest.raises(ValueError, match="Sequential has no module 'x'; print"):
        zero.set_z3_leaf_modules_by_suffix(model, ["0", "x"])
    assert zero.get_z3_leaf_modules(model) == [model[1][0]]


# States of one parameter


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", ["full", "local"])
def test_states_of_a_parameter(start: Start, tmp_path: Path, precision: str, form: str) -> None:
    """None for what is frozen; what is set comes back."""
    changes = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        changes["fp16"]["initial_scale_power"] = 4
    model = net()
    model.second.requires_grad_(False)
    engine, *_ = start(model=model, config=configuration(tmp_path, **changes))
    get = {name: getattr(infinity.zero, f"safe_get_{form}_{name}") for name in NAMES}
    put = {name: getattr(infinity.zero, f"safe_set_{form}_{name}") for name in NAMES}
    frozen, trained = engine.module.second.weight, engine.module.last.weight
    assert get["grad"](trained) is None
    x, labels = batch(0)
    engine.backward(engine(x.to(trained.dtype), labels))
    for parameter in (frozen, trained):
        found = [
            get["fp32_param"](parameter),
            get["grad"](parameter),
            get["optimizer_state"](parameter, "exp_avg"),
        ]
        assert all((value is None) == (parameter is frozen) for value in found)
    shape = trained.shape if form == "full" else (trained.numel(),)
    values = torch.arange(trained.numel(), dtype=torch.float32).view(shape) / 64
    for parameter in (frozen, trained):
        put["fp32_param"](parameter, values)
        put["grad"](parameter, values + 1)
        put["optimizer_state"](parameter, values + 2, "exp_avg")
        put["optimizer_state"](parameter, values + 3, "exp_avg_sq")
    assert torch.equal(get["fp32_param"](trained), values)
    assert torch.equal(get["grad"](trained).float(), values + 1)
    assert torch.equal(get["optimizer_state"](trained, "exp_avg"), values + 2)
    assert torch.equal(get["optimizer_state"](trained, "exp_avg_sq"), values + 3)
    engine.step()
    assert not torch.equal(get["fp32_param"](trained), values)
    assert torch.equal(engine.module_state_dict()["second.weight"].float(), kept(precision))


NAMES = ("fp32_param", "grad", "optimizer_state")


def kept(precision: str) -> torch.Tensor:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return net().second.weight.detach().to(dtype).float()


def test_gradients_are_updated_together(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    engine.backward(engine(*batch(0)))
    parameters = list(engine.parameters())
    before = [infinity.zero.safe_get_full_grad(parameter) for parameter in parameters]
    infinity.zero.safe_update_full_grad_vectorized(parameters, lambda gradient, _: gradient * 2)
    for parameter, gradient in zip(parameters, before, strict=True):
        assert torch.equal(infinity.zero.safe_get_full_grad(parameter), gradient * 2)


# Parameters before there is an engine


def test_parameters_of_init_have_their_names_in_deepspeed() -> None:
    with infinity.zero.Init():
        model = net()
    weight = model.first.weight
    assert weight.ds_shape == (16, 8) and weight.ds_numel == 128
    assert len({each.ds_id for each in model.parameters()}) == 6
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with infinity.zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
    assert weight.is_meta and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE


def test_parameters_of_init_are_told_apart_by_their_addresses() -> None:
    """Scripts count parameters that are tied once, `{p.data_ptr(): p.numel() for p in ...}`."""

    with infinity.zero.Init():
        one, other = nn.Linear(3, 5), nn.Linear(3, 5)
    weight = one.weight
    memory = torch.empty(100_000)
    every = [weight, one.bias, other.weight, other.bias, memory]
    assert len({each.data_ptr() for each in every}) == 5
    assert weight.data_ptr() == weight.data_ptr() == nn.Parameter(weight).data_ptr()
    with pytest.raises(infinity.ConfigError, match=r"no memory before infinity\.wrap.*clone"):
        weight.untyped_storage()


def test_parameters_of_init_are_read_and_changed(start: Start) -> None:
    """As transformers does: it loads module by module, initializes what is missing, and resizes
    embeddings."""
    with infinity.zero.Init():
        model = net()
    loaded = net(1).state_dict()
    for module, prefix in ((model.first, "first."), (model.last, "last.")):
        with infinity.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            getattr(module, LOAD)(loaded, prefix, {}, True, [], [], [])
    with infinity.zero.GatheredParameters(model.second.bias, modifier_rank=0):
        model.second.bias.data.zero_()
        torch.nn.init.ones_(model.second.bias[:2])
    seen = torch.zeros(16, 8)
    with infinity.zero.GatheredParameters([model.first.weight, model.second.bias]):
        assert model.second.bias.sum().item() == 2.0
        assert torch.equal(model.first.weight, loaded["first.weight"])
        seen[:4] = model.first.weight.data[:4]
    assert torch.equal(seen[:4], loaded["first.weight"][:4])
    engine, *_ = start(model=model, config=configuration())
    weights = engine.module_state_dict()
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        assert torch.equal(weights[name], loaded[name])
    assert torch.equal(weights["second.weight"], net().second.weight)
    assert weights["second.bias"].tolist() == [1.0, 1.0, *[0.0] * 6]


def test_a_write_outside_of_a_gather_is_kept(start: Start) -> None:
    with infinity.zero.Init():
        model = net()
    with torch.no_grad():
        model.first.weight.zero_()
    engine, *_ = start(model=model, config=configuration())
    assert not engine.module_state_dict()["first.weight"].any()


# Generation


def test_trl_takes_hooks_away_before_it_generates(start: Start, tmp_path: Path) -> None:
    """As `trl.models.utils.remove_hooks` and `add_hooks` do."""
    engine, *_ = start(model=net(), config=configuration(tmp_path))
    x, _ = batch(0)
    expected = engine(x)
    offload = engine.optimizer.parameter_offload
    with unwrap_model_for_generation(engine) as model:
        assert not [*offload.module.named_parameters(recurse=True)]
        assert not [*offload.module.ds_external_parameters()]
        assert offload.forward_hooks == offload.backward_hooks == []
        with torch.no_grad():
            assert torch.equal(model(x), expected)
            assert model.module.first.weight.ds_status is ZeroParamStatus.AVAILABLE
        methodcaller("_register_deepspeed_module", offload.module)(offload)
    step(engine)


# Tiles


def test_a_tiled_layer_computes_what_a_layer_does(start: Start, tmp_path: Path) -> None:
    plain = nn.Linear(8, 5)
    x = torch.randn(2, 8)
    with infinity.zero.Init():
        tiled = TiledLinear(8, 5, in_splits=3, out_splits=2)
    assert [tuple(row[0].weight.shape) for row in tiled.linears] == [(3, 3), (2, 3)]
    engine, *_ = start(model=nn.Sequential(tiled), config=configuration(tmp_path))
    tiled.copy_params_from(plain)
    torch.testing.assert_close(engine(x), plain(x))
    apart = TiledLinear(8, 5, bias=False, out_splits=2, combine_out_splits=False)
    assert [part.shape for part in apart(x)] == [(2, 3), (2, 2)]
    with pytest.raises(RuntimeError, match="out_splits=6 must be from 1 to 5"):
        TiledLinear(8, 5, out_splits=6)


class WithBias(nn.Linear):
    """Leaves adding its bias to others."""

    def forward(self, x: torch.Tensor) -> Any:
        """The output, and the bias."""
        return nn.functional.linear(x, self.weight), self.bias


def test_a_tiled_layer_may_leave_its_bias_to_others() -> None:
    plain = nn.Linear(8, 5)
    tiled = TiledLinearReturnBias(
        8, 5, in_splits=2, out_splits=2, linear_cls=WithBias, init_linear=plain
    )
    output, bias = tiled(torch.eye(8))
    assert torch.equal(bias, plain.bias)
    torch.testing.assert_close(output, plain.weight.T)
