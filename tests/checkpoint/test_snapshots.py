"""`infinity.snapshot`: a checkpoint of the last committed step, written while training goes on, has
the bits of a save at that step, and changes no number of the run."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import logging
import math
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import infinity
from infinity.checkpoint.data_file import DataWriter
from infinity.checkpoint.files import sibling
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.durable.home import DurableHome
from infinity.durable.session import Session
from infinity.nvme.ticket import Ticket
from infinity.tiers.block_io import BlockIo
from infinity.tiers.drives import NvmeTier
from infinity.tiers.states_files import ExtentTransfer
from support.configs import config_of
from support.durable import LEAST, PLACES, Model, ranks_in_processes
from support.models import text_batch
from support.probe import Probe
from support.threads import one_thread

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10
AT: dict[int | str, int] = {"step": 2, 2: 2, 3: 3}
"""Which step a snapshot has, by the durability of the run."""
UNTIL = {"step": 4, 2: 6, 3: 9}
"""The step whose update would overwrite what that snapshot reads, where all is cached."""


def nothing() -> None:
    """What comes between, where nothing does."""


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

    def step(self, number: int, between: Callable[[], object] = nothing) -> None:
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

    def until_somebody_waits(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same, or when who closes waits for the snapshot, or for what it has yet to read."""
        probe = Probe(run.engine)
        finish, wait = SnapshotTask.finish, type(probe.store).begin_rewrite

        def waits() -> None:
            self.go_on.set()
            probe.jobs.poke()

        def finishing(task: SnapshotTask, timeout: float | None = None) -> bool:
            waits()
            return finish(task, timeout)

        def awaited(store: Any, blocks: Any) -> None:
            if any(block.home.is_rewrite_pinned for block in blocks):
                waits()
            wait(store, blocks)

        def until() -> None:
            probe.await_jobs(lambda: self.go_on.is_set() or bool(self.waiting(probe)), 60)
            self.go_on.set()

        monkeypatch.setattr(SnapshotTask, "finish", finishing)
        monkeypatch.setattr(type(probe.store), "begin_rewrite", awaited)
        self.until = until

    @staticmethod
    def waiting(probe: Probe) -> list[Any]:
        """The units whose updates wait for the snapshot."""
        jobs = probe.jobs.jobs
        return [job.unit for job in jobs if job.is_final and job.is_pinned]


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
        if isinstance(home, DurableHome) and home.pinned is not None:
            assert extent != home.extents[home.pinned]
        return write(block_io, block, extent, *values, **named)

    monkeypatch.setattr(BlockIo, "write", looked_at)


