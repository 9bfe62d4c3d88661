"""`python hosted.py FILE`: scripts of others, one after another, in processes forked after imports
that all of them need.

`FILE` is JSON with `imports`, the names of modules, and `jobs`. A job has:

- `directory`, where the script runs;
- `words`: the script and its arguments;
- `environments`: the variables that each of its processes gets. There are as many processes.

A script that fails does not end this process. `said` raises what it said.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from support.children import CHILD


@dataclasses.dataclass(frozen=True)
class Job:
    """A script that runs in `directory`, in one process for each of `environments`."""

    directory: str
    words: list[str]
    environments: list[dict[str, str]]


def run(
    top: Path,
    hosts: Mapping[str, tuple[Sequence[str], Sequence[Job]]],
    imports: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Run the jobs of all hosts, which work beside each other. A host has a name and the command
    that starts it: Python, or what starts Python. Files of a host lie in `top`."""
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(top / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    started: list[subprocess.Popen[str]] = []
    try:
        for name, (command, jobs) in hosts.items():
            file = top / f"{name}.json"
            asked = {"imports": list(imports), "jobs": [dataclasses.asdict(job) for job in jobs]}
            file.write_text(json.dumps(asked))
            started.append(
                subprocess.Popen(
                    [*command, str(Path(__file__)), str(file)],
                    **{**CHILD, "env": CHILD["env"] | own | environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # with what it starts, so that all can be ended
                )
            )
        texts = [each.communicate()[0] for each in started]
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.communicate()
    assert not any(each.returncode for each in started), "\n".join(texts)


def said(directory: Path) -> str:
    """What the processes of the jobs of `directory` said. Raises where one of them failed."""
    text = "".join(path.read_text() for path in sorted(directory.glob("said*.txt")))
    statuses = [path.read_text().split() for path in directory.glob("status*.txt")]
    assert statuses and {word for words in statuses for word in words} == {"0"}, text
    return text


# The other side: the host and its jobs


def _become(job: Job, environment: Mapping[str, str]) -> int:
    """Run the script in this process; returns the exit status that Python would end with."""
    os.chdir(job.directory)
    os.environ.update(environment)
    with Path(f"said{os.environ.get('RANK', '')}.txt").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.manual_seed(0)  # not every script does
    sys.argv = list(job.words)
    sys.path.insert(0, str(Path(job.words[0]).parent))
    try:
        runpy.run_path(job.words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork(job: Job, environment: Mapping[str, str]) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _become(job, environment)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return child


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.path.remove(str(Path(__file__).parent))  # a script finds its own folder there instead
    for name in asked["imports"]:
        importlib.import_module(name)
    gc.freeze()  # what was imported is no garbage
    rank = os.environ.get("RANK", "")
    for job in (Job(**each) for each in asked["jobs"]):
        children = [_fork(job, environment) for environment in job.environments]
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        with (Path(job.directory) / f"status{rank}.txt").open("a") as file:
            file.write(" ".join(map(str, ends)) + "\n")


if __name__ == "__main__":
    main()
