"""A compute device whose memory the drive cannot reach, and whose work is queued, as a GPU's:
played by host memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infinity.device import ComputeDevice, Copy, Mark, copy_alone


class _Late(Copy):
    """A copy that is made when somebody waits for it, or has asked for the third time; until then
    the target is not a number."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self._target, self._source, self._asked = target, source, 0
        target.view(torch.uint8).fill_(0xFF)

    def done(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self.wait()
        return self._asked >= 3

    def wait(self) -> None:
        if self._asked <= 3:
            copy_alone(self._target, self._source)
            self._asked = 4


class DiscreteDevice(ComputeDevice):
    """What the model queues runs at once here, so a copy may come too early without a wrong number.

    `on_upload(target, after)` is told of each copy to this device, and what it comes after;
    `on_download()` of one from it, and `on_update(after)` of updates in its memory.
    `on_reach(mark)` is told, on the thread that waits, what a drive waits for.
    """

    def __init__(self, kind: Any = "cpu") -> None:
        super().__init__("cpu")
        self.unified_memory = False
        self.has_kernels = True  # those of the CPU
        self.numbers = itertools.count()
        self.on_upload: Callable[[torch.Tensor, Mark | None], None] = lambda target, after: None
        self.on_download: Callable[[], None] = lambda: None
        self.on_update: Callable[[Mark | None], None] = lambda after: None
        self.on_reach: Callable[[Mark | None], None] = lambda mark: None

    @contextmanager
    def _as_unified(self) -> Iterator[None]:
        # Nothing is pinned, and there are no generators but the CPU's.
        before, self.unified_memory = self.unified_memory, True
        try:
            yield
        finally:
            self.unified_memory = before

    def host_memory(self, nbytes: int) -> torch.Tensor:
        with self._as_unified():
            return super().host_memory(nbytes)

    def compute_memory(self, nbytes: int) -> torch.Tensor:
        return self.host_memory(nbytes)

    def random_state(self) -> list[torch.Tensor]:
        with self._as_unified():
            return super().random_state()

    def set_random_state(self, states: list[torch.Tensor]) -> None:
        with self._as_unified():
            super().set_random_state(states)

    def fork_random_state(self, count: int) -> list[list[torch.Tensor]]:
        with self._as_unified():
            return super().fork_random_state(count)

    def follow(self) -> Callable[[], None]:
        with self._as_unified():
            return super().follow()

    def mark(self) -> Mark:
        return Mark(next(self.numbers), None)

    def reach(self, mark: Mark | None) -> None:
        self.on_reach(mark)

    @contextmanager
    def side_stream(self, after: Mark | None) -> Iterator[None]:
        assert after is not None
        yield

    @contextmanager
    def updating(self, after: Mark | None) -> Iterator[Copy]:
        self.on_update(after)
        yield Copy()

    def begin_upload(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | None = None
    ) -> Copy:
        self.on_upload(target, after)
        return super().begin_upload(target, source, after)

    def begin_download(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | None = None
    ) -> Copy:
        self.on_download()
        return super().begin_download(target, source, after)

    def join(self, copy: Copy, memory: torch.Tensor) -> None:
        copy.wait()

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Mark | None
    ) -> Copy:
        return _Late(target, source)
