"""Tensors on NVMe: read and write them at the speed of the drive, many at once, in the background, or as one file.

    infinity.nvme.write(weights, "/mnt/nvme0/weights.bin")               # blocking
    infinity.nvme.read(weights, "/mnt/nvme0/weights.bin")                # fills the tensor that it is given

    ticket = infinity.nvme.read_async(weights, path, offset=1 << 20)
    ...                                                                  # the drive works meanwhile
    ticket.wait()

    infinity.nvme.write_many([(tensor, path, offset), ...])              # one call, one wait
    infinity.nvme.save({"weight": weights}, "model.safetensors")         # what safetensors' load_file reads, and
    tensors = infinity.nvme.load("model.safetensors")                    # the other way round

The module's functions use one `Io`, made when it is first needed; make your own to choose the engine, depth and sizes.

[Note: what every call promises]
Which thread?        Any, also several at once. The I/O is done by native threads, without the GIL.
Does it block?       The `_async` forms return when all is queued, the others when all is on the drive or in the tensor. A
                     tensor on a CUDA device passes pinned host memory in pieces, which the calling thread copies on its
                     current stream: for these the `_async` forms block too.
Queue full?          The call blocks until there is room: a thread can be ahead of the drive by about 2 * depth requests.
How long must what   Nothing needs to be kept: tensors and files stay until their bytes have moved, also when the ticket is
live?                dropped. Until then the content of a tensor that is read into is undefined, and one that is written
                     must not change.
What moves?          Exactly the tensor's bytes, as they lie in memory (little-endian), at any offset, address and length. A
                     write changes no other byte of the file, creates the file when there is none, and makes it as long as
                     is needed, never shorter. Writes and reads that are in flight together must not overlap.
Durable?             `save` is, when it returns. After `write` the bytes have left for the drive, but only an os.fsync of
                     the file makes sure that they survive a power cut.
Errors?              A tensor, offset or path that cannot be: `TypeError` or `ValueError`, before anything has moved. A file
                     that cannot be opened or has no room: the `OSError` of the system (`FileNotFoundError`, ...); tensors
                     before it in the same call may have moved. I/O that stopped early, also at the end of the file:
                     `NvmeError` with path, offset, errno, asked and done; of several, the first in order of the call.
Forked child?        A child makes an `Io` of its own; its parent's, and their tickets, refuse to be used there. Wait for
                     tickets before a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity import native, safetensors
from infinity.device import HUGE_PAGE, HostMemory, huge_pages
from infinity.errors import ConfigError, NvmeError, WeightsError
from infinity.files import Directory
from infinity.safetensors import BLOCK, Entry
from infinity.transfer import Files, InFlight, Part, Ticket, allocate, check, memory_of
from infinity.units import round_up

log = logging.getLogger("infinity")

Item = Sequence[Any]
"""(tensor, path) or (tensor, path, offset)."""

SLOTS, SLOT_BYTES = 4, 4 << 20  # staging, made when it is first needed
HEADER_BYTES = 64 << 10  # of a file that is loaded are read first: most headers end there
FETCH_BYTES = 32 << 20
LOAD_GAP = 64 << 10  # bytes that nobody asked for are read rather than left out, up to here
DIRECT_BYTES = 256 << 10  # runs of whole blocks from here on are saved without passing the staging slots


_Piece = tuple[int, torch.Tensor]  # a position in the file, and the bytes (uint8, one dimension) that belong there


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between bytes of the host, or of the host and a device; returns when it is done."""
    if target.is_cpu and source.is_cpu:
        # Not copy_: on a thread that has used no other torch operation it would start a team of OpenMP threads.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source)


def _runs(pieces: Iterable[_Piece], gap: int = 0) -> Iterator[list[_Piece]]:
    """Cut `pieces`, in the order of the file, into runs that fit a slot whose first byte is that of a block.

    Inside a run there are at most `gap` bytes between two pieces.
    """
    run: list[_Piece] = []
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


