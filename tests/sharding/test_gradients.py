"""The gradients of a step are what torch's `.grad` would be, wherever they are: until `zero_grad`,
after a step, clipped."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from support.configs import config_of
from support.discrete import DiscreteDevice

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 48
PLACEMENTS: dict[str, dict[str, Any]] = {
    "memory": {},
    "nvme": {"gradients": "nvme"},
    "kept in part": {"gradients": "nvme", "cache": "20KiB"},
    "speculative": {"update": "speculative"},
    "speculative, nvme": {"update": "speculative", "gradients": "nvme"},
    "discrete": {"device": DiscreteDevice},
    "discrete, nvme": {"device": DiscreteDevice, "gradients": "nvme"},
}
LR = 2.0**-4
"""A power of two: then SGD rounds once, and torch and the kernels make the same bits."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def loss_of(model: nn.Module, seed: int, skipped: int | None = None) -> torch.Tensor:
    """The loss of batch `seed`; without block `skipped`."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    for number, block in enumerate(model):
        x = x if number == skipped else block(x)
    return x.square().mean()


@pytest.fixture
def wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []

    def make(
        model: nn.Module, device: Any = None, units: Any = (Block,), **options: Any
    ) -> infinity.Engine:
        directory = tempfile.mkdtemp(dir=tmp_path)
        values = {
            "gpu_memory": "1MiB",
            "cpu_memory": "8MiB",
            "cache": 0,
            "poison": True,
            "algorithm": "sgd",
            "device": "cpu",
        }
        with monkeypatch.context() as patch:
            if device is not None:
                patch.setattr(sys.modules["infinity.build"], "ComputeDevice", device)
                values["gpu_direct"] = "off"
            wrapped = infinity.wrap(
                model,
                config_of(nvme=directory, **(values | options)),
                units=list(units),
                group=None,
            )
        models.append(wrapped)
        return infinity.engine(wrapped)

    yield make
    for model in models:
        if "_infinity_engine" in vars(model):  # else a test has closed it
            infinity.engine(model).close()


class Side:
    """A model, plain or wrapped, with two optimizers: one clips, and both have parameters of every
    block."""

    def __init__(self, wrap: Callable[..., infinity.Engine] | None, **options: Any) -> None:
        self.model = build()
        self.engine = None if wrap is None else wrap(self.model, **options)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = list(self.model.parameters())
        self.mine = [
            [i for i, name in enumerate(self.names) if name.endswith("weight") == heavy]
            for heavy in (True, False)
        ]
        kind: Any = torch.optim.SGD if wrap is None else infinity.SGD
        extra = {} if wrap is None else {"max_grad_norm": 0.01}
        first, second = ([self.parameters[i] for i in mine] for mine in self.mine)
        self.optimizers = [kind(first, lr=LR, **extra), kind(second, lr=LR)]
        self.norms: list[float] = []

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def gradients(self) -> list[torch.Tensor | None]:
        if self.engine is None:
            return [None if p.grad is None else p.grad.clone() for p in self.parameters]
        return [self.engine.gradient(p) for p in self.parameters]

    def weights(self) -> list[torch.Tensor]:
        state = self.model.state_dict() if self.engine is None else self.engine.state_dict()
        return [state[name].clone() for name in self.names]

    def clip(self, positions: Sequence[int], max_norm: float, norm: float | None = None) -> float:
        """As the engine does it, with the engine's `norm`: torch's own differs in the last bit."""
        gradients = [g for i in positions if (g := self.parameters[i].grad) is not None]
        found = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert norm is None or norm == pytest.approx(found, rel=1e-6)
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / ((found if norm is None else norm) + 1e-6)))
        return found

    def run(self, operation: str, *arguments: Any, norms: list[float]) -> None:
        getattr(self, operation)(*arguments, norms)

    def backward(self, seed: int, skipped: int | None, exponent: int, norms: list[float]) -> None:
        loss = loss_of(self.model, seed, skipped)
        if self.engine is not None and exponent:
            self.optimizers[0].loss_scaler = infinity.LossScaler(2.0**exponent)
            loss = self.optimizers[0].scale(loss)
            self.optimizers[0].loss_scaler = None
        loss.backward()

    def forget(self, index: int, norms: list[float]) -> None:
        self.parameters[index].grad = None

    def clip_all(self, max_norm: float, norms: list[float]) -> None:
        if self.engine is not None:
            self.norms.append(self.engine.clip_grad_norm_(max_norm))
        else:
            self.clip(range(len(self.parameters)), max_norm, norms.pop(0))

    def step(self, number: int, norms: list[float]) -> None:
        optimizer = self.optimizers[number]
        if number == 0 and self.engine is None:
            self.clip(self.mine[0], 0.01, norms.pop(0))
        optimizer.step()
        if number == 0 and self.engine is not None:
            self.norms.append(optimizer.grad_norm)

    def zero(self, what: int, to_none: bool, norms: list[float]) -> None:
        """A part of a wrapped model always forgets."""
        (self.model, *self.optimizers, self.model[1])[what].zero_grad(
            set_to_none=to_none or what == 3
        )

    def look(self, norms: list[float]) -> None:
        """Between two operations."""
        self.gradients()


OPERATIONS = st.one_of(
    st.tuples(
        st.just("backward"),
        st.integers(0, 9),
        st.sampled_from([None, None, None, 0, 1]),
        st.sampled_from([0, 0, 0, 10]),
    ),
    st.tuples(st.just("forget"), st.integers(0, 8)),
    st.tuples(st.just("clip_all"), st.sampled_from([1e-3, 0.02, 1e3])),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("zero"), st.integers(0, 3), st.sampled_from([True, True, False])),
    st.tuples(st.just("look")),
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(program=st.lists(OPERATIONS, min_size=3, max_size=14))
def test_any_program_of_operations_is_torchs(
    program: list[Any], wrap: Callable[..., infinity.Engine]
) -> None:
    reference = None
    for name, options in PLACEMENTS.items():
        side = Side(wrap, **options)
        try:
            for operation in program:
                side.run(*operation, norms=[])
            gradients, weights = side.gradients(), side.weights()
        finally:
            side.close()
        if reference is None:
            plain, norms = Side(None), list(side.norms)
            for operation in program:
                plain.run(*operation, norms=norms)
            reference = plain.gradients(), plain.weights(), side.norms
        assert side.norms == reference[2], name
        for which, got, wanted in (
            ("gradient", gradients, reference[0]),
            ("weight", weights, reference[1]),
        ):
            for parameter, mine, theirs in zip(side.names, got, wanted, strict=True):
                assert (mine is None) == (theirs is None), (name, which, parameter)
                assert mine is None or torch.equal(mine, theirs), (name, which, parameter)


@pytest.fixture(params=list(PLACEMENTS))
def engine(request: pytest.FixtureRequest, wrap: Callable[..., infinity.Engine]) -> infinity.Engine:
    return wrap(build(), **PLACEMENTS[request.param])


def test_two_steps_and_two_backwards_without_zero_grad(engine: infinity.Engine) -> None:
    plain = build()
    optimizers = [
        infinity.SGD(engine.model.parameters(), lr=LR),
        torch.optim.SGD(plain.parameters(), lr=LR),
    ]
    for seed in range(3):
        for model, optimizer in zip((engine.model, plain), optimizers, strict=True):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.step()
    for mine, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(engine.gradient(mine), theirs.grad)
    state = engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_gradient_that_was_forgotten_counts_for_nothing(engine: infinity.Engine) -> None:
    plain = build()
    for model in (engine.model, plain):
        loss_of(model, 0).backward()
        model[1].linear.weight.grad = None
        loss_of(model, 1, skipped=1).backward()
    assert engine.gradient(engine.model[1].linear.weight) is plain[1].linear.weight.grad is None
    norm = engine.clip_grad_norm_(1e9)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9)), rel=1e-6)
    for model in (engine.model, plain):
        loss_of(model, 2).backward()
    for mine, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(engine.gradient(mine), theirs.grad)


class Skipping(nn.Module):
    """The blocks, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = build().bfloat16()
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return x


