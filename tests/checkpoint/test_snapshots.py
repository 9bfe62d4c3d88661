"""`infinity.snapshot`: a checkpoint of the last committed step, written while training goes on, has
the bits of a save at that step, and changes no number of the run."""

from __future__ import annotations

import errno
import io
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import infinity
from infinity.checkpoint.data_file import DataWriter
from infinity.checkpoint.files import sibling
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.nvme.ticket import Ticket
from infinity.tiers.block_io import BlockIo
from infinity.tiers.drives import NvmeTier
from support.configs import config_of
from support.durable import LEAST, Model
from support.models import text_batch
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6


class Run:
    """A training run, step by step."""

    def __init__(self, folder: Path, resume: bool = False, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = Model()
        infinity.wrap(self.model, config_of(nvme=[folder], **LEAST | options), resume=resume)
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.losses: list[float] = []

    def step(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        """One step, with something between its forward and its backward."""
        loss = self.model(**text_batch(number)).loss
        between()
        self.optimizer.scale(loss * math.nan if number == self.skipped else loss).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    skipped = -1
    """The step whose gradients are not finite."""

    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "lists": [1, (2.5, "x")]}

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(directory, self.optimizer, self.extra())

    def commit(self) -> None:
        """Wait until what was sealed is committed."""
        Probe(self.engine).committer.rest()

    def snapshot(self, directory: Path, **options: Any) -> SnapshotTask:
        self.commit()
        return infinity.snapshot(self.model, directory, self.extra(), **options)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def content(directory: Path) -> dict[str, Any]:
    """All of a checkpoint, by DCP's own reader."""
    stream = directory.with_suffix(".pt")
    dcp_to_torch_save(directory, stream)
    found: dict[str, Any] = torch.load(stream, weights_only=True)
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


class Held:
    """Holds the thread of a snapshot at its reads, until somebody lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.came = threading.Event(), threading.Event()
        self.until: Callable[[], object] = self._await
        self.read: list[Any] = []
        """The blocks that it asked for."""
        real = BlockIo.read_version

        def read(block_io: BlockIo, block: Any, *values: Any) -> Ticket:
            self.came.set()
            self.until()
            self.read.append(block)
            return real(block_io, block, *values)

        monkeypatch.setattr(BlockIo, "read_version", read)

    def _await(self) -> None:
        assert self.go_on.wait(60)

    def until_updates_wait(self, run: Run) -> None:
        """Let it go on when updates that are final wait for it, and at no other time."""
        probe = Probe(run.engine)

        def until() -> None:
            if not self.go_on.is_set():
                probe.await_jobs(lambda: bool(self.waiting(probe)), 60)
                self.go_on.set()

        self.until = until

    @staticmethod
    def waiting(probe: Probe) -> list[Any]:
        """The units whose updates wait for the snapshot."""
        jobs = probe.jobs.jobs
        return [job.unit for job in jobs if job.is_final and job.unit.states.is_pinned]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go_on.set()


@pytest.fixture(autouse=True)
def _nothing_pinned_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = BlockIo.write

    def looked_at(block_io: BlockIo, block: Any, extent: Any, *values: Any, **named: Any) -> Ticket:
        home = block.home
        assert home.pinned is None or extent != home.extents[home.pinned]
        return write(block_io, block, extent, *values, **named)

    monkeypatch.setattr(BlockIo, "write", looked_at)


Reference = tuple[Path, list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run without durability that is saved after every step: where, its losses, and its end."""
    place = tmp_path_factory.mktemp("undisturbed")
    run = Run(place / "nvme", durability="off")
    run.save(place / "0")
    for number in range(STEPS):
        run.step(number)
        run.save(place / f"{number + 1}")
    found = place, run.losses, run.weights()
    run.engine.close()
    return found


PLACES = [("exact", 0), ("speculative", 0), ("exact", "auto"), ("speculative", "256KiB")]


@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_it_has_the_bits_of_a_save_and_training_those_of_an_undisturbed_run(
    update: str, cache: int | str, undisturbed: Reference, tmp_path: Path, held: Held
) -> None:
    """Updates of step 4 wait for what the snapshot of step 2 has yet to read."""
    place, losses, weights = undisturbed
    run = Run(tmp_path / "nvme", update=update, cache=cache)
    tasks: list[SnapshotTask] = []
    held.until_updates_wait(run)
    for number in range(STEPS):
        begins = number == 2
        run.step(number, lambda: tasks.append(run.snapshot(tmp_path / "snap")) if begins else None)
    (task,) = tasks
    assert task.step == 2 and task.wait(60) and task.done()
    assert held.go_on.is_set() and run.losses == losses and same(run.weights(), weights)
    run.engine.close()
    assert same(content(tmp_path / "snap"), content(place / "2"))


def test_what_an_update_waits_for_is_read_first(tmp_path: Path, held: Held) -> None:
    run = Run(tmp_path / "nvme", update="exact")
    probe, order = Probe(run.engine), list[Any]()

    def until() -> None:
        if held.read:
            return  # the first unit is under way
        probe.await_jobs(lambda: len(held.waiting(probe)) > 1, 60)
        order.extend(sorted(held.waiting(probe), key=lambda unit: unit.index))

    held.until = until
    run.step(0)
    run.step(1, lambda: run.snapshot(tmp_path / "snap"))
    run.step(2)
    run.engine.drain()
    run.engine.close()
    units = list(dict.fromkeys(block.unit for block in held.read))
    assert units == sorted(units) and order[0].index == units[0]