def _placed(run: list[_Piece], slot: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of each piece, and those of the slot that stand for them."""
    base = run[0][0] // BLOCK * BLOCK
    for position, data in run:
        yield data, slot[position - base :][: data.numel()]


class Io:
    """An I/O engine of your own, with the methods that the module has as functions (see the note there).

    `engine` is "io_uring", "posix" or "auto". `depth` device requests of `request_bytes` bytes (a multiple of 4096) are in
    flight at a time, and the POSIX engine has `threads` workers; what is None is as the native engine measured it to be best.
    Owns native threads, and 16 MiB of staging memory (32 MiB with CUDA) once something needed it. Ends with `close`, with the
    end of a `with` block, or when it is dropped; each waits for what is in flight. Raises `ValueError` for options that cannot
    be, `RuntimeError` where io_uring was asked for and cannot be had.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        depth: int | None = None,
        threads: int | None = None,
        request_bytes: int | None = None,
    ) -> None:
        self._in_flight = InFlight()
        self._native: Any = None
        self._closed = False
        self._staging = threading.Lock()  # whoever holds it has the slots
        self._memory: dict[bool, HostMemory] = {}  # by whether it is pinned
        self._kept: list[torch.Tensor] = []  # their memory is pinned for the native engine
        options = {"depth": depth, "threads": threads, "request_bytes": request_bytes}
        self._native = native.make_engine(engine, **{name: value for name, value in options.items() if value is not None})

    @property
    def engine(self) -> Any:
        """The native engine: `kind`, `counters()`, `set_faults(...)`. Raises `ValueError` when it is closed."""
        self._check_open()
        return self._native

    def _check_open(self) -> None:
        self._in_flight.check_process()
        if self._closed:
            raise ValueError("this infinity.nvme.Io is closed")

    def write(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
        """Write the bytes of `tensor` to `path`, from byte `offset` on; blocks."""
        self.write_async(tensor, path, offset).wait()

    def read(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> torch.Tensor:
        """Fill `tensor` with the bytes of `path` from byte `offset` on, and return it; blocks."""
        self.read_async(tensor, path, offset).wait()
        return tensor

    def write_async(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
        """Start writing; `tensor` must not change before the ticket is done."""
        return self._start("write", [(tensor, path, offset)])

    def read_async(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
        """Start reading; what is in `tensor` is undefined before the ticket is done."""
        return self._start("read", [(tensor, path, offset)])

    def write_many(self, items: Iterable[Item]) -> None:
        """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
        self.write_many_async(items).wait()

    def read_many(self, items: Iterable[Item]) -> list[torch.Tensor]:
        """Read every (tensor, path, offset) of `items` and return the tensors; blocks. A missing offset is 0."""
        items = list(items)
        self.read_many_async(items).wait()
        return [item[0] for item in items]

    def write_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start writing every (tensor, path, offset); the ticket is that of all of them."""
        return self._start("write", items)

    def read_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start reading every (tensor, path, offset); the ticket is that of all of them."""
        return self._start("read", items)

    def pin(self, tensor: torch.Tensor) -> bool:
        """Pin the memory of `tensor`, on the CPU, until `close`: I/O in it, and in views of it, then takes less CPU time.

        The `Io` keeps the tensor as long. False where the kernel refuses (RLIMIT_MEMLOCK, before Linux 5.19): all works as
        before. A process that forks copies what it has pinned. Raises `ValueError` when some of it is pinned already.
        """
        address, nbytes = memory_of("write", tensor, "pin")
        if not tensor.is_cpu:
            raise ValueError("pin: only memory of the host can be pinned")
        try:
            self.engine.register_memory(address, nbytes)
        except OSError as error:
            log.debug("%d bytes are not registered with the I/O engine: %s", nbytes, error)
            return False
        self._kept.append(tensor)
        return True

    def drain(self) -> None:
        """Wait for every ticket; raises the `NvmeError` of the first that failed without having been waited for."""
        self._in_flight.check_process()
        lost = self._in_flight.drain()
        if lost is not None:
            lost.wait()

    def close(self) -> None:
        """Wait for every ticket and end the threads; then raises as `drain` does. May be called twice."""
        if os.getpid() != self._in_flight.process:
            return
        self._closed = True
        try:
            self.drain()
        finally:
            if self._native is not None:
                self._native.close()
            self._kept.clear()
            with self._staging:
                for memory in self._memory.values():
                    memory.close()
                self._memory.clear()

    def __enter__(self) -> Io:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except NvmeError as error:
            log.error("%s (an infinity.nvme ticket that nobody waited for)", error)

    def _start(self, operation: str, items: Iterable[Item]) -> Ticket:
        requests = [check(operation, *item) for item in items]
        ticket = Ticket(operation, self._in_flight)
        with Files(requests if operation == "write" else ()) as files, self._finishing(ticket):
            for request in requests:
                files.get(request.path)  # also for a tensor of no bytes
                part = ticket.start(request.path, request.offset, request.nbytes, request.tensor)
                if request.tensor.is_cpu:
                    self._move(operation, part, files, request.address, request.offset, request.nbytes)
                else:
                    try:
                        self._stage(operation, files, request.path, [(request.offset, _bytes_of(request.tensor))])
                    except NvmeError as error:
                        part.failed = error.errno or 0, error.offset + error.done - request.offset
                if operation == "read" and not request.tensor.is_inference():
                    torch.autograd.graph.increment_version(request.tensor)
        return ticket

    @contextmanager
    def _finishing(self, ticket: Ticket) -> Iterator[None]:
        """What is started inside is in flight afterwards, or, when it ends with an exception, over."""
        engine = self.engine
        try:
            yield
            self._in_flight.add(ticket)
        except BaseException as error:
            ticket.finish()
            if not isinstance(error, Exception):
                engine.drain()  # an interrupt may have come between a submission and its note in the ticket
            raise

    def _move(self, operation: str, part: Part, files: Files, address: int, offset: int, nbytes: int) -> None:
        """Start moving bytes at `address`.

        A block that is written in part goes through a descriptor without O_DIRECT. With it the block would be read, patched
        and written back: a neighbour's bytes that arrive meanwhile would be lost, and the file would end with the block.
        """
        if nbytes == 0:
            return
        submit, file, end = getattr(self.engine, operation), files.get(part.path), offset + nbytes
        if operation == "read" or not file.direct or (offset % BLOCK == 0 and nbytes % BLOCK == 0):
            part.tickets.append(submit(file, offset, address, nbytes))
            return
        first = min(round_up(offset, BLOCK), end)
        last = max(end // BLOCK * BLOCK, first)
        for begin, until, direct in ((offset, first, False), (first, last, True), (last, end, False)):
            if begin < until:
                part.tickets.append(submit(files.get(part.path, direct), begin, address + begin - offset, until - begin))

    def _stage(self, operation: str, files: Files, path: bytes, pieces: Sequence[_Piece], gap: int = 0) -> None:
        """Move `pieces`, in order of the file, through the slots; raises the `NvmeError` of a run. Blocks.

        A piece lies in its slot as far from the start of a block as it does in the file, so that whole blocks are not copied
        once more.
        """
        with self._staging:
            slots = self._slots(pinned=not all(data.is_cpu for _, data in pieces))
            free = deque(slots.split(SLOT_BYTES))
            busy: deque[tuple[Part, torch.Tensor, list[_Piece]]] = deque()

            def retire() -> None:
                part, slot, run = busy[0]
                part.finish()
                busy.popleft()
                failed = part.failure(operation)
                if failed is not None:
                    raise NvmeError(*failed)
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
                    part = Part(path, begin, end - begin, slot)
                    busy.append((part, slot, run))
                    self._move(operation, part, files, slot.data_ptr() + begin % BLOCK, begin, end - begin)
                while busy:
                    retire()
            except BaseException as error:
                for part, _, _ in busy:
                    part.finish()
                if not isinstance(error, Exception):
                    self.engine.drain()
                raise

    def _slots(self, pinned: bool) -> torch.Tensor:
        """The staging memory, for the one who holds the lock."""
        if pinned not in self._memory:
            self._memory[pinned] = HostMemory(SLOTS * SLOT_BYTES, pin=pinned)
        return self._memory[pinned].tensor

    def save(
        self, tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Save `tensors` by name as a safetensors file, which other tools read too; `metadata` are strings by name. Blocks.

        The file is there whole or not at all: it is written beside `path`, flushed to the drive, and renamed; an error or a
        kill leaves what was there before. Tensors may be on any device and must be contiguous; those that share memory are
        saved each for itself. Raises `TypeError` or `ValueError` for what the format cannot hold.
        """
        self._check_open()
        addresses = {name: memory_of("write", tensor, f"save of tensor {name!r}")[0] for name, tensor in tensors.items()}
        head, entries = safetensors.pack({name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata)
        target = Path(os.path.realpath(os.fsdecode(path)))
        with _replacing(target) as name:
            size = entries[-1].end if entries else len(head)
            with closing(native.aio().File(name)) as file:
                allocate(file, size)
                ticket = Ticket("write", self._in_flight)
                edges: list[_Piece] = [(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))]
                with Files() as files, self._finishing(ticket):
                    for entry in entries:
                        tensor, address = tensors[entry.name], addresses[entry.name]
                        first = min(round_up(entry.begin, BLOCK), entry.end)
                        last = max(entry.end // BLOCK * BLOCK, first)
                        data = _bytes_of(tensor)
                        if not tensor.is_cpu or last - first < DIRECT_BYTES:
                            edges.append((entry.begin, data))
                            continue
                        part = ticket.start(name, first, last - first, tensor)
                        self._move("write", part, files, address + first - entry.begin, first, last - first)
                        edges.append((entry.begin, data[: first - entry.begin]))
                        edges.append((last, data[last - entry.begin :]))
                    self._stage("write", files, name, edges)
                ticket.wait()
                file.sync()

    def load(
        self,
        path: str | os.PathLike[str],
        names: Iterable[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file by name, all or those in `names`, on `device` ("cpu" or a CUDA device). Blocks.

        On the CPU they are views of one piece of memory, which the data lands in without a copy and which is freed with the
        last of them: clone what is to outlive the others. Raises `WeightsError` for a file that is cut off or damaged, or has
        no tensor of such a name, before tensors are made; `NvmeError` when reading fails.
        """
        self._check_open()
        name, shown, where = os.fsencode(path), os.fsdecode(path), torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise ValueError(f"load of {shown}: device must be cpu or cuda, not {where}")
        with Files() as files:
            entries = self._entries(files, name, shown)
            shift = entries[0].begin % 8 if entries else 0  # not 0: written by one who does not align the data
            if names is not None:
                wanted, there = dict.fromkeys(names), {entry.name for entry in entries}
                missing = ", ".join(repr(name) for name in wanted if name not in there)
                if missing:
                    raise WeightsError(f"{shown} has no tensor {missing}; it has {_some(there)}")
                entries = [entry for entry in entries if entry.name in wanted]
            if where.type == "cpu":
                return self._load_host(files, name, entries, shift)
            found = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=where) for entry in entries}
            self._stage("read", files, name, [(entry.begin, _bytes_of(found[entry.name])) for entry in entries], gap=LOAD_GAP)
            return found

    def _entries(self, files: Files, name: bytes, shown: str) -> list[Entry]:
        """What the file says that it holds, checked."""
        size = files.get(name).size()
        first = huge_pages(min(size, HEADER_BYTES))
        self._fetch(files, name, [(first, 0)])
        start = safetensors.data_start(first[:8].numpy().tobytes(), size, shown)
        rest = torch.empty(max(start - first.numel(), 0), dtype=torch.uint8)
        self._fetch(files, name, [(rest, first.numel())])
        return safetensors.parse(first[8:start].numpy().tobytes() + rest.numpy().tobytes(), size, shown)

    def _fetch(self, files: Files, name: bytes, targets: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Fill new host memory from its offsets of the file; blocks.

        The memory is touched piece by piece while what was touched before is read: an engine may not read straight into pages
        that are not there yet.
        """
        ticket = Ticket("read", self._in_flight)
        with self._finishing(ticket):
            for target, offset in targets:
                at = 0
                while at < target.numel():
                    piece = target[at:][: FETCH_BYTES - (offset + at) % BLOCK]
                    piece[::HUGE_PAGE] = 0
                    part = ticket.start(name, offset + at, piece.numel(), piece)
                    self._move("read", part, files, piece.data_ptr(), offset + at, piece.numel())
                    at += piece.numel()
        ticket.wait()

    def _load_host(self, files: Files, name: bytes, entries: Sequence[Entry], shift: int) -> dict[str, torch.Tensor]:
        """Every range of entries without a gap gets memory of its own, as far from a block's start as the file has it."""
        ranges: list[list[Entry]] = []
        for entry in entries:
            if not ranges or ranges[-1][-1].end != entry.begin:
                ranges.append([])
            ranges[-1].append(entry)
        places = [(huge_pages(run[-1].end - run[0].begin, (run[0].begin - shift) % BLOCK), run[0].begin) for run in ranges]
        self._fetch(files, name, places)
        found = {}
        for run, (memory, begin) in zip(ranges, places, strict=True):
            for entry in run:
                found[entry.name] = _tensor_at(memory, entry.begin - begin, entry)
        return found


@contextmanager
def _replacing(target: Path) -> Iterator[bytes]:
    """A name for a new file that takes the place of `target` when the block ends well, and goes when it does not."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        with Directory(target.parent) as directory, directory.drafting() as drafts:
            descriptor = drafts.folder.create(target.name, 0o666)
            try:
                status = directory.status(target.name)
                if status is not None:
                    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
                yield f"/proc/self/fd/{descriptor}".encode()  # no link can come between
            except OSError as error:
                raise _renamed(error, f"/proc/self/fd/{descriptor}", str(target)) from None
            finally:
                os.close(descriptor)
            drafts.publish(target.name)
    except ConfigError as error:  # what the system said
        raise error.__cause__ or error from None


def _renamed(error: OSError, name: str, shown: str) -> OSError:
    """`error`, with `shown` for the file `name`."""
    if error.filename not in (name, name.encode()):
        return error
    if isinstance(error, NvmeError):
        return NvmeError(error.operation, shown, error.offset, error.errno or 0, error.asked, error.done)
    return OSError(error.errno, error.strerror, shown)


def _tensor_at(memory: torch.Tensor, at: int, entry: Entry) -> torch.Tensor:
    """The tensor whose bytes begin at byte `at` of `memory`, with a storage of its own size."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = memory.numpy()
    if (memory.data_ptr() + at) % entry.dtype.itemsize != 0:
        data, at = data[at : at + entry.nbytes].copy(), 0
    return torch.frombuffer(data, dtype=entry.dtype, count=math.prod(entry.shape), offset=at).reshape(entry.shape)


def _some(names: Iterable[str]) -> str:
    """A few of many names."""
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:5])) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the CPU on huge pages, touched, where a block begins: I/O reaches it without a copy and with least work.

    For tensors that are read or written again and again. Memory comes in pages of 2 MiB: make one tensor and use views of it
    where many small ones are needed; `Io.pin` it for the least CPU time. The content is undefined. An ordinary tensor works
    too: its bytes pass a buffer.
    """
    dtype = dtype or torch.get_default_dtype()
    return huge_pages(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)


# ---- The one for everybody ----


class _Shared:
    """The `Io` of the module's functions: made when it is first needed, once per process, ended when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._io: Io | None = None

    def get(self) -> Io:
        with self._lock:
            if self._io is None:
                self._io = Io()
            return self._io

    def forget(self) -> None:
        """In a forked child, where nobody can say who held the lock."""
        self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        with self._lock:
            if self._io is not None:
                self._io.close()


_shared = _Shared()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared.forget)


def write(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
    """Write the bytes of `tensor` to `path`, from byte `offset` on; blocks."""
    _shared.get().write(tensor, path, offset)


def read(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> torch.Tensor:
    """Fill `tensor` with the bytes of `path` from byte `offset` on, and return it; blocks."""
    return _shared.get().read(tensor, path, offset)


def write_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start writing; `tensor` must not change before the ticket is done."""
    return _shared.get().write_async(tensor, path, offset)


def read_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start reading; what is in `tensor` is undefined before the ticket is done."""
    return _shared.get().read_async(tensor, path, offset)


def write_many(items: Iterable[Item]) -> None:
    """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
    _shared.get().write_many(items)


def read_many(items: Iterable[Item]) -> list[torch.Tensor]:
    """Read every (tensor, path, offset) of `items` and return the tensors; blocks. A missing offset is 0."""
    return _shared.get().read_many(items)


def write_many_async(items: Iterable[Item]) -> Ticket:
    """Start writing every (tensor, path, offset); the ticket is that of all of them."""
    return _shared.get().write_many_async(items)


def read_many_async(items: Iterable[Item]) -> Ticket:
    """Start reading every (tensor, path, offset); the ticket is that of all of them."""
    return _shared.get().read_many_async(items)


def drain() -> None:
    """Wait for every ticket; raises the `NvmeError` of the first that failed without having been waited for."""
    _shared.get().drain()


def save(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save `tensors` by name as a safetensors file, whole or not at all (see `Io.save`); blocks."""
    _shared.get().save(tensors, path, metadata)


def load(
    path: str | os.PathLike[str], names: Iterable[str] | None = None, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, all or those in `names`, on `device` (see `Io.load`); blocks."""
    return _shared.get().load(path, names, device)
