"""What an update that may be rolled back has put into a copy never reaches another rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import transformer
from support.rank_group import RANKS, OnRanks


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`. Each puts a guess into its part of a copy that is
    not gathered yet, and then the ranks gather it ahead of its use."""
    model = infinity.wrap(
        transformer(), config_of(gpu_memory=4 << 20, cpu_memory=8 << 20, precision="fp32")
    )
    with contextlib.closing(infinity.engine(model)) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        for unit in engine.units:
            block, resident = unit.blocks[Kind.PARAM], unit.store.resident
            resident.prefetch(block, beyond=-1)
            resident.wait(block)
            guess = torch.full((block.spec.nbytes,), 1, dtype=torch.uint8)
            placing = resident.renew(block, 0, guess)
            assert placing is not None
            placing.wait()
            unit.on_device.gather_ahead()
        for unit in engine.units:
            unit.on_device.start()
            flat = unit.on_device.wait()
            for name, place in zip(unit.facts.names, unit.facts.layout.places, strict=True):
                seen = flat[place.offset : place.end].view(place.shape)
                assert torch.equal(seen, before[name]), name
            del flat
            unit.on_device.release()


def test_ranks_gather_what_holds_before_the_step(on_ranks: OnRanks) -> None:
    assert on_ranks("guess") == ["done"] * RANKS
