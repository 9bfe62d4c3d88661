"""Gradients that users assign and keep on two ranks: they are averaged, checked and applied as in
plain PyTorch, or refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks

STAGES = (0, 1, 2, 3)


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for stage in STAGES:
        torch.save(globals()[task](stage, where, rank), where / f"{stage}_{rank}.pt")


def wrapped(stage: int, where: Path) -> Any:
    (where / str(stage)).mkdir(exist_ok=True)
    whole = {"parameters": "gpu", "gradients": "gpu"} if stage in (1, 2) else {"gradients": "nvme"}
    config = config_of(
        **whole,
        nvme=where / str(stage),
        gpu_memory=4 << 20,
        cpu_memory=8 << 20,
        cache=0,
        precision="fp32",
        stage=stage,
        verify="always",
    )
    return infinity.wrap(transformer(), config)


def value_of(weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return torch.linspace(-1, 1, weight.numel()).view(weight.shape) * factor


def change(model: Any, rank: int, optimizer: Any, backward: Any) -> dict[str, Any]:
    """What is done to the plain model, and on each rank."""
    found: dict[str, Any] = {}
    weight, other = model.tokens.weight, model.blocks[0].up.weight
    # Before any backward.
    weight.grad = value_of(weight)
    optimizer.step()
    optimizer.zero_grad()
    backward(0)
    kept = value_of(weight)
    weight.grad = kept
    kept.mul_(0.5)
    norms = [p.grad.norm() for p in (weight, other)]
    twin = model.blocks[1].up.weight
    other.grad, twin.grad = twin.grad, other.grad
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    found["norms"] = [float(norm) for norm in norms]
    found["kept"] = kept.clone()
    optimizer.zero_grad()
    backward(1)
    late = [p.grad.norm() for p in (weight, other)]
    backward(2)
    optimizer.step()
    found["late"] = [float(norm) for norm in late]
    return found


def changed(stage: int, where: Path, rank: int) -> dict[str, Any]:
    model = wrapped(stage, where)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

    def backward(number: int) -> None:
        model(**text_batch(2 * number + rank)).loss.backward()

    with contextlib.closing(infinity.engine(model)) as engine:
        found = change(model, rank, optimizer, backward)
        return found | {"weights": engine.state_dict()}


def refused(stage: int, where: Path, rank: int) -> str:
    model = wrapped(stage, where)
    with contextlib.closing(infinity.engine(model)):
        kept = value_of(model.tokens.weight)
        model.tokens.weight.grad = kept
        try:
            model(**text_batch(rank)).loss.backward()
        except infinity.ShardedParameterError as error:
            return str(error)
        return "taken"


def averaged(stage: int, where: Path, rank: int) -> list[torch.Tensor]:
    """Ranks that have models of their own average gradients by hand."""
    folder = where / f"own{stage}_{rank}"
    folder.mkdir()
    config = config_of(nvme=folder, gpu_memory=4 << 20, cpu_memory=8 << 20, precision="fp32")
    model = infinity.wrap(transformer(), config, group=None)
    with contextlib.closing(infinity.engine(model)):
        model(**text_batch(rank)).loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        found = [parameter.grad.clone() for parameter in model.parameters()]
        dist.broadcast(model.norm.weight.grad.view(-1)[:2], 1)
        pending = dist.all_reduce(model.norm.weight.grad, async_op=True)
        pending.wait()
        return [*found, model.norm.weight.grad.clone()]


def results(on_ranks: OnRanks, task: str, where: Path) -> list[list[Any]]:
    assert on_ranks(task) == ["done"] * RANKS
    return [[torch.load(where / f"{stage}_{rank}.pt") for rank in range(RANKS)] for stage in STAGES]


@pytest.mark.timeout(240)
def test_gradients_are_assigned_kept_and_exchanged(on_ranks: OnRanks, tmp_path: Path) -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(number: int) -> None:
        losses = [model(**text_batch(2 * number + rank)).loss for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()

    expected = change(model, 0, optimizer, backward)
    for stage in results(on_ranks, "changed", tmp_path):
        for found in stage:
            for name in ("norms", "late"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4)
            torch.testing.assert_close(found["kept"], expected["kept"], rtol=1e-4, atol=1e-6)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(240)
def test_a_backward_into_a_tensor_that_was_assigned_is_refused(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for stage in results(on_ranks, "refused", tmp_path):
        assert all("parameter.grad = tensor.clone()" in said for said in stage)


@pytest.mark.timeout(240)
def test_a_collective_changes_a_gradient(on_ranks: OnRanks, tmp_path: Path) -> None:
    model = transformer()
    losses = [model(**text_batch(rank)).loss for rank in range(RANKS)]
    (sum(losses) / RANKS).backward()
    expected = [p.grad for p in model.parameters()]
    expected.append(model.norm.weight.grad * 2)
    for stage in results(on_ranks, "averaged", tmp_path):
        for found in stage:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
