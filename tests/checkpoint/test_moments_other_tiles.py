"""int8 moments have the same bits in other tiles, because tiles are cut between their groups; where
that is impossible the log says so, and a load rounds them once more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.sharding.tiles import pieces_of
from support.configs import config_of

STATES = ("master", "exp_avg", "exp_avg_sq")
GROUP = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 72), nn.Linear(72, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(directory: Path, width: int, tile: int) -> tuple[nn.Module, infinity.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, width), *(Block(width) for _ in range(2)))
    if tile:
        infinity.tile(model, tile)
    directory.mkdir()
    config = config_of(
        nvme=directory,
        precision="fp32",
        moment_precision="int8",
        gpu_memory="32MiB",
        cpu_memory="64MiB",
        device="cpu",
        threads=1,
        cache=0,
    )
    model = infinity.wrap(model, config, group=None)
    return model, infinity.AdamW(model.parameters(), lr=1e-2)


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = [model[0].weight, *(part.weight for b in model[1:] for part in (b.up, b.down))]
    return {f"{i} {name}": infinity.get(w, name) for i, w in enumerate(weights) for name in STATES}


def loaded(
    directory: Path, width: int, tiles: list[int], frozen: Sequence[int] = ()
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The states after some steps in tiles of the first size, and loaded into all others. Tiles of
    these numbers, of each weight, are frozen meanwhile."""
    model, optimizer = build(directory / "first", width, tiles[0])
    weights = [part.weight for block in model[1:] for part in (block.up, block.down)]
    rest = [pieces_of([weight])[number] for weight in weights for number in frozen]
    for tile in rest:
        tile.requires_grad_(False)
    for step in range(3):
        ids = torch.randint(0, 100, (3, 5), generator=torch.Generator().manual_seed(step))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for tile in rest:
        tile.requires_grad_(True)
    want = states(model)
    infinity.engine(model).save_checkpoint(directory / "checkpoint", optimizer)
    found = []
    for number, tile in enumerate(tiles[1:]):
        model, optimizer = build(directory / f"other{number}", width, tile)
        infinity.engine(model).load_checkpoint(directory / "checkpoint", optimizer)
        found.append(states(model))
    return want, found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("width", [40, 64])
def test_int8_moments_have_the_same_bits_in_other_tiles(width: int, tmp_path: Path) -> None:
    want, found = loaded(tmp_path, width, [3000, 0, 1600, 5000])
    for each in found:
        assert all(torch.equal(want[name], each[name]) for name in want)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("frozen", [[0], [1], [0, -1]])
def test_moments_of_tiles_that_were_never_updated_load_as_zeros(
    frozen: list[int], tmp_path: Path
) -> None:
    want, found = loaded(tmp_path, 64, [3000, 3000], frozen)
    assert all((want[f"{i} exp_avg"] == 0).any() for i in range(1, 5))
    for each in found:
        assert all(torch.equal(want[name], each[name]) for name in want)


@pytest.mark.usefixtures("one_thread")
def test_tiles_that_cut_groups_are_told_and_round_within_the_stated_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        want, found = loaded(tmp_path, 41, [1000, 0])
    assert "cannot be cut between groups of 32 elements" in caplog.text
    assert any(not torch.equal(want[name], found[0][name]) for name in want)
    for name, value in want.items():
        assert torch.equal(value, found[0][name]) or "exp_avg" in name
        largest = value.abs().max()
        assert (value - found[0][name]).abs().max() <= 0.008 * largest
