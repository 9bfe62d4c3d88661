"""Models in the smallest budgets that hold them, of which nothing may be in use at the end of a
test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from support.configs import config_of

WIDTH = 32
MEMORY = {"nvme": [], "optimizer": "cpu", "gpu_memory": 1 << 26, "cpu_memory": 1 << 26}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "nvme, poisoned": {"poison": True},
    "nvme, room for all": {"gpu_memory": 1 << 26, "cpu_memory": 1 << 26},
    "host": MEMORY | {"parameters": "cpu"},
    "device": MEMORY | {"parameters": "gpu"},
}
Wrap = Callable[..., nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


@contextmanager
def wrapping(where: Path) -> Iterator[Wrap]:
    """Gives a function that wraps a model, with the smallest budgets where the placement names
    none; closes what it wrapped."""
    made: list[nn.Module] = []

    def make(model: nn.Module, placement: dict[str, Any], **options: Any) -> nn.Module:
        directory = where / str(len(made))
        directory.mkdir()
        values: dict[str, Any] = {
            "nvme": [directory],
            "gpu_memory": 1,
            "cpu_memory": 1,
            "threads": 1,
        } | placement
        units = options.pop("units", None)
        while True:
            try:
                made.append(infinity.wrap(model, config_of(**(values | options)), units=units))
                return model
            except infinity.BudgetError as error:
                name, smallest = re.search(
                    r"smallest (\w+) that works is (\d+)", str(error)
                ).groups()  # type: ignore[union-attr]
                values[name] = int(smallest)

    yield make
    for model in made:
        engine = infinity.engine(model)
        engine.drain()
        for unit in engine.units:
            assert unit.data.shown == 0, unit.facts.name
            assert all(block.copy.pins == 0 for block in unit.blocks.values()), unit.facts.name
        engine.close()
