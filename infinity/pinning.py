"""Pinning host memory for a GPU, slice by slice, so that no thread waits for all of it.

[Note: one registration for each slice]
CUDA registers some GiB of memory per second, in a call that cannot be interrupted. 100 GiB in one
call take a minute without output. So memory is registered in slices, beside the other work of
`wrap`. The driver refuses a copy that crosses two registrations. So each copy is cut at the ends of
slices, and waits for the slices that it touches (`Pinning.cut`). With slices of 1 GiB, a copy of
the bytes [1.5, 2.25) GiB becomes one of [1.5, 2) and one of [2, 2.25), on one stream.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from infinity.errors import ConfigError, EngineClosedError
from infinity.quantities import format_bytes

log = logging.getLogger("infinity.pinning")  # the command line shows all its messages

SLICE_BYTES = 1 << 30
"""Bytes that each call registers; whole pages."""
SLOW_TO_PIN = 4 << 30
"""From so many bytes on progress is logged, because the process seems to hang otherwise."""
NOT_SUPPORTED = 801
"""CUDA's error if a device cannot use host memory that it did not allocate (some Jetsons, some
virtual GPUs)."""
SAY_SECONDS = 5.0
"""Seconds between two messages of progress."""


def _forget_error() -> None:
    """Clear CUDA's last error of this thread. Otherwise torch would report it after its next
    kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


class Pinning:
    """`nbytes` of host memory that `cudart`, CUDA's runtime, pins. Call `begin`, and `close` when
    no copy uses the memory any more. Any thread may `wait` and `cut`."""

    def __init__(self, nbytes: int, cudart: Any) -> None:
        self._nbytes, self._cudart = nbytes, cudart
        self._slice_bytes = SLICE_BYTES
        self._address = 0
        self._pinned = 0  # bytes from the beginning on that copies may use
        self._registered = 0  # of these, bytes that CUDA must unregister
        self._error: BaseException | None = None
        self._running = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._start = time.perf_counter()
        if nbytes >= SLOW_TO_PIN:
            log.info("pinning %s of host memory for the GPU ...", format_bytes(nbytes))

    def begin(
        self,
        memory: torch.Tensor,
        beside: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        """Pin `memory` (uint8, of shape (nbytes,), from the beginning of a page on).

        With `beside` and more than one slice a thread does it, inside of `beside()`, and this
        returns at once. Otherwise raises the errors of `wait`.
        """
        self._address, self._running = memory.data_ptr(), True
        if beside is None or self._nbytes <= self._slice_bytes:
            self._run(memory, None)
            self.wait()
            return
        thread = threading.Thread(
            target=self._run, args=(memory, beside), name="infinity-pinning", daemon=True
        )
        thread.start()
        self._thread = thread

    def wait(self, end: int | None = None) -> None:
        """Block until the first `end` bytes are pinned, or all.

        Raises `ConfigError` if CUDA refused, and `EngineClosedError` after `close`.
        """
        end = self._nbytes if end is None else end
        if self._pinned >= end:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._pinned >= end or not self._running or self._closed)
            if self._pinned >= end:
                return
            if self._closed:
                raise EngineClosedError("the engine was closed")
            if self._error is not None:
                raise self._error

    def cut(self, tensor: torch.Tensor) -> list[int] | None:
        """The number of bytes of the contiguous `tensor` in each slice, when these are pinned; None
        for a tensor elsewhere. Blocks and raises as `wait`."""
        begin = tensor.data_ptr() - self._address
        end = begin + tensor.nbytes
        if begin < 0 or end > self._nbytes or begin == end:
            return None
        self.wait(end)
        size = self._slice_bytes
        edges = [begin, *range((begin // size + 1) * size, end, size), end]
        return [after - before for before, after in itertools.pairwise(edges)]

    def close(self) -> None:
        """Unpin, after the slice that is under way; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            is_ours = not self._running
        if is_ours:
            self._unpin()
        elif self._thread is not None:
            self._thread.join()  # it unpins, even if we are interrupted here

    def _run(
        self,
        memory: torch.Tensor,  # which stays while this runs
        beside: Callable[[], AbstractContextManager[object]] | None,
    ) -> None:
        try:
            if beside is None:
                self._pin()
            else:
                with beside():
                    self._pin()
        except BaseException as error:  # waiting threads raise it
            self._error = error
        with self._changed:
            self._running = False
            self._changed.notify_all()
            is_ours = self._closed
        if is_ours:
            self._unpin()

    def _pin(self) -> None:
        said = self._start
        while self._pinned < self._nbytes and not self._closed:
            nbytes = min(self._slice_bytes, self._nbytes - self._pinned)
            code = self._cudart.cudaHostRegister(self._address + self._pinned, nbytes, 0)
            if int(code) == NOT_SUPPORTED and self._registered == 0:
                _forget_error()
                log.warning(
                    "this GPU pins no host memory (error %d), so copies between it and the GPU "
                    "go through a buffer of the driver, and the host waits for each",
                    NOT_SUPPORTED,
                )
                nbytes = self._nbytes
            elif int(code) != 0:
                _forget_error()
                raise ConfigError(
                    f"CUDA could not pin {self._nbytes} bytes of host memory (error "
                    f"{int(code)}); lower cpu_memory"
                )
            else:
                self._registered += nbytes
            with self._changed:
                self._pinned += nbytes
                self._changed.notify_all()
            said = self._say(said)

    def _say(self, said: float) -> float:
        """Log how much is pinned, if the last message, at the time `said`, is old. Returns the time
        of the last message."""
        now = time.perf_counter()
        if self._nbytes < SLOW_TO_PIN:
            return said
        total = format_bytes(self._nbytes)
        if self._pinned == self._nbytes:
            log.info("pinned %s in %.1f s", total, now - self._start)
        elif now - said >= SAY_SECONDS:
            log.info("pinned %s of %s ...", format_bytes(self._pinned), total)
        else:
            return said
        return now

    def _unpin(self) -> None:
        for begin in range(0, self._registered, self._slice_bytes):
            self._cudart.cudaHostUnregister(self._address + begin)
        self._pinned = self._registered = 0
