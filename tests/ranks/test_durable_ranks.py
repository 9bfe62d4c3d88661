"""`Config(durability="step")` on several ranks: all commit the same step, and whatever ends which
of them, all go on from one."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import infinity
from infinity.directories.commits import COMMIT_NAMES, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.durable import committer
from infinity.durable.committer import Committer
from infinity.durable.states import HEAD_BYTES, RecordKey
from infinity.durable.store import DurableStore
from infinity.optim.job_table import JobTable
from infinity.optim.updater import Updater
from infinity.tiers.manifest import MANIFEST_NAME
from support.configs import config_of
from support.durable import (
    BEHIND,
    LEAST,
    POINTS,
    STEPS,
    Kill,
    Model,
    logged,
    ranks_in_processes,
    train,
    train_on_rank,
)
from support.models import text_batch
from support.probe import Probe
from support.rank_group import PATIENCE, RANKS, OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")

Trained = tuple[Path, list[dict[str, torch.Tensor]]]


def folder_in(place: Path) -> Path:
    folder = place / "nvme"
    folder.mkdir(parents=True)
    return folder


def results(place: Path, ranks: int = RANKS) -> list[dict[str, torch.Tensor]]:
    return [torch.load(place / f"result{rank}") for rank in range(ranks)]


def same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], value) for name, value in b.items())
        for a, b in zip(found, expected, strict=True)
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The logs and the results of ranks that nobody killed, without durability."""
    place = tmp_path_factory.mktemp("uninterrupted")
    options = {"durability": "off", "resume": False}
    assert ranks_in_processes(place, train_on_rank, [folder_in(place)], options) == [0] * RANKS
    return place, results(place)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which two ranks have committed three steps."""
    place = tmp_path_factory.mktemp("committed")
    folder = folder_in(place)
    assert ranks_in_processes(place, train_on_rank, [folder], {"steps": 3}) == [0] * RANKS
    return folder


def check(place: Path, uninterrupted: Trained) -> None:
    """It ended as if nothing had happened, and every step that was made again was the same."""
    reference, expected = uninterrupted
    assert same(results(place), expected)
    for rank in range(RANKS):
        steps = {number: rest for number, *rest in logged(reference, f"log{rank}")}
        found = logged(place, f"log{rank}")
        assert all(steps[number] == rest for number, *rest in found)
        assert {number for number, *_ in found} == set(range(STEPS))


def train_until_it_ends(
    place: Path,
    kills: Callable[[int], dict[int, Kill]],
    work: Callable[..., None] = train_on_rank,
    **options: Any,
) -> int:
    """Train with the kills of the first, second, ... life until all ranks end well; how many lives
    that took."""
    folder, lives, exits = folder_in(place), 0, [1]
    durability = options.get("durability", "step")
    apart = 1 if durability == "step" else durability
    while any(exits):
        before = [logged(place, f"log{rank}") for rank in range(RANKS)]
        exits = ranks_in_processes(place, work, [folder], options, kills=kills(lives))
        assert set(exits) <= {0, -signal.SIGKILL}
        lives += 1
        for rank in range(RANKS):
            after = logged(place, f"log{rank}")[len(before[rank]) :]
            if before[rank] and after:
                assert after[0][0] > before[rank][-1][0] - apart, "more steps were made again"
    return lives


@pytest.mark.parametrize(
    ("every", "victims", "update", "durability"),
    [
        (2, [1], "exact", "step"),
        (37, [0], "speculative", "step"),
        pytest.param(61, [0, 1], "exact", "step", marks=pytest.mark.long),
        pytest.param(88, [1], "speculative", "step", marks=pytest.mark.long),
        pytest.param(113, [0], "exact", "step", marks=pytest.mark.long),
        (61, [0, 1], "speculative", 2),
        (88, [1], "exact", 3),
    ],
)
def test_killed_again_and_again_they_end_with_the_same_bits(
    every: int,
    victims: list[int],
    update: str,
    durability: int | str,
    uninterrupted: Trained,
    tmp_path: Path,
) -> None:
    """After so many writes, and a few more every time; where two are, in turn. The other one is
    killed wherever it is then."""

    def kills(life: int) -> dict[int, Kill]:
        return {victims[life % len(victims)]: every + 13 * life}

    assert train_until_it_ends(tmp_path, kills, update=update, durability=durability) > 1
    check(tmp_path, uninterrupted)


LAST = STEPS + 1
"""How many records come before the one of `close`: that of `wrap`, and one for each forward."""
SCHEDULES: dict[str, list[dict[int, Kill]]] = {
    point: [{1: (point, 2)}, {0: (point, 3)}, {1: (point, 1)}]
    for point in POINTS
    if "goes back" not in point
} | {
    "behind, and both in the resume": [
        {1: (BEHIND, 4)},
        {0: ("as it goes back to a record", 0)},
        {1: ("as it goes back to a record", 0)},
        {0: (BEHIND, 2)},
        {0: ("as it gives the older record up", 0), 1: ("as it gives the older record up", 1)},
    ],
    "before the first record of all": [
        {1: ("as it writes its record", 0)},
        {0: (BEHIND, 0)},
        {1: ("between its record and those of the others", 0)},
    ],
    "in close": [
        {1: ("as it writes its record", LAST)},
        {0: ("between its record and those of the others", 0)},
    ],
    "both in close": [
        {
            0: ("between its record and those of the others", LAST),
            1: ("as it writes its record", LAST),
        }
    ],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_at_a_point(schedule: str, uninterrupted: Trained, tmp_path: Path) -> None:
    planned = SCHEDULES[schedule]
    lives = train_until_it_ends(tmp_path, lambda life: planned[life] if life < len(planned) else {})
    assert lives == len(planned) + 1
    check(tmp_path, uninterrupted)


def train_and_give_up_at_once(place: Path, rank: int, *arguments: Any) -> None:
    """`train_on_rank` with a bug: a rank empties its older record without waiting for others."""
    write = CommitLog.write

    def hasty(log: CommitLog, content: bytes) -> int:
        sequence = write(log, content)
        log.settle()
        return sequence

    CommitLog.write = hasty  # type: ignore[method-assign]
    train_on_rank(place, rank, *arguments)


def test_the_kills_find_a_rank_that_gives_its_older_record_up_at_once(tmp_path: Path) -> None:
    folder, kills = folder_in(tmp_path), {1: (BEHIND, 4)}
    arguments: Any = train_and_give_up_at_once, [folder], {}
    ranks_in_processes(tmp_path, *arguments, kills=kills)
    assert ranks_in_processes(tmp_path, *arguments, together=False) == [1] * RANKS
    said = (tmp_path / "errors0.txt").read_text()
    assert "CheckpointError: the ranks have no committed step in common" in said


def test_a_rank_that_is_one_step_ahead_goes_back(
    committed: Path, uninterrupted: Trained, tmp_path: Path
) -> None:
    """Whatever its record has: here it cannot be read."""
    shutil.copytree(committed, tmp_path / "nvme")
    for rank in range(RANKS):
        shutil.copy(committed.parent / f"log{rank}", tmp_path)
    with Directory(tmp_path / "nvme" / "rank0") as directory:
        log = CommitLog(DurableFiles(directory))
        last = log.kept()[0]
        log.settle()
        log.write(last.content[:HEAD_BYTES] + b"of a step that the other rank does not have")
    assert ranks_in_processes(tmp_path, train_on_rank, [tmp_path / "nvme"], {}) == [0] * RANKS
    check(tmp_path, uninterrupted)
    assert logged(tmp_path, "log0")[3][0] == 3


def train_on_mesh(place: Path, rank: int, shape: str, options: dict[str, Any]) -> None:
    """Two nodes of two ranks, each node with all parts; or, exchanged, rank 1 and 2 in each other's
    place. The small layer has nothing for some ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if shape == "exchanged":
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    group: Any = mesh if shape in ("mesh", "exchanged") else "auto"
    torch.manual_seed(0)
    batch = rank
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1), nn.Linear(1, 1))
    if shape == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        group, batch = mesh["data"], mesh.get_local_rank("data")
    values = {"nvme": [place.parent / "nvme"], **LEAST, "precision": "fp32", **options}
    config = config_of(**values, stage=0 if shape == "replicas" else 3)
    resumes = config.durability != "off"
    try:
        infinity.wrap(model, config, units=list(model), group=group, resume=resumes)
    except infinity.InfinityError as error:
        (place / f"said{rank}").write_text(str(error))
        return
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for number in range(engine.committed_step or 0, 4):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + batch))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(dict(model.state_dict()), place / f"result{rank}")
    engine.close()


