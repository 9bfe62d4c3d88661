"""Committed states that somebody or something changed: every change is refused with one error, or
is provably harmless, because all values are what was committed."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of

pytestmark = pytest.mark.usefixtures("one_thread")

TRIES = 1000
OPTIONS: dict[str, Any] = {
    "durability": "step",
    "precision": "bf16",
    "gpu_memory": "2MiB",
    "cpu_memory": "4MiB",
    "cache": 0,
    "device": "cpu",
    "threads": 1,
    "io_engine": "posix",
}
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Three units, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = x.to(self.layers[1].bias.dtype)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def resumed(folders: list[Path]) -> tuple[nn.Module, infinity.AdamW]:
    model = Net()
    config = config_of(nvme=folders, **OPTIONS)
    infinity.wrap(model, config, units=list(model.layers), resume=True)
    return model, infinity.AdamW(model.parameters(), lr=1e-2)


def values_of(model: nn.Module, optimizer: infinity.AdamW) -> Values:
    """All that a resume gives back, by name."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, state in copy.deepcopy(optimizer.state_dict()["state"]).items():
        found |= {f"{number} {key}": torch.as_tensor(value) for key, value in state.items()}
    found["committed"] = torch.tensor(infinity.engine(model).committed_step)
    return found


def trained(folders: list[Path], steps: int) -> Values:
    """Train so many steps, and commit them."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = resumed(folders)
    for number in range(steps):
        model(torch.full((2, 64), number + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = values_of(model, optimizer)
    infinity.engine(model).close()
    return found


def files_in(folders: list[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.iterdir())


def flip(path: Path, chance: random.Random, others: list[Path]) -> str:
    """One bit."""
    content = bytearray(path.read_bytes())
    if not content:
        return "nothing to flip"
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} at {at}"


def truncate(path: Path, chance: random.Random, others: list[Path]) -> str:
    length = chance.randrange(path.stat().st_size + 1)
    os.truncate(path, length)
    return f"cut at {length}"


def erase(path: Path, chance: random.Random, others: list[Path]) -> str:
    """A page, or what there is of it, reads as zeros: an SSD lost it."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content) // 4096 + 1) * 4096
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    path.write_bytes(content)
    return f"zeros at {at}"


def swap(path: Path, chance: random.Random, others: list[Path]) -> str:
    """Two files of this run."""
    other = chance.choice([each for each in others if each != path])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"exchanged with {other}"


def remove(path: Path, chance: random.Random, others: list[Path]) -> str:
    path.unlink()
    return "removed"


def replace(path: Path, chance: random.Random, others: list[Path]) -> str:
    """The file of the same name of another run, or of an earlier moment of this one."""
    source = chance.choice(["other", "earlier"])
    theirs = path.parents[2] / source / path.parent.name / path.name
    if theirs.exists():
        shutil.copyfile(theirs, path)
    else:
        path.unlink()
    return f"that of the {source} run"


CHANGES: list[Callable[[Path, random.Random, list[Path]], str]] = [
    flip, flip, flip, truncate, erase, swap, remove, replace
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """A folder with the files of a run, of an earlier moment of it and of another run, and the
    values of the first."""
    place = tmp_path_factory.mktemp("runs")
    folders = {name: [place / name / each for each in "ab"] for name in ("mine", "other")}
    trained(folders["other"], 3)
    trained(folders["mine"], 1)
    shutil.copytree(place / "mine", place / "earlier")
    return place, trained(folders["mine"], 2) | {"committed": torch.tensor(3)}


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_what_was_changed_is_refused_or_harmless(part: int, runs: tuple[Path, Values]) -> None:
    place, expected = runs
    place = place / f"part{part}"
    for name in ("other", "earlier"):
        shutil.copytree(runs[0] / name, place / name)
    folders, refused = [place / "now" / each for each in "ab"], 0
    for seed in range(part, TRIES, 4):
        shutil.rmtree(place / "now", ignore_errors=True)
        shutil.copytree(runs[0] / "mine", place / "now")
        chance = random.Random(seed)
        files = files_in(folders)
        path = chance.choice(files)
        change = chance.choice(CHANGES)
        what = f"seed {seed}: {change.__name__} of {path}: {change(path, chance, files)}"
        try:
            model, optimizer = resumed(folders)
        except infinity.InfinityError as error:
            assert str(error), what
            refused += 1
            continue
        try:
            found = values_of(model, optimizer)
        finally:
            infinity.engine(model).close()
        assert found.keys() == expected.keys(), what
        wrong = [name for name in found if not torch.equal(found[name], expected[name])]
        assert not wrong, f"{what}: {wrong}"
    assert TRIES // 4 * 0.4 < refused < TRIES // 4
