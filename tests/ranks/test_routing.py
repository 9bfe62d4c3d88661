"""Ranks whose data takes different ways through the model: a module that decides is one unit, and
so is gathered whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from support.configs import config_of
from support.rank_group import RANKS, OnRanks

WIDTH, EXPERTS, DEPTH, ROWS, STEPS = 32, 4, 3, 6, 4


class Experts(nn.Module):
    """Every row goes to the expert that the router likes best, as in 2101.03961 (without load
    balancing)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        self.used: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        likes = self.router(x).softmax(dim=-1)
        best, y = likes.argmax(dim=-1), torch.zeros_like(x)
        self.used = set(best.tolist())
        for number in sorted(self.used):
            rows = best == number
            y[rows] = self.experts[number](x[rows]) * likes[rows, number, None]
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Experts() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).pow(2).mean()


def parts(step: int) -> list[torch.Tensor]:
    """What each rank gets; far apart, so that the ranks like different experts."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(ROWS, WIDTH, generator=generator) + 2 * torch.randn(WIDTH, generator=generator)
        for _ in range(RANKS)
    ]


def train(
    directory: Path, rank: int | None, group: dist.ProcessGroup | None, **config: Any
) -> dict[str, Any]:
    """All parts of every batch alone, or one of them as `rank`."""
    directory.mkdir(exist_ok=True)
    values = {
        "nvme": directory,
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        "cache": 0,
        "poison": True,
    }
    values |= {"gpu_memory": "256KiB", "cpu_memory": "8MiB"} | config
    model = infinity.wrap(Model(), config_of(**values), group=group, units=[Experts])
    losses, used = [], []
    with infinity.engine(model) as engine:
        assert [unit.facts.name for unit in engine.units] == [
            "blocks.0",
            "blocks.1",
            "blocks.2",
            "out",
        ]
        optimizer = infinity.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
        for step in range(STEPS):
            for x in parts(step) if rank is None else [parts(step)[rank]]:
                loss = model(x) / (RANKS if rank is None else 1)
                loss.backward()
                losses.append(loss.item())
                used.append([sorted(block.used) for block in model.blocks])
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "used": used, "weights": engine.state_dict()}


def work(config: dict[str, Any], where: Path, rank: int) -> None:
    result = train(where / f"nvme{rank}", rank, dist.group.WORLD, **config)
    torch.save(result, where / f"result{rank}.pt")


@pytest.mark.usefixtures("one_thread")
def test_ranks_that_use_different_experts_are_one_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", None, None)
    on_gpu = {"parameters": "gpu", "gpu_memory": "1MiB"}
    # With stage 1 a rank's home of gradients holds what it had before, where only other ranks have
    # a gradient now.
    for config in (
        {},
        {"update": "speculative"},
        {"stage": 2} | on_gpu,
        {"stage": 1, "gradients": "gpu"} | on_gpu,
        {"stage": 1, "gradients": "cpu"} | on_gpu,
    ):
        assert on_ranks(config) == ["done"] * RANKS
        ranks = [
            torch.load(tmp_path / f"result{rank}.pt", weights_only=True) for rank in range(RANKS)
        ]
        assert any(
            mine != others
            for mine, others in zip(*(result["used"] for result in ranks), strict=True)
        )
        means = [
            sum(losses) / RANKS
            for losses in zip(*(result["losses"] for result in ranks), strict=True)
        ]
        expected = [sum(alone["losses"][RANKS * step :][:RANKS]) for step in range(STEPS)]
        assert means == pytest.approx(expected, rel=1e-5)
        for name, value in alone["weights"].items():
            for result in ranks:
                torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-6)
