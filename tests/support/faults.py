"""Faults of a drive at a moment of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.optim.step import UnitShare
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import Transformer, text_batch, transformer


class Run:
    """A wrapped model with little room, so that every step reads and writes, and its optimizer."""

    def __init__(
        self, directory: Path, smallest: Callable[..., dict[str, int]], **config: Any
    ) -> None:
        config = {"nvme": [directory], "precision": "bf16", "poison": True} | config
        config |= smallest(transformer(width=48), **config)
        self.model: Transformer = infinity.wrap(transformer(width=48), config_of(**config))
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)

    def forward(self, number: int) -> torch.Tensor:
        return self.model(**text_batch(number)).loss

    def step(self, number: int) -> float:
        loss = self.forward(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def states(self) -> dict[tuple[str, str], torch.Tensor]:
        """Every block of parameters and states, as it reads now."""
        units = self.engine.units
        return {
            (unit.facts.name, kind.value): unit.states.read(kind)
            for unit in units
            for kind in unit.blocks
            if kind is not Kind.GRAD
        }

    def pins(self) -> int:
        return sum(block.copy.pins for unit in self.engine.units for block in unit.blocks.values())


def fail_from_the_update_on(run: Run, **fault: int) -> None:
    """The norm is the last thing that a step asks before its update starts: let the drive fail from
    there on."""
    updater = run.optimizer.updater
    norm = updater.norm.of

    def norm_then_fail(shares: Sequence[UnitShare]) -> float:
        found = norm(shares)
        run.engine.io.set_faults(**fault)
        return found

    updater.norm.of = norm_then_fail  # type: ignore[method-assign]
