"""What a step of many units costs: as much for each of them, however many there are. Lines that run
are counted, and no time."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.quantities import round_up
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency
from support.line_counter import LineCounter

WIDTH = 8
FEW, MANY = 24, 96
MOST_GROWTH = 1.25
"""A loop over all units at each use of one would grow four times."""
COUNTED = ("schedule/", "modules/", "sharding/", "optim/", "tiers/slots.py", "tiers/arena.py")
WAITING = ("optim/job_queue.py", "optim/job_table.py")
"""Their lines run again whenever a wait looks whether it is over."""


class Layer(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + 0.01 * weight
        return x


def counted(
    folder: Path, units: int, tensors: int, tier: str, room: float, update: str = "speculative"
) -> Counter[str]:
    """Lines of a step in the steady state, by file; the compute device has room for `room` of all
    units."""
    folder.mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(tensors) for _ in range(units)))
    least = 1 << 20 if tensors > 1 else 0
    slot = 4 * round_up(tensors * WIDTH, 4096)
    config = infinity.Config(
        nvme=folder,
        precision="fp32",
        parameters=tier,
        optimizer=tier,
        gradients="cpu",
        gpu_memory=max(int(room * units) * slot, least),
        cpu_memory=24 * units * slot + (64 << 20),
        tuning=infinity.Tuning(update=update, cache=0, threads=1, gpu_cache=0),
    )
    infinity.wrap(model, config, units=[Layer])
    lines = LineCounter()
    with infinity.engine(model) as engine:
        assert len(engine.units) == units
        optimizer = infinity.AdamW(model.parameters())
        x = torch.randn(2, WIDTH)
        for step in range(4):
            optimizer.zero_grad()
            if step < 3:
                model(x).square().mean().backward()
                optimizer.step()
                engine.drain()
                continue
            with lines.counting():
                model(x).square().mean().backward()
                optimizer.step()
    return Counter(
        {
            name: n
            for name, n in lines.lines.items()
            if name.startswith(COUNTED) and name not in WAITING
        }
    )


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("room", [0.5, 1.0])
def test_a_unit_costs_as_much_however_many_there_are(
    tmp_path: Path, tier: str, room: float
) -> None:
    few = counted(tmp_path / "few", FEW, 1, tier, room)
    many = counted(tmp_path / "many", MANY, 1, tier, room)
    grown = {
        name: (few[name] / FEW, many[name] / MANY)
        for name in many
        if many[name] / MANY > MOST_GROWTH * few[name] / FEW and many[name] > MANY
    }
    assert not grown


def test_a_tensor_costs_as_much_however_many_there_are_in_its_unit(tmp_path: Path) -> None:
    few = counted(tmp_path / "few", 3, 50, "cpu", 1.0)
    many = counted(tmp_path / "many", 3, 400, "cpu", 1.0)
    grown = {
        name: (few[name], many[name])
        for name in many
        if many[name] > 8 * MOST_GROWTH * few[name] and many[name] > 8 * 150
    }
    assert not grown


def test_the_pipeline_looks_at_as_many_updates_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, model = 0, threading.get_ident()
    has_copy = Residency.has_copy

    def counting(self: Residency, block: Block) -> bool:
        nonlocal looked
        looked += threading.get_ident() != model
        return has_copy(self, block)

    monkeypatch.setattr(Residency, "has_copy", counting)
    counted(tmp_path / "states", MANY, 1, "nvme", 0.1, update="auto")
    assert 0 < looked < 4 * 24 * MANY  # in four steps; each take would look at many of them