@pytest.mark.parametrize("shape", ["mesh", "replicas", "default", "tensor"])
def test_parts_replicas_and_ranks_that_have_nothing(shape: str, tmp_path: Path) -> None:
    folder_in(tmp_path)
    found = []
    for durability in ("off", "step"):
        place, ends = tmp_path / durability, [1]
        arguments: Any = train_on_mesh, shape, {"durability": durability}
        while any(ends):
            kills: dict[int, Kill] = (
                {3: (BEHIND, 2)} if durability == "step" and ends == [1] else {}
            )
            ends = ranks_in_processes(place, *arguments, ranks=4, kills=kills)
        found.append(results(place, 4))
    assert same(*found)
    if shape == "mesh":
        ranks_in_processes(tmp_path / "step", train_on_mesh, "exchanged", {}, ranks=4)
        for rank in range(4):
            assert re.search(
                r"rank1 \(of rank 1\) holds the states of rank 1 \(part 2 of 2, replica 1 of 2\), "
                r"and here is rank 1 \(part 1 of 2, replica 2 of 2\); give every rank the nvme "
                "directories that it had, and the same groups of ranks",
                (tmp_path / "step" / f"said{rank}").read_text(),
            )


# What is refused


def try_to_resume(
    place: Path, rank: int, folders: dict[str, list[list[Path]]], options: Any
) -> None:
    """Note what is said of each case, in which rank R has the directories number R."""
    said = {}
    for case, each in folders.items():
        config = config_of(nvme=each[rank], **LEAST | options.get(case, {}))
        try:
            infinity.wrap(Model(), config, resume=True)
            said[case] = "nothing"
        except infinity.InfinityError as error:
            said[case] = f"{type(error).__name__}: {error}"
    (place / f"said{rank}").write_text(json.dumps(said))


