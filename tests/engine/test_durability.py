"""`Config(durability="step")`: whatever ends the process, the next one goes on with the same
bits."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import math
import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli import gc as gc_command
from infinity.cli.gc import collect
from infinity.directories.commits import COMMIT_NAMES, DRAFT_NAME, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.directories.lock import LOCK_NAME
from infinity.durable.committer import Committer
from infinity.durable.home import ExtentState
from infinity.durable.states import HEAD_BYTES, RecordKey
from infinity.durable.store import DurableStore
from infinity.tiers.drives import NvmeTier
from infinity.tiers.manifest import DURABLE_NAMES, MANIFEST_NAME, STATES_NAME
from infinity.tiers.states_files import ExtentTransfer
from support.configs import config_of
from support.durable import (
    LEAST,
    PLACES,
    STEPS,
    Model,
    folders_in,
    in_a_process,
    logged,
    record_in,
    run_undisturbed,
    same,
    train,
)
from support.models import text_batch
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The log and the result of a run that nobody killed, without durability."""
    return run_undisturbed(tmp_path_factory.mktemp("uninterrupted"))


def test_it_changes_no_number(
    uninterrupted: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place, expected = uninterrupted
    found = train(folders_in(tmp_path), tmp_path / "log", resume=False)
    assert same(found, expected) and logged(tmp_path) == logged(place)


@pytest.mark.pairs
@pytest.mark.parametrize("every", [3, 40, 101])
@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_killed_again_and_again_it_ends_with_the_same_bits(
    every: int,
    update: str,
    cache: int | str,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """After so many writes each time, a few more every time so that it comes to an end."""
    reference, expected = uninterrupted
    folders, kill, ends = folders_in(tmp_path, count=2), every, []
    while not ends or ends[-1]:
        before = logged(tmp_path)
        ends.append(in_a_process(tmp_path, folders, kill, update=update, cache=cache))
        after = logged(tmp_path)[len(before) :]
        if before and after:
            assert after[0][0] >= before[-1][0], "more than one step was made again"
        kill += 7
        assert ends[-1] in (0, -signal.SIGKILL)
    assert len(ends) > 1
    assert same(torch.load(tmp_path / "result"), expected)
    steps = {number: rest for number, *rest in logged(reference)}
    assert all(steps[number] == rest for number, *rest in logged(tmp_path))
    assert {number for number, *_ in logged(tmp_path)} == set(range(STEPS))


def test_what_is_closed_goes_on_and_so_does_what_was_evaluated(
    uninterrupted: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folders = folders_in(tmp_path)
    train(folders, tmp_path / "log", steps=3)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=True)
    engine = infinity.engine(model)
    assert engine.committed_step == 3
    with torch.no_grad():
        model.eval()(**text_batch(0))
    engine.close()  # without an optimizer: those of the run before are kept
    found = train(folders, tmp_path / "log")
    assert same(found, uninterrupted[1]) and logged(tmp_path) == logged(uninterrupted[0])


def accumulated(
    folder: Path, order: str, steps: range, begun: bool = False
) -> dict[str, torch.Tensor]:
    """The weights after these steps; those before them are committed. With `begun` there has been
    a backward of the next one."""
    torch.manual_seed(steps.start)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    folder.mkdir(exist_ok=True)
    config = config_of(nvme=folder, **LEAST | {"precision": "fp32"})
    infinity.wrap(model, config, resume=steps.start > 0)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

    def backward(step: int) -> None:
        batches = [torch.linspace(0, step + each + 1, 64).view(4, 16) for each in range(3)]
        if order == "loop":
            for batch in batches:
                (model(batch).square().mean() / 3).backward()
        else:
            infinity.accumulate(model, batches, lambda out, _: out.square().mean(), order=order)

    with infinity.engine(model) as engine:
        assert (engine.committed_step or 0) == steps.start
        for step in steps:
            backward(step)
            optimizer.step()
            optimizer.zero_grad()
        found = {name: value.clone() for name, value in engine.state_dict().items()}
        if begun:
            backward(steps.stop)
    return found


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("order", ["loop", "horizontal", "vertical"])
def test_micro_batches_draw_the_same_numbers_after_a_resume(
    order: str, begun: bool, tmp_path: Path
) -> None:
    expected = accumulated(tmp_path / "whole", order, range(4))
    accumulated(tmp_path / "cut", order, range(2), begun)
    assert same(accumulated(tmp_path / "cut", order, range(2, 4)), expected)


def test_writes_outside_of_steps_are_committed_with_the_next_one(tmp_path: Path) -> None:
    folders, weights = folders_in(tmp_path), []
    for resume in (False, True):
        model = Model()
        infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=resume)
        weight = model.inner.blocks[0].up.weight
        if not resume:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            for value in (1.0, 2.0, 3.0):
                with infinity.gathered([weight], write=True), torch.no_grad():
                    weight.fill_(value)
            model(**text_batch(0)).loss.backward()
            optimizer.step()
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        infinity.engine(model).close()
    assert same(weights[1], weights[0])


def start(folders: list[Path], **options: Any) -> tuple[Model, infinity.Engine, Any]:
    """A resumed run, with its optimizer."""
    model = Model()
    infinity.wrap(model, config_of(nvme=folders, **LEAST | options), resume=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=True)
    return model, infinity.engine(model), optimizer


BETWEEN: dict[str, Callable[[Any, Any, Any], object]] = {
    "norm of the gradients": lambda model, engine, optimizer: engine.clip_grad_norm_(1.0),
    "torch's norm": lambda model, engine, optimizer: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0
    ),
    "a gradient": lambda model, engine, optimizer: next(model.parameters()).grad.sum(),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_record_is_of_the_beginning_of_a_forward(between: str, tmp_path: Path) -> None:
    """Whatever comes between the backward and its step: a kill there draws the same again."""
    losses = []
    for place, kills in (("whole", False), ("killed", True)):
        (folder,) = folders_in(tmp_path / place)
        for steps in (2, 4) if kills else (4,):
            torch.manual_seed(7)
            model, engine, optimizer = start([folder])
            found = []
            for number in range(engine.committed_step or 0, steps):
                loss = model(**text_batch(number)).loss
                loss.backward()
                BETWEEN[between](model, engine, optimizer)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                found.append(loss.item())
            if steps == 2:
                model(**text_batch(2)).loss.backward()
                BETWEEN[between](model, engine, optimizer)
                Probe(engine).committer.rest()
                copy = tmp_path / "copy"
                shutil.copytree(folder, copy)  # as a kill leaves it
                (copy / LOCK_NAME).unlink()
                engine.close()
                folder = copy
        losses.append(found[-2:])
    assert losses[0] == losses[1]


def test_steps_that_are_left_out_count(tmp_path: Path) -> None:
    model, engine, optimizer = start(folders_in(tmp_path))
    for number in range(3):
        loss = model(**text_batch(number)).loss
        (loss * math.nan if number == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    assert start([tmp_path / "nvme0"])[1].committed_step == 3


def test_an_optimizer_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    train(folders, tmp_path / "log", steps=2)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=True)
    with pytest.raises(infinity.ConfigError, match="belong to another optimizer"):
        infinity.Adam(model.parameters())
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert moments and all(bool(moment.any()) for moment in moments[-4:])
    infinity.engine(model).close()


def test_one_optimizer_has_all_that_is_trained(tmp_path: Path) -> None:
    model = Model()
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST))
    first, *rest = model.inner.blocks
    optimizer = infinity.AdamW(first.parameters())
    with pytest.raises(infinity.ConfigError, match="commits the steps of one optimizer"):
        infinity.AdamW(rest[0].parameters())
    del optimizer
    infinity.AdamW(rest[0].parameters())
    infinity.engine(model).close()


