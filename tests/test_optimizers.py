"""The optimizer family: the formulas, state dicts and refusals of torch, with states that the engine keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import text_batch, transformer
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []

    def make(model: nn.Module, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        settings = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "poison": True} | options
        models.append(infinity.wrap(model, infinity.Config(nvme=folder, **settings)))
        return infinity.engine(model)

    yield make
    for model in models:
        infinity.engine(model).close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        model(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def close_to(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


FAMILY: dict[str, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer], dict[str, Any], str]] = {
    "adam": (infinity.Adam, torch.optim.Adam, {"lr": 1e-3, "eps": 1e-6}, "adam"),
    "decay": (infinity.Adam, torch.optim.Adam, {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}, "adam"),
    "adamw": (infinity.AdamW, torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}, "adam"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_each_follows_torch(name: str, wrap: Callable[..., infinity.Engine]) -> None:
    mine, theirs, settings, _ = FAMILY[name]
    model, plain = transformer(), transformer()
    engine = wrap(model)
    groups = [
        [{"params": list(m.blocks.parameters())}, {"params": [m.tokens.weight], "lr": 3e-3, "weight_decay": 0.02}]
        for m in (model, plain)
    ]
    optimizer, expected = mine(groups[0], **settings), theirs(groups[1], **settings)
    train(model, optimizer, range(6))
    train(plain, expected, range(6))
    close_to(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", FAMILY)
def test_states_go_to_torch_and_come_from_torch(name: str, wrap: Callable[..., infinity.Engine]) -> None:
    mine, theirs, settings, _ = FAMILY[name]
    model, plain = transformer(), transformer()
    engine = wrap(model)
    optimizer, expected = mine(model.parameters(), **settings), theirs(plain.parameters(), **settings)
    train(model, optimizer, range(3))
    train(plain, expected, range(3))
    ours, torchs = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert ours.keys() == torchs.keys()
    assert all(torchs[number].keys() <= ours[number].keys() for number in torchs)
    reached = engine.state_dict()
    other, copied = transformer(), transformer()
    for target in (other, copied):
        target.load_state_dict(reached)
    second = wrap(other)
    back, forth = mine(other.parameters()), theirs(copied.parameters())
    back.load_state_dict(expected.state_dict())
    forth.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, back), (copied, forth)):
        train(m, o, range(3, 6))
    close_to(second.state_dict(), copied.state_dict())
    close_to(engine.state_dict(), copied.state_dict())


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "betas"])
def test_a_value_out_of_range_in_a_group_is_refused(name: str, wrap: Callable[..., infinity.Engine]) -> None:
    model = transformer()
    wrap(model)
    value: Any = (0.9, 1.0) if name == "betas" else -1.0
    with pytest.raises(infinity.ConfigError, match=rf"^AdamW: {name}=.* is out of range$"):
        infinity.AdamW([{"params": model.parameters(), name: value}])
