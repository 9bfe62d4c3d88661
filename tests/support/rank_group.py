"""Ranks: processes over gloo that call a function of a test file.

They are forked from a server that has imported what ranks need. So a rank starts in a fraction of
the three CPU seconds that these imports take.

`run_ranks` starts ranks for one task. `Group` is two ranks that all test files share; tests ask for
it by the fixture `on_ranks`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
PATIENCE = 240.0  # seconds that a rank waits for another one, less than the limit of a test

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "hypothesis",
        "infinity",
        "pytest",
        "torch.distributed.tensor.parallel",
        "torch.testing",
        "transformers.models.llama.modeling_llama",
    ]
)

# The other side: a rank


@functools.cache
def load(path: str) -> Any:
    """The test file at `path`, as a module."""
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def become_rank(errors: Path) -> None:
    """Be a rank, which says on the file `errors` what a process says on its standard error."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what the server imported is no garbage
    torch.set_num_threads(1)


def _run(errors: Path, path: str, work: str, *arguments: Any) -> None:
    become_rank(errors)
    getattr(load(path), work)(*arguments)


def _serve(errors: Path, rendezvous: Path, rank: int, ranks: int, tasks: Connection) -> None:
    """Join the group, and work for each task: a test file, a directory and what its `work` takes.

    Sends "ready", then "done" or "failed ..." for each task.
    """
    become_rank(errors)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE),
    )
    tasks.send("ready")
    while True:
        path, where, task = tasks.recv()
        try:
            load(path).work(task, where, rank)
            tasks.send("done")
        except BaseException as error:
            traceback.print_exc()
            tasks.send(f"failed {type(error).__name__}: {error}".replace("\n", " "))


# This side


def run_ranks(path: str, directory: Path, ranks: int, work: str = "serve") -> None:
    """Let `ranks` processes call `work(directory, rank, ranks)` of the test file at `path`; returns
    when all have ended.

    As soon as one fails the others are killed, for they may wait for it, and what all of them said
    is raised. There is no patience: pytest's own limit ends what hangs.
    """
    said = [directory / f"errors{rank}.txt" for rank in range(ranks)]
    processes = [
        SERVER.Process(target=_run, args=(said[rank], path, work, directory, rank, ranks))
        for rank in range(ranks)
    ]
    run_all(processes)
    if any(process.exitcode for process in processes):
        exits = [process.exitcode for process in processes]
        raise AssertionError("\n".join([f"ranks ended with {exits}", *map(_content, said)]))


def run_all(processes: Sequence[ForkServerProcess], together: bool = True) -> None:
    """Start all, and return when they have ended. Where one fails the others are killed, or not
    unless `together`."""
    try:
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in wait(list(running)):
                process = running.pop(sentinel)  # type: ignore[index]
                process.join()
                if process.exitcode and together:
                    end(processes)
    finally:
        end(processes)


def end(processes: Sequence[ForkServerProcess]) -> None:
    """Kill those that run, and wait for all."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def _content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Group:
    """Two ranks, or as many as it is given, that wait for tasks; `close` ends them however they
    are."""

    def __init__(self, directory: Path, ranks: int = RANKS) -> None:
        self._tasks: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            ours, theirs = SERVER.Pipe()
            said, rendezvous = directory / f"errors{rank}.txt", directory / "rendezvous"
            arguments = (said, rendezvous, rank, ranks, theirs)
            process = SERVER.Process(target=_serve, args=arguments)
            self._tasks.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()
        try:
            assert self._answers() == ["ready"] * ranks
        except BaseException:
            self.close()
            raise

    def _answers(self) -> list[str]:
        """What every rank says next, or "gone"."""
        answers = []
        for connection in self._tasks:
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionResetError):
                answers.append("gone")
        return answers

    def do(self, path: Path, task: Any, where: Path) -> list[str]:
        """Let every rank call `work(task, where, rank)` of the test file at `path`: what each
        says."""
        values = dataclasses.asdict(task) if dataclasses.is_dataclass(task) else task
        for connection in self._tasks:
            connection.send((str(path), where, values))
        return self._answers()

    def close(self) -> None:
        """End the ranks."""
        end(self._processes)
        for connection in self._tasks:
            connection.close()


OnRanks = Callable[[Any], list[str]]