def test_the_last_step_is_committed_without_its_optimizer(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)

    def steps() -> Any:
        model, _, optimizer = start(folders)
        model(**text_batch(0)).loss.backward()
        optimizer.step()
        return model

    model = steps()
    gc.collect()
    infinity.engine(model).close()
    assert start(folders)[1].committed_step == 1


def test_a_model_that_is_collected_before_its_first_step_can_be_resumed(tmp_path: Path) -> None:
    """Its buffers are gone, so what `wrap` committed stays the last record."""
    folders = folders_in(tmp_path)
    for _ in range(2):
        model, engine, _ = start(folders)
        assert engine.committed_step in (None, 0)
        del model, engine
        gc.collect()
    train(folders, tmp_path / "log", steps=1)


def test_a_record_of_another_run_is_not_taken(tmp_path: Path) -> None:
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=4)
    for name in (MANIFEST_NAME, STATES_NAME):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(infinity.CheckpointError, match=r"lacks a part|is gone"):
            start([folder])
        (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest | {"run": "0" * 32}))
    with pytest.raises(infinity.CheckpointError, match="or it is of another run"):
        start([folder])


def test_a_checkpoint_that_is_loaded_is_committed(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    model, engine, optimizer = start(folders)
    for number in range(2):
        model(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            engine.save_checkpoint(tmp_path / "first", optimizer)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.load_checkpoint(tmp_path / "first", optimizer)
    copy = tmp_path / "copy"
    shutil.copytree(folders[0], copy)  # as a kill leaves it
    (copy / LOCK_NAME).unlink()
    engine.close()
    again, engine, _ = start([copy])
    assert engine.committed_step == 1 and same(again.state_dict(), expected)
    engine.close()


class Slow:
    """Commits that end when the backward after them has ended; every write is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.writes = threading.Event(), 0
        self.blocks: list[Any] = []
        commit, write = DurableStore.commit, NvmeTier.write

        def slow(store: DurableStore, *values: Any) -> None:
            self.blocks = store.state_blocks()
            assert self.go_on.wait(60)
            commit(store, *values)

        def looked_at(tier: NvmeTier, transfer: ExtentTransfer) -> Any:
            for home in (block.home for block in self.blocks):
                kept = (ExtentState.SEALED, ExtentState.COMMITTED)
                states = zip(home.extents, home.states, strict=False)
                assert transfer.extent not in {each for each, state in states if state in kept}
            self.writes += 1
            return write(tier, transfer)

        monkeypatch.setattr(DurableStore, "commit", slow)
        monkeypatch.setattr(NvmeTier, "write", looked_at)


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_no_update_writes_where_something_is_committed(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST | {"update": update}))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    written = []
    for number in range(4):
        slow.go_on.clear()
        model(**text_batch(number)).loss.backward()
        written.append(slow.writes)
        slow.go_on.set()
        optimizer.step()
        optimizer.zero_grad()
        infinity.engine(model).drain()
    infinity.engine(model).close()
    assert slow.writes > written[-1] > written[1]


def test_writes_outside_of_steps_leave_what_is_to_be_committed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a commit: what no record speaks of is rewritten in its place."""
    slow = Slow(monkeypatch)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST))
    weight = model.inner.blocks[0].up.weight
    for value in (1.0, 2.0, 3.0):
        with infinity.gathered([weight], write=True), torch.no_grad():
            weight.fill_(value)
    assert not slow.go_on.is_set() and bool((weight == 3.0).all())
    slow.go_on.set()
    infinity.engine(model).close()


