"""Two ranks train a model whose weights lie in tiles, which they share in each ZeRO stage."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.modules import division
from infinity.sharding.tiles import TiledWeight, named_wholes
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks

STAGES = (0, 1, 2, 3)
STEPS = 2


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for stage in STAGES:
        torch.save(globals()[task](stage, where, rank), where / f"{stage}_{rank}.pt")


def configured(stage: int, where: Path, gpu_memory: int) -> infinity.Config:
    (where / str(stage)).mkdir(exist_ok=True)
    on_gpu = {"parameters": "gpu", "gradients": "gpu"} if stage in (1, 2) else {}
    return config_of(
        **on_gpu,
        nvme=where / str(stage),
        gpu_memory=gpu_memory,
        cpu_memory=8 << 20,
        cache=0,
        precision="fp32",
        stage=stage,
    )


def trained(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """What a model in tiles has after some steps, and a part of it."""
    model = infinity.tile(transformer(), "2KiB")
    infinity.wrap(model, configured(stage, where, 4 << 20))
    with contextlib.closing(infinity.engine(model)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            model(**text_batch(RANKS * step + rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.save_checkpoint(where / f"checkpoint{stage}", optimizer)
        weights = dict(engine.state_dict())
        moments = {name: infinity.get(p, "exp_avg") for name, p in named_wholes(model)}
        model.load_state_dict({name: value + 1 for name, value in weights.items()})
        engine.load_checkpoint(where / f"checkpoint{stage}", optimizer)
        again = dict(model.state_dict())
        return {"weights": weights, "moments": moments, "again": again}


def tiled_by_wrap(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """The names after a `wrap` that has to make units smaller, in one stage."""
    if stage < 3:
        return {}
    before, division.LEAST_SPLIT = division.LEAST_SPLIT, 2 << 10
    try:
        model = infinity.wrap(transformer(), configured(stage, where, 96 << 10))
    finally:
        division.LEAST_SPLIT = before
    with contextlib.closing(infinity.engine(model)):
        loss = model(**text_batch(rank)).loss
        loss.backward()
        names = [name for name, _ in model.named_parameters()]
        return {"names": names, "loss": loss.detach()}


def results(on_ranks: OnRanks, task: str, where: Path) -> list[list[Any]]:
    assert on_ranks(task) == ["done"] * RANKS
    return [[torch.load(where / f"{stage}_{rank}.pt") for rank in range(RANKS)] for stage in STAGES]


def plain() -> dict[str, Any]:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        losses = [model(**text_batch(RANKS * step + rank)).loss for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.timeout(240)
def test_ranks_train_what_one_does(on_ranks: OnRanks, tmp_path: Path) -> None:
    """And a checkpoint of theirs loads on one rank without tiles, with the same bits."""
    expected = plain()
    for stage, found in enumerate(results(on_ranks, "trained", tmp_path)):
        for name, value in expected.items():
            assert torch.equal(found[0]["weights"][name], found[1]["weights"][name]), name
            torch.testing.assert_close(found[0]["weights"][name], value, rtol=1e-3, atol=1e-3)
            for rank in found:
                assert torch.equal(rank["again"][name], rank["weights"][name]), name
        model = infinity.wrap(transformer(), infinity.Config(gpu_memory="8MiB", cpu_memory="8MiB"))
        optimizer = infinity.AdamW(model.parameters())
        with infinity.engine(model) as engine:
            engine.load_checkpoint(tmp_path / f"checkpoint{stage}", optimizer)
            for name, value in engine.state_dict().items():
                assert torch.equal(value, found[0]["weights"][name]), name
            for name, parameter in model.named_parameters():
                moment = infinity.get(parameter, "exp_avg")
                assert torch.equal(moment, found[0]["moments"][name]), name


@pytest.mark.timeout(240)
def test_ranks_make_the_same_units_smaller(on_ranks: OnRanks, tmp_path: Path) -> None:
    found = results(on_ranks, "tiled_by_wrap", tmp_path)[-1]
    assert found[0]["names"] == found[1]["names"]
    assert any("_tiles." in name for name in found[0]["names"])
    for rank in range(RANKS):
        expected = transformer()(**text_batch(rank)).loss
        torch.testing.assert_close(found[rank]["loss"], expected.detach())


def test_the_model_has_something_to_cut() -> None:
    model = infinity.tile(transformer(), "2KiB")
    assert sum(isinstance(p, TiledWeight) for _, p in named_wholes(model)) > 4
    assert isinstance(model, nn.Module)