def refusals(
    place: Path, folders: dict[str, list[list[Path]]], options: Any = None, ranks: int = RANKS
) -> list[dict[str, str]]:
    """What each rank says of each case; the directories are as they were."""
    before = {each: contents(each) for case in folders.values() for rank in case for each in rank}
    arguments: Any = try_to_resume, folders, options or {}
    assert ranks_in_processes(place, *arguments, ranks=ranks) == [0] * ranks
    assert all(contents(each) == found for each, found in before.items())
    return [json.loads((place / f"said{rank}").read_text()) for rank in range(ranks)]


def test_wrong_directories_are_refused_on_all_ranks(committed: Path, tmp_path: Path) -> None:
    """With one error, which names the rank, the directory and the way out."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(committed, tmp_path / case))

    exchanged, missing, damaged = copy("exchanged"), copy("missing"), copy("damaged")
    (exchanged / "rank0").rename(exchanged / "rank2")
    (exchanged / "rank1").rename(exchanged / "rank0")
    (exchanged / "rank2").rename(exchanged / "rank1")
    shutil.rmtree(missing / "rank1")
    for name in COMMIT_NAMES:
        path = damaged / "rank1" / name
        path.write_bytes(path.read_bytes()[:1000])
    earlier = copy("earlier")
    with Directory(earlier / "rank1") as directory:
        log = CommitLog(DurableFiles(directory))
        content = log.kept()[0].content
        log.settle()
        for _ in range(2):  # what the other one does not have
            log.write(content)
            log.settle()
    another = copy("another")
    for path in [another / "rank1" / MANIFEST_NAME]:
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {"run": "0" * 32}))
    with Directory(another / "rank1") as directory:
        log = CommitLog(DurableFiles(directory))
        content = b"0" * 32 + log.kept()[0].content[32:]
        log.settle()
        log.write(content)
        log.settle()
    mixed = copy("mixed")
    with Directory(mixed / "rank1") as directory:
        log = CommitLog(DurableFiles(directory))
        last = log.kept()[0]
        log.keep(last.sequence)
        content = last.content[:32] + b"0" * 32 + last.content[64:]
        for name in COMMIT_NAMES:
            (mixed / "rank1" / name).unlink()
        log = CommitLog(DurableFiles(directory))
        for _ in range(last.sequence):
            log.write(content)
            log.settle()
    nodes = [tmp_path / f"node{rank}" for rank in range(RANKS)]
    for rank, node in enumerate(nodes):
        shutil.copytree(committed / f"rank{rank}", node / f"rank{rank}")
    (tmp_path / "spare").mkdir()
    cases = {
        "nodes": r"CheckpointError: .*node1/rank0 \(of rank 0\) has no committed states, and "
        r".*node1/rank1 has those of rank 1; give every rank the nvme directories that it had",
        "one node": r"CheckpointError: .*node0/rank1 \(of rank 1\) has no committed states, and "
        r".*node0/rank0 has those of rank 0; give every rank the nvme directories that it had",
        "two drives": r"CheckpointError: .*spare/rank0 \(of rank 0\) has no committed states, and "
        r".*node1/rank1 has those of rank 1; give every rank the nvme directories that it had",
        "mixed": r"CheckpointError: the ranks have no committed step in common: .* has step 3 "
        r"\(record \d+ of \w{8}\).*, .*/rank1 \(of rank 1\) has step 3 \(record \d+ of 0{8}\); ",
        "exchanged": r"ConfigError: .*exchanged/rank0 \(of rank 0\) holds the states of rank 1 "
        r"\(part 2 of 2\), and here is rank 0 \(part 1 of 2\); give every rank",
        "missing": r"CheckpointError: .*missing/rank1 \(of rank 1\) has no committed states, and "
        r".*missing/rank0 \(of rank 0\) has those of step 3; give every rank",
        "earlier": r"CheckpointError: the ranks have no committed step in common: .*/rank0 "
        r"\(of rank 0\) has step 3 .*, .*/rank1 \(of rank 1\) has step 3 \(record \d+ of .*: "
        r"go on from a checkpoint",
        "another": r"CheckpointError: .*another/rank1 \(of rank 1\) is of another run",
        "damaged": r"CheckpointError: .*damaged/rank1 holds .* is damaged; go on from a checkpoint",
        "precision": r"ConfigError: .*rank[01] holds the states of another model or configuration",
    }
    folders = {case: [[tmp_path / case]] * RANKS for case in cases} | {
        "precision": [[committed]] * RANKS,
        "nodes": [[nodes[1]], [nodes[0]]],
        "one node": [[tmp_path / "spare"], [nodes[0]]],
        "two drives": [[tmp_path / "spare", nodes[1]], [tmp_path / "spare", nodes[0]]],
    }
    said = refusals(tmp_path, folders, {"precision": {"precision": "fp32"}})
    for case, expected in cases.items():
        for rank in range(RANKS):
            text = said[rank][case]
            told = f"InfinityError: rank 1 failed: {expected}"
            assert re.match(expected, text) or re.match(told, text), (case, rank, text)


def test_another_number_of_ranks_is_refused(committed: Path, tmp_path: Path) -> None:
    way = "another number of ranks goes on from a checkpoint"
    with pytest.raises(infinity.ConfigError, match=f"on several ranks, and here is one; {way}"):
        infinity.wrap(Model(), config_of(nvme=[committed], **LEAST), resume=True)
    for text in refusals(tmp_path, {"three": [[committed]] * 3}, ranks=3):
        assert re.search(f"states of a run on 2 ranks, and here are 3; {way}", text["three"])
    alone = tmp_path / "alone"
    alone.mkdir()
    train([alone], tmp_path / "log", steps=1)
    for text in refusals(tmp_path, {"alone": [[alone]] * RANKS}):
        assert f"of a run on one rank, and here are several; {way}" in text["alone"]


def test_nothing_is_refused_that_was_killed_before_all_had_committed(tmp_path: Path) -> None:
    """See the schedule of that name for what becomes of it."""
    folder = folder_in(tmp_path)
    kills: dict[int, Kill] = {1: (BEHIND, 0)}
    ranks_in_processes(tmp_path, train_on_rank, [folder], {}, kills=kills)
    assert (folder / "rank0" / COMMIT_NAMES[0]).exists()
    shutil.rmtree(folder / "rank1")
    assert ranks_in_processes(tmp_path, train_on_rank, [folder], {"steps": 1}) == [0] * RANKS


# Waits. These run in two processes that are started once and told which function to call.


def start(directory: Path, **options: Any) -> tuple[Model, infinity.Engine, infinity.AdamW]:
    nvme = directory / "nvme"
    nvme.mkdir(exist_ok=True)
    model = Model()
    infinity.wrap(model, config_of(nvme=[nvme], **LEAST | {"collective_timeout": 4.0} | options))
    return model, infinity.engine(model), infinity.AdamW(model.parameters(), lr=1e-2)


def step(model: Model, optimizer: infinity.AdamW) -> None:
    model(**text_batch(dist.get_rank())).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def come(directory: Path, name: str) -> None:
    """Let others know that this rank is there."""
    (directory / f"{name} {dist.get_rank()}").touch()


def await_rank(directory: Path, name: str, rank: int) -> None:
    """Return when `rank` is there; not by a collective."""
    until = time.monotonic() + PATIENCE / 2
    while not (directory / f"{name} {rank}").exists():
        assert time.monotonic() < until, f"rank {rank} did not come to {name}"
        threading.Event().wait(0.01)  # which nobody sets


@contextlib.contextmanager
def records(number: int, before: Callable[[], object]) -> Iterator[None]:
    """`before` comes before record `number` of this rank, counted from 0."""
    record, left = DurableStore.record, number

    def counted(store: DurableStore, *values: Any) -> None:
        nonlocal left
        if left == 0:
            before()
        left -= 1
        record(store, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DurableStore, "record", counted)
        yield


def kept(directory: Path, rank: int) -> list[int]:
    """The numbers of the records that a rank has."""
    with Directory(directory / "nvme" / f"rank{rank}") as place:
        return [each.sequence for each in CommitLog(DurableFiles(place)).kept()]


def another_rank_never_commits(directory: Path, rank: int) -> None:
    if rank == 1:
        with records(1, lambda: await_rank(directory, "told", 0)):
            model, engine, optimizer = start(directory)
            with pytest.raises(infinity.EngineClosedError):
                for _ in range(3):
                    step(model, optimizer)
            engine.close()
        return
    model, engine, optimizer = start(directory)
    with pytest.raises(infinity.EngineClosedError) as caught:
        step(model, optimizer)
    assert re.search(
        r"a commit failed .*rank 0 waited \d+ s for the others to commit step 0; rank 1 has step 0 "
        r"\(record 1\)\. .*raise Config\(tuning=Tuning\(collective_timeout=4\)\)",
        str(caught.value),
    )
    come(directory, "told")
    engine.close()
    assert kept(directory, 0) == [2, 1], "the others may lack the last one"


def another_rank_fails_to_commit(directory: Path, rank: int) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    options = {"collective_timeout": 600.0}  # nobody waits so long
    with records(1, fail) if rank == 1 else contextlib.nullcontext():
        model, engine, optimizer = start(directory, **options)
        with pytest.raises(infinity.EngineClosedError, match="no space is left") as caught:
            for _ in range(3):
                step(model, optimizer)
    assert ("rank 1" in str(caught.value)) is (rank == 0)
    engine.close()


def a_rank_closes_before_the_others_have_committed(directory: Path, rank: int) -> None:
    """It does not wait for them to make its last record, and has the one before, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committer, "CLOSING_SECONDS", math.inf)
        model, engine, optimizer = start(directory)
        step(model, optimizer)
        if rank == 1:
            await_rank(directory, "closed", 0)
            engine.close()
            assert kept(directory, 0) == [3, 2] and kept(directory, 1) == [3]
        else:
            engine.close()
            come(directory, "closed")