class Branches(nn.Module):
    """Layers, of which the last one is used when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for layer in self.layers[:count]:
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize("commits", ["soon", "late"])
def test_how_long_a_commit_takes_changes_no_record(
    commits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks must make the same records. A write outside of a step, to what the step leaves
    alone, is the case where a commit under way looked like something to be committed."""
    found, go_on = [], threading.Event()
    seal, rest, commit = Committer.seal, Committer.rest, DurableStore.commit

    def late(store: DurableStore, *values: Any) -> None:
        assert go_on.wait(60)
        commit(store, *values)

    def noted(self: Committer, key: RecordKey, *values: Any) -> None:
        found.append(key.step)
        seal(self, key, *values)

    def waited_for(self: Committer) -> bool:
        go_on.set()
        return rest(self)

    monkeypatch.setattr(Committer, "seal", noted)
    if commits == "late":
        monkeypatch.setattr(DurableStore, "commit", late)
        monkeypatch.setattr(Committer, "rest", waited_for)
    model = Branches()
    options = LEAST | {"precision": "fp32"}
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **options), units=list(model.layers))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        model(torch.ones(2, 64), 3 if number == 0 else 2).sum().backward()
        if number == 2:
            if commits == "soon":
                Probe(infinity.engine(model)).committer.rest()
            weight = model.layers[2].weight
            with infinity.gathered([weight], write=True), torch.no_grad():
                weight.fill_(number)
        optimizer.step()
        optimizer.zero_grad()
        infinity.engine(model).drain()
        go_on.clear()
    go_on.set()
    infinity.engine(model).close()
    assert found == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_commit_that_fails_ends_all_who_wait(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last one that did not counts."""
    folders, left = folders_in(tmp_path), at

    def write(log: CommitLog, content: bytes, real: Any = CommitLog.write) -> int:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.ENOSPC, "no space is left", "nvme0")
        return int(real(log, content))

    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "write", write)
        with pytest.raises(infinity.EngineClosedError, match=r"a commit failed.*no space is left"):
            train(folders, tmp_path / "log", steps=5)
    gc.collect()  # the engine of the run that failed
    before = len(logged(tmp_path))
    train(folders, tmp_path / "log", steps=5)
    assert logged(tmp_path)[before:][0][0] == max(at - 2, 0)


def test_gc_removes_what_is_committed_only_when_it_is_told_to(tmp_path: Path) -> None:
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=2)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted((STATES_NAME, MANIFEST_NAME, *COMMIT_NAMES))
    assert collect(folder) == {}
    train([folder], tmp_path / "log", steps=3)
    assert sorted(Path(name).name for name in collect(folder, committed=True)) == names
    assert list(folder.iterdir()) == []
    train([folder], tmp_path / "log", steps=1)
    assert logged(tmp_path)[-1][0] == 0


def test_gc_leaves_what_is_committed_after_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found what a run had left that was killed before its first commit, and another run takes
    the directory before it does."""
    (folder,) = folders_in(tmp_path)
    (folder / STATES_NAME).touch()
    real = gc_command.lock

    def lock(place: Directory) -> Any:
        train([folder], tmp_path / "log", steps=2)
        return real(place)

    monkeypatch.setattr(gc_command, "lock", lock)
    assert collect(folder) == {}
    train([folder], tmp_path / "log", steps=3)
    assert logged(tmp_path)[-1][0] == 2


# What is refused


def test_states_are_neither_lost_nor_taken_for_others(tmp_path: Path) -> None:
    folders = folders_in(tmp_path, count=2)
    train(folders, tmp_path / "log", steps=2)
    content = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}

    def refused(match: str, nvme: list[Path], resume: bool = True, **options: Any) -> None:
        with pytest.raises(infinity.InfinityError, match=match):
            infinity.wrap(Model(), config_of(nvme=nvme, **LEAST | options), resume=resume)
        assert all(path.read_bytes() == before for path, before in content.items())

    refused("go on from them with infinity.wrap.model, config, resume=True.", folders, False)
    off = {"durability": "off", "cache": 0}
    refused(
        "holds the committed states.*begin anew with infinity finetune --overwrite, or",
        folders,
        False,
        **off,
    )
    refused("the states of another model or configuration: format of", folders, precision="fp32")
    refused("another model or configuration", folders, moment_precision="bf16")
    refused("do not hold the states of one run together", folders[:1])
    refused("give all nvme directories of that run in the order", folders[::-1])
    refused("give all nvme directories of that run in the order", folders[1:])
    refused("resume=True goes on from committed states", folders, durability="off")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parameters": "cpu"}, "durability='step' needs parameters='nvme'"),
        ({"optimizer": "cpu"}, "needs optimizer='nvme'"),
        ({"copy_on_write": False}, "needs copy_on_write=True"),
        ({"update": "delayed"}, "needs another update than 'delayed'"),
        ({"algorithm": "other"}, "another algorithm than 'other'"),
        ({"stage": 1, "parameters": "gpu", "gradients": "gpu"}, "stage=1 keeps them on the device"),
        ({"stage": 2, "parameters": "gpu"}, "stage=2 keeps them .* set stage=3, or stage=0 for"),
    ],
)
def test_what_cannot_be_committed_is_refused(
    options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(infinity.ConfigError, match=match):
        config_of(nvme=folders_in(tmp_path), **LEAST | options)


def test_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    train(folders, tmp_path / "log", steps=1)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=True)
    with pytest.raises(infinity.ConfigError, match=r"belong to another optimizer \(AdamW\)"):
        infinity.Adam(model.parameters())
    with pytest.raises(infinity.ConfigError, match="or to other parameters in its groups"):
        infinity.AdamW(list(model.parameters())[1:])
    infinity.AdamW(model.parameters())
    infinity.engine(model).close()


