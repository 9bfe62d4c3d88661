"""`Config(durability="step")`: whatever ends the process, the next one goes on with the same
bits."""

from __future__ import annotations

import errno
import gc
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cli.gc import collect
from infinity.directories.commits import COMMIT_NAMES, CommitLog
from infinity.optim.committer import Committer
from infinity.tiers.drives import STATES_NAME, NvmeTier
from infinity.tiers.durable import MANIFEST_NAME
from infinity.tiers.store import Store
from support.configs import config_of
from support.durable import LEAST, STEPS, Model, in_a_process, logged, train
from support.models import text_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def folders_in(place: Path, count: int = 1) -> list[Path]:
    folders = [place / f"nvme{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The log and the result of a run that nobody killed, without durability."""
    place = tmp_path_factory.mktemp("uninterrupted")
    assert in_a_process(place, folders_in(place), durability="off", resume=False) == 0
    return place, torch.load(place / "result")


def test_it_changes_no_number(
    uninterrupted: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place, expected = uninterrupted
    found = train(folders_in(tmp_path), tmp_path / "log", resume=False)
    assert same(found, expected) and logged(tmp_path) == logged(place)


@pytest.mark.parametrize("every", [3, 40, 67, 101, 139])
@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_killed_again_and_again_it_ends_with_the_same_bits(
    every: int,
    update: str,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """After so many writes each time, a few more every time so that it comes to an end."""
    reference, expected = uninterrupted
    folders, kill, ends = folders_in(tmp_path, count=2), every, []
    while not ends or ends[-1]:
        before = logged(tmp_path)
        ends.append(in_a_process(tmp_path, folders, kill, update=update))
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


class Slow:
    """Commits that end when the backward after them has ended; every write is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.writes = threading.Event(), 0
        self.blocks: list[Any] = []
        commit, write = Store.commit, NvmeTier.write

        def slow(store: Store, *values: Any) -> None:
            self.blocks = store.durable_blocks()
            assert self.go_on.wait(60)
            commit(store, *values)

        def looked_at(tier: NvmeTier, extent: Any, *values: Any, **named: Any) -> Any:
            for home in (block.home for block in self.blocks):
                kept = {home.durable, home.sealed if home.sealed == home.version else None}
                assert extent not in {home.extents[each] for each in kept - {None}}
            self.writes += 1
            return write(tier, extent, *values, **named)

        monkeypatch.setattr(Store, "commit", slow)
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


def test_writes_before_the_first_commit_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)

    def rest(committer: Committer, real: Any = Committer.rest) -> None:
        slow.go_on.set()
        real(committer)

    monkeypatch.setattr(Committer, "rest", rest)
    model = Model()
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST))
    weight = model.inner.blocks[0].up.weight
    waited = []
    for value in (1.0, 2.0, 3.0):
        with infinity.gathered([weight], write=True), torch.no_grad():
            weight.fill_(value)
        waited.append(slow.go_on.is_set())
    assert waited == [False, True, True], "who writes twice waits for the commit"
    assert bool((weight == 3.0).all())
    infinity.engine(model).close()


@pytest.mark.parametrize("at", [0, 1, 2])
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
    assert logged(tmp_path)[before:][0][0] == max(at - 1, 0)


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
    refused("holds the committed states", folders, False, **off)
    refused("the states of another model or configuration: format of", folders, precision="fp32")
    refused("another model or configuration", folders, moment_precision="bf16")
    refused("lie in 2 nvme directories, and 1 are given", folders[:1])
    refused("give all directories of that run, in the order", folders[::-1])
    refused("resume=True goes on from committed states", folders, durability="off")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parameters": "cpu"}, "durability='step' needs parameters='nvme'"),
        ({"optimizer": "cpu"}, "needs optimizer='nvme'"),
        ({"copy_on_write": False}, "needs copy_on_write=True"),
        ({"cache": "1MiB"}, "needs cache=0"),
        ({"update": "delayed"}, "needs another update than 'delayed'"),
        ({"algorithm": "other"}, "another algorithm than 'other'"),
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


def test_what_is_frozen_cannot_be_rewritten_in_place(tmp_path: Path) -> None:
    model = Model()
    for parameter in model.inner.blocks[0].parameters():
        parameter.requires_grad_(False)
    infinity.wrap(model, config_of(nvme=folders_in(tmp_path), **LEAST))
    infinity.engine(model).track()
    frozen = model.inner.blocks[0].up.weight
    before = frozen.clone()
    with (
        pytest.raises(infinity.ConfigError, match="cannot be changed with durability='step'"),
        infinity.gathered([frozen], write=True),
    ):
        frozen.zero_()
    assert torch.equal(model.inner.blocks[0].up.weight, before)
    infinity.engine(model).close()


@pytest.mark.parametrize("name", [*COMMIT_NAMES, MANIFEST_NAME, STATES_NAME])
def test_damage_is_said_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    (folder,) = folders_in(tmp_path)
    train([folder], tmp_path / "log", steps=2)
    path = folder / name
    if path.stat().st_size == 0:
        return  # the older record
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(infinity.CheckpointError, match=r"is damaged|is cut off"):
        infinity.wrap(Model(), config_of(nvme=[folder], **LEAST), resume=True)
    path.write_bytes(content)
    train([folder], tmp_path / "log", steps=3)
