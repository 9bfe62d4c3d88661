"""What makes a graph of a wrapped model is refused in one sentence with a way out, and that way
works; what only records calls of modules is right."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import infinity
from support.recomputed import wrapped

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torch.jit is deprecated
]


class Around(nn.Module):
    """A plain model around a wrapped one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.more(self.inner(x))
        return result


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8)


def _inside_gathered(model: nn.Module, export: Callable[[nn.Module], Any]) -> Any:
    with infinity.gathered(model):
        return export(model)


def _fake(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.empty(2, 8))


TRACERS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda m: torch.jit.trace(m, batch()),
    "trace of a layer": lambda m: torch.jit.trace(m[0], batch()),
    "trace of a function": lambda m: torch.jit.trace(lambda x: m(x), batch()),
    "trace of a weight": lambda m: torch.jit.trace(lambda x: x @ m[0].weight.t(), batch()),
    "trace of a model around": lambda m: torch.jit.trace(Around(m), batch()),
    "trace of methods": lambda m: torch.jit.trace_module(m, {"forward": batch()}),
    "trace while gathered": lambda m: _inside_gathered(m, TRACERS["trace"]),
    "script": torch.jit.script,
    "script of a layer": lambda m: torch.jit.script(m[0]),
    "script of a model around": lambda m: torch.jit.script(Around(m)),
    "export": lambda m: torch.export.export(m, (batch(),)),
    "export of a layer": lambda m: torch.export.export(m[0], (batch(),)),
    "export of a model around": lambda m: torch.export.export(Around(m), (batch(),)),
    "export while gathered": lambda m: _inside_gathered(m, TRACERS["export"]),
    "onnx": lambda m: torch.onnx.export(m, (batch(),), io.BytesIO(), dynamo=False),
    "make_fx": lambda m: make_fx(lambda x: m(x))(batch()),
    "fake tensors": _fake,
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_makes_a_graph_is_refused(tracer: str) -> None:
    with wrapped(build(), parameters="nvme", optimizer="nvme") as engine:
        model: Any = engine.model
        expected = model(batch()).detach()
        for _ in range(2):
            with pytest.raises(infinity.ShardedParameterError, match="wrapped model") as caught:
                TRACERS[tracer](model)
        assert "load_state_dict(infinity.engine(model).state_dict())" in str(caught.value)
        del caught  # torch.jit.trace refers to parameters for as long as its error is there
        loss = model(batch())
        assert torch.equal(loss.detach(), expected)
        loss.sum().backward()
        assert engine.gradient(model[0].weight) is not None


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: torch.func.grad(lambda x: m(x).sum())(batch()),
    "vjp": lambda m: torch.func.vjp(m, batch()),
    "jvp": lambda m: torch.func.jvp(m, (batch(),), (batch(),)),
    "jacfwd": lambda m: torch.func.jacfwd(m)(batch()),
    "functionalize": lambda m: torch.func.functionalize(m)(batch()),
    "jvp in vmap": lambda m: torch.func.vmap(lambda x: torch.func.jvp(m, (x,), (x,)))(batch()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_around_a_wrapped_model_are_refused(transform: str) -> None:
    with wrapped(build(), parameters="nvme", optimizer="nvme") as engine:
        expected = engine.model(batch())
        with pytest.raises(RuntimeError, match=r"torch\.func\..* cannot pass a wrapped model"):
            TRANSFORMS[transform](engine.model)
        assert torch.equal(engine.model(batch()), expected)


def test_a_gradient_inside_of_the_forward_is_refused_by_name() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda t: t.pow(3).sum())(torch.ones(8))
            result: torch.Tensor = self.linear(x) + slope
            return result

    with (
        wrapped(nn.Sequential(Inner(), Inner())) as engine,
        pytest.raises(RuntimeError, match=r"parameters of a wrapped model .* jacfwd"),
    ):
        engine.model(batch())


@pytest.mark.parametrize("way", ["vmap", "forward mode"])
@pytest.mark.parametrize("recompute", ["off", "all"])
def test_transforms_that_pass_a_wrapped_model(way: str, recompute: str) -> None:
    def run(model: Any) -> torch.Tensor:
        if way == "vmap":
            result: torch.Tensor = torch.func.vmap(model)(batch())
            return result
        with forward_ad.dual_level():
            found: Any = model(forward_ad.make_dual(batch(), torch.ones(2, 8)))
            tangent: torch.Tensor = forward_ad.unpack_dual(found).tangent
            return tangent

    plain = nn.Sequential(*(build()[:2] for _ in range(3)))
    run(plain).square().sum().backward()
    model = nn.Sequential(*(build()[:2] for _ in range(3)))
    with wrapped(model, recompute=recompute) as engine:
        run(model).square().sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            found = engine.gradient(parameter)
            assert (found is None) == (other.grad is None)
            assert found is None or torch.equal(found, other.grad)


def test_the_way_out() -> None:
    with wrapped(build()) as engine:
        copy = build()
        copy.load_state_dict(engine.state_dict())
        traced = torch.jit.trace(copy, batch())
        assert torch.equal(traced(batch()), engine.model(batch()))


def test_what_records_calls_of_modules_is_right() -> None:
    plain, gradients = build(), []
    torch.fx.symbolic_trace(plain)(batch()).sum().backward()
    with wrapped(build(), parameters="nvme", optimizer="nvme") as engine:
        torch.fx.symbolic_trace(engine.model)(batch()).sum().backward()
        gradients = [engine.gradient(parameter) for parameter in engine.model.parameters()]
        for found, parameter in zip(gradients, plain.parameters(), strict=True):
            assert found is not None and parameter.grad is not None
            assert torch.equal(found, parameter.grad)


def product(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(w) * v


class Scripted(nn.Module):
    """Uses weights of modules that it does not call, which stay, and hands more of them to a
    scripted function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        x = nn.functional.linear(nn.functional.linear(x, first.weight), second.weight)
        scripted = torch.jit.script(product)
        out: torch.Tensor = x @ scripted(third.weight, fourth.weight)
        return out


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_script_says_what_memory_is_missing() -> None:
    """TorchScript leaves out the text of an error of Python."""
    with (
        wrapped(Scripted(), parameters="nvme", gpu_memory=49152) as engine,
        pytest.raises(
            RuntimeError, match=r"(?s)TorchScript .*gpu_memory=\d+ .* is enough"
        ) as caught,
    ):
        engine.model(torch.ones(2, 64))
    del caught
