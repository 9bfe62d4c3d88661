"""What several test files need of an engine: the smallest budgets that it accepts, and what it
holds of the process."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # engines import it; see `_less_to_collect`
import torch.distributed as dist
from hypothesis import settings
from torch import nn

import infinity
from support import covering, elsewhere, roads, threads
from support.budgets import BUDGETS, ROOMY
from support.configs import config_of
from support.rank_group import RANKS, Group, OnRanks
from support.workers import pytest_addoption as pytest_addoption
from support.workers import pytest_runtestloop as pytest_runtestloop

elsewhere.move()

# What `nohup` and `&` ignore is ignored by every child, too, and tests send these to theirs.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

TESTS = Path(__file__).parent

# `torch.manual_seed` writes down its stack for each kind of device that it may have to seed later.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

# How long an example takes says nothing on a loaded one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the roads of all tests, and mark what `make test` leaves out. On another device than the
    CPU leave out what cannot run there."""
    covering.mark_the_rest(items)
    config.stash[roads.COLLECTED] = roads.marked(items)
    for item in items:
        if not elsewhere.runs(item.path.relative_to(TESTS).as_posix(), item.name):
            item.add_marker(pytest.mark.skip(reason=elsewhere.REASON))


@pytest.fixture(scope="module", autouse=True)
def _less_to_collect() -> None:
    """What was imported before this file is no garbage: each `gc.collect` of a test or an engine
    would look at all of torch and transformers again, for 0.3 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """`infinity.initialize` and `zero.Init` make one for their process, which other files share."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`mount(options)`: an empty file system in memory, below `tmp_path`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mounted: list[Path] = []

    def attach(options: str) -> Path:
        target = tmp_path / "mounted"
        target.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield attach
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="session")
def _groups() -> Iterator[list[Group]]:
    """The ranks that all files share: at most one group, none where the last one was given up."""
    kept: list[Group] = []
    yield kept
    for group in kept:
        group.close()


@pytest.fixture
def on_ranks(
    request: pytest.FixtureRequest,
    _groups: list[Group],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> OnRanks:
    """`on_ranks(task)`: let two ranks call `work(task, tmp_path, rank)` of the test's file; what
    each said.

    After a failure the next task gets a new group.
    """

    def both(task: Any) -> list[str]:
        group = _groups.pop() if _groups else Group(tmp_path_factory.mktemp("group"))
        answers: list[str] = []
        try:
            answers = group.do(request.path, task, tmp_path)
        finally:
            if answers == ["done"] * RANKS:
                _groups.append(group)
            else:
                group.close()
        return answers

    return both


@pytest.fixture(name="one_thread")
def _one_thread() -> Iterator[None]:
    """Keep torch on one thread."""
    with threads.one_thread():
        yield


@pytest.fixture(scope="session")
def smallest() -> Callable[..., dict[str, int]]:
    """`smallest(model, **config)`: the smallest gpu_memory and cpu_memory that work, as the
    refusals name them."""

    def find(model: nn.Module, **config: Any) -> dict[str, int]:
        budgets = {}
        for key in BUDGETS:
            with pytest.raises(infinity.BudgetError, match=f"{key}=0 B is too small") as refusal:
                infinity.wrap(model, config_of(**(config | ROOMY | {key: 0})))
            found = re.search(rf"the smallest {key} that works is (\d+)", str(refusal.value))
            assert found is not None
            budgets[key] = int(found[1])
        return budgets

    return find


class Footprint:
    """What this process holds that an engine could leave behind."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = threads.count_threads()
        self.python_threads = {thread.name for thread in threading.enumerate()}
        self.descriptors = sorted(
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        )

    def __eq__(self, other: object) -> bool:
        """A thread that Python has joined may run on for a moment: it is given a minute to end."""
        if not isinstance(other, Footprint):
            return False
        end = time.monotonic() + 60
        while self.threads > other.threads and time.monotonic() < end:
            os.sched_yield()
            self.threads = threads.count_threads()
        return vars(self) == vars(other)

    def __ne__(self, other: object) -> bool:
        """Without that wait: what should be there now is there."""
        return not isinstance(other, Footprint) or vars(self) != vars(other)

    def __repr__(self) -> str:
        return f"Footprint({vars(self)})"


@pytest.fixture(scope="session")
def footprint() -> Callable[[], Footprint]:
    """`footprint()`: the threads and descriptors of this process, to be compared with those of
    another moment."""
    return Footprint


@pytest.fixture(autouse=True, scope="module")
def _no_accelerator_of_another_file() -> Iterator[None]:
    """accelerate keeps its first settings as long as the process lives."""
    yield
    if "accelerate.state" in sys.modules:
        import accelerate

        accelerate.state.AcceleratorState._reset_state(True)