def a_rank_closes_and_lacks_what_comes_before(directory: Path, rank: int) -> None:
    """What the others may have to go back to is not overwritten."""
    wait = functools.partial(await_rank, directory, "closed", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committer, "CLOSING_SECONDS", 0.5)
        with records(0, wait) if rank == 1 else contextlib.nullcontext():
            model, engine, _ = start(directory, collective_timeout=600.0)
            model(**text_batch(rank))
            engine.close()
            assert kept(directory, rank) in ([1], [2, 1], [2])
            assert rank == 1 or kept(directory, rank) == [1]
            come(directory, "closed")


def a_rank_is_closed_while_it_waits(directory: Path, rank: int) -> None:
    """By another thread: the step does not go on as if all had committed."""
    wait = functools.partial(await_rank, directory, "closed", 0)
    with records(1, wait) if rank == 1 else contextlib.nullcontext():
        model, engine, optimizer = start(directory, collective_timeout=600.0)
        loss = model(**text_batch(rank)).loss
        loss.backward()
        if rank == 0:
            waits, rest = threading.Event(), Committer.rest

            def rested(self: Committer) -> bool:
                waits.set()
                return rest(self)

            def close() -> None:
                assert waits.wait(PATIENCE)
                engine.close()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Committer, "rest", rested)
                closing = threading.Thread(target=close)
                closing.start()
                with pytest.raises(infinity.EngineClosedError, match="the engine was closed"):
                    optimizer.step()
                closing.join()
            assert kept(directory, 0) == [2, 1]
            come(directory, "closed")
        else:
            optimizer.step()
            engine.close()


