"""A gradient that is set before any backward fills all of its block on NVMe, padding too, so that a
read of it finds the checksums of what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from support.configs import config_of
from support.rank_group import RANKS, OnRanks

WIDTH = 600  # the last chunk of the second rank is nothing but padding


def work(task: str, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    (where / str(rank)).mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    config = config_of(
        nvme=where / str(rank),
        gradients="nvme",
        gpu_memory="18MiB",
        cpu_memory="64MiB",
        device="cpu",
        threads=1,
        cache=0,
        verify="always",
    )
    model = infinity.wrap(model, config, group=dist.group.WORLD, units=[nn.Linear])
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with infinity.engine(model) as engine:
        before = engine.state_dict()
        for _ in range(2):
            parameter = model[0].bias if task == "bias" else model[0].weight
            parameter.grad = torch.ones(parameter.shape)
            optimizer.step()
            optimizer.zero_grad()
        after = engine.state_dict()
    changed = f"0.{task}"
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name != changed)


@pytest.mark.parametrize("task", ["weight", "bias"])
def test_a_gradient_set_before_any_backward_is_read_as_it_was_written(
    task: str, on_ranks: OnRanks
) -> None:
    assert on_ranks(task) == ["done"] * RANKS
