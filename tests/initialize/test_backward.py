"""Backward and accumulation under DeepSpeed's rules: by the engine, or by the script itself."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import infinity
from infinity.deepspeed.fragments import safe_get_full_grad
from support.deepspeed import Net, batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that there are, on the host."""
    return {
        name.removeprefix("module."): found
        for name, parameter in model.named_parameters()
        if (found := safe_get_full_grad(parameter)) is not None
    }


def plain_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("how", ["engine", "script", "scale"])
def test_a_backward_divides_by_the_forwards_of_a_step(start: Start, how: str) -> None:
    """The bits are those of the plain loop that divides the loss."""
    engine, *_ = start(model=net(), config=configuration(gradient_accumulation_steps=3))
    plain = net()
    for number in range(3):
        loss = engine(*batch(number))
        if how == "engine":
            divided = engine.backward(loss)
            assert divided.item() == (loss / 3).item()
        elif how == "scale":
            engine.scale(loss).backward()
        else:
            loss.backward()
        (plain(*batch(number)) / 3).backward()
        assert engine.is_gradient_accumulation_boundary() == (number == 2)
        if number < 2:
            engine.step()
    same(gradients(engine), plain_gradients(plain))
    engine.step()
    assert not gradients(engine)
    assert engine.global_steps == 1 and engine.micro_steps == 3 and engine.was_step_applied()


