"""A training run that may be killed at any of its writes, in a process of its own."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import infinity
from infinity.directories.commits import COMMIT_NAMES, CommitLog, DurableFiles, decoded
from infinity.durable.agreement import Agreement
from infinity.durable.states import RecordKey
from infinity.durable.store import DurableStore
from infinity.tiers.drives import NvmeTier
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import PATIENCE, RANKS, SERVER, become_rank, load, run_all

STEPS = 8
LEAST: dict[str, Any] = {
    "durability": "step",
    "gpu_memory": "4MiB",
    "cpu_memory": "8MiB",
    "precision": "bf16",
    "device": "cpu",
    "threads": 1,
}

PLACES = [("exact", 0), ("speculative", 0), ("exact", "auto"), ("speculative", "256KiB")]
"""How updates run, and how much of the states may be cached: none, all, a part."""


def record_in(folder: Path) -> Path:
    """The file with the last record, which is the only one that is whole."""
    paths = [folder / name for name in COMMIT_NAMES]
    (found,) = (path for path in paths if decoded(path.read_bytes()) is not None)
    return found


class Counter(nn.Module):
    """A buffer that training changes, as batch norms have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return x


class Model(nn.Module):
    """A transformer with dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.counter = transformer(dropout=0.1), Counter()

    def forward(self, **batch: Any) -> Any:
        output = self.inner(**batch)
        return output._replace(loss=self.counter(output.loss))


def train(
    folders: list[Path], log: Path, resume: bool = True, steps: int = STEPS, **options: Any
) -> dict[str, torch.Tensor]:
    """Train until step `steps`, on all ranks there are; every step adds its number, its loss and
    rate to `log`. Returns the state dict."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = Model()
    config = config_of(nvme=folders, **LEAST | options)
    infinity.wrap(model, config, resume=resume)
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine.track(scheduler=scheduler)
    with log.open("a") as lines:
        for number in range(engine.committed_step or 0, steps):
            loss = model(**text_batch(number * ranks + rank)).loss
            loss.backward()
            optimizer.step()
            rate = optimizer.param_groups[0]["lr"]
            scheduler.step()
            optimizer.zero_grad()
            lines.write(json.dumps([number, loss.item(), rate]) + "\n")
            lines.flush()
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.close()
    return found


WRITES = (
    (NvmeTier, "write"),
    (NvmeTier, "flush"),
    (DurableFiles, "create"),
    (DurableFiles, "overwrite"),
    (DurableFiles, "remove"),
    (CommitLog, "keep"),
    (Agreement, "reach"),
)
"""What `kill_at` counts: writes of states, records and names, flushes, a step back, and what a rank
tells others of its record."""
POINTS = {
    "as it writes its record": (CommitLog, "write"),
    "between its record and those of the others": (Agreement, "reach"),
    "as it gives the older record up": (CommitLog, "settle"),
    "as it goes back to a record": (CommitLog, "keep"),
}
BEHIND = "when the others have a record that it lacks"

Kill = int | tuple[str, int]
"""At which of `WRITES`, or how many times at a point before: 0 is the first one."""


def kill_at(kill: Kill) -> None:
    """Kill this process there."""
    point, left = kill if isinstance(kill, tuple) else ("", kill)
    if point == BEHIND:
        _kill_behind(left)
        return

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*values, **named)

        return call

    for owner, name in [POINTS[point]] if point else WRITES:
        setattr(owner, name, counted(getattr(owner, name)))


def _kill_behind(left: int) -> None:
    """Kill this process when it would make its record number `left`, and another rank has."""
    made: list[Agreement] = []
    make, record = Agreement.__init__, DurableStore.record

    def noted(self: Agreement, *values: Any) -> None:
        made.append(self)
        make(self, *values)

    def late(store: DurableStore, key: RecordKey, *values: Any) -> None:
        nonlocal left
        while left == 0:
            if made[-1].is_awaited(key):
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait(0.01)  # which nobody sets
        left -= 1
        record(store, key, *values)

    Agreement.__init__ = noted  # type: ignore[method-assign]
    DurableStore.record = late  # type: ignore[method-assign]


