"""`infinity.initialize` trains as plain PyTorch does, with DeepSpeed's calling convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.deepspeed import Net, batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`infinity.initialize`; engines are destroyed at the end."""
    engines: list[Any] = []

    def initialize(**arguments: Any) -> tuple[Any, Any, Any, Any]:
        found = infinity.initialize(**arguments)
        engines.append(found[0])
        return found

    yield initialize
    for engine in engines:
        engine.destroy()


def plain_losses(
    model: nn.Module, steps: int, forwards: int = 1, clip: float = 0.0, lr: float = 1e-2
) -> list[float]:
    """Losses of a plain loop with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses = []
    for step in range(steps):
        for forward in range(forwards):
            loss = model(*batch(step * forwards + forward))
            losses.append(loss.item())
            (loss / forwards).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def engine_losses(engine: Any, steps: int) -> list[float]:
    """Losses of DeepSpeed's loop."""
    losses = []
    for number in range(steps):
        loss = engine(*batch(number))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_loop_has_the_losses_of_plain_pytorch(
    start: Start, tmp_path: Path, forwards: int, clip: float
) -> None:
    config = configuration(tmp_path, gradient_accumulation_steps=forwards, gradient_clipping=clip)
    engine, optimizer, loader, scheduler = start(model=net(), config=config)
    close(engine_losses(engine, 4 * forwards), plain_losses(net(), 4, forwards, clip))
    assert loader is None and scheduler is None
    assert engine.global_steps == 4 and engine.global_samples == 8 * forwards
    assert engine.optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer)


def test_attributes_are_those_of_the_model(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    assert isinstance(engine.module, Net)
    assert engine.first is engine.module.first
    assert next(iter(engine.state_dict())).startswith("module.")
    with pytest.raises(AttributeError, match="nothing_like_that"):
        engine.nothing_like_that  # noqa: B018