@dataclasses.dataclass
class Outputs:
    """Not a tuple, and not a dict."""

    loss: torch.Tensor
    logits: list[torch.Tensor]
    name: str = "kept"

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize("how", ["engine", "script"])
@pytest.mark.parametrize("kind", [dict, Outputs, CausalLMOutput])
def test_a_loss_of_several_outputs_is_divided_once(start: Start, how: str, kind: Any) -> None:
    """The model returns a loss and what it was made of, and the script uses both."""

    class Both(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = super().forward(x)
            return kind(loss=nn.functional.cross_entropy(logits, labels), logits=[logits])

    def total(outputs: Any) -> torch.Tensor:
        return outputs["loss"] + outputs["logits"][0].square().mean()

    torch.manual_seed(0)
    model = Both()
    engine, *_ = start(model=model, config=configuration(gradient_accumulation_steps=4))
    torch.manual_seed(0)
    plain = Both()
    if how == "engine":
        engine.backward(total(engine(*batch(0))))
    else:
        total(engine(*batch(0))).backward()
    (total(plain(*batch(0))) / 4).backward()
    for name, value in plain_gradients(plain).items():
        torch.testing.assert_close(gradients(engine)[name], value)


def test_the_division_may_be_left_out(start: Start) -> None:
    """As accelerate does, which divides itself."""
    engine, *_ = start(model=net(), config=configuration(gradient_accumulation_steps=4))
    plain = net()
    engine.backward(engine(*batch(0)), scale_wrt_gas=False)
    plain(*batch(0)).backward()
    same(gradients(engine), plain_gradients(plain))


def test_a_backward_from_a_tensor_of_several_elements(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    plain = net()
    x, _ = batch(0)
    for model in (engine, plain):
        out = model(x)
        out.backward(torch.ones_like(out))
    same(gradients(engine), plain_gradients(plain))


@pytest.mark.parametrize("scales", [True, False])
def test_two_losses_of_one_forward(start: Start, scales: bool) -> None:
    engine, *_ = start(model=net(), config=configuration())
    plain = net()
    (x, labels), (_, others) = batch(0), batch(1)
    for model in (engine, plain):
        found = []
        out = model(x)
        for number, target in enumerate((labels, others)):
            loss = nn.functional.cross_entropy(out, target)
            model.zero_grad()
            if model is plain:
                loss.backward(retain_graph=number == 0)
            elif scales:
                engine.scale(loss, retain_graph=number == 0).backward(retain_graph=number == 0)
            else:
                engine.backward(loss, retain_graph=number == 0)
            found.append(gradients(engine) if model is engine else plain_gradients(plain))
        if model is engine:
            seen = found
    for one, other in zip(seen, found, strict=True):
        same(one, other)


def test_several_engines_share_a_loss(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    engines = [start(model=net(number), config=config)[0] for number in range(3)]
    plain = [net(number) for number in range(3)]
    for step in range(2):
        sum(engine(*batch(step)) / (i + 1) for i, engine in enumerate(engines)).backward()
        sum(model(*batch(step)) / (i + 1) for i, model in enumerate(plain)).backward()
        for engine, model in zip(engines, plain, strict=True):
            if step == 0:
                same(gradients(engine), plain_gradients(model))
            engine.step()
            engine.optimizer.zero_grad()


def test_several_engines_divide_a_loss_once(start: Start) -> None:
    """Whoever goes backward."""
    for by_engine in (True, False):
        config = configuration(gradient_accumulation_steps=2)
        engines = [start(model=net(number), config=config)[0] for number in range(2)]
        loss = engines[0](*batch(0)) + engines[1](*batch(0))
        if by_engine:
            engines[0].backward(loss)
        else:
            loss.backward()
        for number, engine in enumerate(engines):
            plain = net(number)
            (plain(*batch(0)) / 2).backward()
            same(gradients(engine), plain_gradients(plain))


def test_the_script_says_where_a_step_ends(start: Start) -> None:
    """As accelerate does; and with managed_gradient_accumulation=false, where it calls `step`."""
    engine, *_ = start(model=net(), config=configuration(gradient_accumulation_steps=2))
    for is_boundary in (False, False, True, True):
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        assert engine.is_gradient_accumulation_boundary() is is_boundary
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.was_step_applied() is is_boundary
    assert engine.global_steps == 2 and engine.micro_steps == 4
    config = configuration(gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    own, *_ = start(model=net(), config=config)
    own.backward(own(*batch(0)))
    own.step()
    assert own.global_steps == 1
    with pytest.raises(AssertionError, match="managed_gradient_accumulation is false"):
        own.set_gradient_accumulation_boundary(False)


def test_no_sync_changes_no_number_and_takes_no_step(start: Start) -> None:
    found = []
    for apart in (True, False):
        engine, *_ = start(model=net(), config=configuration(gradient_accumulation_steps=2))
        with engine.no_sync() if apart else contextlib.nullcontext():
            engine.backward(engine(*batch(0)))
            engine.step()
        engine.backward(engine(*batch(1)))
        found.append(gradients(engine))
        if apart:
            with (
                pytest.raises(AssertionError, match=r"inside of engine\.no_sync"),
                engine.no_sync(),
            ):
                engine.step()
        engine.step()
        assert engine.global_steps == 1
    same(*found)


def test_gradients_are_clipped_and_their_norm_is_known(start: Start) -> None:
    norms = {}
    for clip in (0.0, 0.01):
        engine, *_ = start(model=net(), config=configuration(gradient_clipping=clip))
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(*batch(0)))
        engine.step()
        norms[clip] = engine.get_global_grad_norm()
        assert engine.gradient_clipping() == clip
    plain = net()
    plain(*batch(0)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert norms[0.0] == norms[0.01] == pytest.approx(expected.item(), rel=1e-6)


# Parameters without gradients


class Branches(nn.Module):
    """Of two layers the input chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x).square().mean()


def test_unused_parameters_stay_as_they_are(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = start(model=Branches(), config=configuration(tmp_path))
    torch.manual_seed(0)
    plain = Branches()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for number in (0, 0, 1):
        x, _ = batch(number)
        engine.backward(engine(x, number))
        engine.step()
        plain(x, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-6)


def test_unused_parameters_may_be_refused(start: Start) -> None:
    config = configuration()
    config["zero_optimization"]["ignore_unused_parameters"] = False
    engine, *_ = start(model=Branches(), config=config)
    engine.backward(engine(batch(0)[0], 0))
    with pytest.raises(AssertionError, match=r"branches\.1\.weight got no gradient"):
        engine.step()


def test_frozen_parameters_are_left_alone(start: Start) -> None:
    model = net()
    model.first.requires_grad_(False)
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=configuration())
    for number in range(2):
        engine.backward(engine(*batch(number)))
        assert set(gradients(engine)) == {
            f"{layer}.{name}" for layer in ("second", "last") for name in ("weight", "bias")
        }
        engine.step()
    assert torch.equal(engine.module_state_dict()["first.weight"], net().first.weight)
    assert not any(
        name.startswith("first")
        for name in engine.module_state_dict(exclude_frozen_parameters=True)
    )


# fp16


def halves(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, labels = batch(number)
    return x.half(), labels


@pytest.mark.parametrize("scale", [{"initial_scale_power": 8}, {"loss_scale": 138.0}])
def test_fp16_scales_the_loss(start: Start, scale: dict[str, Any]) -> None:
    config = configuration(fp16={"enabled": True, **scale})
    engine, optimizer, *_ = start(model=net(), config=config)
    expected = scale.get("loss_scale", 256.0)
    assert engine.loss_scale() == optimizer.loss_scale == expected
    assert engine.dynamic_loss_scale() == ("loss_scale" not in scale)
    engine.backward(engine(*halves(0)))
    plain = net().half()
    plain(*halves(0)).backward()
    for name, value in plain_gradients(plain).items():
        torch.testing.assert_close(gradients(engine)[name], value.float(), rtol=1e-2, atol=1e-3)
    engine.step()
    assert engine.was_step_applied()


def test_fp16_asks_for_the_scale(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration(fp16={"enabled": True}))
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(*halves(0)).backward()
    engine.scale(engine(*halves(0))).backward()
    engine.step()


@pytest.mark.parametrize("static", [True, False])
def test_an_overflow_leaves_the_step_out(start: Start, static: bool) -> None:
    scale = {"loss_scale": 100.0} if static else {"initial_scale_power": 4, "hysteresis": 1}
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    config = configuration(fp16={"enabled": True, **scale}, scheduler=block)
    engine, optimizer, _, scheduler = start(model=net(), config=config)
    before = engine.module_state_dict()
    rates = scheduler.last_epoch
    x, labels = halves(0)
    engine.backward(engine(x * torch.inf, labels))
    engine.step()
    assert optimizer.overflow and not engine.was_step_applied()
    assert engine.skipped_steps == 1 and engine.global_steps == 1
    assert engine.get_global_grad_norm() == math.inf
    assert scheduler.last_epoch == rates
    assert engine.loss_scale() == (100.0 if static else 8.0)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name])
    engine.backward(engine(x, labels))
    engine.step()
    assert not optimizer.overflow and engine.was_step_applied()
    assert 0 < engine.get_global_grad_norm() < math.inf
    assert scheduler.last_epoch == rates + 1


def test_bf16_skips_what_is_not_finite(start: Start) -> None:
    engine, optimizer, *_ = start(model=net(), config=configuration(bf16={"enabled": True}))
    x, labels = batch(0)
    engine.backward(engine(x.bfloat16() * torch.nan, labels))
    engine.step()
    assert optimizer.overflow and engine.skipped_steps == 1


@pytest.mark.parametrize("wrong", [None, torch.ones(2, requires_grad=True), "loss"])
def test_a_loss_of_a_wrong_kind(start: Start, wrong: Any) -> None:
    engine, *_ = start(model=net(), config=configuration())
    with pytest.raises(infinity.ConfigError, match=r"the loss is .*; it must be a scalar tensor"):
        engine.backward(wrong)
    with torch.no_grad():
        loss = engine(*batch(0))
    with pytest.raises(infinity.ConfigError, match="the loss has no gradients to give"):
        engine.backward(loss)
