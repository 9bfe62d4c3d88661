"""A small model that is trained, with blocks that are recomputed or not, and what shows it."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.models import Block, text_batch

LEAST: dict[str, Any] = {
    "parameters": "cpu",
    "optimizer": "cpu",
    "gpu_memory": "16MiB",
    "cpu_memory": "16MiB",
    "poison": True,
}


@contextmanager
def wrapped(model: nn.Module, discrete: bool = False, **config: Any) -> Iterator[infinity.Engine]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if discrete:
            patch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
        options = LEAST | {"nvme": folder, "device": "cpu"} | config
        with infinity.engine(infinity.wrap(model, config_of(**options))) as engine:
            yield engine


def counted(model: nn.Module) -> Counter[str]:
    """How often each block of `model` is called, from now on."""
    calls: Counter[str] = Counter()
    for name, block in model.named_modules():
        if isinstance(block, Block):
            block.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    return calls


def train(engine: infinity.Engine, steps: int = 2, order: str = "") -> list[torch.Tensor]:
    """Losses, gradients and states of some steps, each of two micro-batches; draws from seed 5."""
    torch.manual_seed(5)
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
    found: list[torch.Tensor] = []
    for step in range(steps):
        batches = [text_batch(2 * step), text_batch(2 * step + 1)]
        if order:
            found += infinity.accumulate(engine.model, batches, order=order)  # type: ignore[arg-type]
        else:
            for each in batches:
                loss = engine.model(**each).loss
                (loss / 2).backward()
                found.append(loss.detach())
        gradients = (engine.gradient(p) for p in engine.model.parameters())
        found += [each.clone() for each in gradients if each is not None]
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    return [*found, *engine.state_dict().values(), torch.get_rng_state()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    pairs = enumerate(zip(found, expected, strict=True))
    assert not [number for number, pair in pairs if not torch.equal(*pair)]


def names(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, each in model.named_modules() if isinstance(each, Block))


class Counting(nn.Module):
    """Changes what it holds in each forward, in all ways there are, and depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.plain_norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("fixed", torch.full((8,), 0.5))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
        seen.append(len(seen))
        self.count.add_(1)
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        y = self.linear(x) * self.count * self.fixed + self.average
        return x + self.plain_norm(self.norm(y)).tanh() * len(seen)


class CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[int] = []
        for block in self.blocks:
            x = block(x, seen)
        assert len(seen) == 3
        return x.square().sum()