Reference = tuple[Path, list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _on_one_thread() -> Iterator[None]:
    """Sums of several threads may round otherwise from run to run."""
    with one_thread():
        yield


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


@pytest.fixture(params=["step", 2, 3])
def durability(request: pytest.FixtureRequest) -> int | str:
    """Which steps are committed."""
    found: int | str = request.param
    return found


@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_it_has_the_bits_of_a_save_and_training_those_of_an_undisturbed_run(
    update: str,
    cache: int | str,
    durability: int | str,
    undisturbed: Reference,
    tmp_path: Path,
    held: Held,
) -> None:
    """Later updates wait for what the snapshot has yet to read."""
    place, losses, weights = undisturbed
    run = Run(tmp_path / "nvme", update=update, cache=cache, durability=durability)
    tasks: list[SnapshotTask] = []
    held.until_updates_wait(run)

    def snapshot() -> None:
        tasks.append(run.snapshot(tmp_path / "snap"))

    for number in range(STEPS):
        run.step(number, snapshot if number == AT[durability] else nothing)
    (task,) = tasks
    assert task.step == AT[durability] and task.wait(60) and task.done()
    assert held.go_on.is_set() and run.losses == losses and same(run.weights(), weights)
    run.engine.close()
    assert same(content(tmp_path / "snap"), content(place / f"{task.step}"))


class Layers(nn.Module):
    """Layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_what_an_update_waits_for_is_read_next(tmp_path: Path, held: Held) -> None:
    model = Layers()
    (tmp_path / "nvme").mkdir()
    options = LEAST | {"precision": "fp32", "update": "exact"}
    infinity.wrap(model, config_of(nvme=[tmp_path / "nvme"], **options), units=list(model.layers))
    engine = infinity.engine(model)
    probe, optimizer = Probe(engine), infinity.AdamW(model.parameters(), lr=1e-2)

    def until() -> None:
        if not held.read:  # the first unit is under way
            probe.await_jobs(lambda: len(held.waiting(probe)) == 1, 60)

    held.until = until
    for number in range(3):
        for at, layer in enumerate(model.layers):
            layer.requires_grad_(number == 0 or at == 2)
        loss = model(torch.ones(2, 64)).sum()
        if number == 1:
            probe.committer.rest()
            task = engine.snapshot(tmp_path / "snap")
            assert held.came.wait(60)  # at the first unit, before any update waits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.wait(60)
    engine.close()
    assert list(dict.fromkeys(block.spec.unit for block in held.read)) == [0, 2, 1, 3]


# What a step is


def test_a_step_that_is_left_out(tmp_path: Path, held: Held) -> None:
    """fp16, with a loss scale that was halved."""
    options = {"precision": "fp16", "update": "speculative"}
    for durability in ("off", "step"):
        run = Run(tmp_path / durability, durability=durability, **options)
        run.skipped = 1
        run.step(0)
        run.step(1)
        if durability == "off":
            run.save(tmp_path / "saved")
            run.engine.close()
    tasks = list[SnapshotTask]()
    held.until_updates_wait(run)
    run.step(2, lambda: tasks.append(run.snapshot(tmp_path / "snap")))
    run.step(3)
    run.step(4)
    run.engine.close()
    assert tasks[0].step == 2 and tasks[0].wait(60)
    saved = content(tmp_path / "snap")
    assert (saved["infinity"]["posted_steps"], saved["infinity"]["skipped_steps"]) == (1, 1)
    assert same(saved, content(tmp_path / "saved"))


def test_before_the_first_forward(undisturbed: Reference, tmp_path: Path) -> None:
    """The optimizer was made after the first commit; and what is tracked goes on as ever."""
    run = Run(tmp_path / "nvme")
    task = infinity.snapshot(run.engine, tmp_path / "snap", run.extra())
    assert task.step == 0 and task.wait(60)
    for number in range(STEPS):
        run.step(number)
    assert run.losses == undisturbed[1]
    run.engine.close()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / "0"))


def test_a_resumed_run(undisturbed: Reference, tmp_path: Path) -> None:
    place = undisturbed[0]
    run = Run(tmp_path / "nvme")
    for number in range(3):
        run.step(number)
    extra = run.extra()
    run.engine.close()
    run = Run(tmp_path / "nvme", resume=True)
    task = infinity.snapshot(run.model, tmp_path / "snap", extra)
    assert task.step == 3 and task.wait(60)
    run.engine.close()
    assert same(content(tmp_path / "snap")["optimizer"], content(place / "3")["optimizer"])
    assert same(content(tmp_path / "snap")["model"], content(place / "3")["model"])


class Adapted(nn.Module):
    """A frozen base, with a low-rank part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def train_adapted(
    place: Path, weights: Path | None, held: Held, durability: str, cache: int | str
) -> bool:
    """Four steps; the state after the first one is in `place / durability`. Returns whether the
    base stays in files of the user."""
    nvme = place / f"nvme {durability}"
    nvme.mkdir()
    options = LEAST | {"precision": "fp32", "durability": durability, "cache": cache}
    model = Adapted()
    config = config_of(nvme=[nvme], **options, update="exact")
    infinity.wrap(model, config, weights=weights, units=[model.base, model.down, model.up])
    engine = infinity.engine(model)
    probe = Probe(engine)
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    held.until = lambda: held.read or probe.await_jobs(lambda: bool(held.waiting(probe)), 60)
    for number in range(4):
        loss = model(torch.full((2, 64), number + 1.0)).pow(2).sum()
        if number == 1 and durability == "step":
            probe.committer.rest()
            task = engine.snapshot(place / durability)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and durability == "off":
            engine.save_checkpoint(place / durability, optimizer)
    in_files = engine.units[0].states.are_in_files
    engine.close()
    assert durability == "off" or task.wait(60)
    return in_files


@pytest.mark.parametrize("cache", [0, "auto"])
@pytest.mark.parametrize("home", ["nvme", "files"])
def test_adapters_beside_a_frozen_base(
    home: str, cache: int | str, tmp_path: Path, held: Held
) -> None:
    weights = tmp_path / "base.safetensors"
    save_file(dict(Adapted().state_dict()), weights)
    for durability in ("off", "step"):
        given = weights if home == "files" else None
        assert train_adapted(tmp_path, given, held, durability, cache) is (home == "files")
    assert same(content(tmp_path / "step"), content(tmp_path / "off"))


def test_another_placement_loads_it(undisturbed: Reference, tmp_path: Path) -> None:
    run = Run(tmp_path / "nvme")
    for number in range(3):
        run.step(number)
    run.model(**text_batch(3))
    task = run.snapshot(tmp_path / "snap")
    assert task.step == 3 and task.wait(60)
    run.engine.close()
    options = {"parameters": "cpu", "optimizer": "cpu", "durability": "off"}
    other = Run(tmp_path / "other", **options)
    extra = other.engine.load_checkpoint(tmp_path / "snap", other.optimizer)
    other.scheduler.load_state_dict(extra["scheduler"])
    other.save(tmp_path / "again")
    assert same(content(tmp_path / "again"), content(undisturbed[0] / "3"))
    other.engine.close()


# How it ends


def saved_once(place: Path, durability: int | str, **options: Any) -> Run:
    """A run before the step whose forward commits what a snapshot has, with a checkpoint of step
    1."""
    run = Run(place / "nvme", durability=durability, **options)
    for number in range(AT[durability]):
        run.step(number)
        if number == 0:
            run.save(place / "snap")
    return run


@pytest.fixture
def stopped(
    tmp_path: Path, held: Held, durability: int | str
) -> Iterator[tuple[Run, SnapshotTask]]:
    """A run with a snapshot that is held, over a checkpoint of step 1."""
    run = saved_once(tmp_path, durability)
    run.model(**text_batch(AT[durability]))
    task = run.snapshot(tmp_path / "snap")
    assert task.step == AT[durability] and held.came.wait(60)
    yield run, task
    held.go_on.set()
    run.engine.close()


def is_untouched(run: Run, undisturbed: Reference, tmp_path: Path) -> bool:
    """Whether the earlier checkpoint is there alone, and training goes on as ever."""
    place = undisturbed[0]
    assert not sibling(tmp_path / "snap", "partial").exists()
    assert same(content(tmp_path / "snap"), content(place / "1"))
    assert not any(
        block.home.pinned is not None for block in Probe(run.engine).store.state_blocks()
    )
    return True


def go_on_when_it_is_waited_for(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = SnapshotTask.finish

    def waited_for(task: SnapshotTask, timeout: float | None = None) -> bool:
        held.go_on.set()
        return finish(task, timeout)

    monkeypatch.setattr(SnapshotTask, "finish", waited_for)


def test_cancelled(
    stopped: tuple[Run, SnapshotTask],
    held: Held,
    undisturbed: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, task = stopped
    with pytest.raises(infinity.ConfigError, match=r"one at a time: wait for it .*cancel"):
        run.engine.snapshot(tmp_path / "other")
    assert not task.wait(0) and not task.done()
    go_on_when_it_is_waited_for(held, monkeypatch)
    task.cancel()
    assert task.done() and is_untouched(run, undisturbed, tmp_path) and not said(caplog)
    text = f"the snapshot of step {task.step} was cancelled"
    with pytest.raises(infinity.CheckpointError, match=text):
        task.wait()
    again = run.engine.snapshot(tmp_path / "snap", run.extra())
    assert again.step == task.step and again.wait(60)
    again.cancel()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / f"{task.step}"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


def full(held: Held, run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    def no_room(writer: DataWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DataWriter, "_send", no_room)
    return "cannot be written: .*No space left on device"


def damaged(held: Held, run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bit of what a snapshot reads; not of what training does, which has gone on by then."""
    (block,) = (b for b in run.engine.units[2].blocks.values() if b.kind.value == "exp_avg")
    path, offset = Probe(run.engine).nvme.where(block.home.extents[block.home.pinned], 0)
    with Path(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    return rf"damaged at offset {offset}: the checksum of {block.name} \(exp_avg\)"


def fails_to_read(held: Held, run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    real = NvmeTier.read

    def read(tier: NvmeTier, transfer: ExtentTransfer, direct: bool = False) -> Ticket:
        if transfer.background:
            raise OSError(errno.EIO, "Input/output error")
        return real(tier, transfer, direct)

    monkeypatch.setattr(NvmeTier, "read", read)
    return "cannot be written: .*Input/output error"


@pytest.mark.parametrize("fault", [full, damaged, fails_to_read])
def test_what_fails_harms_neither_training_nor_the_checkpoint_before(
    fault: Callable[[Held, Run, pytest.MonkeyPatch], str],
    durability: int | str,
    held: Held,
    undisturbed: Reference,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = saved_once(tmp_path, durability, update="exact")
    at = AT[durability]
    probe, faults = Probe(run.engine), list[str]()
    with pytest.MonkeyPatch.context() as patch:

        def until() -> None:
            if not faults:
                probe.await_jobs(lambda: bool(held.waiting(probe)), 60)
                faults.append(fault(held, run, patch))

        held.until = until
        tasks = list[SnapshotTask]()
        run.step(at, lambda: tasks.append(run.snapshot(tmp_path / "snap")))
        for number in range(at + 1, UNTIL[durability]):
            run.step(number)
        with pytest.raises(infinity.CheckpointError) as raised:
            tasks[0].wait(60)
    assert re.search(faults[0], str(raised.value))
    assert isinstance(raised.value.__cause__, (OSError, infinity.CorruptStateError))
    (record,) = said(caplog)
    assert f"the snapshot of step {at} in" in record and "training goes on" in record
    for number in range(UNTIL[durability], STEPS):
        run.step(number)
    assert is_untouched(run, undisturbed, tmp_path) and run.losses == undisturbed[1]
    assert same(run.weights(), undisturbed[2])
    run.engine.close()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "nvme")
    (tmp_path / "file").touch()
    task = infinity.snapshot(run.model, tmp_path / "file" / "snap")
    with pytest.raises(infinity.CheckpointError, match="Not a directory"):
        task.wait(60)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").touch()
    with pytest.raises(infinity.CheckpointError, match="no checkpoint, so it is not replaced"):
        infinity.snapshot(run.model, tmp_path / "mine").wait(60)
    run.step(0)
    run.engine.close()


@pytest.mark.parametrize(
    ("durability", "cache", "last"),
    [
        *[("step", "auto", 3), ("step", 0, 4)],
        *[(2, "auto", 3), (2, 0, 5), (2, "auto", 5), (2, "auto", 6)],
        *[(3, 0, 5), (3, 0, 7), (3, "auto", 8), (3, "auto", 9)],
    ],
)
def test_close_finishes_it(
    durability: int | str,
    cache: int | str,
    last: int,
    held: Held,
    undisturbed: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the last commit waits for updates, or for what it has to write beside them, and
    these for the snapshot."""
    run, at = saved_once(tmp_path, durability, cache=cache), AT[durability]
    tasks = list[SnapshotTask]()
    held.until_somebody_waits(run, monkeypatch)
    run.step(at, lambda: tasks.append(run.snapshot(tmp_path / "snap")))
    for number in range(at + 1, last):
        run.step(number)
    run.engine.close()
    assert tasks[0].done() and tasks[0].wait()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / f"{at}"))
    run = Run(tmp_path / "nvme", resume=True, durability=durability, cache=cache)
    assert run.engine.committed_step == last
    run.save(tmp_path / "last")
    run.engine.close()
    for name in ("model", "optimizer"):
        assert same(content(tmp_path / "last")[name], content(undisturbed[0] / f"{last}")[name])


@pytest.mark.parametrize("where", ["last step", "snapshot"])
def test_ctrl_c_in_close_cancels_it(
    where: str,
    stopped: tuple[Run, SnapshotTask],
    held: Held,
    undisturbed: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it waits for the snapshot, or for what the last step waits for, which may be that."""
    run, task = stopped
    finish, interrupts = SnapshotTask.finish, [KeyboardInterrupt()]

    def sealing(durability: Session, closes: bool = False) -> None:
        raise interrupts.pop()

    if where == "last step":
        monkeypatch.setattr(Session, "seal", sealing)

    def interrupted(task: SnapshotTask, timeout: float | None = None) -> bool:
        if interrupts:
            raise interrupts.pop()
        held.go_on.set()
        return finish(task, timeout)

    monkeypatch.setattr(SnapshotTask, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.engine.close()
    assert task.done() and not sibling(tmp_path / "snap", "partial").exists()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / "1"))


@pytest.mark.parametrize("how", ["gathered", "load"])
def test_writes_outside_of_steps_wait_for_it(
    how: str,
    durability: int | str,
    held: Held,
    undisturbed: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They overwrite what the commit before the last one speaks of."""
    run, at = saved_once(tmp_path, durability, update="exact"), AT[durability]
    run.save(tmp_path / "saved")
    tasks, waited = list[SnapshotTask](), list[bool]()
    run.step(at, lambda: tasks.append(run.snapshot(tmp_path / "snap")))
    next_commit = at + (1 if durability == "step" else int(durability))
    for number in range(at + 1, next_commit):
        run.step(number)
    run.model(**text_batch(next_commit))
    run.commit()
    wait = type(Probe(run.engine).store).begin_rewrite

    def awaited(store: Any, blocks: Any) -> None:
        waited.append(any(block.home.is_rewrite_pinned for block in blocks))
        held.go_on.set()
        wait(store, blocks)

    monkeypatch.setattr(type(Probe(run.engine).store), "begin_rewrite", awaited)
    if how == "load":
        run.engine.load_checkpoint(tmp_path / "saved", run.optimizer)
    else:
        weight = run.model.inner.blocks[0].up.weight
        with infinity.gathered([weight], write=True), torch.no_grad():
            weight.zero_()
    assert waited[0] and tasks[0].wait(60)
    run.engine.close()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / f"{at}"))


def die_in_a_snapshot(place: Path, rank: int, number: int, durability: int | str) -> None:
    run = saved_once(place, durability)
    reads, read = itertools.count(), BlockIo.read_version

    def counted(*values: Any) -> Ticket:
        if next(reads) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(*values)

    BlockIo.read_version = counted  # type: ignore[method-assign]
    run.step(AT[durability], lambda: run.snapshot(place / "snap"))
    for at in range(AT[durability] + 1, UNTIL[durability]):
        run.step(at)
    run.engine.close()


def test_a_kill_leaves_the_checkpoint_before_and_what_is_committed(
    durability: int | str, undisturbed: Reference, tmp_path: Path
) -> None:
    exits = ranks_in_processes(tmp_path, die_in_a_snapshot, 7, durability, ranks=1)
    assert exits == [-signal.SIGKILL]
    assert sibling(tmp_path / "snap", "partial").exists()
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / "1"))
    run = Run(tmp_path / "nvme", resume=True, durability=durability)
    run.engine.track(scheduler=run.scheduler)
    at = AT[durability]
    assert run.engine.committed_step in (at, at + (1 if durability == "step" else int(durability)))
    run.engine.load_checkpoint(tmp_path / "snap", run.optimizer)
    task = run.engine.snapshot(tmp_path / "snap", {"again": 1})
    assert task.step == 1 and task.wait(60)
    run.engine.close()
    assert not sibling(tmp_path / "snap", "partial").exists()
    assert same(content(tmp_path / "snap")["model"], content(undisturbed[0] / "1")["model"])


