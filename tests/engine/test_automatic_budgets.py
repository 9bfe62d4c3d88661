"""A directory is enough, and no configuration at all, too: what is free decides on the budgets, and
the log and the report say how."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.device import ComputeDevice
from infinity.free_memory import Memory
from support.discrete import DiscreteDevice
from support.rank_group import RANKS, OnRanks

pytestmark = [pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
BUILD = "infinity.build"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers on every machine."""
    monkeypatch.setattr(f"{BUILD}.ComputeDevice", lambda kind: ComputeDevice("cpu"))


@contextmanager
def trained(*arguments: Any) -> Iterator[tuple[list[float], infinity.Engine]]:
    """Losses, and the engine."""
    model = infinity.wrap(build(), *arguments)
    with infinity.engine(model) as engine:
        yield train(model, infinity.AdamW(model.parameters(), lr=1e-2)), engine


def tiers(engine: infinity.Engine) -> set[tuple[str, str]]:
    return {(kind.value, b.tier.name) for unit in engine.units for kind, b in unit.blocks.items()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(total, free)`: MiB of host memory."""

    def has(total: int, free: int) -> None:
        memory = Memory(total * MIB, free * MIB, "this machine")
        monkeypatch.setattr(f"{BUILD}.read_host", lambda: memory)

    return has


def test_a_model_alone_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"), trained() as (losses, engine):
        report = engine.report()
        assert {tier for _, tier in tiers(engine)} == {"cpu"}
        assert all(report.budgets[tier] >= report.peaks[tier] > 0 for tier in ("gpu", "cpu"))
        assert all(
            report.budget_sources[tier].startswith("auto: ") and "are free, less" in source
            for tier, source in report.budget_sources.items()
        )
        (line,) = [text for text in caplog.messages if "gpu_memory is" in text]
        for tier, source in report.budget_sources.items():
            assert f"{tier}_memory is " in line and f"({source})" in line
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_directory_is_enough_and_changes_no_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trained(infinity.Config(nvme=tmp_path)) as (automatic, engine):
        assert ("param", "nvme") in tiers(engine) and ("exp_avg", "nvme") in tiers(engine)
    caplog.clear()
    config = infinity.Config(nvme=tmp_path, gpu_memory="4MiB", cpu_memory="8MiB")
    with caplog.at_level(logging.INFO, "infinity"), trained(config) as (given, engine):
        report = engine.report()
        assert (report.budgets["gpu"], report.budgets["cpu"]) == (4 * MIB, 8 * MIB)
        assert report.budget_sources == {"gpu": "given", "cpu": "given"}
    assert not [text for text in caplog.messages if "gpu_memory is" in text]
    assert given == automatic


def test_what_is_free_is_divided(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine(total=20 << 10, free=16 << 10)
    with trained(infinity.Config(nvme=tmp_path)) as (_, engine):
        budgets = engine.report().budgets
        # Beside the reserve of 2 GiB, a quarter is for the computation.
        assert budgets["gpu"] + budgets["cpu"] == (14 << 30) * 3 // 4
        assert abs(budgets["gpu"] - budgets["cpu"] // 3) < MIB
    with trained(infinity.Config(nvme=tmp_path, cpu_memory="10%")) as (_, engine):
        assert engine.report().budgets["cpu"] == (16 << 30) // 10
        assert engine.report().budget_sources["cpu"] == "10% of the 16 GiB that are free"


def test_states_that_need_it_get_the_room_of_a_guess(machine: Callable[..., None]) -> None:
    """Of 512 KiB beside the reserve, three quarters are given to host memory already."""
    machine(total=1, free=1)
    everywhere = infinity.Config(
        parameters="gpu", gradients="gpu", optimizer="gpu", cpu_memory="384KiB"
    )
    with trained(everywhere) as (_, engine):
        assert engine.report().peaks["gpu"] == MIB // 8
    machine(total=1, free=0)
    with pytest.raises(infinity.BudgetError, match=r"^gpu_memory=0 B is too small"):
        infinity.wrap(build(), everywhere)


def test_half_of_a_gpu_is_left_to_the_computation(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(DiscreteDevice):
        def memory(self) -> Memory:
            return Memory(24 * MIB, 22 * MIB, "the GPU")

    monkeypatch.setattr(f"{BUILD}.ComputeDevice", Small)
    machine(total=8 << 10, free=6 << 10)
    config = infinity.Config(nvme=tmp_path, tuning=infinity.Tuning(gpu_cache=0, device="cpu"))
    with trained(config) as (_, engine):
        report = engine.report()
        assert (report.budgets["gpu"], report.budgets["cpu"]) == (11 * MIB, 4 << 30)
        assert report.budget_sources["gpu"] == "auto: half of the 22 MiB that are free"


def test_more_than_the_machine_has_is_refused(machine: Callable[..., None]) -> None:
    machine(total=16, free=16)
    model = build()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(
        infinity.BudgetError,
        match=(
            r"^cpu_memory=17825792 \(17 MiB\) is more than this machine has, 16777216 \(16 MiB\); "
            r"lower it, or leave it out for a part of what is free$"
        ),
    ):
        infinity.wrap(model, infinity.Config(gpu_memory="1MiB", cpu_memory="17MiB"))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


# Ranks


def work(task: None, where: Path, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(20 << 30, (16 - 4 * rank) << 30, "this machine")
        patch.setattr(f"{BUILD}.read_host", lambda: memory)
        patch.setattr(f"{BUILD}.ComputeDevice", lambda kind: ComputeDevice("cpu"))
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with trained(infinity.Config(nvme=where)) as (losses, engine):
            report = engine.report()
            found = {"budgets": report.budgets, "sources": report.budget_sources, "losses": losses}
    (where / f"result{rank}.json").write_text(json.dumps(found))


def test_ranks_of_a_node_share_what_is_free_and_agree(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(None) == ["done"] * RANKS
    found = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(RANKS)]
    for tier in ("gpu", "cpu"):
        (chosen,) = {each["budgets"][tier] for each in found}
        assert chosen > 0
        assert found[0]["sources"][tier].endswith(
            "among 2 ranks of this node; another rank has less"
        )
        assert found[1]["sources"][tier].endswith("among 2 ranks of this node")
    total = sum(each["budgets"][tier] for each in found for tier in ("gpu", "cpu"))
    assert total == (10 << 30) * 3 // 4, "of the 12 GiB that the second rank saw, 2 are the reserve"
    assert found[0]["losses"] == found[1]["losses"]
