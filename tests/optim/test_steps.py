"""What one optimizer step takes in, and what a refused or failed one leaves behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency
from support.configs import config_of


class Raise(torch.autograd.Function):
    """The identity, whose backward fails while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Raise.armed:
            raise ArithmeticError("made to fail")
        return gradient


class Model(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Raise.apply(torch.relu(self.body(x))))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(seed))
    dtype = torch.bfloat16 if next(model.parameters()).dtype == torch.bfloat16 else torch.float32
    return model(x.to(dtype)).float().pow(2).mean()


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    engines = []

    def make(model: nn.Module, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(engines))
        folder.mkdir()
        settings = {
            "gpu_memory": "4MiB",
            "cpu_memory": "8MiB",
            "cache": 0,
            "poison": True,
        } | options
        engines.append(infinity.engine(infinity.wrap(model, config_of(nvme=folder, **settings))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_place_that_is_lost_before_its_update_takes_it_ends_no_update(
    wrap: Callable[..., infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of updates asks whether a unit has its place. Then another unit may take it."""
    model, other = nn.Linear(48, 48), nn.Linear(48, 48)
    other.load_state_dict(model.state_dict())
    engine, expected = wrap(model, update="exact"), wrap(other, update="exact")
    steps(other, infinity.AdamW(other.parameters(), lr=1e-2), range(1))
    weights = expected.state_dict()
    has_copy, answers, lost = Residency.has_copy, iter([True, False]), threading.Event()

    def lose_once(self: Residency, block: Block) -> bool:
        has = has_copy(self, block)
        if has and threading.current_thread().name == "infinity-updater":
            has = next(answers, True)
            if not has:
                lost.set()
        return has

    monkeypatch.setattr(Residency, "has_copy", lose_once)
    steps(model, infinity.AdamW(model.parameters(), lr=1e-2), range(1))
    assert lost.wait(60)
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())


def test_a_step_inside_of_gathered_is_refused_and_may_be_tried_again(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, other = Model(), Model()
    refused, plain = wrap(model), wrap(other)
    optimizers = [
        infinity.AdamW(m.parameters(), lr=1e-2, max_grad_norm=0.1) for m in (model, other)
    ]
    loss_of(model, 0).backward()
    with (
        infinity.gathered(model.body),
        pytest.raises(
            RuntimeError,
            match=r"^body cannot be updated inside of a forward or of infinity\.gathered",
        ),
    ):
        optimizers[0].step()
    optimizers[0].step()
    optimizers[0].zero_grad()
    steps(model, optimizers[0], range(1, 4))
    steps(other, optimizers[1], range(4))
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in refused.state_dict().items())


def test_a_clip_factor_belongs_to_the_gradients_it_was_computed_from(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, other = Model(), Model()
    clipped, plain = wrap(model), wrap(other)
    optimizers = [infinity.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    loss_of(model, 7).backward()
    clipped.clip_grad_norm_(1e-3)
    optimizers[0].zero_grad()  # the batch is thrown away, and its factor with it
    for m, optimizer in zip((model, other), optimizers, strict=True):
        steps(m, optimizer, range(3))
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in clipped.state_dict().items())


def test_one_clip_counts_for_every_optimizer_of_the_engine(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = Model(), Model()
    engine = wrap(model)
    mine = [
        infinity.AdamW(part.parameters(), lr=1e-2, eps=1e-2) for part in (model.body, model.head)
    ]
    theirs = [
        torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-2) for part in (plain.body, plain.head)
    ]
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(plain, seed).backward()
        norm = engine.clip_grad_norm_(1e-2)
        assert norm == pytest.approx(
            float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)), rel=1e-6
        )
        for optimizer in (*mine, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_the_norm_of_an_optimizer_is_that_of_its_units(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = Model(), Model()
    wrap(model)
    optimizer = infinity.AdamW(model.head.parameters(), lr=1e-2, max_grad_norm=1e-2)
    reference = torch.optim.AdamW(plain.head.parameters(), lr=1e-2)
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(plain, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        norm = float(nn.utils.clip_grad_norm_(plain.head.parameters(), 1e-2))
        reference.step()
        plain.zero_grad()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_a_backward_that_was_cut_off_leaves_what_it_brought(
    gradients: str, wrap: Callable[..., infinity.Engine]
) -> None:
    """As in torch: the head's gradient is there, the body has none, and nothing of the step before
    comes back."""
    model, plain = Model(), Model()
    engine = wrap(model, gradients=gradients)
    mine = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-2)
    steps(model, mine, range(1))
    steps(plain, theirs, range(1))
    Raise.armed = True
    try:
        for m in (model, plain):
            with pytest.raises(ArithmeticError):
                loss_of(m, 1).backward()
    finally:
        Raise.armed = False
    assert engine.gradient(model.body.weight) is None
    torch.testing.assert_close(engine.gradient(model.head.weight), plain.head.weight.grad)
    for optimizer in (mine, theirs):
        optimizer.step()
        optimizer.zero_grad()
    for m, optimizer in ((model, mine), (plain, theirs)):
        steps(m, optimizer, range(2, 4))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_gathered_write_keeps_the_masters_of_what_did_not_change(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engines, models = [], [Model(), Model()]
    for number, model in enumerate(models):
        engines.append(wrap(model, precision="bf16"))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        steps(model, optimizer, range(3))
        if number == 0:
            with infinity.gathered(model, write=True):
                pass
            with torch.no_grad(), infinity.gathered(model.body, write=True):
                model.body.weight[0, 0] = model.body.weight[0, 0]
        steps(model, optimizer, range(3, 8))
    first, second = (engine.state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_gathered_write_that_fails_is_said_and_never_hangs(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model = Model()
    engine = wrap(model)
    with (
        pytest.raises(infinity.NvmeError),
        torch.no_grad(),
        infinity.gathered(model.body, write=True),
    ):
        model.body.weight.add_(1)
        engine.io.set_faults(fail_write_at=0)
    engine.io.set_faults()
    with pytest.raises(infinity.EngineClosedError):
        loss_of(model, 0)


def test_loading_a_state_forgets_what_it_does_not_have(
    wrap: Callable[..., infinity.Engine],
) -> None:
    models = [Model(), Model()]
    engines = [wrap(model, precision="bf16") for model in models]
    optimizers = [infinity.AdamW(model.parameters(), lr=1e-3) for model in models]
    weights = engines[0].state_dict()
    fresh = copy.deepcopy(optimizers[0].state_dict())
    steps(models[0], optimizers[0], range(3))
    with torch.no_grad(), infinity.gathered(models[0], write=True):
        for name, parameter in models[0].named_parameters():
            parameter.copy_(weights[name])
    optimizers[0].load_state_dict(fresh)
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, range(5, 8))
    first, second = (engine.state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_refused_group_is_not_kept(wrap: Callable[..., infinity.Engine]) -> None:
    model = Model()
    wrap(model)
    optimizer = infinity.AdamW(model.head.parameters())
    with pytest.raises(infinity.ConfigError, match="no wrapped model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


def test_gradients_wait_for_the_update_that_still_reads_the_last_ones(
    wrap: Callable[..., infinity.Engine],
) -> None:
    """An embedding saves no parameter: the backward of a graph made before the step would overwrite
    what the update reads."""
    results = []
    for slow in (0.0, 4e6):
        torch.manual_seed(0)
        model = nn.Embedding(4096, 64)
        engine = wrap(model, cpu_memory="3MiB")
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        first, second = (model(torch.arange(part, 4096, 2)).pow(2).sum() for part in (0, 1))
        first.backward()
        engine.io.set_faults(bytes_per_second=slow)
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        results.append(engine.state_dict()["weight"])
    assert torch.equal(*results)


def test_sparse_gradients_are_taken(wrap: Callable[..., infinity.Engine]) -> None:
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(64, 16, sparse=sparse)
        engine = wrap(model)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(torch.arange(step, 30)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(engine.state_dict()["weight"])
    assert torch.equal(*results)


def test_a_loss_built_inside_of_gathered_may_go_backward_outside(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model, plain = Model(), Model()
    engine = wrap(model)
    with infinity.gathered(model):
        loss = (model.body.weight.pow(2).sum() * model.head.weight.square()).sum()
    loss.backward()
    (plain.body.weight.pow(2).sum() * plain.head.weight.square()).sum().backward()
    assert torch.equal(engine.gradient(model.body.weight), plain.body.weight.grad)
    assert torch.equal(engine.gradient(model.head.weight), plain.head.weight.grad)


def test_a_model_that_is_only_called_in_parts_is_traced_step_by_step(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model = Model()
    engine = wrap(model, update="exact")
    optimizer = infinity.AdamW(model.parameters())
    for seed in range(5):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(seed))
        model.head(model.body(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.plan().read > 0
    assert engine.report().read_per_parameter == engine.report().planned_read_per_parameter
