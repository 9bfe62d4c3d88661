"""Turns ranges of files into native requests, directly on the memory of a tensor or through staging
slots."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.device import HostMemory, cudart
from infinity.errors import NvmeError
from infinity.nvme.open_files import Files
from infinity.nvme.requests import IoRequest
from infinity.nvme.safetensors import BLOCK
from infinity.nvme.ticket import Ticket, Tickets, check_process
from infinity.quantities import round_up

log = logging.getLogger("infinity")

SLOTS = 4
SLOT_BYTES = 4 << 20  # of staging memory, which its first use allocates

# An offset in the file (bytes), and the bytes (uint8, one dimension) that belong there.
Piece = tuple[int, torch.Tensor]
Range = tuple[int, int]  # an offset in the file, and a number of bytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor as uint8, of shape (bytes,)."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within host memory, or between host and device; blocks."""
    if target.is_cpu and source.is_cpu:
        # Not copy_: it would start a team of OpenMP threads for a thread that has none.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source)


def _runs(pieces: Iterable[Piece], gap: int = 0) -> Iterator[list[Piece]]:
    """Cut `pieces`, in file order, into runs that each fit a slot. A slot begins at a block of the
    file.

    Inside a run at most `gap` bytes lie between two pieces.
    """
    run: list[Piece] = []
    base = end = 0
    for start, data in pieces:
        position = start
        while position < start + data.numel():
            if not run or position > end + gap or position >= base + SLOT_BYTES:
                if run:
                    yield run
                run, base = [], position // BLOCK * BLOCK
            end = min(start + data.numel(), base + SLOT_BYTES)
            run.append((position, data[position - start : end - start]))
            position = end
    if run:
        yield run


