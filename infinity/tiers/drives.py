"""The NVMe tier: one preallocated file per directory, each behind an async-IO engine of its own,
striped in user space."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from infinity import native
from infinity.errors import BudgetError, ConfigError, NvmeError
from infinity.native import make_engine
from infinity.nvme.ticket import Ticket
from infinity.observe import Recorder
from infinity.tiers.extents import Extents, Shares
from infinity.tiers.originals import FileExtent, Originals
from infinity.tiers.places import Places, check_directories
from infinity.tiers.states_files import Extent, ExtentTransfer

log = logging.getLogger("infinity")

ALIGNMENT = 4096
# Larger requests cost less CPU, but an urgent request then waits longer behind them.
REQUEST_BYTES = 1 << 20
DIRECT_THREADS = 8
"""Requests under way at once for each drive that writes to a GPU. A request takes one thread."""


class NvmeTier:
    """Extents on one or more directories, each holding one states file and one lock file, and
    served by a native engine.

    Declare extents with `extents.reserve`. Then `open` locks the directories, removes the files of
    a dead run and preallocates. The address space is striped over the directories in pieces of 4
    MiB, so a large block uses every drive. `read` and `write` may be called by any thread; the
    caller's memory outlives the transfer.
    """

    def __init__(
        self,
        places: Places,
        engine: str,
        budget: int | None,
        recorder: Recorder,
        shares: Shares = "measured",
    ) -> None:
        """`engine` is the kind of I/O engine, and `budget` limits the bytes of all files."""
        self.places = places
        """The directories."""
        self._kind = engine
        self._recorder = recorder
        self._parts = ExitStack()  # undone by `close` in reverse order
        self.extents = Extents(places, budget, shares)
        """The extents."""
        self._states = self.extents.states
        self.engines = self._states.engines
        """The native I/O engines, one per directory; empty without extents."""
        self.direct: list[Any] = []
        """The engines that read into the memory of `attach`, one per directory; empty without
        it."""
        self.originals = Originals(engine, REQUEST_BYTES)
        """Files of the user that are homes, beside the directories."""
        self._registered: list[torch.Tensor] = []
        self._parts.callback(self._registered.clear)  # the engines are closed then
        self._parts.callback(self.originals.close)
        self._parts.callback(places.close)
        self._unflushed: str | None = None  # the file whose flush has failed

    def measure(self) -> float:
        """Before `open`: bytes per second of all directories together; see `Extents.measure`. Locks
        and reclaims as `open` does. Raises what `open` raises about directories and drives."""
        with self._undoing():
            self._enter()
        return self.extents.measure()

    def open(self) -> None:
        """Lock, reclaim, measure and preallocate. After an error no file of ours remains.

        Raises `ConfigError` (no such directory, not writable), `PathInUseError` (another process),
        `BudgetError` (space), `NvmeError` (a drive that fails when it is measured).
        """
        # A wrong path is an error even if all states fit elsewhere.
        check_directories(self.places.paths)
        if self.extents.reserved == 0:
            return
        stripes = self.extents.stripes()
        with self._undoing():
            self._enter()
            self.extents.allocate(stripes)

    def find(self) -> None:
        """Before `open`: lock the directories, and read the manifests of an earlier run. Changes
        nothing else."""
        with self._undoing():
            self.places.find()

    def _enter(self) -> None:
        """Lock the directories, reclaim their files, and give each a file and an engine. A new file
        is empty."""
        if self.engines:
            return
        self.places.find()
        self.extents.adopt()
        for file in self.places.open_files():
            self._parts.callback(file.close)
            engine = make_engine(self._kind, request_bytes=REQUEST_BYTES)
            self._parts.callback(engine.close)
            self._states.add(file, engine)

    @contextmanager
    def _undoing(self) -> Iterator[None]:
        """Close after an error inside."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def register(self, memory: torch.Tensor) -> None:
        """Let every engine pin `memory` until `forget_memory` or `close`, so that requests in it
        cost less CPU. An engine may refuse."""
        self._registered.append(memory)
        self._pin(memory)

    def forget_memory(self) -> None:
        """Let no engine pin the registered memory any more. No request is under way. Otherwise an
        engine would continue to use the pages that are given back."""
        for memory in self._registered:
            for engine in filter(None, (*self.engines, self.originals.engine)):
                engine.forget_memory(memory.data_ptr())

    def register_again(self) -> None:
        """Undo `forget_memory`."""
        for memory in self._registered:
            self._pin(memory)

    def _pin(self, memory: torch.Tensor) -> None:
        if memory.numel() > 0:
            for engine in filter(None, (*self.engines, self.originals.engine)):
                try:
                    engine.register_memory(memory.data_ptr(), memory.numel())
                except OSError as error:
                    log.debug(
                        "%d bytes are not registered with the I/O engine: %s", memory.numel(), error
                    )

    def attach(self, memory: torch.Tensor) -> None:
        """After `open`: let the drives write to `memory` (uint8, on a GPU) until `close`, for
        `read` with `direct`.

        Tries each drive with a file of its own. Raises `RuntimeError` with the reason if a drive
        cannot write there; then nothing has changed.
        """
        with ExitStack() as undo:
            cufile = native.cufile()
            undo.callback(cufile.close)
            cufile.register_memory(memory.data_ptr(), memory.numel())
            options = {"threads": DIRECT_THREADS, "request_bytes": REQUEST_BYTES}
            direct = []
            for number in range(len(self._states)):
                direct.append(self._states.direct_engine(number, cufile, **options))
                undo.callback(direct[-1].close)
            try:
                with self.places.scratch(named=True) as files:  # cuFile may look for names
                    for number, file in enumerate(files):
                        with closing(cufile.engine(file, **options)) as engine:
                            self._try_direct(number, file, engine, memory[:ALIGNMENT])
            except (BudgetError, ConfigError) as error:
                raise RuntimeError(str(error)) from None
            self.direct = direct
            self._parts.callback(self.direct.clear)
            self._parts.enter_context(undo.pop_all())

    def _try_direct(self, number: int, file: Any, engine: Any, place: torch.Tensor) -> None:
        """Raise `RuntimeError` unless a block of `file`, on drive `number`, arrives in `place`.
        `place` keeps its content."""
        before = place.cpu().clone()
        block = (torch.arange(ALIGNMENT) * (number + 3) // 7).to(torch.uint8)
        try:
            for word, io, address in (
                ("write", self.engines[number], block.data_ptr()),
                ("read", engine, place.data_ptr()),
            ):
                getattr(io, word)(file, 0, address, ALIGNMENT).wait()
            if not torch.equal(place.cpu(), block):
                raise RuntimeError(f"a block of {file.path} did not arrive on the GPU")
        except NvmeError as error:
            raise RuntimeError(str(error)) from None
        finally:
            place.copy_(before)

    def read(self, transfer: ExtentTransfer, direct: bool = False) -> Ticket:
        """Start reading the bytes of `transfer`, with `direct` to the attached memory."""
        extent, name = transfer.extent, transfer.name
        if transfer.meter is not None:
            transfer.meter.add(read=transfer.nbytes)
        self._recorder.count("nvme bytes read", transfer.nbytes)
        if isinstance(extent, FileExtent):
            where = (transfer.begin, transfer.nbytes, transfer.address, name)
            requests = self.originals.requests(extent, *where)
        else:
            engines = self.direct if direct else self.engines
            requests = self._states.read(_start_of(extent, transfer), transfer, engines)
        return Ticket(requests, self._spanning("nvme read", name))

    def write(self, transfer: ExtentTransfer) -> Ticket:
        """Start writing the bytes of `transfer`.

        Raises `RuntimeError`, and writes nothing, if the bytes were not given out or a commit
        includes them.
        """
        extent, name = transfer.extent, transfer.name
        if isinstance(extent, FileExtent):
            raise RuntimeError(f"{name} is at home in files of the user, which are only read")
        requests = self._states.write(_start_of(extent, transfer), transfer)
        if transfer.meter is not None:
            transfer.meter.add(written=transfer.nbytes)
        self._recorder.count("nvme bytes written", transfer.nbytes)
        return Ticket(requests, self._spanning("nvme write", name))

    def where(self, extent: Extent, begin: int) -> tuple[str, int]:
        """The path, and the offset in that file, of byte `begin` of `extent`."""
        return self._states.where(extent.start + begin)

    def flush(self) -> None:
        """Return when all writes that have ended would survive a power cut.

        After a failure, each later flush fails too. The system may have dropped the bytes that it
        could not write, and its next flush of that file would still succeed.
        """
        if self._unflushed is not None:
            reason = "an earlier flush failed, and what was written there may be lost"
            raise OSError(errno.EIO, reason, self._unflushed)
        for number in range(len(self._states)):
            try:
                self._states.sync(number)
            except BaseException:
                self._unflushed = self._states.path(number)
                raise

    def _spanning(self, lane: str, name: str) -> Callable[[Ticket], None]:
        """Begin a span that ends with a ticket. A failed transfer is not recorded."""
        start = time.perf_counter()
        shown = self._recorder.show(lane, name)

        def ended(ticket: Ticket) -> None:
            self._recorder.hide(shown)
            if not ticket.failed:
                self._recorder.add(lane, name, start, time.perf_counter())

        return ended

    def close(self) -> None:
        """Wait for transfers in flight, then remove the files and the locks, even after failures.
        May be called twice."""
        self._parts.close()


def _start_of(extent: Extent, transfer: ExtentTransfer) -> int:
    """The address of the first byte of `transfer`. Raises `ValueError` beyond `extent`."""
    begin, end = transfer.begin, transfer.begin + transfer.nbytes
    if begin < 0 or end > extent.nbytes:
        raise ValueError(f"bytes {begin}..{end} are not in an extent of {extent.nbytes}")
    return extent.start + begin
