"""A compute device whose memory the drive cannot reach, and whose work is queued, as a GPU's:
played by host memory."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infinity.device import ComputeDevice, Copy, Mark, copy_alone


class _Late(Copy):
    """A copy that is made when somebody waits for it or for a later one, or has asked for the third
    time; until then the target is not a number. It is its own event."""

    def __init__(
        self, made: _InOrder, target: torch.Tensor, source: torch.Tensor, after: Mark | Copy | None
    ) -> None:
        super().__init__(self)
        self._made, self._asked = made, 0
        self._copy = (target, source, after) if isinstance(after, Copy) else (target, source, None)
        target.view(torch.uint8).fill_(0xFF)

    def done(self) -> bool:
        self._asked += 1
        if self._asked >= 3:
            self.wait()
        return self._asked >= 3

    def wait(self) -> None:
        self._asked = 3
        self._made.until(self)

    def make(self) -> None:
        target, source, after = self._copy
        if after is not None:
            after.wait()
        copy_alone(target, source)


class _InOrder:
    """The copies of one direction: each is made after those that were asked for before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._coming: deque[_Late] = deque()

    def add(self, *values: Any) -> _Late:
        with self._lock:
            self._coming.append(_Late(self, *values))
            return self._coming[-1]

    def until(self, last: _Late | None = None) -> None:
        with self._lock:
            while self._coming and (last is None or last in self._coming):
                self._coming.popleft().make()


class DiscreteDevice(ComputeDevice):
    """What the model queues runs at once here, so a copy may come too early without a wrong number.

    `on_upload(target, after)` is told of each copy to this device, and what it comes after;
    `on_update(after)` of updates in its memory.
    `on_reach(mark)` is told, on the thread that waits, what a drive waits for.
    """

    def __init__(self, kind: Any = "cpu") -> None:
        super().__init__("cpu")
        self.unified_memory = False
        self.has_kernels = True  # those of the CPU
        self.numbers = itertools.count()
        self._up, self._down = _InOrder(), _InOrder()
        self.on_upload: Callable[[torch.Tensor, Mark | None], None] = lambda target, after: None
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

    def check_random_state(self, states: list[torch.Tensor]) -> None:
        with self._as_unified():
            super().check_random_state(states)

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
    def side_stream(self, after: Mark | None) -> Iterator[Copy]:
        assert after is not None
        yield Copy()

    @contextmanager
    def updating(self, after: Mark | None) -> Iterator[Copy]:
        self.on_update(after)
        yield Copy()

    def begin_upload(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Copy:
        self.on_upload(target, after)
        return super().begin_upload(target, source, after)

    def await_copies(self) -> None:
        for copies in (self._up, self._down):
            if copies is not None:
                copies.until()

    def follow_copy(self, copy: Copy) -> None:
        copy.wait()

    def join(self, copy: Copy, memory: torch.Tensor) -> None:
        copy.wait()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Copy:
        return stream.add(target, source, after)

    def close(self) -> None:
        self._up = self._down = None
        super().close()
