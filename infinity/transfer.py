"""What `infinity.nvme` moves: checked requests, the files of a call, its bytes in flight, and the ticket for them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.errors import NvmeError

RESERVE_BYTES = 4 << 20  # files that grow by less are not worth the call
MANY_TICKETS = 256
OPEN_FILES = 64  # of one call; what is in flight keeps its own


class Request(NamedTuple):
    """One tensor's bytes at `offset` of the file, checked."""

    tensor: torch.Tensor
    address: int
    nbytes: int
    path: bytes
    offset: int


def check(operation: str, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Request:
    """Raises what is wrong with them, before anything has moved."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"the path {os.fsdecode(name)!r} has a null byte")
    if type(offset) is not int or offset < 0:
        raise ValueError(f"offset must be a number of bytes, 0 or more, not {offset!r}")
    return Request(tensor, *memory_of(operation, tensor, f"{operation} of {os.fsdecode(name)}"), name, offset)


def memory_of(operation: str, tensor: torch.Tensor, what: str) -> tuple[int, int]:
    """Address and length of the tensor's memory, which `operation` may use."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: it takes a torch.Tensor, not {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{what}: a {type(tensor).__name__} has no memory of its own; give the tensors that it wraps")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what}: a tensor on {tensor.device.type} has no bytes that can be moved; use one on cpu or cuda")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{what}: a {'quantized' if tensor.is_quantized else tensor.layout} tensor is more than its bytes")
    address = tensor.data_ptr()  # of a parameter that lives on another tier: raises an error with its name
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what}: the tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}, but bytes move in one piece; "
            + ("write tensor.contiguous()" if operation == "write" else "read into a .contiguous() tensor and copy_ from it")
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what}: a lazily conjugated or negated view differs from its bytes; use .resolve_conj().resolve_neg()")
    if operation == "read" and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what}: the tensor requires grad; read inside torch.no_grad(), or into tensor.detach()")
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes and tensor.storage_offset() * tensor.itemsize + nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{what}: the memory of the tensor of shape {tuple(tensor.shape)} has been freed or shrunk")
    return address, nbytes


class Failure(NamedTuple):
    """What `NvmeError` is made from."""

    operation: str
    path: str
    offset: int
    code: int
    asked: int
    done: int


