"""Programs that run in processes forked from the server of ranks.

Such a process has imported torch and transformers, so it starts in a fraction of the six CPU
seconds that `python -m infinity finetune` needs. It ends as a child of multiprocessing, without
what `atexit` was told: tests of the end of an interpreter start a real one.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.rank_group import SERVER, become_rank, end


class Ended(NamedTuple):
    """What became of a process: its exit code, or a signal as a negative number, and what it
    said."""

    returncode: int | None
    stdout: str
    stderr: str


def run(
    directory: Path,
    program: str | Path,
    arguments: Sequence[object] = (),
    environments: Sequence[Mapping[str, str]] = ({},),
) -> list[Ended]:
    """Run a script, or a module by its name, once for each of `environments` and all at once.
    Returns when all have ended. What they say is kept in `directory`.

    An environment is added to that of this process. Each has one thread of torch.
    """
    folders = [directory / f"said{number}" for number in range(len(environments))]
    words = [str(program), *map(str, arguments)]
    processes = []
    try:
        for folder, environment in zip(folders, environments, strict=True):
            folder.mkdir(parents=True)
            whole = os.environ | environment
            processes.append(SERVER.Process(target=_become, args=(folder, words, whole)))
            processes[-1].start()
        for process in processes:
            process.join()
    finally:
        end(processes)
    said = [[(folder / name).read_text() for name in ("stdout", "stderr")] for folder in folders]
    return [Ended(p.exitcode, *texts) for p, texts in zip(processes, said, strict=True)]


def _become(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    with (folder / "stdout").open("w") as file:
        os.dup2(file.fileno(), 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words)
    become_rank(folder / "stderr")
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