def test_the_log_says_where_nothing_is_to_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not where a step is resumed, or none was asked for."""
    folders = folders_in(tmp_path)
    text = f"{folders[0]}: no step is committed, so training begins anew"
    (tmp_path / "other").mkdir()
    with caplog.at_level(logging.INFO, "infinity"):
        train([tmp_path / "other"], tmp_path / "log", resume=False, steps=1)
        assert "begins anew" not in caplog.text
        for _ in range(2):
            train(folders, tmp_path / "log", steps=1)
            assert caplog.messages.count(text) == 1


def test_what_is_frozen_cannot_be_rewritten_in_place(tmp_path: Path) -> None:
    model = Model()
    for parameter in model.inner.blocks[0].parameters():
        parameter.requires_grad_(False)
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST))
    infinity.engine(model).track()
    frozen = model.inner.blocks[0].up.weight
    before = frozen.clone()
    with (
        pytest.raises(infinity.ConfigError, match="cannot be changed with durability"),
        infinity.gathered([frozen], write=True),
    ):
        frozen.zero_()
    assert torch.equal(model.inner.blocks[0].up.weight, before)
    infinity.engine(model).close()


@pytest.mark.parametrize("name", ["the last record", MANIFEST_NAME, STATES_NAME])
def test_damage_is_said_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=2)
    path = record_in(folder) if name == "the last record" else folder / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 8])  # a record lies in the first half of its file
    with pytest.raises(infinity.CheckpointError, match=r"is damaged|is cut off"):
        infinity.wrap(Model(), config_of(nvme=[folder], **LEAST), resume=True)
    path.write_bytes(content)
    train([folder], tmp_path / "log", steps=3)


@pytest.mark.root
def test_a_drive_that_others_fill_takes_further_commits(
    mount: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a commit writes has its place from the first one on."""
    place, steps = mount("size=32m"), itertools.count()

    def forward(self: Model, real: Any = Model.forward, **batch: Any) -> Any:
        if next(steps) == 2:
            Probe(infinity.engine(self)).committer.rest()
            with contextlib.suppress(OSError), (place / "full").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert os.statvfs(place).f_bavail == 0
        return real(self, **batch)

    monkeypatch.setattr(Model, "forward", forward)
    (folder,), (other,) = folders_in(place), folders_in(tmp_path)
    train([folder], tmp_path / "log")
    (place / "full").unlink()
    found = train([folder], tmp_path / "log", steps=STEPS + 1)
    assert same(found, train([other], tmp_path / "other log", steps=STEPS + 1))


