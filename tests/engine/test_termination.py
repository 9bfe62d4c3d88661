"""Whether a program ends does not depend on where states live: what waits for an update has that
very update run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60, method="thread")]

WIDTH, DEPTH = 4096, 6
ROOMY = {"gpu_memory": 1 << 30, "cpu_memory": 1 << 30, "cache": 0}


class Bias(nn.Module):
    """Saves nothing for its backward, so torch lets a graph of it outlive a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Lookup(nn.Module):
    """An embedding saves indices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[0]))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(DEPTH)))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def over_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps with two graphs each, the second of which goes backward when the first one has been
    stepped."""
    for seed in range(2):
        model(inputs(seed)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for seed in range(2, 5):
        first, second = model(inputs(seed)).mean(), model(inputs(seed) + 1).mean()
        for graph in (first, second):
            graph.backward()
            optimizer.step()
            optimizer.zero_grad()


def wrapped(kind: type[nn.Module], **config: Any) -> nn.Module:
    """A model of `DEPTH` units in the smallest budgets that work, as the refusals name them."""
    budgets = {"gpu_memory": 0, "cpu_memory": 0}
    while True:
        try:
            return infinity.wrap(build(kind), config_of(**budgets | config), units=[kind])
        except infinity.BudgetError as refusal:
            found = re.search(r"smallest (\w+) that works is (\d+)", str(refusal))
            assert found is not None
            budgets[found[1]] = int(found[2])


PLACES: dict[str, dict[str, Any]] = {
    "all on nvme": {},
    "gradients on nvme": {"gradients": "nvme"},
    "parameters on nvme alone": {"optimizer": "cpu"},
    "states on nvme alone": {"parameters": "cpu"},
    "all in memory": {"parameters": "cpu", "optimizer": "cpu", "gradients": "cpu"},
    "exact": {"update": "exact"},
    "speculative": {"update": "speculative"},
    "plain": {"update": "plain"},
    "delayed": {"update": "delayed", "delayed_after": 1},
}


@pytest.mark.parametrize("kind", [Bias, Lookup])
@pytest.mark.parametrize("place", PLACES)
def test_a_graph_that_outlives_a_step_ends(
    place: str, kind: type[nn.Module], tmp_path: Path
) -> None:
    """With room for one unit its update waits for a place that only a forward would bring: the
    backward has it run."""
    plain = build(kind)
    over_a_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    config = {
        "nvme": [tmp_path],
        "algorithm": "sgd",
        "device": "cpu",
        "threads": 1,
        "poison": True,
    } | PLACES[place]
    found = []
    for budgets in ({}, ROOMY):
        model = wrapped(kind, **config, **budgets)
        with infinity.engine(model) as engine:
            over_a_step(model, infinity.SGD(model.parameters(), lr=0.1))
            found.append(engine.state_dict())
    tight, roomy = found
    for name, value in plain.state_dict().items():
        assert torch.equal(tight[name], roomy[name]), name
        if place != "delayed":
            torch.testing.assert_close(tight[name], value, rtol=1e-6, atol=1e-6)


Call = Callable[[infinity.Engine, nn.Module, torch.optim.Optimizer, Path], object]


def read(
    engine: infinity.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> object:
    with infinity.gathered(model[-1]):
        return model[-1].bias.sum().item()


def write(
    engine: infinity.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> object:
    with infinity.gathered(model[-1], write=True), torch.no_grad():
        return model[-1].bias.mul_(0.5).sum().item()


def checkpoint(
    engine: infinity.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> object:
    engine.save_checkpoint(directory / "saved", optimizer)
    return engine.load_checkpoint(directory / "saved", optimizer)


def take_over(
    engine: infinity.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> object:
    optimizer.load_state_dict(optimizer.state_dict())
    return None


def evaluate_the_last(
    engine: infinity.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> object:
    with torch.no_grad():
        return model[-1](inputs(9)).sum().item()


CALLS: dict[str, Call] = {
    "gathered": read,
    "gathered to write": write,
    "checkpoint": checkpoint,
    "load_state_dict": take_over,
    "evaluation of the last unit": evaluate_the_last,
    "state_dict": lambda engine, *_: engine.state_dict()["5.bias"].sum().item(),
    "zero_grad and step": lambda engine, model, optimizer, _: (
        engine.zero_grad(),
        optimizer.step(),
    ),
    "gradient": lambda engine, model, *_: engine.gradient(model[-1].bias),
    "clip_grad_norm_": lambda engine, *_: engine.clip_grad_norm_(1.0),
    "drain": lambda engine, *_: engine.drain(),
    "report": lambda engine, *_: engine.report().steps,
    "backward of the last unit": lambda engine, model, *_: model[-1](inputs(9)).mean().backward(),
    "freezing": lambda engine, model, *_: model[-1].requires_grad_(False) and None,
}


@pytest.mark.parametrize("update", ["exact", "speculative", "delayed"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_comes_right_after_a_step_ends(call: str, update: str, tmp_path: Path) -> None:
    """The updates of the units without a place are still to come then; the numbers do not depend on
    that."""
    found = []
    for name, budgets in (("tight", {}), ("roomy", ROOMY)):
        (tmp_path / name).mkdir()
        model = wrapped(
            Bias,
            nvme=[tmp_path / name],
            algorithm="momentum",
            device="cpu",
            threads=1,
            update=update,
            **budgets,
        )
        with infinity.engine(model) as engine:
            optimizer = infinity.SGD(model.parameters(), lr=0.1, momentum=0.9)
            seen = []
            for seed in range(4):
                model(inputs(seed)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(CALLS[call](engine, model, optimizer, tmp_path / name))
            found.append((seen, engine.state_dict()))
    (seen, tight), (expected, roomy) = found
    assert seen == expected
    assert all(torch.equal(tight[name], roomy[name]) for name in roomy)