# What is refused


def test_what_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "off", durability="off")
    with pytest.raises(infinity.ConfigError, match=r"committed steps: set durability='step'"):
        infinity.snapshot(run.model, tmp_path / "snap")
    run.engine.close()
    run = Run(tmp_path / "nvme")
    with pytest.raises(infinity.ConfigError, match="directory of a checkpoint is 5; give a path"):
        run.engine.snapshot(5)  # type: ignore[arg-type]
    with pytest.raises(infinity.CheckpointError, match="extra may have numbers"):
        run.engine.snapshot(tmp_path / "snap", {"stream": io.BytesIO})
    run.step(0)
    run.model(**text_batch(1))
    run.commit()
    run.optimizer = None  # type: ignore[assignment]
    run.scheduler = None  # type: ignore[assignment]
    gc.collect()
    with pytest.raises(
        infinity.ConfigError, match=r"optimizer \(AdamW\) of the committed step 1 is"
    ):
        run.engine.snapshot(tmp_path / "snap")
    assert not any(b.home.pinned is not None for b in Probe(run.engine).store.state_blocks())
    run.engine.close()
    assert not (tmp_path / "snap").exists()


def test_a_model_that_is_collected_leaves_it_whole(
    held: Held, undisturbed: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "nvme")
    run.step(0)
    run.model(**text_batch(1))
    extra, progress = run.extra(), list[tuple[int, int]]()
    task = run.snapshot(tmp_path / "snap", progress=lambda *counts: progress.append(counts))
    assert task.step == 1 and held.came.wait(60)
    go_on_when_it_is_waited_for(held, monkeypatch)
    gone = weakref.ref(run.model)
    del run
    gc.collect()
    assert gone() is None and task.done() and task.wait()
    assert (
        progress[-1][0] == progress[-1][1] > 0 and extra == content(tmp_path / "snap")["extra"]["0"]
    )
    assert same(content(tmp_path / "snap"), content(undisturbed[0] / "1"))