def test_states_of_another_version_are_refused(tmp_path: Path) -> None:
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=1)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["version"] -= 1
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(
        infinity.CheckpointError, match=r"it is of version 3, and 4 is known\); go on from a checkp"
    ):
        infinity.wrap(Model(), config_of(nvme=[folder], **LEAST), resume=True)


def test_the_last_record_is_not_kept_in_memory(tmp_path: Path) -> None:
    """It has the buffers of the model. A snapshot reads it from the drive, and says what it finds
    there."""
    (folder,) = folders_in(tmp_path)
    nbytes = 8 << 20
    for resume in (False, True):
        model = Model()
        model.register_buffer("large", torch.zeros(nbytes, dtype=torch.uint8))
        infinity.wrap(model, config_of(nvme=[folder], **LEAST), resume=resume)
        engine = infinity.engine(model)
        optimizer = infinity.AdamW(model.parameters())
        tracemalloc.start()
        for number in range(2):
            model(**text_batch(number)).loss.backward()
            Probe(engine).committer.rest()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < nbytes / 2
            optimizer.step()
        tracemalloc.stop()
        assert engine.snapshot(tmp_path / "snap").wait(60)
        engine.close()
    model = Model()
    model.register_buffer("large", torch.zeros(nbytes, dtype=torch.uint8))
    infinity.wrap(model, config_of(nvme=[folder], **LEAST), resume=True)
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters())
    for name in COMMIT_NAMES:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 8] ^= 1
        (folder / name).write_bytes(content)
    with pytest.raises(infinity.CheckpointError, match="record of the committed states cannot be"):
        engine.snapshot(tmp_path / "snap")
    assert not any(b.home.pinned is not None for b in Probe(engine).store.state_blocks())
    engine.close()


