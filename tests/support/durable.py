"""A training run that may be killed at any of its writes, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

import infinity
from infinity.directories.commits import DurableFiles
from infinity.tiers.drives import NvmeTier
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import SERVER, become_rank

STEPS = 8
LEAST: dict[str, Any] = {
    "durability": "step",
    "gpu_memory": "4MiB",
    "cpu_memory": "8MiB",
    "precision": "bf16",
    "device": "cpu",
    "threads": 1,
}


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
    """Train until step `steps`; every step adds its number, its loss and rate to `log`. Returns the
    state dict."""
    model = Model()
    config = config_of(nvme=folders, **LEAST | options)
    infinity.wrap(model, config, resume=resume)
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine.track(scheduler=scheduler)
    with log.open("a") as lines:
        for number in range(engine.committed_step or 0, steps):
            loss = model(**text_batch(number)).loss
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


def kill_at(number: int) -> None:
    """Kill this process as it begins its write number `number`: of states, records, names, or a
    flush; 0 is the first one."""
    left = number

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*values, **named)

        return call

    for owner, name in (
        (NvmeTier, "write"),
        (NvmeTier, "flush"),
        (DurableFiles, "create"),
        (DurableFiles, "overwrite"),
        (DurableFiles, "remove"),
    ):
        setattr(owner, name, counted(getattr(owner, name)))


def _work(
    errors: Path, folders: list[Path], log: Path, kill: int, result: Path, options: dict[str, Any]
) -> None:
    become_rank(errors)
    if kill >= 0:
        kill_at(kill)
    torch.save(train(folders, log, **options), result)


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


def logged(place: Path) -> list[tuple[int, float, float]]:
    """The steps of all processes so far, in their order."""
    path = place / "log"
    return (
        [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    )
