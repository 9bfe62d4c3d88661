"""`infinity.snapshot` on several ranks: all write one committed step, and end together."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import infinity
from infinity.checkpoint.files import sibling
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.nvme.ticket import Ticket
from infinity.tiers.block_io import BlockIo
from support.configs import config_of
from support.durable import LEAST, Model
from support.models import text_batch
from support.probe import Probe
from support.rank_group import RANKS, OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")


def nothing() -> None:
    """What comes between, where nothing does."""


class Run:
    """Training on all ranks, with batches of their own."""

    def __init__(self, place: Path, **options: Any) -> None:
        place.mkdir(exist_ok=True)
        self.model = Model()
        infinity.wrap(self.model, config_of(nvme=[place], **LEAST | options))
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int, between: Callable[[], object] = nothing) -> None:
        loss = self.model(**text_batch(number * RANKS + dist.get_rank())).loss
        between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def content(directory: Path) -> dict[str, Any]:
    """All of a checkpoint, by DCP's own reader, flat."""
    dcp_to_torch_save(directory, directory.with_suffix(".pt"))
    found: dict[str, Any] = torch.load(directory.with_suffix(".pt"), weights_only=True)
    flat: dict[str, Any] = {}
    left = [("", found)]
    while left:
        prefix, each = left.pop()
        for name, value in each.items():
            if isinstance(value, dict):
                left.append((f"{prefix}{name}/", value))
            else:
                flat[f"{prefix}{name}"] = value
    return flat


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        for name, value in a.items()
    )


def train(
    directory: Path, rank: int, patch: pytest.MonkeyPatch, holds: int = 1, **options: Any
) -> None:
    """Rank `holds` reads nothing before its own updates wait for it."""
    plain = Run(directory / "plain", **options | {"durability": "off"})
    for number in range(5):
        plain.step(number)
        if number == 1:
            plain.engine.save_checkpoint(
                directory / "saved", plain.optimizer, {"rank": rank, "more": [1.5]}
            )
    weights = {name: value.clone() for name, value in plain.model.state_dict().items()}
    plain.engine.close()
    run, read, tasks = (
        Run(directory / "nvme", **options),
        BlockIo.read_version,
        list[SnapshotTask](),
    )
    probe, count = Probe(run.engine), 0

    def until(*values: Any) -> Ticket:
        nonlocal count
        jobs = probe.jobs.jobs
        if count == 0 and rank == holds:
            probe.await_jobs(lambda: any(j.is_final and j.is_pinned for j in jobs), 60)
        count += 1
        return read(*values)

    patch.setattr(BlockIo, "read_version", until)

    def snapshot() -> None:
        extra = {"rank": rank, "more": [1.5]}
        tasks.append(infinity.snapshot(run.model, directory / "snap", extra))

    for number in range(5):
        run.step(number, snapshot if number == 2 else nothing)
    task = tasks[0]
    assert task.step == 2 and task.wait(60)
    if rank == 0:  # that it is there does not depend on the other one
        assert same(content(directory / "snap"), content(directory / "saved"))
    assert same(dict(run.model.state_dict()), weights)
    run.engine.close()


def parts(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    train(directory, rank, patch)


def parts_that_begin_in_backward(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    train(directory, rank, patch, update="speculative")


def replicas(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    """The first one writes; the second one's updates wait for nothing."""
    train(directory, rank, patch, holds=0, stage=0)


def one_fails(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    run = Run(directory / "nvme")
    run.step(0)
    with pytest.MonkeyPatch.context() as broken:
        if rank == 1:
            broken.setattr(BlockIo, "read_version", lambda *values: 1 / 0)
        failing = run.engine.snapshot(directory / "snap")
        with pytest.raises(infinity.CheckpointError, match="division by zero"):
            failing.wait(60)
    assert not (directory / "snap").exists()
    assert rank == 1 or not sibling(directory / "snap", "partial").exists()
    go_on, read = threading.Event(), BlockIo.read_version

    def held(*values: Any) -> Ticket:
        assert rank == 0 or go_on.wait(60)
        return read(*values)

    patch.setattr(BlockIo, "read_version", held)
    cancelled = run.engine.snapshot(directory / "snap")
    finish = SnapshotTask.finish
    if rank == 1:

        def finishing(task: SnapshotTask, timeout: float | None = None) -> bool:
            go_on.set()
            return finish(task, timeout)

        patch.setattr(SnapshotTask, "finish", finishing)
        cancelled.cancel()
    with pytest.raises(infinity.CheckpointError, match="the snapshot of step 0 was cancelled"):
        cancelled.wait(60)
    run.step(1)
    run.step(2)
    assert run.engine.snapshot(directory / "snap").wait(60)
    run.engine.close()


def one_refuses(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Before anything is begun on any rank."""
    run = Run(directory / "nvme")
    run.step(0)
    extra = {"what": threading.Event} if rank == 0 else {}
    text = (
        "no rank begins this snapshot: rank 0 refuses it: extra may have" if rank else "^extra may"
    )
    with pytest.raises(infinity.CheckpointError, match=text):
        run.engine.snapshot(directory / "snap", extra)
    task = run.engine.snapshot(directory / "snap", {})
    run.engine.close()
    assert task.done() and task.wait() and (directory / "snap").exists()


def one_has_no_optimizer(directory: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Which shows when all know which step it is: nobody waits for the one that refuses."""
    run = Run(directory / "nvme", collective_timeout=600.0)
    run.step(0)
    run.model(**text_batch(rank))
    if rank == 1:
        run.optimizer = None  # type: ignore[assignment]
        gc.collect()
    reason = r"the optimizer \(AdamW\) of the committed step 1 is gone"
    kind, text = (
        (infinity.ConfigError, f"^{reason}")
        if rank == 1
        else (
            infinity.CheckpointError,
            f"^no rank begins this snapshot: rank 1 refuses it: {reason}",
        )
    )
    for _ in range(2):
        with pytest.raises(kind, match=text):
            run.engine.snapshot(directory / "snap")
    assert not any(b.home.pinned is not None for b in Probe(run.engine).store.state_blocks())
    run.optimizer = run.optimizer or infinity.AdamW(run.model.parameters(), lr=1e-2)
    task = run.engine.snapshot(directory / "snap")
    run.engine.close()
    assert task.wait() and (directory / "snap").exists()


def work(name: str, where: Path, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        globals()[name](where, rank, patch)


@pytest.mark.parametrize(
    "work",
    [
        parts,
        parts_that_begin_in_backward,
        replicas,
        one_fails,
        one_refuses,
        one_has_no_optimizer,
    ],
)
def test_on_two_ranks(
    work: Callable[[Path, int, pytest.MonkeyPatch], None], on_ranks: OnRanks
) -> None:
    assert on_ranks(work.__name__) == ["done"] * RANKS
