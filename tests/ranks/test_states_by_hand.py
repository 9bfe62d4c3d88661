"""`optimizer.state` on two ranks: all of them read and write alike."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks

STAGES = (0, 2, 3)


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for stage in STAGES:
        found = [play(stage, where / f"{stage}{by_hand}", rank, by_hand) for by_hand in (0, 1)]
        torch.save(found, where / f"{stage}_{rank}.pt")


def play(stage: int, where: Path, rank: int, by_hand: int) -> dict[str, Any]:
    """Train, change states by `infinity.set` or in `optimizer.state`, and train."""
    where.mkdir(exist_ok=True)
    memory = {"gpu_memory": 4 << 20, "cpu_memory": 8 << 20, "cache": 0}
    on_gpu = {"parameters": "gpu", "gradients": "gpu"} if stage == 2 else {}
    model = infinity.wrap(
        transformer(), config_of(nvme=where, precision="fp32", stage=stage, **memory, **on_gpu)
    )
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with contextlib.closing(infinity.engine(model)) as engine:
        train(model, optimizer, rank, 2)
        tokens, norm = model.tokens.weight, model.norm.weight
        found = {"read": infinity.get(tokens, "exp_avg")}
        if by_hand:
            found["read"] = optimizer.state[tokens]["exp_avg"].clone()
            optimizer.state[tokens]["exp_avg"].mul_(0.5)
            optimizer.state[tokens]["exp_avg_sq"][1:4] = 0.25
            optimizer.state_dict()["state"][number_of(optimizer, norm)]["exp_avg"].zero_()
        else:
            infinity.set(tokens, "exp_avg", infinity.get(tokens, "exp_avg") * 0.5)
            square = infinity.get(tokens, "exp_avg_sq")
            square[1:4] = 0.25
            infinity.set(tokens, "exp_avg_sq", square)
            infinity.set(norm, "exp_avg", torch.zeros(norm.shape))
        kept = optimizer.state_dict()["state"][0]["exp_avg"]
        train(model, optimizer, rank, 2)
        with pytest.raises(infinity.ShardedParameterError, match="out of date"):
            kept.norm()
        if by_hand:
            optimizer.state.clear()
        else:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved | {"state": {}})
        assert not optimizer.state
        train(model, optimizer, rank, 2)
        assert optimizer.state[tokens]["step"] == 2
        return found | {name: value.clone() for name, value in engine.state_dict().items()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        model(**text_batch(RANKS * step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def number_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """The number of a parameter in a state dict."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    return next(number for number, each in enumerate(members) if each is parameter)


def test_what_is_done_to_states_is_what_infinity_set_does(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks("states") == ["done"] * RANKS
    for stage in STAGES:
        runs = [run for rank in range(RANKS) for run in torch.load(tmp_path / f"{stage}_{rank}.pt")]
        for run in runs[1:]:
            assert run.keys() == runs[0].keys()
            for name, value in runs[0].items():
                assert torch.equal(run[name], value), (stage, name)