class Part:
    """One tensor's bytes in flight: native requests, in the order of the file, and what must live until they are complete."""

    __slots__ = ("failed", "nbytes", "offset", "path", "tensor", "tickets")

    def __init__(self, path: bytes, offset: int, nbytes: int, tensor: torch.Tensor) -> None:
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.tensor: torch.Tensor | None = tensor
        self.tickets: list[Any] = []
        self.failed: tuple[int, int] | None = None  # errno (0: the file ended) and the bytes done

    def done(self) -> bool:
        if not all(ticket.done() for ticket in self.tickets):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for all of it, for the memory may be reused after that; then let go of the tickets, which keep files open."""
        tickets, failed, done = self.tickets, self.failed, 0  # in this order: another thread may be in the next lines
        for ticket in tickets:
            code, _, moved = ticket.wait()
            done += moved if failed is None else 0
            if code != 0 and failed is None:
                failed = max(code, 0), done
        self.failed = failed
        self.tickets, self.tensor = [], None

    def failure(self, operation: str) -> Failure | None:
        """What stopped it, once it is finished."""
        if self.failed is None:
            return None
        return Failure(operation, os.fsdecode(self.path), self.offset, self.failed[0], self.nbytes, self.failed[1])


class InFlight:
    """The tickets of one `Io` that are not complete: it keeps them, so that their tensors live as long as the I/O."""

    def __init__(self) -> None:
        # A collection inside these few lines may end another Io of the same thread: reentrant.
        self.lock = threading.RLock()
        self.process = os.getpid()
        self._tickets: dict[Ticket, None] = {}
        self._lost: Ticket | None = None  # the first that failed and that nobody has waited for

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise ValueError(f"this belongs to process {self.process}, which was forked; make an infinity.nvme.Io of your own")

    def add(self, ticket: Ticket) -> None:
        """Keep `ticket`, and let go of those that are complete: the oldest, or all when there are many."""
        with self.lock:
            for older in list(self._tickets):
                if older.done():
                    self.end(older)
                elif len(self._tickets) <= MANY_TICKETS:
                    break
            self._tickets[ticket] = None

    def end(self, ticket: Ticket) -> None:
        """Let go of a complete ticket, but not of a failure that nobody has seen."""
        with self.lock:
            self._tickets.pop(ticket, None)
            if ticket.failed and not ticket.reported and self._lost is None:
                self._lost = ticket

    def drain(self) -> Ticket | None:
        """Wait for every ticket; the first that failed without `wait` having said so, if any."""
        with self.lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.finish()
            self.end(ticket)
        with self.lock:
            lost, self._lost = self._lost, None
        return None if lost is None or lost.reported else lost


class Ticket:
    """One call's I/O in flight. Any thread may use it, several times; it may outlive its `Io`, which waits for it."""

    def __init__(self, operation: str, in_flight: InFlight) -> None:
        self._operation, self._in_flight = operation, in_flight
        self._parts: list[Part] = []
        self._settled = 0  # of the parts
        self._lock = threading.RLock()  # reentrant as that of InFlight
        self._complete = False
        self._error: Failure | None = None
        self.reported = False  # whether `wait` has raised what failed

    @property
    def failed(self) -> bool:
        """Whether it is complete and did not move all bytes; does not block."""
        return self._error is not None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if not self._complete:
            self._in_flight.check_process()
            if all(part.done() for part in self._parts):
                self.finish()
        return self._complete

    def wait(self) -> None:
        """Block until every byte has moved; raises `NvmeError` with path, offset, errno, asked and done."""
        if not self._complete:
            self._in_flight.check_process()
            self.finish()
        self.reported = True
        self._in_flight.end(self)
        if self._error is not None:
            raise NvmeError(*self._error)  # a new one each time: a raised exception grows

    def finish(self) -> None:
        """Wait without raising."""
        parts = list(self._parts)
        for part in parts:
            part.finish()
        with self._lock:
            if not self._complete:
                failures = (part.failure(self._operation) for part in parts)
                self._error = next((failure for failure in failures if failure is not None), None)
                self._parts, self._complete = [], True

    def start(self, path: bytes, offset: int, nbytes: int, tensor: torch.Tensor) -> Part:
        """Note what is about to be started; the native requests go into the part. Lets go of parts that are complete."""
        while self._settled < len(self._parts) and self._parts[self._settled].done():
            self._settled += 1
        part = Part(path, offset, nbytes, tensor)
        self._parts.append(part)
        return part


class Files:
    """The files of one call, each opened once; at most `OPEN_FILES` at a time.

    What is in flight keeps its descriptor, so closing the files does not wait. Nothing is kept from call to call: a file that
    is replaced or removed is never mistaken for its successor, and opening one costs microseconds.
    """

    def __init__(self, writes: Iterable[Request] = ()) -> None:
        self._open: OrderedDict[tuple[bytes, bool], Any] = OrderedDict()
        self._writes: dict[bytes, tuple[int, int]] = {}  # for each file that is to be made: bytes to come, and their end
        for request in writes:
            total, end = self._writes.get(request.path, (0, 0))
            self._writes[request.path] = total + request.nbytes, max(end, request.offset + request.nbytes)

    def get(self, path: bytes, direct: bool = True) -> Any:
        """The file; with O_DIRECT where it can be had, unless `direct` is false. Raises `OSError`."""
        file = self._open.get((path, direct))
        if file is not None:
            self._open.move_to_end((path, direct))
            return file
        file = native.aio().File(path, create=path in self._writes, mode=0o666, direct=direct)
        self._open[path, direct] = file
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        if direct and path in self._writes:
            self._reserve(file, path)
        return file

    def _reserve(self, file: Any, path: bytes) -> None:
        """Give a file that grows its blocks at once: requests past the end of a file are done one after the other."""
        total, end = self._writes[path]
        growth = end - file.size()
        if growth < RESERVE_BYTES or total < growth:  # the file may stay sparse
            return
        now = os.stat(path)  # noqa: PTH116, a Path takes longer than the call
        if stat.S_ISREG(now.st_mode) and now.st_blocks * 512 >= now.st_size:
            allocate(file, end)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open.values():
            file.close()


def allocate(file: Any, nbytes: int) -> None:
    """Reserve the first `nbytes`; raises `OSError` when there is no room, and does nothing where that cannot be done."""
    try:
        file.allocate(nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
