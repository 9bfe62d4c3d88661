"""Two ranks whose engines sleep between steps: the bits stay, and all of them sleep or none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks

PLACES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 3, host": {"stage": 3, "parameters": "cpu", "optimizer": "cpu"},
    "stage 2": {"stage": 2, "parameters": "gpu"},
    "stage 1": {"stage": 1, "parameters": "gpu", "optimizer": "cpu"},
    "durable": {"stage": 3, "durability": "step"},
}


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for name, options in PLACES.items():
        for way in ("slept", "awake"):
            folder = where / f"{name} {way}"
            found = trained(folder, rank, way == "slept", options)
            torch.save(found, where / f"{name} {way} {rank}.pt")


def trained(folder: Path, rank: int, sleeps: bool, options: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    budgets = {"gpu_memory": 4 << 20, "cpu_memory": 16 << 20, "poison": True}
    model = infinity.wrap(transformer(), config_of(nvme=folder, **budgets | options))
    with contextlib.closing(infinity.engine(model)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        for step in range(3):
            model(**text_batch(2 * step + rank)).loss.backward()
            if sleeps and step == 1:
                with pytest.raises(RuntimeError, match="waits for a step; call"):
                    engine.sleep()
            optimizer.step()
            optimizer.zero_grad()
            if sleeps and step == 1:
                refuse_on_one(engine, rank)
            if sleeps:
                engine.sleep()
                with pytest.raises(infinity.EngineClosedError, match="the engine sleeps"):
                    model(**text_batch(0))
                if rank == 0 or step == 2:  # as after a `wake` that failed on rank 1
                    engine.wake()
                if step < 2:
                    engine.sleep()
                    engine.wake()
        return dict(engine.state_dict())


def refuse_on_one(engine: infinity.Engine, rank: int) -> None:
    """The directory of one rank cannot have the file: neither sleeps."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("tempfile.TemporaryFile", full)
        text = "No space left" if rank == 1 else "rank 1 failed: .*No space left"
        with pytest.raises(infinity.InfinityError, match=text):
            engine.sleep()
    assert engine.memory()["gpu"] > 0


def full(**_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.timeout(240)
def test_ranks_that_sleep_have_the_same_bits(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks("trained") == ["done"] * RANKS
    for name in PLACES:
        for rank in range(RANKS):
            found, expected = (
                torch.load(tmp_path / f"{name} {way} {rank}.pt") for way in ("slept", "awake")
            )
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value), (name, key)