CLOSED = {
    "within a step and in a forward": ("step", "forward", 1),
    "within a step and after it": ("step", "after", 1),
    "after a step and in a forward": ("after", "forward", 1),
    "after a step and after a write": ("after", "write", 1),
    "within a step": ("step", "step", 2),
    "after a step": ("after", "after", 2),
    "before any step": ("made", "scheduled", 0),
}
"""Where the two ranks are closed after two steps or before any, and the step that they go on
from."""


def ranks_are_closed_at_different_places(directory: Path, rank: int) -> None:
    """What a scheduler and another object that is tracked have become is the same on all ranks."""
    for number, (first, second, step) in enumerate(CLOSED.values()):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        found = [_closed_at(place, rank, (first, second)[rank]), _goes_on(place)]
        assert found[0][:step] == found[1], (first, second)


class _Steps:
    """Counts them, whatever the rates are."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, values: dict[str, int]) -> None:
        vars(self).update(values)


def _tracked(
    engine: infinity.Engine, optimizer: infinity.AdamW
) -> tuple[torch.optim.lr_scheduler.LRScheduler, _Steps]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    steps = _Steps()
    engine.track(scheduler=scheduler, steps=steps)
    return scheduler, steps


def _closed_at(directory: Path, rank: int, where: str) -> list[float]:
    """The rate of each step."""
    model, engine, optimizer = start(directory, collective_timeout=600.0)
    scheduler, steps = _tracked(engine, optimizer)
    rates = []
    if where == "scheduled":
        scheduler.step()
        steps.count += 1
    for number in range(0 if where in ("made", "scheduled") else 2):
        rates.append(optimizer.param_groups[0]["lr"])
        step(model, optimizer)
        if where != "step" or number == 0:
            scheduler.step()
            steps.count += 1
    if where == "forward":
        await_rank(directory, "closed", 1 - rank)
        with contextlib.suppress(infinity.InfinityError):  # in the forward, or the step after it
            step(model, optimizer)
            pytest.fail("it goes on without the other rank")
    if where == "write":
        weight = next(model.parameters())
        infinity.set(weight, "value", infinity.get(weight, "value", local=True), local=True)
    engine.close()
    come(directory, "closed")
    await_rank(directory, "closed", 1 - rank)
    return rates


def _goes_on(directory: Path) -> list[float]:
    """The rates of the steps that were made, by what a resume finds."""
    model = Model()
    config = config_of(nvme=[directory / "nvme"], **LEAST | {"collective_timeout": 600.0})
    infinity.wrap(model, config, resume=True)
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    scheduler, steps = _tracked(engine, optimizer)
    committed = engine.committed_step or 0
    said = [None] * RANKS
    dist.all_gather_object(said, (committed, steps.count, scheduler.last_epoch))
    assert len(set(said)) == 1, said
    engine.close()
    return [1e-2 / (1 + number) for number in range(committed)]


def ranks_make_different_steps(directory: Path, rank: int) -> None:
    model, engine, optimizer = start(directory, collective_timeout=8.0)
    step(model, optimizer)
    if rank == 1:
        key = RecordKey(3, 7, 0, "")
        Probe(engine).committer.seal(key, lambda versions: b"of no step that rank 0 makes")
    with pytest.raises(infinity.EngineClosedError) as caught:
        for _ in range(3):
            step(model, optimizer)
    if rank == 0:
        assert re.search(
            r"record 3 of rank 1 is of step 7, and record 3 of rank 0 of step 1; all ranks must "
            r"take the same steps|rank 1 failed: a commit failed.* of step 7",
            str(caught.value),
        )
    engine.close()


def ranks_differ_in_what_they_want(directory: Path, rank: int) -> None:
    for wanted, text in (
        (("off", "step"), "'off' on rank 0 and 'step' on rank 1"),
        ((2, 3), "2 on rank 0 and 3 on rank 1"),
    ):
        with pytest.raises(infinity.ConfigError, match=text):
            start(directory, durability=wanted[rank], collective_timeout=600.0)


class Branches(nn.Module):
    """Layers, of which one is not used in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == unused else x + torch.relu(layer(x))
        return x


