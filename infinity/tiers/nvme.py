"""The NVMe tier: one preallocated file per directory, striped in user space, behind the async-IO engine."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.errors import BudgetError, ConfigError, NvmeError, PathInUseError
from infinity.native import make_engine
from infinity.observe import Meter, Recorder
from infinity.units import format_bytes, round_up

log = logging.getLogger("infinity")

ALIGNMENT = 4096
STRIPE_BYTES = 4 << 20
REQUEST_BYTES = 1 << 20  # larger ones cost less CPU, but what is needed first then waits longer behind them
LOCK_NAME = "infinity.lock"
STATES_NAME = "infinity-states.bin"


class Extent(NamedTuple):
    """`nbytes` bytes at `start` of the striped address space; both multiples of 4096."""

    start: int
    nbytes: int


class Request(NamedTuple):
    """One native request: its ticket and what an error message needs."""

    ticket: Any
    path: str
    offset: int


class Transfer:
    """The I/O of one contiguous range, in flight. Any thread may wait, several times."""

    def __init__(self, operation: str, name: str, requests: Sequence[Request], recorder: Recorder) -> None:
        self._operation, self._name, self._recorder = operation, name, recorder
        self._requests: Sequence[Request] = requests
        self._failed: tuple[str, int, int, int, int] | None = None
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._seen = False

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(request.ticket.done() for request in self._requests)

    def wait(self) -> None:
        """Block until every byte has moved; raises `NvmeError` with path, offset, errno, asked and done."""
        self._finish()
        if self._failed is not None:
            raise NvmeError(self._operation, *self._failed)

    def _finish(self) -> None:
        """Wait for every request, for the memory may be reused after that, and let go of the tickets: they keep files open."""
        failed = None
        for ticket, path, offset in self._requests:
            code, asked, done = ticket.wait()
            if code != 0 and failed is None:
                failed = path, offset, max(code, 0), asked, done
        with self._lock:
            first, self._seen = not self._seen, True
            if first:
                self._failed, self._requests = failed, ()
        if first and failed is None:
            self._recorder.add(f"nvme {self._operation}", self._name, self._start, time.perf_counter())


class NvmeTier:
    """Extents on one or more directories, each holding one states file and one lock file.

    Declare extents with `reserve`, then `open` locks the directories, reclaims what a dead run left there and preallocates.
    A range of the address space is striped over the directories in pieces of 4 MiB, so that a block of some size uses
    every drive. `read` and `write` may be called by any thread; the caller's memory outlives the transfer.
    """

    def __init__(self, directories: Sequence[Path], engine: str, budget: int | None, recorder: Recorder) -> None:
        self._directories, self._kind, self._budget, self._recorder = list(directories), engine, budget, recorder
        self._locks: list[int] = []
        self._files: list[Any] = []
        self._io: Any = None
        self.reserved = 0

    @property
    def engine(self) -> Any:
        """The native I/O engine."""
        return self._io

    def reserve(self, nbytes: int) -> Extent:
        """Declare an extent of `nbytes` (a multiple of 4096), before `open`."""
        extent = Extent(self.reserved, nbytes)
        self.reserved += nbytes
        return extent

    def open(self) -> None:
        """Lock, reclaim and preallocate; on an error nothing of ours stays behind.

        Raises `ConfigError` (no such directory, not writable), `PathInUseError` (another process), `BudgetError` (space).
        """
        self._check_directories()  # a mistake in a path is told even if all states fit elsewhere
        if self.reserved == 0:
            return
        per_path = round_up(round_up(self.reserved, STRIPE_BYTES) // STRIPE_BYTES, len(self._directories))
        per_path = per_path // len(self._directories) * STRIPE_BYTES
        total = per_path * len(self._directories)
        if self._budget is not None and total > self._budget:
            raise BudgetError(
                f"nvme_memory={format_bytes(self._budget)} cannot hold the states on nvme, which need {format_bytes(total)}; "
                f"the smallest nvme_memory that works is {total} (invariant I10)"
            )
        try:
            for directory in self._directories:
                self._locks.append(lock_directory(directory))
            self._io = make_engine(self._kind, request_bytes=REQUEST_BYTES)
            for directory in self._directories:
                self._files.append(self._allocate(directory, per_path))
        except BaseException:
            self.close()
            raise

    def _check_directories(self) -> None:
        for directory in self._directories:
            if not directory.is_dir():
                kind = "is not a directory" if directory.exists() else "does not exist"
                raise ConfigError(f"nvme directory {directory} {kind}; create it on the drive to be used: mkdir -p {directory}")
        if len({directory.resolve() for directory in self._directories}) < len(self._directories):
            raise ConfigError(f"the nvme directories must differ: {', '.join(map(str, self._directories))}")

    def _allocate(self, directory: Path, nbytes: int) -> Any:
        path = directory / STATES_NAME
        if path.exists():
            log.warning("reclaimed %s that an earlier run left in %s", format_bytes(path.stat().st_size), directory)
            path.unlink()
        aio = native.aio()
        file = aio.File(str(path), create=True, mode=0o600)
        try:
            file.allocate(nbytes)
        except OSError as error:
            file.close()
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            status = os.statvfs(directory)
            free = status.f_bavail * status.f_frsize
            raise BudgetError(
                f"{directory} has {format_bytes(free)} free, but the states on nvme need {format_bytes(nbytes)} there; free "
                f"{format_bytes(max(nbytes - free, 0))}, add a second directory, or set copy_on_write=False (halves what is "
                "updated, but a failed step then loses the state)"
            ) from error
        if not file.direct:
            log.warning("%s does not support O_DIRECT; I/O goes through the page cache and is slower", directory)
        return file

    def register(self, memory: torch.Tensor) -> None:
        """Let the I/O engine pin `memory` until `close`, so that requests in it cost less CPU; needless, so it may be refused."""
        if self._io is not None and memory.numel() > 0:
            try:
                self._io.register_memory(memory.data_ptr(), memory.numel())
            except OSError as error:
                log.debug("%d bytes are not registered with the I/O engine: %s", memory.numel(), error)

    def read(self, extent: Extent, begin: int, nbytes: int, address: int, name: str, meter: Meter | None = None) -> Transfer:
        """Start reading bytes [begin, begin + nbytes) of `extent` into `address`; `name` labels the span, `meter` counts."""
        if meter is not None:
            meter.add(read=nbytes)
        self._recorder.count("nvme bytes read", nbytes)
        return self._submit("read", extent, begin, nbytes, address, name)

    def write(
        self,
        extent: Extent,
        begin: int,
        nbytes: int,
        address: int,
        name: str,
        meter: Meter | None = None,
        background: bool = False,
    ) -> Transfer:
        """Start writing `nbytes` from `address` to bytes [begin, begin + nbytes) of `extent`; in the `background` when nobody
        waits for it: reads then go first."""
        if meter is not None:
            meter.add(written=nbytes)
        self._recorder.count("nvme bytes written", nbytes)
        return self._submit("write", extent, begin, nbytes, address, name, background)

    def _submit(
        self, operation: str, extent: Extent, begin: int, nbytes: int, address: int, name: str, background: bool = False
    ) -> Transfer:
        if begin < 0 or begin + nbytes > extent.nbytes:
            raise ValueError(f"bytes {begin}..{begin + nbytes} are not in an extent of {extent.nbytes}")
        submit = getattr(self._io, operation)
        requests = []
        for number, offset, length in striped(extent.start + begin, nbytes, len(self._files)):
            file = self._files[number]
            requests.append(Request(submit(file, offset, address, length, background), file.path, offset))
            address += length
        return Transfer(operation, name, requests, self._recorder)

    def close(self) -> None:
        """Wait for what is in flight, then remove the files and the locks. May be called twice."""
        if self._io is not None:
            self._io.close()
        for file in self._files:
            path = Path(file.path)
            file.close()
            path.unlink(missing_ok=True)
        for directory, lock in zip(self._directories, self._locks, strict=False):
            (directory / LOCK_NAME).unlink(missing_ok=True)
            os.close(lock)
        self._files.clear()
        self._locks.clear()


def striped(position: int, nbytes: int, files: int) -> Iterator[tuple[int, int, int]]:
    """(number of the file, offset, bytes) of the pieces of a range over `files` files: 4 MiB each in turn, one file in one."""
    while nbytes > 0:
        stripe, within = divmod(position, STRIPE_BYTES)
        length = nbytes if files == 1 else min(nbytes, STRIPE_BYTES - within)
        yield stripe % files, stripe // files * STRIPE_BYTES + within, length
        position, nbytes = position + length, nbytes - length


def lock_directory(directory: Path) -> int:
    """Lock `directory` for this process and write our pid into the lock file; returns the descriptor that holds the lock.

    Raises `PathInUseError` with the holder's pid, or `ConfigError` when the directory cannot be written.
    """
    path = directory / LOCK_NAME
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"nvme directory {directory} cannot be written: {os.strerror(error.errno or 0)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise PathInUseError(
                f"nvme directory {directory} is in use by process {holder}; give each job its own directory"
            ) from None
        # The holder removes the file as it leaves: make sure that what we locked is still what the name means.
        try:
            same = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            same = False
        if same:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)
