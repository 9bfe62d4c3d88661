"""Every checkpoint loads into everything: 1, 2 and 4 ranks, stages 1 to 3, any placement. All pairs
have the same bits.

With INFINITY_ALL_PAIRS=1 it is all 576 pairs of 1, 2 and 4 ranks and eight places, some minutes;
otherwise 64 of them. `pytest -s` shows the table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import run_ranks

IS_WHOLE = os.environ.get("INFINITY_ALL_PAIRS") == "1"
RANKS = (1, 2, 4) if IS_WHOLE else (1, 2)
PLACES = {
    "stage 3, nvme": {"cache": 0},
    "stage 3, nvme cached": {"cache": "auto"},
    "stage 3, cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "stage 3, gpu": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "stage 2, nvme": {"stage": 2, "parameters": "gpu"},
    "stage 2, cpu": {"stage": 2, "parameters": "gpu", "optimizer": "cpu"},
    "stage 1, nvme": {"stage": 1, "parameters": "gpu", "gradients": "gpu"},
    "stage 1, cpu": {"stage": 1, "parameters": "gpu", "gradients": "gpu", "optimizer": "cpu"},
}
if not IS_WHOLE:
    PLACES = dict(list(PLACES.items())[::2])
STEPS = 2


def engines(directory: Path, rank: int, group: Any, seed: int) -> Iterator[tuple[str, Any, Any]]:
    """Where states are, an engine that has them there, and its optimizer."""
    for number, (name, options) in enumerate(PLACES.items()):
        nvme = directory / f"nvme{rank}-{number}"
        nvme.mkdir(exist_ok=True)
        budgets = {"gpu_memory": "8MiB", "cpu_memory": "16MiB", "device": "cpu", "threads": 1}
        config = config_of(nvme=[nvme], precision="bf16", **budgets | options)
        model = infinity.wrap(transformer(seed), config, group=group)
        with infinity.engine(model) as engine:
            yield name, engine, infinity.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    """All ranks have equal batches, so that what they compute does not depend on how many there
    are."""
    for number in range(steps):
        model(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(engine: infinity.Engine, optimizer: Any) -> str:
    """Of all bits of the model and of the optimizer, by name."""
    found = dict(engine.state_dict())
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": torch.as_tensor(value) for name, value in values.items()}
    whole = hashlib.sha256()
    for name, value in sorted(found.items()):
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        whole.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def save_all(directory: Path, rank: int, ranks: int, group: Any) -> dict[str, str]:
    """Train and save from every place; the digests, by the name of the checkpoint."""
    found = {}
    for number, (name, engine, optimizer) in enumerate(engines(directory, rank, group, seed=0)):
        train(engine.model, optimizer, STEPS)
        engine.save_checkpoint(directory.parent / f"saved-{ranks}-{number}", optimizer)
        found[f"{ranks} ranks, {name}"] = digest(engine, optimizer)
    return found


def load_all(directory: Path, rank: int, ranks: int, group: Any) -> dict[str, dict[str, str]]:
    """Load every checkpoint into every place; the digests, by place and checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for name, engine, optimizer in engines(directory, rank, group, seed=7):
        train(engine.model, optimizer, 1)  # what was there before does not matter
        there = found[f"{ranks} ranks, {name}"] = {}
        for saved_by in RANKS:
            for number, place in enumerate(PLACES):
                engine.load_checkpoint(directory.parent / f"saved-{saved_by}-{number}", optimizer)
                there[f"{saved_by} ranks, {place}"] = digest(engine, optimizer)
    return found


def serve(directory: Path, rank: int, ranks: int) -> None:
    """A rank."""
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    work = save_all if directory.name.startswith("save") else load_all
    found = work(directory, rank, ranks, dist.group.WORLD)
    (directory / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_ranks(where: Path, ranks: int) -> dict[str, Any]:
    """What all of `ranks` find."""
    where.mkdir()
    run_ranks(__file__, where, ranks)
    found = [json.loads((where / f"found{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each == found[0] for each in found), "ranks differ"
    result: dict[str, Any] = found[0]
    return result


def table(saved: dict[str, str], loaded: dict[str, dict[str, str]]) -> Iterator[str]:
    """A row for each place that loads, a column for each checkpoint: "=" for equal bits."""
    names = list(saved)
    yield from (f"{number:2}  saved by {name}" for number, name in enumerate(names))
    yield f"{'loaded by':32}" + "".join(f"{number:3}" for number in range(len(names)))
    for place, found in loaded.items():
        cells = ("=" if found[name] == saved[name] else "x" for name in names)
        yield f"{place:32}" + "".join(f"{cell:>3}" for cell in cells)


@pytest.mark.timeout(900)
def test_all_pairs_have_the_same_bits(tmp_path: Path) -> None:
    saved: dict[str, str] = {}
    loaded: dict[str, dict[str, str]] = {}
    for ranks in RANKS:
        saved |= on_ranks(tmp_path / f"save{ranks}", ranks)
    assert len(set(saved.values())) == 1, "placement, stage and ranks change no number"
    for ranks in RANKS:
        loaded |= on_ranks(tmp_path / f"load{ranks}", ranks)
    lines = list(table(saved, loaded))
    print("\n".join(lines))
    pairs = [found[name] == saved[name] for found in loaded.values() for name in saved]
    assert len(pairs) == (len(RANKS) * len(PLACES)) ** 2 and all(pairs), "\n".join(lines)
