"""Two processes over gloo that all test files share: started once, and told what to do, line by
line.

A rank loads the test file that asks, and calls its `work(task, where, rank)`. Tests ask by the
fixture `on_ranks`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.children import CHILD

RANKS = 2
PATIENCE = 240.0  # seconds that a rank waits for another one, less than the limit of a test

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


def serve(directory: Path, rank: int) -> None:
    """A process that joins the group, and works for each line of its input: a test file, a
    directory and a task.

    Says "ready", then "done" or "failed ..." for each line.
    """
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timeout,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        path, where, task = json.loads(line)
        try:
            load(path).work(task, Path(where), rank)
            print("done", flush=True)
        except BaseException as error:
            traceback.print_exc()
            print(f"failed {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    dist.destroy_process_group()


# This side


class Group:
    """The processes of all ranks, and a queue of what each says; `close` ends them however they
    are."""

    def __init__(self, directory: Path) -> None:
        environment = CHILD["env"] | {"GLOO_SOCKET_IFNAME": "lo"}
        self.said: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in range(RANKS)]
        self.processes: list[subprocess.Popen[str]] = []
        self.listeners: list[threading.Thread] = []
        for rank in range(RANKS):
            with (directory / f"errors{rank}.txt").open("w") as errors:
                command = [sys.executable, __file__, str(directory), str(rank)]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
            self.processes.append(process)
            listener = threading.Thread(
                target=self._listen, args=(process, self.said[rank]), daemon=True
            )
            listener.start()
            self.listeners.append(listener)
        try:
            assert self.answers() == ["ready"] * RANKS
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _listen(process: subprocess.Popen[str], said: queue.SimpleQueue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.strip())
        said.put("gone")

    def answers(self) -> list[str]:
        """What every rank says next, or "gone"."""
        return [said.get() for said in self.said]

    def do(self, path: Path, task: Any, where: Path) -> list[str]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(
                json.dumps(
                    [
                        str(path),
                        str(where),
                        dataclasses.asdict(task) if dataclasses.is_dataclass(task) else task,
                    ]
                )
                + "\n"
            )
            process.stdin.flush()
        return self.answers()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, listener in zip(self.processes, self.listeners, strict=True):
            process.wait()
            listener.join()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


OnRanks = Callable[[Any], list[str]]

if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