def updates_in_backward_wait_for_the_commits_of_others(directory: Path, rank: int) -> None:
    """On the first rank alone updates begin in backward, and wait for the commit of the second one,
    whose code waits for the first. The last layer is updated, and never used again: so its update
    has no place on the compute device, and on the second rank nothing else needs that it ends."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(JobTable, "_is_waited_for", lambda table: False)
        _train_with_updates_in_backward(directory, rank)


def _train_with_updates_in_backward(directory: Path, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Updater, "_may_begin", lambda *_: None)
        _train_and_compare(directory, rank)


def _train_and_compare(directory: Path, rank: int) -> None:
    found = []
    for number, durability in enumerate(("off", "step")):
        for clip in ("unit", "previous"):
            nvme = directory / f"nvme {durability} {clip}"
            nvme.mkdir(exist_ok=True)
            options: dict[str, Any] = {
                "precision": "fp32",
                "gpu_memory": 96 << 10,
                "collective_timeout": 4.0,
                "update": "speculative",
                "durability": durability,
            }
            model = Branches()
            config = config_of(nvme=[nvme], **LEAST | options)
            infinity.wrap(model, config, units=list(model.layers))
            engine = infinity.engine(model)
            optimizer = infinity.AdamW(model.parameters(), clip=clip, max_grad_norm=0.1)
            for step in range(6):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step + 10 * rank))
                model(x, unused=4 if step else -1).pow(2).mean().backward()
                if durability == "step" and step > 2:
                    name = f"{clip} committed {step}"
                    until = time.monotonic() + PATIENCE / 2
                    while rank == 0 and engine.committed_step != step:
                        assert time.monotonic() < until, "a commit waits for ever"
                        threading.Event().wait(0.01)  # which nobody sets
                    come(directory, name)
                    await_rank(directory, name, 1 - rank)
                optimizer.step()
            assert number == 0 or rank == 1 or engine.report().updates_kept
            found.append({name: value.clone() for name, value in model.state_dict().items()})
            engine.close()
    assert same(found[2:], found[:2])


def work(name: str, where: Path, rank: int) -> None:
    globals()[name](where, rank)


@pytest.mark.parametrize(
    "work",
    [
        another_rank_never_commits,
        another_rank_fails_to_commit,
        a_rank_closes_before_the_others_have_committed,
        a_rank_closes_and_lacks_what_comes_before,
        a_rank_is_closed_while_it_waits,
        ranks_are_closed_at_different_places,
        ranks_make_different_steps,
        ranks_differ_in_what_they_want,
        updates_in_backward_wait_for_the_commits_of_others,
    ],
)
def test_a_wait_for_other_ranks_ends(work: Callable[[Path, int], None], on_ranks: OnRanks) -> None:
    assert on_ranks(work.__name__) == ["done"] * RANKS