def test_what_a_flush_that_failed_may_have_dropped_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next flush would succeed. The error says which step a resume goes on from."""
    folders, flush, count = folders_in(tmp_path), NvmeTier.flush, 0

    def failing(tier: NvmeTier) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.EIO, "Input/output error", "nvme0")
        flush(tier)

    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "flush", failing)
        with pytest.raises(
            infinity.EngineClosedError,
            match=r"nvme0: Input/output error; .*; wrap with resume=True goes on from step 0,",
        ):
            train(folders, tmp_path / "log", steps=5)
        gc.collect()  # the engine of the run that failed
        assert count == 3
    before = len(logged(tmp_path))
    train(folders, tmp_path / "log", steps=5)
    assert logged(tmp_path)[before:][0][0] == 0


def test_a_record_that_cannot_be_read_leaves_nothing_behind(
    tmp_path: Path, footprint: Callable[[], Any]
) -> None:
    """It is whole, but says something else, as that of another version may."""
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=1)
    with Directory(folder) as directory:
        commits = CommitLog(DurableFiles(directory))
        last = commits.last()
        assert last is not None
        commits.write(last.content[:HEAD_BYTES] + b"something else")
    before = footprint()
    with pytest.raises(infinity.CheckpointError, match="cannot be read"):
        infinity.wrap(Model(), config_of(nvme=[folder], **LEAST), resume=True)
    assert footprint() == before


def test_a_kill_while_a_first_commit_that_failed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was committed, so nothing is refused, whatever of it is still there."""
    (folder,) = folders_in(tmp_path)
    copies: list[Path] = []

    def fail(directory: Directory, sync: Any = Directory.sync) -> None:
        if (folder / COMMIT_NAMES[0]).exists() and not copies:
            raise OSError(errno.EIO, "a drive fails", "nvme0")
        sync(directory)

    def remove(directory: Directory, name: str, real: Any = Directory.remove) -> None:
        if (folder / COMMIT_NAMES[0]).exists() or copies:
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(folder, copies[-1])  # as a kill leaves it
            (copies[-1] / LOCK_NAME).unlink()
        real(directory, name)

    model = Model()
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "sync", fail)
        patch.setattr(Directory, "remove", remove)
        infinity.wrap(model, config_of(nvme=[folder], **LEAST), resume=True)
        Probe(infinity.engine(model)).committer.rest()
        infinity.engine(model).close()
    assert list(folder.iterdir()) == []
    assert len(copies) >= len(DURABLE_NAMES)
    for copy in copies:
        train([copy], tmp_path / "log", steps=1)