def _work(
    errors: Path, folders: list[Path], log: Path, kill: int, result: Path, options: dict[str, Any]
) -> None:
    become_rank(errors)
    if kill >= 0:
        kill_at(kill)
    torch.save(train(folders, log, **options), result)


def _work_on_ranks(
    errors: Path,
    rank: int,
    place: Path,
    ranks: int,
    rendezvous: Path,
    file: str,
    work: str,
    arguments: Sequence[Any],
    kill: Kill | None,
) -> None:
    become_rank(errors)
    limit = timedelta(seconds=PATIENCE)
    meeting = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=limit, **meeting)
    if kill is not None:
        kill_at(kill)
    getattr(load(file), work)(place, rank, *arguments)
    dist.destroy_process_group()


def train_on_rank(place: Path, rank: int, folders: list[Path], options: dict[str, Any]) -> None:
    """`train`, with a log and a result of this rank in `place`."""
    found = train(folders, place / f"log{rank}", **options)
    torch.save(found, place / f"result{rank}")


def ranks_in_processes(
    place: Path,
    work: Callable[..., Any],
    *arguments: Any,
    ranks: int = RANKS,
    kills: Mapping[int, Kill] | None = None,
    together: bool = True,
) -> list[int]:
    """Let `ranks` processes call `work(place, rank, *arguments)`, and end those in `kills` at that
    point; their exits. Where one is killed the others are at once, or not unless `together`."""
    place.mkdir(exist_ok=True, parents=True)
    file = inspect.getfile(work)
    rendezvous = place / f"rendezvous {time.monotonic_ns()}"
    said = [place / f"errors{rank}.txt" for rank in range(ranks)]
    processes = [
        SERVER.Process(
            target=_work_on_ranks,
            args=(
                *(said[rank], rank, place, ranks, rendezvous),
                *(file, work.__name__, arguments, (kills or {}).get(rank)),
            ),
        )
        for rank in range(ranks)
    ]
    run_all(processes, together)
    exits = [process.exitcode or 0 for process in processes]
    for code, errors in zip(exits, said, strict=True):
        if code not in (0, -signal.SIGKILL):
            sys.stderr.write(errors.read_text())
    return exits


def in_a_process(place: Path, folders: list[Path], kill: int = -1, **options: Any) -> int:
    """`train` in a process, with `place` for what it says, its log and its result; its exit."""
    return _run(_work, place, folders, place / "log", kill, place / "result", options)


def _run(work: Callable[..., None], place: Path, *arguments: Any) -> int:
    """`work` in a process, whose errors are shown unless it was killed; its exit."""
    errors = place / "errors.txt"
    process = SERVER.Process(target=work, args=(errors, *arguments))
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        sys.stderr.write(errors.read_text())
    return process.exitcode or 0


def _finetune(errors: Path, arguments: list[str], kill: int, summary: Path) -> None:
    from infinity.cli.main import app

    become_rank(errors)
    if kill >= 0:
        kill_at(kill)
    result = CliRunner().invoke(app, ["finetune", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    summary.write_text(result.stdout)


def finetune_in_a_process(place: Path, arguments: list[Any], kill: int = -1) -> int:
    """`infinity finetune` in a process, which writes what it prints to `place / "summary"`."""
    return _run(_finetune, place, list(map(str, arguments)), kill, place / "summary")


def logged(place: Path, name: str = "log") -> list[tuple[int, float, float]]:
    """The steps of all processes so far, in their order."""
    path = place / name
    return (
        [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    )


def folders_in(place: Path, count: int = 1) -> list[Path]:
    """New directories below `place`, one for each drive."""
    folders = [place / f"nvme{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether these have the same names, and the same bits."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def run_undisturbed(place: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The log and the result of a run that nobody killed, without durability."""
    assert in_a_process(place, folders_in(place), durability="off", resume=False) == 0
    return place, torch.load(place / "result")
