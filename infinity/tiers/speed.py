"""How fast the drives of several directories are beside each other: what decides how much of the
states each one holds.

All are measured at the same time, for they may share a link, or even be one drive; first writing,
then reading, as the engine's traffic is about as much of one as of the other.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch

from infinity.device import HostMemory
from infinity.errors import NvmeError

PROBE_BYTES = 64 << 20
"""What is written to each drive once, and read back."""
PROBE_SECONDS = 0.2
"""A slow drive moves less: after so long, in each direction, nothing more is begun."""

_REQUEST_BYTES, _IN_FLIGHT = 2 << 20, 4  # with the engine's own requests of 1 MiB, eight of them

Transferred = TypeVar("Transferred")


class Probe(NamedTuple):
    """A file that may be written to, up to `nbytes`, and the native engine that serves it."""

    engine: Any
    file: Any
    nbytes: int


def measure(probes: Sequence[Probe]) -> list[float]:
    """Bytes per second of each, half of them read and half written; 0.0 where `nbytes` is 0. Raises
    `NvmeError`.

    Takes 8 MiB of memory, one thread per probe and mostly far less than a second. What was in the
    files is overwritten.
    """
    with ExitStack() as stack:
        memory = noise(_REQUEST_BYTES * _IN_FLIGHT)
        stack.callback(memory.close)
        address = memory.tensor.data_ptr()
        threads = stack.enter_context(ThreadPoolExecutor(len(probes), "infinity-probe"))
        written = list(
            threads.map(lambda probe: _move("write", probe, probe.nbytes, address), probes)
        )
        read = list(
            threads.map(
                lambda probe, wrote: _move("read", probe, wrote[0], address), probes, written
            )
        )
    return [
        float(statistics.harmonic_mean([n / seconds for n, seconds in ways]))
        for ways in zip(written, read, strict=True)
    ]


def noise(nbytes: int) -> HostMemory:
    """Memory of random bytes: drives may compress, and write zeros at no cost."""
    memory = HostMemory(nbytes)
    memory.tensor.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return memory


def finish_all(transfers: deque[Transferred], wait: Callable[[Transferred], object]) -> None:
    """Wait for every transfer, for the memory is used again after that; then raise the first
    failure."""
    failure: NvmeError | None = None
    while transfers:
        try:
            wait(transfers.popleft())
        except NvmeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _move(operation: str, probe: Probe, nbytes: int, address: int) -> tuple[int, float]:
    """Move the first `nbytes`, or what there is time for; returns bytes and seconds."""
    submit, in_flight = getattr(probe.engine, operation), deque[Any]()
    end, start = 0, time.perf_counter()
    try:
        while end < nbytes and (end == 0 or time.perf_counter() - start < PROBE_SECONDS):
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().wait()
            length = min(_REQUEST_BYTES, nbytes - end)
            slot = address + end // _REQUEST_BYTES % _IN_FLIGHT * _REQUEST_BYTES
            in_flight.append(submit(probe.file, end, slot, length))
            end += length
    finally:
        finish_all(in_flight, lambda ticket: ticket.wait())
    return end, max(time.perf_counter() - start, 1e-9)