def test_a_run_that_was_killed_before_it_made_its_optimizer_has_it_in_snapshots(
    tmp_path: Path,
) -> None:
    """The record that is taken over lacks it, and so the first forward makes another one."""
    (tmp_path / "nvme").mkdir()
    model = Model()
    infinity.wrap(model, config_of(nvme=[tmp_path / "nvme"], **LEAST))
    infinity.engine(model).close()

    run = Run(tmp_path / "nvme", resume=True)
    tasks: list[SnapshotTask] = []
    run.step(0, lambda: tasks.append(infinity.snapshot(run.model, tmp_path / "snapshot")))
    assert tasks[0].step == 0
    tasks[0].wait()

    other = Run(tmp_path / "other")
    other.engine.load_checkpoint(tmp_path / "snapshot", other.optimizer)
    other.step(0)
    assert other.losses == run.losses
    assert same(other.weights(), run.weights())
    for each in (run, other):
        each.engine.close()


@pytest.mark.parametrize("durability", ["step", 2])
@pytest.mark.parametrize("when", ["before the step", "after it", "after one that is left out"])
@pytest.mark.parametrize("begun", [True, False], ids=["after a forward", "before any forward"])
def test_an_optimizer_that_is_younger_than_the_first_record(
    begun: bool, when: str, durability: int | str, tmp_path: Path
) -> None:
    """A snapshot of step 0 has it, as a save before the first step does."""
    (tmp_path / "nvme").mkdir()
    model = Model()
    options = LEAST | {"durability": durability}
    engine = infinity.engine(infinity.wrap(model, config_of(nvme=[tmp_path / "nvme"], **options)))
    loss = model(**text_batch(0)).loss if begun else None
    Probe(engine).committer.rest()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=True)
    optimizer.param_groups[0]["lr"] = 0.5
    engine.save_checkpoint(tmp_path / "saved", optimizer)

    def step() -> None:
        value = math.nan if when == "after one that is left out" else 1.0
        if loss is not None:
            (loss * value).backward()
        else:
            for parameter in model.parameters():
                parameter.grad = torch.full(parameter.shape, value, dtype=parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()

    if when != "before the step":
        step()
    task = infinity.snapshot(model, tmp_path / "snap")
    assert task.wait(60) and task.step == 0
    snap, saved = content(tmp_path / "snap"), content(tmp_path / "saved")
    assert (snap["model"].pop("counter.seen"), saved["model"].pop("counter.seen")) == (0, begun)
    assert same(snap, saved)
    assert optimizer.skipped_steps == (when == "after one that is left out")
    other = Run(tmp_path / "other")
    other.engine.load_checkpoint(tmp_path / "snap", other.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    for each in (engine, other.engine):
        each.close()