def _placed(run: list[Piece], slot: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of each piece of `run`, and its bytes in the slot."""
    base = run[0][0] // BLOCK * BLOCK
    for position, data in run:
        yield data, slot[position - base :][: data.numel()]


class Submitter:
    """Owns a native engine, its tickets in flight, and staging memory for bytes that cannot move
    directly. Any thread may use it. It ends with `close`."""

    def __init__(self, engine: Any) -> None:
        self.tickets = Tickets()
        self._engine = engine
        self._closed = False
        self._staging = threading.Lock()  # its holder uses the slots
        self._memory: dict[bool, HostMemory] = {}  # by whether it is pinned for CUDA
        self._kept: list[torch.Tensor] = []  # registered with the native engine

    @property
    def engine(self) -> Any:
        """The native engine. Raises as `check_open` does."""
        self.check_open()
        return self._engine

    def check_open(self) -> None:
        """Raise `ValueError` after `close`, and in a forked child."""
        check_process(self.tickets.process)
        if self._closed:
            raise ValueError("this infinity.nvme.Io is closed")

    def pin(self, tensor: torch.Tensor, address: int, nbytes: int) -> bool:
        """Pin the memory of `tensor` and keep the tensor until `close`. Returns False if the kernel
        refuses."""
        try:
            self.engine.register_memory(address, nbytes)
        except OSError as error:
            log.debug("%d bytes are not registered with the I/O engine: %s", nbytes, error)
            return False
        self._kept.append(tensor)
        return True

    def drain(self) -> None:
        """Wait for every ticket. Raises the first `NvmeError` that no call of `Ticket.wait`
        raised."""
        check_process(self.tickets.process)
        lost = self.tickets.drain()
        if lost is not None:
            lost.wait()

    def close(self) -> None:
        """Wait for every ticket and end the threads. Then raises as `drain` does. May be called
        twice. Does nothing in a forked child."""
        if os.getpid() != self.tickets.process:
            return
        self._closed = True
        try:
            self.drain()
        finally:
            self._engine.close()
            self._kept.clear()
            with self._staging:
                for memory in self._memory.values():
                    memory.close()
                self._memory.clear()

    def __del__(self) -> None:
        try:
            self.close()
        except NvmeError as error:
            log.error("%s (an infinity.nvme ticket that nobody waited for)", error)

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """A ticket for the I/O that the block starts. If the block raises, that I/O ends before the
        exception propagates."""
        self.check_open()
        ticket = Ticket(ended=self.tickets.ended)
        try:
            yield ticket
            self.tickets.add(ticket)
        except BaseException:
            ticket.reported = True
            ticket.finish()
            raise

    def move(
        self,
        ticket: Ticket,
        operation: str,
        files: Files,
        request: IoRequest,
        whole: Range | None = None,
    ) -> None:
        """Start moving the bytes of `request`, a part of `whole`, directly from or to the memory of
        its tensor.

        A partial block is written through a descriptor without O_DIRECT. With O_DIRECT the native
        engine would read the block, patch it and write it back. A concurrent write to its other
        bytes would be lost, and the file would grow to the end of the block.
        """
        tensor, address, nbytes, path, offset = request
        if nbytes == 0:
            return
        submit = getattr(self.engine, operation)
        whole = whole or (offset, nbytes)
        file = files.get(path)
        if operation == "read" or not file.direct or (offset % BLOCK == 0 and nbytes % BLOCK == 0):
            ticket.add(submit(file, offset, address, nbytes, owner=tensor, whole=whole))
            return
        end = offset + nbytes
        first = min(round_up(offset, BLOCK), end)
        last = max(end // BLOCK * BLOCK, first)
        for begin, until, direct in (
            (offset, first, False),
            (first, last, True),
            (last, end, False),
        ):
            if begin < until:
                file = files.get(path, direct)
                ticket.add(
                    submit(
                        file,
                        begin,
                        address + begin - offset,
                        until - begin,
                        owner=tensor,
                        whole=whole,
                    )
                )

    def stage(
        self,
        operation: str,
        files: Files,
        path: bytes,
        pieces: Sequence[Piece],
        gap: int = 0,
        ticket: Ticket | None = None,
        whole: Range | None = None,
    ) -> None:
        """Move `pieces`, in file order, through the slots. Blocks. Raises the `NvmeError` of the
        first run that fails.

        A piece has the same offset from a block's start in its slot as in the file, so the native
        engine does not copy whole blocks once more. The runs become requests of `ticket`, which
        raises the same error.
        """
        with self._staging:
            slots = self._slots(pinned=not all(data.is_cpu for _, data in pieces))
            free = deque(slots.split(SLOT_BYTES))
            busy: deque[tuple[Ticket, torch.Tensor, list[Piece]]] = deque()

            def retire() -> None:
                moving, slot, run = busy[0]
                moving.finish()
                busy.popleft()
                moving.wait()
                if operation == "read":
                    for target, at in _placed(run, slot):
                        _copy(target, at)
                free.append(slot)

            try:
                for run in _runs(pieces, gap):
                    if not free:
                        retire()
                    slot = free.popleft()
                    if operation == "write":
                        for source, at in _placed(run, slot):
                            _copy(at, source)
                    begin, end = run[0][0], run[-1][0] + run[-1][1].numel()
                    moving = Ticket()
                    busy.append((moving, slot, run))
                    if ticket is not None:
                        ticket.add(moving)
                    request = IoRequest(
                        slot, slot.data_ptr() + begin % BLOCK, end - begin, path, begin
                    )
                    self.move(moving, operation, files, request, whole)
                while busy:
                    retire()
            except BaseException:
                for moving, _, _ in busy:
                    moving.finish()
                raise

    def _slots(self, pinned: bool) -> torch.Tensor:
        """The staging memory. The caller holds `_staging`."""
        if pinned not in self._memory:
            memory = HostMemory(SLOTS * SLOT_BYTES, cudart() if pinned else None)
            memory.pin()
            self._memory[pinned] = memory
        return self._memory[pinned].tensor
