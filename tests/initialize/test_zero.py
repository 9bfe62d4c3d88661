"""`infinity.zero`, and DeepSpeed's functions for the states of one parameter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

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
        pytest.raises(infinity.ShardedParameterError, match=r"was changed inside .* modifier_rank"),
        infinity.zero.GatheredParameters(model.last.bias),
    ):
        model.last.bias.data.zero_()
    with infinity.zero.GatheredParameters(model.last.bias, enabled=False):
        assert model.last.bias.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with infinity.zero.GatheredParameters(net().first.weight, modifier_rank=0):
        pass
    with pytest.raises(infinity.ConfigError, match="GatheredParameters takes a module"):
        infinity.zero.GatheredParameters("first.weight")


@pytest.mark.parametrize("home", ["nvme", "gpu"])
@pytest.mark.parametrize("together", [True, False])
def test_aliases_of_gathered_parameters_may_be_kept(
    start: Start, tmp_path: Path, home: str, together: bool
) -> None:
    """Scripts keep `.data` until the next turn of a loop, and `.data.cpu()`, which is an alias on a
    CPU, until they save it."""
    config = configuration(tmp_path)
    if home == "gpu":
        del config["zero_optimization"]["offload_param"]
    engine, *_ = start(model=net(), config=config)
    model, kept, arrays = engine.module, {}, {}
    with ExitStack() as all_of_it:
        if together:
            all_of_it.enter_context(infinity.zero.GatheredParameters(model))
        for name, parameter in model.named_parameters():
            with infinity.zero.GatheredParameters([parameter]):
                kept[name] = parameter.data.cpu()
                arrays[name] = parameter.detach().numpy()
    with infinity.zero.GatheredParameters([model.last.bias], modifier_rank=0), torch.no_grad():
        data = model.last.bias.data
        data.mul_(2)
        assert torch.equal(model.last.bias, data)
        model.last.bias.add_(1)
        assert torch.equal(model.last.bias, data)
        changed = data[:]
    step(engine)
    plain = net()
    for name, parameter in plain.named_parameters():
        assert torch.equal(kept[name], parameter)
        assert torch.equal(torch.from_numpy(arrays[name]), parameter)
        assert kept[name].untyped_storage().nbytes() == parameter.nbytes
    with torch.no_grad():
        plain.last.bias.mul_(2).add_(1)
    assert torch.equal(changed, plain.last.bias)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    plain(*batch(0)).backward()
    optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[name], value)


def test_memory_of_an_alias_that_is_not_kept_is_free(start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration(tmp_path))
    weight = engine.module.first.weight
    with infinity.zero.GatheredParameters(weight):
        storage = StorageWeakRef(weight.data.untyped_storage())
        assert not storage.expired()
    assert storage.expired()


def test_a_view_of_the_parameter_itself_may_not_be_kept(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    weight = engine.module.first.weight
    with (
        pytest.raises(infinity.ShardedParameterError, match=r"outlives .*; keep \.data"),
        infinity.zero.GatheredParameters(weight),
    ):
        kept = weight.view(-1)
    assert kept.numel() == 128


@pytest.mark.parametrize("alias", [lambda p: p.view(-1), lambda p: p[0], lambda p: p.data.t()])
def test_what_is_written_to_one_view_shows_in_all(
    start: Start, tmp_path: Path, alias: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A view that was made before `.data` does not stay behind."""

    def write(weight: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            view = alias(weight)
            view.mul_(2)
            seen = [weight.data.clone(), weight.detach().clone()]
            weight.data.add_(1)
            return [*seen, view.clone(), weight.clone()]

    engine, *_ = start(model=net(), config=configuration(tmp_path))
    weight = engine.module.first.weight
    with infinity.zero.GatheredParameters(weight, modifier_rank=0):
        ours = write(weight)
    plain = write(net().first.weight)
    assert all(map(torch.equal, ours, plain))
    assert torch.equal(engine.module_state_dict()["first.weight"], plain[-1])


class Saves(torch.autograd.Function):
    """`x @ weight.t()`, as functions of libraries save and ask for a weight."""

    saved: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Saves.saved.append(getattr(weight, "ds_status", None))
        return gradient @ weight, gradient.t() @ x


@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_of_aliases_finds_their_unit(start: Start, tmp_path: Path, inside: bool) -> None:
    """A graph that is made where parameters have memory of their own goes backward there, with what
    is there, and later, with the bytes of the unit."""
    engine, *_ = start(model=net(), config=configuration(tmp_path))
    weight, plain = engine.module.first.weight, net().first.weight
    x = batch(0)[0].requires_grad_()
    Saves.saved.clear()
    with ExitStack() as gathered:
        gathered.enter_context(infinity.zero.GatheredParameters([weight], modifier_rank=0))
        data = weight.data
        if inside:
            with torch.no_grad():
                data.mul_(2)
                plain.mul_(2)
        loss = Saves.apply(x, weight).square().sum()
        if not inside:
            gathered.close()
        loss.backward()
        assert Saves.saved == [ZeroParamStatus.AVAILABLE]
    theirs = x.grad
    x.grad = None
    Saves.apply(x, plain).square().sum().backward()
    assert torch.equal(x.grad, theirs) and torch.equal(weight.grad, plain.grad)
    assert torch.equal(data, plain)


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
