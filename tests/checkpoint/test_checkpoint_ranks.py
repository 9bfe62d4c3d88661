"""A checkpoint of any number of ranks can be read by any other number, with the same bits; all
ranks save or fail together.

Ranks are processes over gloo, started for one task each (`Task`); what they find comes back in
files.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.checkpoint import pieces
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import run_ranks

ROOMY = {"gpu_memory": "8MiB", "cpu_memory": "16MiB", "device": "cpu", "threads": 1, "poison": True}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16", "moment_precision": "bf16"},
    "int8": {"precision": "bf16", "moment_precision": "int8"},
    "adapted": {"precision": "bf16", "algorithm": "other"},
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What every rank does: load `source` or not, make the steps up to `last`, save to `target` or
    not."""

    form: str
    directory: str
    source: str = ""
    target: str = ""
    last: int = 0
    piece: int = 1 << 22
    fails: int | None = None
    """The rank whose drive is full, or which cannot read."""
    dies: int | None = None
    """The rank that is killed before the last step; all save after each one."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def work(task: Task, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Do `task`; all ranks have equal batches, so that what they compute does not depend on how
    many they are."""
    pieces.PIECE = task.piece
    nvme = Path(task.directory) / f"nvme{rank}"
    nvme.mkdir(exist_ok=True)
    model = infinity.wrap(
        transformer(7 if task.source else 0),
        config_of(nvme=[nvme], **ROOMY, **FORMATS[task.form], **task.config),
        group=group,
    )
    with infinity.engine(model) as engine:
        optimizer: Any
        if task.form == "adapted":
            optimizer = infinity.adapt(
                torch.optim.RMSprop, model.parameters(), lr=1e-3, momentum=0.5
            )
        else:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

        def states() -> dict[str, torch.Tensor]:
            packed = copy.deepcopy(optimizer.state_dict()["state"])
            weights = {name: value.clone() for name, value in engine.state_dict().items()}
            return weights | {
                f"{number} {name}": v
                for number, values in packed.items()
                for name, v in values.items()
            }

        if task.source:  # what was there before does not matter
            model(**text_batch(99)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model(**text_batch(98)).loss.backward()
        first, extra, error = 0, None, ""
        if task.fails == rank:
            os.fsync = refuse  # type: ignore[assignment]
        try:
            if task.source:
                extra = engine.load_checkpoint(task.source, optimizer)
                first = extra["step"]
        except infinity.CheckpointError as failed:
            error = str(failed)
        loaded, losses = states(), []
        for number in range(first, task.last):
            if rank == task.dies and number == task.last - 1:
                os.kill(os.getpid(), 9)
            loss = model(**text_batch(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if task.dies is not None:
                engine.save_checkpoint(task.target, optimizer, {"step": number + 1})
        try:
            if task.target:
                engine.save_checkpoint(task.target, optimizer, {"step": task.last, "rank": rank})
        except infinity.CheckpointError as failed:
            error = str(failed)
        share = sum(
            unit.facts.layout.overlap(n, rank).length
            for unit in engine.units
            for n in range(len(unit.facts.names))
        )
        return {
            "losses": losses,
            "loaded": loaded,
            "states": states(),
            "extra": extra,
            "error": error,
            "share": share,
        }


def refuse(_: Any) -> None:
    raise OSError(28, "No space left on device")


def serve(directory: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    task = Task(**json.loads((directory / "task.json").read_text()))
    place = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    torch.save(work(task, rank, dist.group.WORLD), directory / f"result{rank}.pt")
    dist.destroy_process_group()


def run(where: Path, ranks: int, form: str, **values: Any) -> list[dict[str, Any]]:
    """What each of `ranks` ranks finds; 1 is this process, without a process group."""
    where.mkdir()
    task = Task(form, str(where), **values)
    if ranks == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [work(task, 0, None)]
        finally:
            torch.set_num_threads(before)
            pieces.PIECE = Task.piece
    (where / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
    run_ranks(__file__, where, ranks)
    return [torch.load(where / f"result{rank}.pt", weights_only=True) for rank in range(ranks)]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not equal in every bit."""
    return sorted(a.keys() ^ b.keys()) + [
        name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])
    ]


@pytest.mark.parametrize("form", ["fp32", "int8", "adapted"])
def test_any_number_of_ranks_reads_what_any_other_wrote(form: str, tmp_path: Path) -> None:
    """1 to 2, 2 to 3, 3 to 1, in other pieces and another placement each time; a step in
    between."""
    checkpoints = [str(tmp_path / f"checkpoint{number}") for number in range(4)]
    settings: list[dict[str, Any]] = [
        {"parameters": "gpu", "optimizer": "gpu"},
        {"cache": 0, "update": "exact"} if form != "adapted" else {"cache": 0},
        {"parameters": "cpu", "optimizer": "cpu"},
        {"optimizer": "cpu"},
    ]
    before: dict[str, torch.Tensor] = {}
    for number, (ranks, piece) in enumerate([(1, 1000), (2, 300), (3, 5000), (1, 1 << 22)]):
        source = checkpoints[number - 1] if number else ""
        last = number + 3
        results = run(
            tmp_path / f"run{number}",
            ranks,
            form,
            source=source,
            target=checkpoints[number],
            last=last,
            piece=piece,
            config=settings[number],
        )
        assert len(results[0]["losses"]) == (1 if number else 3)
        for result in results:
            assert not source or differing(result["loaded"], before) == []
            assert not source or result["extra"] == {"step": number + 2, "rank": 0}
            assert differing(result["states"], results[0]["states"]) == []
            assert result["losses"] == results[0]["losses"]
        before = results[0]["states"]


@pytest.mark.parametrize("form", ["bf16"])
def test_ranks_go_on_as_if_nothing_had_happened(form: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2, form, last=5)
    first = run(tmp_path / "first", 2, form, last=2, target=str(tmp_path / "checkpoint"))
    second = run(tmp_path / "second", 2, form, last=5, source=str(tmp_path / "checkpoint"))
    for rank in range(2):
        assert second[rank]["extra"] == {"step": 2, "rank": rank}, "its own"
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert differing(second[rank]["states"], whole[rank]["states"]) == []


def test_every_rank_writes_its_share_once(tmp_path: Path) -> None:
    results = run(tmp_path / "run", 3, "fp32", last=1, target=str(tmp_path / "checkpoint"))
    assert sum(result["share"] for result in results) == sum(
        p.numel() for p in transformer().parameters()
    )
    assert len(list((tmp_path / "checkpoint").iterdir())) == 5, (
        "one file each, and two that say what is in them"
    )
    for rank, result in enumerate(results):
        size = (tmp_path / "checkpoint" / f"__{rank}_0.distcp").stat().st_size
        assert 12 * result["share"] < size < 12 * result["share"] + 2048 * len(result["states"])


@pytest.mark.parametrize("fails", [0, 1])
def test_when_one_rank_cannot_write_all_say_so_and_go_on(fails: int, tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoint")
    first = run(tmp_path / "first", 2, "bf16", last=1, target=where)
    second = run(tmp_path / "second", 2, "bf16", source=where, last=2, target=where, fails=fails)
    for result in second:
        assert result["error"] == (
            f"{where} cannot be written: No space left on device; free some of its space, or "
            "choose another path"
        )
    third = run(tmp_path / "third", 2, "bf16", source=where)
    assert differing(third[0]["loaded"], first[0]["states"]) == []
    assert not list(tmp_path.glob(".checkpoint*"))


def test_what_is_damaged_is_told_by_all_ranks(tmp_path: Path) -> None:
    where = tmp_path / "checkpoint"
    run(tmp_path / "first", 2, "bf16", last=1, target=str(where))
    data = where / "__1_0.distcp"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 1)
    for result in run(tmp_path / "second", 2, "bf16", source=str(where)):
        assert (
            result["error"]
            == f"{data} is cut off: it has {size - 1} of {size} bytes; take an earlier checkpoint"
        )


def test_ranks_go_on_after_one_of_them_was_killed(tmp_path: Path) -> None:
    """They save after every step, and end where they would have ended."""
    whole = run(tmp_path / "whole", 2, "bf16", last=4)
    checkpoint = str(tmp_path / "checkpoint")
    with pytest.raises(AssertionError, match=r"ranks ended with \[.*-9"):
        run(tmp_path / "killed", 2, "bf16", target=checkpoint, last=4, dies=1)
    found = run(tmp_path / "again", 2, "bf16", source=checkpoint, last=4)
    for rank, result in enumerate(found):
        assert result["extra"]["step"] == 3
        assert result["losses"] == whole[rank]["losses"][3:]
        assert differing(result["states"], whole[rank]["states"]) == []