@pytest.mark.parametrize("units", [[Block], [Skipping]], ids=["units of blocks", "one unit"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_backward_rounds_clipped_gradients_that_it_adds_nothing_to(
    placement: str, units: list[type[nn.Module]], wrap: Callable[..., infinity.Engine]
) -> None:
    """torch rounds them when it clips. The engine keeps a factor for the next step, and rounds
    before the one after."""
    plain = nn.Sequential(Skipping())
    engine = wrap(nn.Sequential(Skipping()), units=units, **PLACEMENTS[placement])
    norms: dict[nn.Module, list[float]] = {engine.model: [], plain: []}
    for model in norms:
        for skipped in (None, 0):
            model[0].skipped = skipped
            model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
            if model is plain:
                gradients = [p.grad for p in plain.parameters()]
                norm = math.sqrt(
                    sum(gradient.double().square().sum().item() for gradient in gradients)
                )
                for gradient in gradients:
                    gradient.mul_(0.01 / (norm + 1e-6))
            else:
                norm = engine.clip_grad_norm_(0.01)
            norms[model].append(norm)
    assert norms[engine.model] == pytest.approx(norms[plain], rel=1e-12)


def spoil(model: nn.Module, value: float) -> Any:
    """Make an element of a gradient `value` in every backward from now on."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[3] = value
        return gradient

    return model[1].linear.bias.register_hook(hook)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("through", ["engine", "optimizer"])
def test_a_norm_that_is_not_finite_does_to_gradients_what_torch_does(
    value: float, through: str, wrap: Callable[..., infinity.Engine]
) -> None:
    plain, engine = build(), wrap(build(), gradients="nvme")
    clipped = 0.5 if through == "optimizer" else None
    mine = infinity.SGD(engine.model.parameters(), lr=LR, max_grad_norm=clipped)
    theirs = torch.optim.SGD(plain.parameters(), lr=LR)
    for model in (engine.model, plain):
        spoil(model, value)
        loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    norm = engine.clip_grad_norm_(0.5) if through == "engine" else math.nan
    mine.step()
    theirs.step()
    assert not math.isfinite(norm) and (through == "engine" or not math.isfinite(mine.grad_norm))
    state = engine.state_dict()
    for name, expected in plain.state_dict().items():
        assert torch.equal(state[name].isnan(), expected.isnan()) and torch.equal(
            state[name].nan_to_num(), expected.nan_to_num()
        )
    assert any(tensor.isnan().any() for tensor in state.values())


def test_error_if_nonfinite_names_the_parameter_and_changes_nothing(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap(build())
    optimizer = infinity.SGD(engine.model.parameters(), lr=LR, error_if_nonfinite=True)
    handle = spoil(engine.model, math.nan)
    loss_of(engine.model, 0).backward()
    handle.remove()
    before, gradient = engine.state_dict(), engine.gradient(engine.model[0].linear.weight)
    text = (
        r"^the gradient norm of step 1 is nan; the gradient of 1\.linear\.bias is not "
        r"finite, and error_if_nonfinite=True"
    )
    for fails in (optimizer.step, lambda: engine.clip_grad_norm_(1.0, error_if_nonfinite=True)):
        with pytest.raises(infinity.NonFiniteError, match=text) as refusal:
            fails()
        assert refusal.value.parameter == "1.linear.bias"
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    assert torch.equal(engine.gradient(engine.model[0].linear.weight), gradient)
    engine.model[1].linear.bias.grad = None
    optimizer.step()
    assert engine.report().steps == 1
    with pytest.raises(infinity.ConfigError, match="give skip_nonfinite or error_if_nonfinite"):
        infinity.SGD(engine.model.parameters(), skip_nonfinite=True, error_if_nonfinite=True)
