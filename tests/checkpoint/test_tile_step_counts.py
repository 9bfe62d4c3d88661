"""Tiles of one weight that had different numbers of updates keep them in a checkpoint; other tiles,
which cannot have them, are refused before anything is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of


def build(directory: Path, tile: int) -> tuple[nn.Module, infinity.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    if tile:
        infinity.tile(model, tile)
    directory.mkdir(exist_ok=True)
    config = config_of(
        nvme=directory, gpu_memory="16MiB", cpu_memory="64MiB", device="cpu", threads=1
    )
    model = infinity.wrap(model, config, group=None)
    return model, infinity.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: infinity.AdamW, seed: int) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_uneven_counts(directory: Path) -> tuple[nn.Module, infinity.AdamW]:
    """One tile of the first weight had one update more than the others."""
    model, optimizer = build(directory, 2048)
    step(model, optimizer, 0)
    tiles = [p for name, p in model.named_parameters() if name.startswith("0.weight_tiles")]
    assert len(tiles) > 2
    for tile in (tiles[0], *tiles[2:]):
        tile.requires_grad_(False)
    step(model, optimizer, 1)
    for tile in tiles:
        tile.requires_grad_(True)
    return model, optimizer


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tile", [2048, 1024])
def test_each_tile_goes_on_from_its_own_count(tile: int, tmp_path: Path) -> None:
    model, optimizer = with_uneven_counts(tmp_path / "first")
    infinity.engine(model).save_checkpoint(tmp_path / "checkpoint", optimizer)
    other, its_optimizer = build(tmp_path / "second", tile)
    infinity.engine(other).load_checkpoint(tmp_path / "checkpoint", its_optimizer)
    for seed in (2, 3):
        step(model, optimizer, seed)
        step(other, its_optimizer, seed)
    # Products of other tiles may round otherwise; a wrong count changes weights by 1e-3.
    close = {"rtol": 0.0, "atol": 0.0 if tile == 2048 else 1e-5}
    for place in (0, 1):
        for name in ("weight", "bias"):
            pair = [infinity.get(getattr(each[place], name)) for each in (model, other)]
            torch.testing.assert_close(*pair, **close)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tile", [0, 4096])
def test_tiles_that_cannot_have_these_counts_are_refused(tile: int, tmp_path: Path) -> None:
    model, optimizer = with_uneven_counts(tmp_path / "first")
    infinity.engine(model).save_checkpoint(tmp_path / "checkpoint", optimizer)
    other, its_optimizer = build(tmp_path / "second", tile)
    before = infinity.engine(other).state_dict()
    with pytest.raises(infinity.CheckpointError, match=r"parts of 0\.weight had .* updates"):
        infinity.engine(other).load_checkpoint(tmp_path / "checkpoint", its_optimizer)
    after = infinity.engine(other).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The weights alone can be loaded.
    infinity.engine(other).load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(infinity.get(other[0].weight), infinity.get(model[0].weight))
