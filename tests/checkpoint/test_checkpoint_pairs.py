"""Every checkpoint loads into everything: 1, 2 and 4 ranks, stages 1 to 3, any placement; be it a
save, or a snapshot that was written while training went on. All pairs have the same bits.

With INFINITY_ALL_PAIRS=1 it is all 864 pairs: 1, 2 and 4 ranks save in eight places and write
snapshots in four, and load into eight. Otherwise it is 80 of them. `pytest -s` shows the table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.nvme.ticket import Ticket
from infinity.tiers.block_io import BlockIo
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe
from support.rank_group import run_ranks

IS_WHOLE = os.environ.get("INFINITY_ALL_PAIRS") == "1"
RANKS = (1, 2, 4) if IS_WHOLE else (1, 2)
PLACES: dict[str, dict[str, Any]] = {
    "stage 3, nvme": {"cache": 0},
    "stage 3, nvme cached": {"cache": "auto"},
    "stage 3, cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "stage 3, gpu": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "stage 2, nvme": {"stage": 2, "parameters": "gpu"},
    "stage 2, cpu": {"stage": 2, "parameters": "gpu", "optimizer": "cpu"},
    "stage 1, nvme": {"stage": 1, "parameters": "gpu", "gradients": "gpu"},
    "stage 1, cpu": {"stage": 1, "parameters": "gpu", "gradients": "gpu", "optimizer": "cpu"},
}
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "a snapshot, stage 3, nvme cached, every 2nd": {"cache": "auto", "durability": 2},
    "a snapshot, stage 3, nvme": {"cache": 0, "durability": "step"},
    "a snapshot, stage 3, nvme cached": {"cache": "auto", "durability": "step"},
    "a snapshot, stage 0, nvme": {"stage": 0, "cache": 0, "durability": "step"},
}
"""The places of durable runs: none has parameters beside NVMe, as stages 1 and 2 do."""
if not IS_WHOLE:
    PLACES = dict(list(PLACES.items())[::2])
STEPS = 2

Places = dict[str, dict[str, Any]]


def savers(ranks: int) -> Places:
    """Where `ranks` ranks save, and where they write snapshots."""
    names = list(SNAPSHOTS) if IS_WHOLE else [list(SNAPSHOTS)[ranks - 1]]
    return PLACES | {name: SNAPSHOTS[name] for name in names}


def engines(
    directory: Path, rank: int, group: Any, seed: int, places: Places
) -> Iterator[tuple[str, Any, Any]]:
    """Where states are, an engine that has them there, and its optimizer."""
    for number, (name, options) in enumerate(places.items()):
        nvme = directory / f"nvme{rank}-{number}"
        nvme.mkdir(exist_ok=True)
        budgets = {"gpu_memory": "8MiB", "cpu_memory": "16MiB", "device": "cpu", "threads": 1}
        config = config_of(nvme=[nvme], precision="bf16", **budgets | options)
        model = infinity.wrap(transformer(seed), config, group=group)
        with infinity.engine(model) as engine:
            yield name, engine, infinity.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    between: Callable[[], object] = lambda: None,
) -> None:
    """All ranks have equal batches, so that what they compute does not depend on how many there
    are. `between` comes between each forward and its backward."""
    for number in steps:
        loss = model(**text_batch(number)).loss
        between()
        loss.backward()
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


class SnapshotWhileTraining:
    """A snapshot of the step that was committed last. It reads nothing before an update waits for
    what it has yet to read, so training goes on meanwhile."""

    def __init__(self, engine: infinity.Engine, directory: Path) -> None:
        self._engine, self._directory = engine, directory
        self._task: SnapshotTask | None = None
        self._has_waited = False

    def begin(self) -> None:
        """Begin, where it has not."""
        if self._task is None:
            Probe(self._engine).committer.rest()
            self._task = self._engine.snapshot(self._directory)

    def write(self, optimizer: Any) -> None:
        """Write it, while training goes on until updates have waited for it."""
        real, probe = BlockIo.read_version, Probe(self._engine)

        def read(*values: Any) -> Ticket:
            if not self._has_waited:
                jobs = probe.jobs.jobs
                probe.await_jobs(lambda: any(job.is_final and job.is_pinned for job in jobs), 60)
                self._has_waited = True
            return real(*values)

        durability = self._engine.config.durability
        more = 2 * (1 if durability == "step" else int(durability))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockIo, "read_version", read)
            train(self._engine.model, optimizer, range(STEPS, STEPS + more), self.begin)
            assert self._task is not None and self._task.wait(60) and self._task.step == STEPS
        writes = self._engine.config.stage == 3 or not dist.get_rank()
        assert self._has_waited is writes, "of replicas the first one writes"


def save_all(directory: Path, rank: int, ranks: int, group: Any) -> dict[str, str]:
    """Train and save from every place; the digests, by the name of the checkpoint."""
    found = {}
    places = savers(ranks)
    for number, (name, engine, optimizer) in enumerate(engines(directory, rank, group, 0, places)):
        train(engine.model, optimizer, range(STEPS))
        found[f"{ranks} ranks, {name}"] = digest(engine, optimizer)
        checkpoint = directory.parent / f"saved-{ranks}-{number}"
        if name in SNAPSHOTS:
            SnapshotWhileTraining(engine, checkpoint).write(optimizer)
            assert digest(engine, optimizer) != found[f"{ranks} ranks, {name}"]
        else:
            engine.save_checkpoint(checkpoint, optimizer)
    return found


def load_all(directory: Path, rank: int, ranks: int, group: Any) -> dict[str, dict[str, str]]:
    """Load every checkpoint into every place; the digests, by place and checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for name, engine, optimizer in engines(directory, rank, group, 7, PLACES):
        train(engine.model, optimizer, range(1))  # what was there before does not matter
        there = found[f"{ranks} ranks, {name}"] = {}
        for saved_by in RANKS:
            for number, place in enumerate(savers(saved_by)):
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


@pytest.mark.timeout(3600 if IS_WHOLE else 900)
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
    assert len(pairs) == (864 if IS_WHOLE else 80) and all(pairs), "\n".join(lines)
