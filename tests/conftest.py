"""What several test files need of an engine: the smallest budgets that it accepts, and what it holds of the process."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from configs import config_of
from hypothesis import settings
from torch import nn

import infinity
from infinity.placement.spec import Kind

elsewhere.move()

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing on a loaded one
settings.load_profile("any machine")

BUDGETS = ("gpu_memory", "cpu_memory")
ROOMY = dict.fromkeys(BUDGETS, 1 << 30) | {"cache": 0}
"""Room for everything; yet what is on NVMe moves, for nothing of it is kept in memory."""
CHILD = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}, "text": True}
"""Arguments for `subprocess`, so that a child imports what this process does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On another device than the CPU leave out what cannot run there."""
    for item in items if elsewhere.KIND else ():
        if item.path.name not in elsewhere.FILES or item.name.startswith(elsewhere.NEAR):
            item.add_marker(pytest.mark.skip(reason=elsewhere.REASON))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` at once; raises what the first of them raised."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def come_to_rest(engine: infinity.Engine) -> None:
    """Wait for all I/O that the engine does without the next forward; `drain` would make it do more."""
    pipeline = engine._updater._pipeline
    queue = pipeline.jobs
    with queue.changed:
        assert queue.changed.wait_for(
            lambda: not queue.has_work(pipeline._may_hold()) and not any(job.in_flight for job in queue.jobs)
        )
    for unit in engine.units:
        fetch = unit.blocks[Kind.PARAM].copy.fetch
        if fetch is not None:
            fetch.settle()
    for io in engine.ios:
        io.drain()


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Any]]:
    """A file keeps its processes of ranks in it (`test_ranks.Group`), at most one group, none where the last one was given up."""
    kept: list[Any] = []
    yield kept
    for group in kept:
        group.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep torch on one thread: tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smallest() -> Callable[..., dict[str, int]]:
    """`smallest(model, **config)`: the smallest gpu_memory and cpu_memory that work, as the refusals name them."""

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


def is_what_the_kernel_counts(moved: Sequence[int], kernel: Sequence[int]) -> bool:
    """Whether the kernel counts the bytes `moved`, and at most a few pages of the file system's own tables beside them."""
    return all(0 <= counted - ours <= 64 << 10 for ours, counted in zip(moved, kernel, strict=True))


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended since it was listed
        return "iou-"


class Footprint:
    """What this process holds that an engine could leave behind."""

    def __init__(self) -> None:
        gc.collect()
        names = [_name(task) for task in Path("/proc/self/task").iterdir()]
        self.threads = sum(not name.startswith("iou-") for name in names)  # the kernel's workers of a ring come and go
        self.python_threads = {thread.name for thread in threading.enumerate()}
        self.descriptors = sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Footprint) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"Footprint({vars(self)})"


@pytest.fixture(scope="session")
def footprint() -> Callable[[], Footprint]:
    """`footprint()`: the threads and descriptors of this process, to be compared with those of another moment."""
    return Footprint
