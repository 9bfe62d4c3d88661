"""The speeds of drives, measured through native engines.

`measure` returns the speeds of several directories, which decide the share of the states of each.
All are measured at the same time, because they may share a link, or be one drive. Writing comes
first, then reading: the engine's traffic is about half of each. `DriveProbe` has files of its own,
for plans and benchmarks.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from infinity import native
from infinity.device import HostMemory
from infinity.directories.directory import Directory
from infinity.errors import NvmeError
from infinity.measure.rates import seconds_of

PROBE_BYTES = 64 << 20
"""Bytes that are written to each drive once, and read back."""
PROBE_SECONDS = 0.2
"""After this time in either direction, no further transfer begins. A slow drive moves less."""

PIECE_BYTES = 4 << 20
"""A stripe of the engine, which a `DriveProbe` moves at a time."""
_NAME = "probe.bin"
_REQUEST_BYTES, _IN_FLIGHT = 2 << 20, 4  # with the engine's own requests of 1 MiB, eight of them

Transferred = TypeVar("Transferred")


class Probe(NamedTuple):
    """A file for writing, up to `nbytes`, and the native engine that moves its bytes."""

    engine: Any
    file: Any
    nbytes: int


def measure(probes: Sequence[Probe]) -> list[float]:
    """Bytes per second of each, half of them read and half written. 0.0 if `nbytes` is 0. Raises
    `NvmeError`.

    Takes 8 MiB of memory, one thread per probe, and mostly far less than a second. Overwrites the
    files.
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
    """Memory of random bytes. Drives may compress zeros, and write them at no cost."""
    memory = HostMemory(nbytes)
    memory.tensor.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return memory


def finish_all(transfers: deque[Transferred], wait: Callable[[Transferred], object]) -> None:
    """Wait for every transfer, because the memory is used again after that. Then raise the first
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
    """Move the first `nbytes`, or less in `PROBE_SECONDS`. Returns bytes and seconds."""
    submit, in_flight = getattr(probe.engine, operation), deque[Any]()
    end, start = 0, time.perf_counter()
    try:
        while end < nbytes and (end == 0 or time.perf_counter() - start < PROBE_SECONDS):
            if len(in_flight) == _IN_FLIGHT:
                in_flight[0].wait()  # if it fails, it stays the first failure
                in_flight.popleft()
            length = min(_REQUEST_BYTES, nbytes - end)
            slot = address + end // _REQUEST_BYTES % _IN_FLIGHT * _REQUEST_BYTES
            in_flight.append(submit(probe.file, end, slot, length))
            end += length
    finally:
        finish_all(in_flight, lambda ticket: ticket.wait())
    return end, max(time.perf_counter() - start, 1e-9)


class DriveProbe:
    """A file of `nbytes` in each of `directories`, inside a `with` block. It is written and read in
    order, in pieces of 4 MiB.

    Raises `OSError` and `NvmeError`.
    """

    def __init__(self, directories: Sequence[Path], engine: str, nbytes: int) -> None:
        self._count = max(2, nbytes // PIECE_BYTES)
        self._directories, self._engine = directories, engine
        self.nbytes = self._count * PIECE_BYTES * len(directories)
        """Bytes of `write` and of `read`."""
        self.both_bytes = self._count // 2 * 2 * PIECE_BYTES * len(directories)

    def __enter__(self) -> DriveProbe:
        with ExitStack() as stack:
            memory = noise(self._count * PIECE_BYTES)
            stack.callback(memory.close)
            self._address = memory.tensor.data_ptr()
            self._places = [stack.enter_context(self._place(each)) for each in self._directories]
            self.write()  # bytes that were never written cost nothing to read
            self._parts = stack.pop_all()
        return self

    @contextmanager
    def _place(self, directory: Path) -> Iterator[tuple[Any, Any]]:
        """An engine, and its file in `directory`."""
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix="infinity-bench-step-") as folder,
            Directory(Path(folder)) as place,
            closing(native.make_engine(self._engine)) as engine,
            closing(native.file_at(place.create_in_place(_NAME), f"{folder}/{_NAME}")) as file,
        ):
            file.allocate(self._count * PIECE_BYTES)
            yield engine, file

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def write(self) -> None:
        """Write all bytes."""
        self._run(self._requests("write", range(self._count)))

    def read(self) -> None:
        """Read all bytes."""
        self._run(self._requests("read", range(self._count)))

    def both(self) -> None:
        """Read one half and write the other half, in turns."""
        half = self._count // 2
        pairs = zip(
            self._requests("read", range(half)),
            self._requests("write", range(half, 2 * half)),
            strict=True,
        )
        self._run(request for pair in pairs for request in pair)

    def _requests(self, operation: str, numbers: range) -> Iterator[Any]:
        for number in numbers:
            at = number * PIECE_BYTES
            for engine, file in self._places:
                yield getattr(engine, operation)(file, at, self._address + at, PIECE_BYTES)

    def _run(self, requests: Iterator[Any]) -> None:
        in_flight = deque[Any]()
        try:
            in_flight.extend(requests)
        finally:
            finish_all(in_flight, lambda ticket: ticket.wait())


def drives(probe: DriveProbe, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of all drives together: of writing, of reading, and of both at once, half of
    each."""
    turns = [
        {
            "nvme_write": probe.nbytes / seconds_of(probe.write),
            "nvme_read": probe.nbytes / seconds_of(probe.read),
            "nvme_both": probe.both_bytes / seconds_of(probe.both),
        }
        for _ in range(rounds)
    ]
    return {name: [turn[name] for turn in turns] for name in turns[0]}


def beside_drives(compute: Callable[[], float], probe: DriveProbe, rounds: int) -> list[float]:
    """The share of their speed that `compute`, which returns its seconds, and the drives keep if
    both work at the same time, from 0 to 1. The mean of the two."""

    def move(end: threading.Event) -> int:
        turns = 0
        while not (turns and end.is_set()):
            probe.both()
            turns += 1
        return turns

    found = []
    for _ in range(rounds):
        alone, moved = compute(), seconds_of(probe.both)
        end = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            start = time.perf_counter()
            moving = thread.submit(move, end)
            try:
                together = compute()
            finally:
                end.set()
            turns = moving.result()
            each = (time.perf_counter() - start) / turns
        found.append(min(1.0, (alone / together + moved / each) / 2))
    return found
