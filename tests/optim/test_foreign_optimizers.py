"""Optimizers of torch that infinity has no kernels for, on the slow path of `infinity.adapt`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import rounded, text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),  # sees a parameter as a whole
}


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []

    def make(model: nn.Module, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        settings = {
            "gpu_memory": "4MiB",
            "cpu_memory": "8MiB",
            "poison": True,
            "algorithm": "other",
        } | options
        models.append(infinity.wrap(model, config_of(nvme=folder, **settings)))
        return infinity.engine(model)

    yield make
    for model in models:
        infinity.engine(model).close()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        loss = model(**text_batch(number)).loss
        (
            optimizer.scale(loss)
            if isinstance(optimizer, infinity.optim.optimizer.Optimizer)
            else loss
        ).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(engine: infinity.Engine, plain: nn.Module) -> bool:
    actual, expected = engine.state_dict(), plain.state_dict()
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in expected
    )


def takes_groups_later(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> bool:
    """Whether a step of torch works after `add_param_group`: Adagrad of 2.11 makes no states for
    the new parameters."""
    first, later = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = kind([first], **settings)
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(2, 2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("name", KINDS)
def test_each_does_what_it_does_in_torch(
    name: str, tier: str, wrap: Callable[..., infinity.Engine]
) -> None:
    kind, settings = KINDS[name]
    model, plain = transformer(), transformer()
    engine = wrap(model, optimizer=tier, update="speculative")
    assert all(set(unit.blocks) == {Kind.PARAM, Kind.GRAD} for unit in engine.units)
    groups = [
        [{"params": m.blocks.parameters()}, {"params": [m.tokens.weight], "lr": 2e-3}]
        for m in (model, plain)
    ]
    optimizers = [infinity.adapt(kind, groups[0], **settings), kind(groups[1], **settings)]
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers
    ]
    for step in range(6):
        if step == 3 and takes_groups_later(kind, settings):
            for m, optimizer in zip((model, plain), optimizers, strict=True):
                m.zero_grad()
                optimizer.add_param_group({"params": [m.places, *m.norm.parameters()]})
        for m, optimizer, scheduler in zip((model, plain), optimizers, schedulers, strict=True):
            train(m, optimizer, range(step, step + 1))
            m.zero_grad()
            scheduler.step()
    assert equal(engine, plain)
    ours, theirs = (optimizer.state_dict() for optimizer in optimizers)
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.equal(
                torch.as_tensor(ours["state"][number][key]), torch.as_tensor(value)
            ), (number, key)
    report = engine.report()
    assert (report.steps, report.updates_kept, report.updates_rolled_back) == (6, 0, 0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_one_for_matrices_alone(wrap: Callable[..., infinity.Engine]) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    for m, kind in ((model, infinity.adapt), (plain, lambda kind, *given: kind(*given))):
        matrices = [p for p in m.blocks.parameters() if p.ndim == 2]
        train(m, kind(torch.optim.Muon, matrices), range(2))
    assert equal(engine, plain)


@pytest.mark.parametrize("name", ["rmsprop", "adafactor"])
def test_states_are_taken_over(name: str, wrap: Callable[..., infinity.Engine]) -> None:
    kind, settings = KINDS[name]
    model, plain = transformer(), transformer()
    engine = wrap(model)
    optimizers = [
        infinity.adapt(kind, model.parameters(), **settings),
        kind(plain.parameters(), **settings),
    ]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, range(3))
    continued = []
    for source in optimizers:
        other = transformer()
        other.load_state_dict(engine.state_dict())
        continued.append(wrap(other))
        fresh = infinity.adapt(kind, other.parameters(), lr=1.0)
        fresh.load_state_dict(source.state_dict())
        train(other, fresh, range(3, 6))
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, range(3, 6))
    assert equal(engine, plain)
    assert all(equal(each, plain) for each in continued)


def test_low_precision_parameters_have_masters(wrap: Callable[..., infinity.Engine]) -> None:
    """A rate so small that bf16 parameters alone would never move."""
    model = transformer()
    engine = wrap(model, precision="bf16")
    optimizer = infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=1e-6)
    masters = {
        name: nn.Parameter(value.detach()) for name, value in transformer().named_parameters()
    }
    reference = torch.optim.RMSprop(masters.values(), lr=1e-6)
    for number in range(5):
        model(**text_batch(number)).loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = engine.gradient(parameter).float()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    saved = optimizer.state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(saved[number]["master"], masters[name]), name
        assert torch.equal(engine.state_dict()[name], rounded(masters[name], torch.bfloat16)), name


def test_clipping_and_skipping_are_those_of_the_family(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3}
    scaler = infinity.LossScaler(2.0**8, hysteresis=1)
    optimizer = infinity.adapt(
        torch.optim.RMSprop, model.parameters(), max_grad_norm=0.1, loss_scaler=scaler, **settings
    )
    reference = torch.optim.RMSprop(plain.parameters(), **settings)
    for number in range(6):
        bad = math.inf if number == 2 else 1.0
        optimizer.scale(model(**text_batch(number)).loss * bad).backward()
        plain(**text_batch(number)).loss.backward()
        before = engine.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        if number != 2:
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
            reference.step()
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == (number == 2)
        reference.zero_grad()
    assert (optimizer.skipped_steps, scaler.scale) == (1, 2.0**7)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_states_leave_no_trace_on_the_drive(
    wrap: Callable[..., infinity.Engine], tmp_path: Path
) -> None:
    """Unnamed files: nothing has to be removed after a kill. Between steps no state is in
    memory."""
    model = transformer()
    wrap(model)
    names = set((tmp_path / "0").iterdir())
    optimizer = infinity.adapt(torch.optim.RMSprop, model.parameters())
    train(model, optimizer, range(2))
    assert set((tmp_path / "0").iterdir()) == names
    for bench in optimizer._benches.values():
        assert bench.optimizer is not None
        assert all(stand.untyped_storage().nbytes() <= 4 for stand in bench.stands)
        assert all(stand.grad is None for stand in bench.stands)
        for state in bench.optimizer.state.values():
            assert all(
                not isinstance(value, torch.Tensor) or value.numel() <= 1
                for value in state.values()
            )


def test_there_is_one_notice(
    wrap: Callable[..., infinity.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    model = transformer()
    wrap(model)
    train(model, infinity.adapt(torch.optim.RMSprop, model.parameters()), range(3))
    assert caplog.messages == [
        "infinity has no kernels for RMSprop: it updates one unit after the other on the host "
        "while step() waits; one unit needs memory beside the budgets; its states are on nvme, "
        "beside the budgets"
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            infinity.AdamW,
            (
                "infinity.adapt takes a class of torch.optim optimizers that is not "
                "infinity's own, not the class"
            ),
        ),
        (
            nn.Linear,
            (
                "infinity.adapt takes a class of torch.optim optimizers that is not "
                "infinity's own, not the class"
            ),
        ),
        (
            torch.optim.LBFGS,
            (
                "LBFGS evaluates the loss inside its step, for all parameters at once, but "
                "infinity updates unit by unit"
            ),
        ),
    ],
)
def test_what_cannot_be_adapted(kind: Any, text: str, wrap: Callable[..., infinity.Engine]) -> None:
    model = transformer()
    wrap(model)
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}"):
        infinity.adapt(kind, model.parameters())
    with pytest.raises(ValueError, match="Invalid learning rate"):
        infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=-1.0)
    train(model, infinity.adapt(torch.optim.RMSprop, model.parameters()), range(1))


@pytest.mark.parametrize(
    "kind", [torch.optim.RMSprop, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor]
)
def test_an_optimizer_of_torch_alone_says_the_way_out(
    kind: Any, wrap: Callable[..., infinity.Engine]
) -> None:
    model = transformer()
    early = kind(model.parameters(), lr=1e-3)  # made before the model was wrapped
    engine = wrap(model)
    before = engine.state_dict()
    model(**text_batch(0)).loss.backward()
    for optimizer in (early, kind(model.parameters(), lr=1e-3)):
        with pytest.raises(
            infinity.ShardedParameterError,
            match=r"or any other by infinity\.adapt\(torch\.optim\.RMSprop, ",
        ):
            optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


class Failing(torch.optim.SGD):
    """Fails in the update number `fails`, from 0."""

    fails = -1

    def step(self, closure: Any = None) -> Any:
        Failing.fails -= 1
        if Failing.fails < 0:
            raise ArithmeticError("made to fail")
        return super().step(closure)


def test_a_failure_before_anything_was_changed_may_be_tried_again(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    Failing.fails = 1000  # `adapt` tries it
    optimizers = [
        infinity.adapt(Failing, model.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    ]
    for m in (model, plain):
        m(**text_batch(0)).loss.backward()
    Failing.fails = 0
    with pytest.raises(ArithmeticError):
        optimizers[0].step()
    Failing.fails = 1000
    for optimizer in optimizers:
        optimizer.step()
    assert equal(engine, plain)


def test_a_failure_in_the_middle_ends_the_engine(wrap: Callable[..., infinity.Engine]) -> None:
    model = transformer()
    engine = wrap(model)
    Failing.fails = 1000  # `adapt` tries it
    optimizer = infinity.adapt(Failing, model.parameters(), lr=0.1)
    model(**text_batch(0)).loss.backward()
    Failing.fails = 2
    with pytest.raises(ArithmeticError):
        optimizer.step()
    for go_on in (optimizer.step, engine.drain, optimizer.state_dict):
        with pytest.raises(infinity.EngineClosedError, match="made to fail"):
            go_on()


def test_a_step_inside_of_gathered_is_refused(wrap: Callable[..., infinity.Engine]) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    optimizers = [
        infinity.adapt(torch.optim.RMSprop, model.parameters()),
        torch.optim.RMSprop(plain.parameters()),
    ]
    for m in (model, plain):
        m(**text_batch(0)).loss.backward()
    with (
        infinity.gathered(model.norm),
        pytest.raises(RuntimeError, match=r"cannot be updated inside of a forward or of"),
    ):
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.step()
    assert equal(engine, plain)


def test_a_state_dict_of_other_shapes_is_refused_before_anything_is_changed(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap(transformer())
    optimizer = infinity.adapt(torch.optim.RMSprop, engine.model.parameters(), lr=1e-3)
    engine.model(**text_batch(0)).loss.backward()
    optimizer.step()
    before = optimizer.state_dict()
    bad = {
        "state": {k: dict(v) for k, v in before["state"].items()},
        "param_groups": before["param_groups"],
    }
    bad["state"][3]["square_avg"] = torch.zeros(3, 3)
    with pytest.raises(
        infinity.ConfigError, match=r"square_avg of \S+ has shape \[3, 3\], and should have"
    ):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()["state"]
    for number, state in before["state"].items():
        assert all(
            torch.equal(after[number][name], value)
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        )


class Averaging(torch.optim.SGD):
    """As those of schedulefree: parameters are others in an evaluation."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("train_mode", False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before")
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 0.3)

    def _turn(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in (p for p in group["params"] if p in self.state):
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._turn(True, 0.25)

    def eval(self) -> None:
        self._turn(False, -1 / 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_that_trains_and_evaluates(
    precision: str, wrap: Callable[..., infinity.Engine]
) -> None:
    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for number in range(3):
            optimizer.train()
            train(model, optimizer, range(number, number + 1))
            optimizer.eval()
            optimizer.eval()
            with torch.no_grad():
                found.append(model(**text_batch(9)).loss.item())
        return found

    plain = transformer()
    expected = losses(plain, Averaging(plain.parameters()))
    engine = wrap(transformer(), precision=precision)
    optimizer = infinity.adapt(Averaging, engine.model.parameters())
    found = losses(engine.model, optimizer)
    assert found == (expected if precision == "fp32" else pytest.approx(expected, abs=0.05))
    assert optimizer.param_groups[0]["train_mode"] is False
    with pytest.raises(RuntimeError, match=r"call train\(\) before"):
        train(engine.model, optimizer, range(1))


def test_modes_are_not_changed_inside_of_gathered(wrap: Callable[..., infinity.Engine]) -> None:
    engine = wrap(transformer())
    optimizer = infinity.adapt(Averaging, engine.model.parameters())
    optimizer.train()
    train(engine.model, optimizer, range(1))
    with (
        infinity.gathered(engine.model.tokens.weight),
        pytest.raises(infinity.ShardedParameterError, match=r"^Averaging\.eval\(\): "),
    ):
        optimizer.eval()


class Packed(torch.Tensor):
    """A tensor of a class of its own."""


class PackedStates(torch.optim.SGD):
    """Keeps large states in a class of its own, as torchao does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() >= 4096:
                    self.state[p]["mean"] = torch.zeros_like(p).as_subclass(Packed)


def test_states_of_a_class_of_their_own_are_refused(wrap: Callable[..., infinity.Engine]) -> None:
    engine = wrap(transformer())
    with pytest.raises(
        infinity.ConfigError, match=r"^the state 'mean' of PackedStates is a Packed, a tensor of a"
    ):
        infinity.adapt(PackedStates, engine.model.parameters(), lr=0.1)


def test_an_optimizer_with_a_backward_of_its_own_is_refused() -> None:
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None: ...

    with pytest.raises(infinity.ConfigError, match=r"^Lomo updates parameters in its own fused_b"):
        infinity.adapt(Lomo, [nn.Parameter(torch.zeros(2))], lr=0.1)
