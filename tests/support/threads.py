"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_EXITING = 0x4  # PF_EXITING of the kernel, in field 9 of /proc/self/task/*/stat


def count_threads() -> int:
    """How many threads this process has, without the kernel's workers of a ring, which come and go.

    A thread that was joined may be listed for a moment longer: what is ending is not counted.
    """
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(") ")
        except OSError:  # it has ended since it was listed
            continue
        count += not name.startswith("iou-") and not int(fields.split()[6]) & _EXITING
    return count


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread: tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
