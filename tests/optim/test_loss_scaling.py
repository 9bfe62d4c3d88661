"""Gradients that are infinite or NaN: fp16 skips the step and rescales, bf16 if asked; nothing else
changes by a bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []

    def make(model: nn.Module, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        values = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "poison": True} | options
        models.append(infinity.wrap(model, config_of(nvme=folder, **values)))
        return infinity.engine(model)

    yield make
    for model in models:
        infinity.engine(model).close()


def contents(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    """Every byte that a step may change: parameters, masters and moments."""
    engine.drain()
    kinds = (kind for kind in Kind if kind is not Kind.GRAD)
    return {
        f"{u.name} {kind.value}": u.states.read(kind).view(torch.uint8)
        for kind in kinds
        for u in engine.units
        if kind in u.blocks
    }


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def backward(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.scale(model(**text_batch(number)).loss).backward()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        backward(model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad()


class Spoiler:
    """Makes the gradient of one parameter `value` in every backward while it is armed; the other
    gradients stay."""

    def __init__(self, model: nn.Module, name: str, value: float) -> None:
        self.armed, self.value = False, value
        parameter = dict(model.named_parameters())[name]
        parameter.register_hook(self.spoil)

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[-1] = self.value
        return spoilt


# The scaler by itself


class Plain:
    """The rules of the scale, as a table of what happens after each step."""

    def __init__(self, initial: float, window: int | None, hysteresis: int, minimum: float) -> None:
        self.scale = initial
        self.window = window
        self.hysteresis = hysteresis
        self.minimum = minimum
        self.steps: list[bool] = []
        self.borne = 0

    def step(self, finite: bool) -> bool:
        self.steps.append(finite)
        if not finite:
            self.borne += 1
            if self.borne < self.hysteresis:
                return True
            if self.scale / 2 < self.minimum:
                return False
            self.scale /= 2
            return True
        run = len(self.steps) - max(
            (i + 1 for i, good in enumerate(self.steps) if not good), default=0
        )
        if self.window is not None and run % self.window == 0:
            self.scale, self.borne = min(self.scale * 2, max(self.scale, 2.0**24)), 0
        return True


@given(
    initial=st.integers(0, 26),
    below=st.integers(0, 5),
    window=st.one_of(st.none(), st.integers(1, 5)),
    hysteresis=st.integers(1, 4),
    steps=st.lists(st.booleans(), max_size=60),
    saved=st.integers(0, 60),
)
def test_any_sequence_of_steps(
    initial: int, below: int, window: int | None, hysteresis: int, steps: list[bool], saved: int
) -> None:
    options: dict[str, Any] = {
        "window": window,
        "hysteresis": hysteresis,
        "minimum": 2.0 ** (initial - below),
    }
    scaler, plain = infinity.LossScaler(2.0**initial, **options), Plain(2.0**initial, **options)
    for number, finite in enumerate(steps):
        if number == saved:
            state = scaler.state_dict()
            scaler = infinity.LossScaler(2.0**initial, **options)
            scaler.load_state_dict(state)
        assert scaler.update(finite) == plain.step(finite)
        assert scaler.scale == plain.scale
        assert math.frexp(scaler.scale)[0] == 0.5
    assert scaler.skipped == steps.count(False)


@given(window=st.integers(1, 5), steps=st.lists(st.booleans(), max_size=60))
def test_without_hysteresis_it_is_the_scale_of_torch(window: int, steps: list[bool]) -> None:
    scaler = infinity.LossScaler(1.0, window, hysteresis=1, minimum=2.0**-100)
    scale, tracker = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    for finite in steps:
        assert scaler.update(finite)
        # What GradScaler.update does.
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), 2.0, 0.5, window)
        assert scaler.scale == min(float(scale), 2.0**24)
        scale = torch.tensor(scaler.scale)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"initial": 1000.0},
            "LossScaler: initial=1000.0 must be a power of two, and minimum or more",
        ),
        (
            {"initial": 1.0, "minimum": 2.0},
            "LossScaler: initial=1.0 must be a power of two, and minimum or more",
        ),
        ({"minimum": 0.0}, "LossScaler: minimum=0.0 must be a power of two"),
        (
            {"initial": math.inf},
            "LossScaler: initial=inf must be a power of two, and minimum or more",
        ),
        (
            {"window": 0},
            "LossScaler: window=0 must be 1 or more, or None for a scale that never grows",
        ),
        ({"hysteresis": 0}, "LossScaler: hysteresis=0 must be 1 or more"),
        ({"initial": "dynamic"}, "LossScaler: initial is 'dynamic', not a number"),
        ({"window": "long"}, "LossScaler: window is 'long', not a number"),
        (
            {"minimum": None},
            "LossScaler: minimum=None must be a power of two, unless window is None, too",
        ),
        (
            {"initial": 0.0, "window": None, "minimum": None},
            "LossScaler: initial=0.0 must be a positive number",
        ),
    ],
)
def test_values_out_of_range(values: dict[str, Any], text: str) -> None:
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}$"):
        infinity.LossScaler(**values)


def test_a_static_scale_never_changes() -> None:
    scaler = infinity.LossScaler(138.0, window=None, minimum=None)
    assert [scaler.update(finite) for finite in (True, *[False] * 40, True)] == [True] * 42
    assert scaler.scale == 138.0 and scaler.skipped == 40
    scaler.load_state_dict(infinity.LossScaler(2.0**10).state_dict())
    assert scaler.scale == 138.0 and scaler.skipped == 0
    with pytest.raises(infinity.ConfigError, match="that of a static scale, 138"):
        infinity.LossScaler().load_state_dict(scaler.state_dict())


# In training


@pytest.mark.parametrize("scale", [138.0, 0.3, 2.0**10])
def test_a_static_scale_of_any_value_is_divided_out(
    scale: float, wrap: Callable[..., infinity.Engine]
) -> None:
    """Exactly where it is a power of two; else a gradient is rounded twice."""
    found = []
    for scaler in (None, infinity.LossScaler(scale, window=None, minimum=None)):
        engine = wrap(transformer(), precision="fp32")
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-3, loss_scaler=scaler)
        train(engine.model, optimizer, range(2))
        backward(engine.model, optimizer, 2)
        gradient = engine.gradient(engine.model.norm.weight)
        assert gradient is not None
        found.append((gradient, engine.state_dict()["norm.weight"]))
    exact = math.frexp(scale)[0] == 0.5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_scale_that_is_divided_out_changes_no_bit(
    precision: str, max_grad_norm: float | None, wrap: Callable[..., infinity.Engine]
) -> None:
    """In formats that lose nothing to the scale."""
    engines, norms = [], []
    for scaler in (None, infinity.LossScaler(2.0**20, window=2)):
        engines.append(wrap(transformer(), precision=precision))
        model = engines[-1].model
        optimizer = infinity.AdamW(
            model.parameters(), lr=1e-3, max_grad_norm=max_grad_norm, loss_scaler=scaler
        )
        assert torch.equal(
            optimizer.scale(torch.tensor(1.5)), torch.tensor(1.5 if scaler is None else 1.5 * 2**20)
        )
        train(model, optimizer, range(6))
        norms.append(
            engines[-1].clip_grad_norm_(1.0) if max_grad_norm is None else optimizer.grad_norm
        )
    assert norms[0] == norms[1]
    assert equal(contents(engines[0]), contents(engines[1]))


def test_fp16_is_scaled_by_default_and_trains_as_fp32_does(
    wrap: Callable[..., infinity.Engine],
) -> None:
    """Gradients of a loss of 1e-6 vanish in fp16 unless it is scaled."""
    outcomes = []
    for precision, scaled in (("fp32", True), ("fp16", True), ("fp16", False)):
        engine = wrap(transformer(), precision=precision)
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-3, eps=1e-12)
        assert (optimizer.loss_scaler is None) == (precision == "fp32")
        for number in range(10):
            loss = engine.model(**text_batch(number)).loss * 1e-6
            (optimizer.scale(loss) if scaled else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outcomes.append(engine.model(**text_batch(99)).loss.item())
    assert outcomes[1] == pytest.approx(outcomes[0], abs=2e-2)
    assert abs(outcomes[2] - outcomes[0]) > 2 * abs(outcomes[1] - outcomes[0])


def test_a_loss_that_is_not_scaled_in_fp16_is_told_once(
    wrap: Callable[..., infinity.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for scaler in (None, infinity.LossScaler(1.0, window=None)):
        model = transformer()
        wrap(model, precision="fp16")
        optimizer = infinity.AdamW(model.parameters(), loss_scaler=scaler)
        train(model, optimizer, range(1))
        for number in range(1, 4):
            model(**text_batch(number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        said.append(len(caplog.messages))
    assert said == [1, 1]
    assert (
        "the loss was not scaled, so fp16 gradients below 6e-8 are lost: call optimizer.scale(loss)"
        in caplog.messages[0]
    )


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["plain", "exact", "speculative"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["tokens.weight", "blocks.2.up.bias", "norm.weight"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_scale(
    name: str, value: float, update: str, wrap: Callable[..., infinity.Engine]
) -> None:
    model = transformer()
    spoiler = Spoiler(model, name, value)
    engine = wrap(model, precision="fp16", update=update)
    optimizer = infinity.AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=1.0, loss_scaler=infinity.LossScaler(2.0**10)
    )
    twin = transformer()
    reference = wrap(twin, precision="fp16", update="plain")
    expected = infinity.AdamW(
        twin.parameters(), lr=1e-2, max_grad_norm=1.0, loss_scaler=infinity.LossScaler(2.0**10)
    )
    scales = []
    for number in range(8):
        spoiler.armed = number in (0, 2, 3, 6)
        before = contents(engine)
        counts, scale = dict(optimizer._steps), optimizer.loss_scaler.scale
        backward(model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scaler.scale)
        assert (
            optimizer.grad_norm is not None and math.isfinite(optimizer.grad_norm)
        ) is not spoiler.armed
        engine.drain()
        assert equal(before, contents(engine)) == spoiler.armed
        assert (counts == optimizer._steps) == spoiler.armed
        if not spoiler.armed:
            expected.loss_scaler.scale = scale
            backward(twin, expected, number)
            expected.step()
            expected.zero_grad()
            assert optimizer.grad_norm == expected.grad_norm
            assert equal(contents(engine), contents(reference))
    # The first is borne.
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**7, 2.0**7]
    assert (
        optimizer.skipped_steps
        == optimizer.loss_scaler.skipped
        == engine.report().skipped_steps
        == 4
    )
    assert engine.report().steps == 4


PARAMETERS = [name for name, _ in transformer().named_parameters()]


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_parameter_in_any_micro_batch_of_any_step(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is left is what training without the bad steps gives. bf16 loses nothing to a scale, so
    the scales need not agree."""
    accumulation = data.draw(st.integers(1, 2))
    bad = data.draw(
        st.dictionaries(st.integers(0, 4), st.integers(0, accumulation - 1), min_size=1, max_size=4)
    )
    value = data.draw(st.sampled_from([math.inf, math.nan]))
    name = data.draw(st.sampled_from(PARAMETERS))
    max_grad_norm = data.draw(st.sampled_from([None, 0.5, 1e6]))
    options = {
        "gradients": data.draw(st.sampled_from(["cpu", "nvme", "gpu"])),
        "optimizer": data.draw(st.sampled_from(["cpu", "nvme"])),
        "copy_on_write": data.draw(st.booleans()),
        "update": data.draw(st.sampled_from(["exact", "auto"])),
    }
    if options["copy_on_write"] and options["optimizer"] == "nvme":
        options["update"] = "speculative"
    outcomes = []
    for spoils in (True, False):
        model = transformer()
        spoiler = Spoiler(model, name, value)
        mine = options if spoils else {"update": "plain"}
        config = config_of(
            nvme=tmp_path_factory.mktemp("nvme"),
            gpu_memory="4MiB",
            cpu_memory="8MiB",
            precision="bf16",
            poison=True,
            **mine,
        )
        with infinity.engine(infinity.wrap(model, config)) as engine:
            scaler = infinity.LossScaler(2.0**30, window=2, hysteresis=1) if spoils else None
            optimizer = infinity.AdamW(
                model.parameters(), lr=1e-2, max_grad_norm=max_grad_norm, loss_scaler=scaler
            )
            for step in (number for number in range(5) if spoils or number not in bad):
                for part in range(accumulation):
                    spoiler.armed = spoils and bad.get(step) == part
                    backward(model, optimizer, 10 * step + part)
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append(
                (
                    contents(engine),
                    {int(state["step"]) for state in optimizer.state_dict()["state"].values()},
                )
            )
            assert optimizer.skipped_steps == (len(bad) if spoils else 0)
    assert equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def test_the_scale_falls_until_fp16_can_hold_the_gradients(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap(transformer(), precision="fp16")
    optimizer = infinity.AdamW(engine.model.parameters(), loss_scaler=infinity.LossScaler(2.0**24))
    train(engine.model, optimizer, range(20))
    assert 0 < optimizer.skipped_steps < 15
    assert optimizer.loss_scaler.scale == 2.0 ** (24 - optimizer.skipped_steps + 1)
    assert all(bool(value.isfinite().all()) for value in engine.state_dict().values())


def test_the_smallest_scale_names_the_first_parameter(wrap: Callable[..., infinity.Engine]) -> None:
    model = transformer()
    spoilers = [
        Spoiler(model, name, math.nan) for name in ("blocks.3.down.weight", "blocks.1.norm2.bias")
    ]
    engine = wrap(model, precision="fp16")
    scaler = infinity.LossScaler(2.0**5, hysteresis=1, minimum=2.0**3)
    optimizer = infinity.AdamW(model.parameters(), loss_scaler=scaler)
    train(model, optimizer, range(2))
    before = contents(engine)
    for spoiler in spoilers:
        spoiler.armed = True
    train(model, optimizer, range(2))
    assert scaler.scale == 2.0**3
    text = (
        "the gradient of blocks.1.norm2.bias is not finite at the smallest loss scale, "
        "8 (skipped step 5); the model"
    )
    with pytest.raises(infinity.NonFiniteError, match=f"^{re.escape(text)}") as caught:
        train(model, optimizer, range(1))
    assert caught.value.parameter == "blocks.1.norm2.bias"
    assert equal(before, contents(engine))
    optimizer.zero_grad()
    for spoiler in spoilers:
        spoiler.armed = False
    train(model, optimizer, range(1))  # the engine goes on
    assert not equal(before, contents(engine))


def test_a_scale_that_changes_between_micro_batches(wrap: Callable[..., infinity.Engine]) -> None:
    """A gradient knows by what its loss was scaled, so a micro-batch may be scaled differently or
    not at all."""
    norms = []
    for scales in ((1.0, 1.0, 1.0), (1.0, 2.0**8, 2.0**8), (2.0**8, 1.0, 2.0**9)):
        engine = wrap(transformer(), precision="bf16")
        optimizer = infinity.AdamW(engine.model.parameters(), max_grad_norm=1e9)
        for number, scale in enumerate(scales):
            optimizer.loss_scaler = None if scale == 1.0 else infinity.LossScaler(scale)
            backward(engine.model, optimizer, number)
        norms.append(
            (engine.clip_grad_norm_(1e9), engine.gradient(engine.model.norm.weight).float())
        )
    assert all(
        norm == norms[0][0] and torch.equal(gradient, norms[0][1]) for norm, gradient in norms
    )


class Checkpointed(nn.Module):
    """Nothing but checkpointed blocks, so that in a re-entrant backward nothing of ours happens
    outside of the inner ones."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_scale_reaches_through_recomputation(
    use_reentrant: bool, wrap: Callable[..., infinity.Engine]
) -> None:
    """A re-entrant checkpoint runs a backward inside of the backward, whose end is not that of the
    scaled one."""
    outcomes = []
    for scaler in (None, infinity.LossScaler(2.0**20)):
        engine = wrap(Checkpointed(use_reentrant))
        optimizer = infinity.AdamW(
            engine.model.parameters(), lr=1e-3, max_grad_norm=0.5, loss_scaler=scaler
        )
        for number in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).requires_grad_()
            optimizer.scale(engine.model(x).pow(2).mean()).backward()
            assert {unit.gradients.loss_scale for unit in engine.units} == {
                1.0 if scaler is None else scaler.scale
            }
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(contents(engine))
    assert equal(*outcomes)


def test_a_scaled_backward_that_was_cut_off(wrap: Callable[..., infinity.Engine]) -> None:
    model = transformer()
    engine = wrap(model, precision="bf16")
    plain = infinity.AdamW(model.parameters())
    plain.loss_scaler = infinity.LossScaler()
    seen: list[bool] = []

    def fail(gradient: torch.Tensor) -> None:
        seen.append(True)
        raise ArithmeticError("made to fail")

    handle = model.blocks[0].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    loss = model(**text_batch(0)).loss
    with pytest.raises(ArithmeticError):
        plain.scale(loss).backward()
    assert seen
    handle.remove()
    plain.zero_grad()
    model(**text_batch(0)).loss.backward()
    assert {unit.gradients.loss_scale for unit in engine.units} == {1.0}


def test_what_is_read_of_scaled_gradients_is_not_scaled(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    optimizer = infinity.AdamW(model.parameters(), loss_scaler=infinity.LossScaler())
    backward(model, optimizer, 0)
    plain(**text_batch(0)).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(engine.gradient(parameter), dict(plain.named_parameters())[name].grad)


def test_the_state_of_the_scale_is_saved_with_the_optimizer(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model = transformer()
    spoiler = Spoiler(model, "norm.weight", math.inf)
    engine = wrap(model, precision="fp16")
    optimizer = infinity.AdamW(
        model.parameters(), loss_scaler=infinity.LossScaler(2.0**12, window=7)
    )
    spoiler.armed = True
    train(model, optimizer, range(3))
    spoiler.armed = False
    train(model, optimizer, range(3, 9))
    saved, weights = optimizer.state_dict(), engine.state_dict()
    torch.optim.AdamW(transformer().parameters()).load_state_dict(saved)  # torch ignores it
    other = transformer()
    other.load_state_dict(weights)
    wrap(other, precision="fp16")
    second = infinity.AdamW(other.parameters(), loss_scaler=infinity.LossScaler(2.0**12, window=7))
    second.load_state_dict(saved)
    assert (second.loss_scaler.scale, second.loss_scaler.skipped) == (2.0**10, 3)
    train(other, second, range(1))
    assert second.loss_scaler.scale == 2.0**11  # the seventh good step in a row


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_bf16_skips_if_asked(
    update: str, wrap: Callable[..., infinity.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    model = transformer()
    spoiler = Spoiler(model, "blocks.1.up.weight", math.nan)
    engine = wrap(model, precision="bf16", update=update)
    optimizer = infinity.AdamW(model.parameters(), skip_nonfinite=True)
    assert optimizer.loss_scaler is None
    train(model, optimizer, range(3))
    before = contents(engine)
    spoiler.armed = True
    train(model, optimizer, range(2))
    assert equal(before, contents(engine))
    assert optimizer.skipped_steps == engine.report().skipped_steps == 2
    assert caplog.messages == [
        f"step {n} is skipped: the gradient of blocks.1.up.weight is not finite" for n in (4, 5)
    ]
    spoiler.armed = False
    train(model, optimizer, range(3, 5))
    assert not equal(before, contents(engine))
    assert all(bool(value.isfinite().all()) for value in engine.state_dict().values())


def test_bf16_takes_the_step_and_says_so_if_not(
    wrap: Callable[..., infinity.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    model = transformer()
    spoiler = Spoiler(model, "blocks.1.up.weight", math.inf)
    engine = wrap(model, precision="bf16")
    optimizer = infinity.AdamW(model.parameters(), max_grad_norm=1.0)
    train(model, optimizer, range(1))
    spoiler.armed = True
    before = contents(engine)
    text = "the gradient norm of step 2 is inf; the gradient of blocks.1.up.weight is not finite"
    backward(model, optimizer, 0)
    assert engine.clip_grad_norm_(1.0) == math.inf
    assert caplog.messages == [text]
    optimizer.zero_grad()
    train(model, optimizer, range(1))
    assert caplog.messages == [text, text]
    assert not equal(before, contents(engine))
    assert optimizer.skipped_steps == engine.report().skipped_steps == 0


# torch.amp.GradScaler


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_grad_scaler_of_torch(update: str, wrap: Callable[..., infinity.Engine]) -> None:
    """Skips what it skips with a torch optimizer, and rescales as it does; with a scheduler that
    patches `step`."""
    models = [transformer(), transformer()]
    spoilers = [Spoiler(model, "norm.weight", math.inf) for model in models]
    engine = wrap(models[0], update=update)
    optimizers = [
        infinity.AdamW(models[0].parameters(), lr=1e-3, eps=1e-6, max_grad_norm=1e9),
        torch.optim.AdamW(models[1].parameters(), lr=1e-3, eps=1e-6),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in models]
    for number in range(7):
        norms = []
        for model, spoiler, optimizer, scheduler, scaler in zip(
            models, spoilers, optimizers, schedulers, scalers, strict=True
        ):
            spoiler.armed = number in (1, 2)
            scaler.scale(model(**text_batch(number)).loss).backward()
            if model is models[1]:
                scaler.unscale_(optimizer)
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
                scaler.step(optimizer)
            else:
                steps = engine.report().steps
                scaler.step(optimizer)
                skipped = engine.report().steps == steps
                norms.append(math.inf if skipped else optimizer.grad_norm)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6) or not math.isfinite(norms[1])
    assert engine.report().steps == 5
    for name, value in models[1].state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


class Stage(torch.autograd.Function):
    """Keeps the graph of what it runs, whose backward is run by this one's: as between stages of a
    pipeline."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = run(ctx.x)
        return ctx.y.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.autograd.backward(ctx.y, gradient)
        return ctx.x.grad, None


class Staged(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))) for _ in range(2)
        )
        self.nested = nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return Stage.apply(x, self.second) if self.nested else self.second(x)


def test_a_backward_inside_of_a_scaled_one_inherits_its_scale(
    wrap: Callable[..., infinity.Engine],
) -> None:
    gradients = []
    for nested in (False, True):
        engine = wrap(Staged(nested))
        optimizer = infinity.AdamW(
            engine.model.parameters(), loss_scaler=infinity.LossScaler(2.0**16)
        )
        optimizer.scale(engine.model(torch.ones(2, 16)).square().mean()).backward()
        assert {unit.gradients.loss_scale for unit in engine.units} == {2.0**16}
        gradients.append([engine.gradient(parameter) for parameter in engine.model.parameters()])
        engine.model.zero_grad()
        engine.model(torch.ones(2, 16)).square().mean().backward()
        assert {unit.gradients.loss_scale for unit in engine.units} == {1.0}
    assert all(map(torch.equal, *gradients))
