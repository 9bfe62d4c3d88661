"""Two ranks train a mixture of experts whose banks lie in tiles, with tokens for other experts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support.configs import config_of
from support.experts import mixture, tokens_of
from support.rank_group import RANKS, OnRanks

STAGES = (0, 3)


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for stage in STAGES:
        for size in ("whole", "13KiB"):
            torch.save(trained(stage, size, where, rank), where / f"{stage}_{size}_{rank}.pt")
    model = wrapped("eager", 3, "13KiB", where / "eager")
    engine, refused = (
        infinity.engine(model),
        pytest.raises(infinity.ConfigError, match="tiles of a"),
    )
    with contextlib.closing(engine), refused:
        model(input_ids=tokens_of(rank))


def wrapped(way: str, stage: int, size: str, where: Path) -> Any:
    where.mkdir(exist_ok=True)
    model = mixture("mixtral", way)
    if size != "whole":
        infinity.tile(model, size)
    return infinity.wrap(
        model,
        config_of(
            nvme=where,
            gpu_memory=4 << 20,
            cpu_memory=16 << 20,
            cache=0,
            precision="fp32",
            stage=stage,
        ),
    )


def trained(stage: int, size: str, where: Path, rank: int) -> dict[str, Any]:
    model = wrapped("grouped_mm", stage, size, where / f"{stage}{size}")
    with contextlib.closing(infinity.engine(model)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            ids = tokens_of(2 * step + rank)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(engine.state_dict())


@pytest.mark.timeout(240)
def test_ranks_have_the_bits_of_whole_banks(on_ranks: OnRanks, tmp_path: Path) -> None:
    """By `grouped_mm`; a loop over experts is refused, with the way out."""
    assert on_ranks("trained") == ["done"] * RANKS
    for stage in STAGES:
        for rank in range(RANKS):
            expected = torch.load(tmp_path / f"{stage}_whole_{rank}.pt")
            found = torch.load(tmp_path / f"{stage}_13KiB_{rank}.pt")
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (stage, name)
