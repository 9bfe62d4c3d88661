"""Operations in flight on blocks (a fetch to the compute device, a check-out of one chunk), and the
thread that finishes fetches."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from infinity.device import Copy
from infinity.nvme.ticket import Ticket

log = logging.getLogger("infinity")


class Pending(Protocol):
    """A collective into a lease."""

    def ended(self) -> bool:
        """Whether the collective has ended."""

    def await_end(self) -> None:
        """Block until it has ended, well or not."""


class Fetch:
    """A parameter shard on its way to its lease on the compute device. Any thread may call
    `finish`, more than once.

    `work` blocks until the bytes are there. When it has returned or raised, `land(fetch, arrived)`
    is called once.
    """

    def __init__(self, work: Callable[[], None], land: Callable[[Fetch, bool], None]) -> None:
        self._work, self._land = work, land
        self._lock = threading.Lock()
        self._finished = False

    def finish(self) -> None:
        """Block until the fetch has landed or failed.

        The first caller does the work and gets its error. Later callers get no error.
        """
        with self._lock:
            if self._finished:
                return
            self._finished = True
            arrived = False
            try:
                self._work()
                arrived = True
            finally:
                self._land(self, arrived)

    def await_end(self) -> None:
        """Like `finish`, but an `Exception` is only logged: the next use fetches the block
        again."""
        try:
            self.finish()
        except Exception as error:
            log.debug("a prefetch failed: %s", error)


class PlaceCopy(Copy):
    """New content from an update, on its way to its place on the compute device. `end` is called
    when the copy has ended. One thread uses it, and calls `wait` at the end."""

    def __init__(self, copy: Copy, end: Callable[[], None]) -> None:
        super().__init__(copy.event)
        self._copy, self._end = copy, end
        self._finished = False

    def done(self) -> bool:
        """Whether the copy has ended. If so, `end` has been called."""
        if not self._finished and self._copy.done():
            self.wait()
        return self._finished

    def wait(self) -> None:
        """Block until the copy has ended. May be called again."""
        if not self._finished:
            self._finished = True
            try:
                self._copy.wait()
            finally:
                self._end()


class Mover:
    """One thread that finishes fetches in the order in which they were posted, so copies do not
    wait for the model."""

    def __init__(
        self, begin: Callable[[], object], failed: Callable[[BaseException], object]
    ) -> None:
        """`begin` is called first on the thread. `failed` gets an error that is not an `Exception`,
        because no other thread may see it."""
        self._begin, self._failed = begin, failed
        self._posted: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="infinity-mover", daemon=True)
        self._thread.start()

    def post(self, fetch: Fetch) -> None:
        """Queue `fetch` for the thread. Returns at once."""
        self._posted.put(fetch)

    def close(self) -> None:
        """Finish all posted fetches and end the thread."""
        self._posted.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._begin()
        while (fetch := self._posted.get()) is not None:
            try:
                fetch.await_end()
            except BaseException as error:
                self._failed(error)


class Checkout:
    """One chunk of one block on the host, as `tensor` (uint8): `wait`, then read it, change it,
    `commit` it; then `release`.

    One thread uses it. If the block is at home in host memory, `tensor` is the home itself and
    nothing is copied. If an update writes a shadow copy, `tensor` is the shadow copy, and `source`
    is the current content until `fill`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        arrive: Ticket | Copy | Callable[[], object] | None = None,
        write: Callable[[bool], Ticket | Copy] | None = None,
        end: Callable[[], None] | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        self.tensor, self.source = tensor, source
        self._arrive, self._write, self._end = arrive, write, end
        self._writing: Ticket | Copy | None = None

    def wait(self) -> None:
        """Block until the content has arrived."""
        if isinstance(self._arrive, Ticket | Copy):
            self._arrive.wait()
        elif self._arrive is not None:
            self._arrive()
        self._arrive = None

    def arrived(self) -> bool:
        """Whether `wait` would return without waiting for I/O."""
        return not isinstance(self._arrive, Ticket | Copy) or self._arrive.done()

    def expect(self, copy: Copy) -> None:
        """The content comes with `copy`."""
        self._arrive = copy

    def hold(self, copy: Copy) -> None:
        """`copy` reads the content: `release` waits for it."""
        self._writing = copy

    def fill(self, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Call `copy(tensor, source)` if only `source` has the content."""
        if self.source is not None:
            copy(self.tensor, self.source)
            self.source = None

    @property
    def writes(self) -> bool:
        """Whether `commit` has anything to write."""
        return self._write is not None

    def commit(self, background: bool = False) -> None:
        """Start writing the content back. Use `background` if no caller waits for the write."""
        if self._write is not None:
            self._writing = self._write(background)

    def promote(self) -> None:
        """A caller now waits for the write: move it out of the background."""
        if isinstance(self._writing, Ticket):
            self._writing.promote()

    def committed(self) -> bool:
        """Whether the write, if any, has ended."""
        return self._writing is None or self._writing.done()

    def release(self) -> None:
        """Wait for all I/O in flight and return the slot, even if the I/O failed."""
        try:
            self.wait()
            if self._writing is not None:
                self._writing.wait()
        finally:
            self._writing = None
            if self._end is not None:
                self._end()
                self._end = None