@pytest.mark.parametrize("by", ["the engine", "infinity gc"])
def test_a_kill_while_committed_states_are_removed_leaves_all_or_nothing(
    by: str,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before each removal: a run goes on from the committed step, or begins anew."""
    names = ("nvme0", "nvme1") if by == "the engine" else ("nvme0",)
    home = tmp_path / "run"
    folders = folders_in(home, count=len(names))
    train(folders, tmp_path / "log", steps=3)
    copies: list[Path] = []

    def copied(name: str) -> None:
        real = getattr(Directory, name)

        def call(directory: Directory, *values: Any) -> Any:
            if directory.path in folders and values[0] not in (LOCK_NAME, DRAFT_NAME):
                copies.append(tmp_path / f"copy{len(copies)}")
                shutil.copytree(home, copies[-1])  # as a kill leaves it
                for folder in names:
                    (copies[-1] / folder / LOCK_NAME).unlink(missing_ok=True)
            return real(directory, *values)

        monkeypatch.setattr(Directory, name, call)

    if by == "the engine":
        model = Model()
        infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=True)
        infinity.engine(model).discard_committed()
    for name in ("remove", "rename", "reclaim"):
        copied(name)
    if by == "the engine":
        infinity.engine(model).close()
    else:
        collect(folders[0], committed=True)
    monkeypatch.undo()
    assert not any(list(folder.iterdir()) for folder in folders)
    began = []
    for copy in copies:
        log = copy / "log"
        found = train([copy / name for name in names], log)
        began.append(logged(copy)[0][0])
        assert same(found, uninterrupted[1])
    assert began == sorted(began, reverse=True) and set(began) == {0, 3}


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("by", "lasts"),
    [("the engine", False), ("the engine", True), ("infinity gc", True)],
)
def test_an_error_while_committed_states_are_removed_leaves_all_or_nothing(
    by: str,
    lasts: bool,
    first: int,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of states that are striped over two directories, one of which fails at one operation, or from
    then on: a run goes on from the committed step, or begins anew. Every other operation fails."""
    names = ("nvme0", "nvme1")
    train(folders_in(tmp_path / "run", count=2), tmp_path / "log", steps=3)
    began = []
    for at in itertools.count(first, 2):
        home = tmp_path / f"copy{at}"
        shutil.copytree(tmp_path / "run", home)
        folders = [home / name for name in names]
        if by == "the engine":
            model = Model()
            infinity.wrap(model, config_of(nvme=folders, **LEAST), resume=True)
            infinity.engine(model).discard_committed()
        left, broken = at, set[Path]()

        def failing(name: str, folders: list[Path] = folders, broken: set[Path] = broken) -> None:
            real = getattr(Directory, name)

            def call(directory: Directory, *values: Any) -> Any:
                nonlocal left
                if directory.path in folders and values[:1] != (LOCK_NAME,):
                    if left == 0 or (lasts and directory.path in broken):
                        broken.add(directory.path)
                        left -= 1
                        raise OSError(errno.EIO, "Input/output error")
                    left -= 1
                return real(directory, *values)

            patch.setattr(Directory, name, call)

        with monkeypatch.context() as patch:
            for name in ("remove", "rename", "reclaim", "create", "sync", "open"):
                failing(name)
            with contextlib.suppress(OSError):
                if by == "the engine":
                    infinity.engine(model).close()
                else:
                    collect(*folders[::-1], committed=True)
        if not broken:
            break
        log = home / "log"
        assert same(train(folders, log), uninterrupted[1]), f"after operation {at}"
        began.append(logged(home)[0][0])
    assert not any(list(folder.iterdir()) for folder in folders)
    assert began == sorted(began, reverse=True) and set(began) == {0, 3}


def test_activations_that_go_to_nvme_from_now_on_do_not_cut_states_off(tmp_path: Path) -> None:
    """Of a run whose states fill their file, and so have no room beyond."""
    (folder,) = folders_in(tmp_path)
    sizes, weights = [], []
    for activations in ("gpu", "nvme", "gpu"):
        model = nn.Sequential(nn.Linear(128, 4096, bias=False))
        config = config_of(nvme=[folder], activations=activations, **LEAST | {"precision": "fp32"})
        infinity.wrap(model, config, resume=True)
        optimizer = infinity.AdamW(model.parameters())
        weights.append(model[0].weight.clone())
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        infinity.engine(model).close()
        sizes.append((folder / STATES_NAME).stat().st_size)
    assert weights[1].ne(weights[0]).any() and weights[2].ne(weights[1]).any()
    # Two extents each of parameters and of two moments, 4 bytes per element: 3 stripes.
    assert sizes[0] == sizes[2] == 2 * 3 * 4 * 128 * 4096 == 3 * (4 << 20)
    assert sizes[1] == 4 * (4 << 20)
