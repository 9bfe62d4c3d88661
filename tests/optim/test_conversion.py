"""An optimizer of torch and what it is converted to compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

import infinity
from infinity.optim.conversion import algorithm_for, converted, redirect

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, tuple[Make, str, str]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2), "adam", "AdamW"),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3), "adam", "Adam"),
    "adam whose decay is decoupled": (
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
        "adam",
        "AdamW",
    ),
    "groups of both": (
        lambda p: torch.optim.Adam(
            [
                {"params": p[:1], "decoupled_weight_decay": True},
                {"params": p[1:], "decoupled_weight_decay": False},
            ],
            lr=1e-2,
            weight_decay=0.3,
        ),
        "other",
        "Adapted",
    ),
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), "other", "Adapted"),
    "momentum in one group": (
        lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=1e-2),
        "momentum",
        "SGD",
    ),
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2), "sgd", "SGD"),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-2), "adagrad", "Adagrad"),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-2), "other", "Adapted"),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """One inside of another."""
    last = LambdaLR(optimizer, lambda step: 0.5**step)
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=1), last], milestones=[1])


@pytest.mark.parametrize("name", KINDS)
def test_they_compute_the_same_under_a_schedule(name: str) -> None:
    make, algorithm, kind = KINDS[name]
    plain, model = build(), build()
    theirs = make(list(plain.parameters()))
    train(plain, theirs, schedule(theirs))
    before = make(list(model.parameters()))
    scheduler = schedule(before)
    assert algorithm_for(before) == algorithm
    infinity.wrap(model, infinity.Config(algorithm=algorithm))
    ours = converted(before)
    redirect(scheduler, before, ours)
    assert type(ours).__name__ == kind
    with contextlib.closing(infinity.engine(model)) as engine:
        train(model, ours, scheduler)
        for parameter, expected in zip(
            engine.state_dict().values(), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-5, atol=1e-6)
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]


def test_a_subclass_may_compute_something_else() -> None:
    class Louder(torch.optim.AdamW):
        pass

    assert algorithm_for(Louder(build().parameters())) == "other"


def test_what_is_none_is_refused() -> None:
    wrong: Any = "adamw"
    with pytest.raises(infinity.ConfigError, match="is no optimizer; give one of infinity or torc"):
        converted(wrong)
