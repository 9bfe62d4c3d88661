"""Where the units of a model do not fit into `gpu_memory`, `wrap` makes them smaller."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.modules import division
from infinity.placement.spec import Kind
from infinity.sharding.tiles import Tile, TiledWeight
from support.configs import config_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

WIDTH, HIDDEN = 64, 256
LARGEST = WIDTH * HIDDEN * 4  # bytes of a weight; a block has twice that and biases


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units may become as small as a model for a test needs it."""
    monkeypatch.setattr(division, "LEAST_SPLIT", 16 << 10)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Any]:
    """A configuration with states on NVMe and the given `gpu_memory`."""
    number = 0

    def make(gpu_memory: int, **options: Any) -> infinity.Config:
        nonlocal number
        number += 1
        (tmp_path / str(number)).mkdir()
        given = {"nvme": [tmp_path / str(number)], "cpu_memory": 1 << 24, "poison": True}
        return config_of(**given | {"gpu_memory": gpu_memory} | options)

    return make


def trained(model: nn.Module, config: infinity.Config, **options: Any) -> dict[str, torch.Tensor]:
    """The units, losses and weights after some steps."""
    infinity.wrap(model, config, **options)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), **engine.state_dict()}


def test_the_report_names_each_weight_that_was_cut_without_being_asked(config: Any) -> None:
    weights = [f"{number}.{part}.weight" for number in range(3) for part in ("up", "down")]
    for budget, expected in ((1 << 22, []), (3 * LARGEST, []), (LARGEST + LARGEST // 2, weights)):
        model = infinity.wrap(built(), config(budget))
        with infinity.engine(model) as engine:
            assert list(engine.report().tiled) == expected
    model = infinity.wrap(infinity.tile(built(), LARGEST // 2), config(1 << 22))
    with infinity.engine(model) as engine:
        assert not engine.report().tiled  # these were asked for


def test_blocks_that_fit_stay_whole(config: Any) -> None:
    model = infinity.wrap(built(), config(1 << 22))
    with infinity.engine(model) as engine:
        assert [unit.facts.name for unit in engine.units] == ["0", "1", "2"]


def test_smaller_units_change_no_bits(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A unit for each linear layer, in a device that does not hold two blocks."""
    expected = trained(built(), config(1 << 22))
    model = built()
    with caplog.at_level(logging.INFO, "infinity"):
        found = trained(model, config(3 * LARGEST))
    assert "3 blocks of more than 16 KiB are a unit for each of their modules" in caplog.text
    assert not any(isinstance(module, Tile) for module in model.modules())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_then_weights_become_tiles(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In a device that does not hold two weights; to the rounding of input gradients."""
    expected = trained(built(), config(1 << 22))
    model = built()
    with caplog.at_level(logging.INFO, "infinity"):
        found = trained(model, config(LARGEST + LARGEST // 2))
    assert "6 weights lie in tiles of at most 36 KiB each: 0.up.weight, 0.down" in caplog.text
    assert "gradients of their inputs round otherwise" in caplog.text
    assert all(isinstance(block.up.weight, TiledWeight) for block in model)  # type: ignore[union-attr]
    assert torch.equal(found["losses"][0], expected["losses"][0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("inside", [False, True])
def test_what_does_not_fit_even_so_is_refused(config: Any, inside: bool) -> None:
    """The error says how much works, and the model is as it was."""
    torch.manual_seed(0)
    if inside:
        with infinity.init():
            model: nn.Module = nn.Sequential(*(Block() for _ in range(3)))
    else:
        model = built()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(infinity.BudgetError, match=r"infinity\.tile\(model, max_bytes") as refusal:
        infinity.wrap(model, config(1))
    assert [name for name, _ in model.named_parameters()] == names
    assert all(type(block.up) is nn.Linear for block in model)  # type: ignore[union-attr]
    least = int(re.search(r"smallest gpu_memory that works is (\d+)", str(refusal.value))[1])  # type: ignore[index]
    assert least < LARGEST
    found = trained(model, config(least))
    assert found["losses"].isfinite().all()
    with pytest.raises(infinity.BudgetError):
        infinity.wrap(built(), config(least - 4096))


def test_units_that_were_given_stay(config: Any) -> None:
    with pytest.raises(infinity.BudgetError):
        infinity.wrap(built(), config(3 * LARGEST), units=[Block])


def test_tiles_of_an_earlier_call_become_smaller(config: Any) -> None:
    model = infinity.tile(built(), LARGEST // 2)
    trained(model, config(LARGEST // 2 + LARGEST // 4))
    assert max(p.nbytes for p in model.parameters()) <= LARGEST // 4


def test_frozen_tiles_stay_in_files(config: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(built().state_dict(), tmp_path / "model.safetensors")
    with infinity.init(exact=False):
        model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        block.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    options = config(LARGEST + LARGEST // 2, parameters="nvme")
    infinity.wrap(model, options, weights=tmp_path / "model.safetensors")
    with infinity.engine(model) as engine:
        tiles = [unit for unit in engine.units if "up.weight_tiles" in unit.facts.name]
        assert tiles
        assert all(unit.facts.stored for unit in tiles)
        for name, value in built().state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name


@pytest.mark.parametrize("meta", [False, True])
def test_inference_in_tiles_trains_nothing(meta: bool, config: Any, tmp_path: Path) -> None:
    """Nor does it take `requires_grad` from the parameters, also not from the tiles."""
    where = tmp_path / "model.safetensors"
    save_file(built().state_dict(), where)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = built()(x)
    with torch.device("meta") if meta else nullcontext():
        model = built()
    infinity.wrap(model, config(LARGEST + LARGEST // 2, inference=True), weights=where)
    with infinity.engine(model) as engine, torch.no_grad():
        assert any(isinstance(module, Tile) for module in model.modules())
        assert not any(unit.facts.trainable for unit in engine.units)
        assert all(set(unit.blocks) == {Kind.PARAM} for unit in engine.units)
        assert all(parameter.requires_grad for parameter in model.parameters())
        torch.testing.assert_close(model(x), expected)
        assert engine.memory()["nvme"] <= 4096, "they are read from their file"
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("gpu_memory", [3 * LARGEST, LARGEST + LARGEST // 2])
def test_blocks_in_smaller_units_are_recomputed(gpu_memory: int, config: Any) -> None:
    """The blocks, and neither their modules nor tiles."""
    expected = trained(built(), config(gpu_memory))
    model, calls = built(), Counter[str]()
    for name, block in model.named_children():
        forward = block.forward

        def counted(x: torch.Tensor, name: str = name, forward: Any = forward) -> torch.Tensor:
            calls[name] += 1
            return forward(x)

        block.forward = counted
    infinity.wrap(model, config(gpu_memory, recompute="all"))
    with infinity.engine(model) as engine:
        loss = model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))).pow(2)
        loss = loss.mean()
        loss.backward()
        assert torch.equal(loss.detach(), expected["losses"][0])
        assert engine.report().recomputed == ("0", "1", "2")
    assert calls == {"0": 2, "1": 2, "2": 2}
