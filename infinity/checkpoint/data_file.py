"""Writes data files from start to end, and reads their items ahead. Both run at the speed of the
drive, with O_DIRECT if the file system supports it.

[Note: how much memory a data file takes]
A writer has `BUFFERS` buffers of `BUFFER_BYTES`. It fills one buffer while the drive writes the
others. A reader has `SLOTS` slots. Each holds one run of items, of at most `RUN_BYTES`, or one
larger item. The caller uses one slot while the others are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.checkpoint.digest import crc32c
from infinity.checkpoint.manifest import ItemPlace
from infinity.device import copy_alone, huge_pages, zero_alone
from infinity.nvme.open_files import allocate
from infinity.quantities import round_up
from infinity.tiers.drives import ALIGNMENT

BUFFERS = 4
BUFFER_BYTES = 8 << 20
SEGMENT_BYTES = 1 << 20  # filled, then digested while it is in a cache
SLOTS = 3
RUN_BYTES = 16 << 20


class DataWriter:
    """A new file that is written from start to end. Used by one thread.

    `crc` is the CRC32C of the bytes since the caller last set it. The caller ends with `finish` and
    `close`. `close` alone abandons the file after it waits for writes in flight.
    """

    def __init__(self, path: Path, io_engine: str) -> None:
        """Raises `OSError`, also if `path` exists."""
        self.crc = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._file: Any = None
        self._engine: Any = None
        try:
            self._file = native.aio().File(_path_of(self._descriptor), name=os.fsencode(path))
            self._engine = native.make_engine(io_engine)
            self._memory = huge_pages(BUFFERS * BUFFER_BYTES)
        except BaseException:
            self.close()
            raise
        self._free = deque(self._memory.split(BUFFER_BYTES))
        self._writing: deque[tuple[Any, torch.Tensor]] = deque()
        self._buffer, self._filled = self._free.popleft(), 0
        self._written = 0  # bytes in earlier buffers

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._written + self._filled

    def reserve(self, nbytes: int) -> None:
        """Allocate `nbytes` more. File systems serialize writes past the end of a file. Raises
        `OSError` if there is no room."""
        allocate(self._file, self.tell() + nbytes)

    def write(self, data: bytes | memoryview) -> None:
        if len(data):
            writable = data if isinstance(data, memoryview) else bytearray(data)
            source = torch.frombuffer(writable, dtype=torch.uint8)
            self.fill(len(data), lambda begin, part: copy_alone(part, source[begin:][: len(part)]))

    def fill(self, nbytes: int, put: Callable[[int, torch.Tensor], object]) -> None:
        """Append `nbytes` bytes.

        `put(begin, part)` fills `part` (uint8), of at most `SEGMENT_BYTES`, with the bytes from
        byte `begin` on. If byte 0 lies at a multiple of 64 in the file, each `part` begins at such
        a multiple.
        """
        done = 0
        while done < nbytes:
            if self._filled == BUFFER_BYTES:
                self._send()
            room = min(BUFFER_BYTES - self._filled, SEGMENT_BYTES, nbytes - done)
            part = self._buffer[self._filled : self._filled + room]
            put(done, part)
            self.crc = crc32c(part, self.crc)
            self._filled += room
            done += room

    def finish(self) -> None:
        """Return when everything is on the drive. Raises `NvmeError` or `OSError`."""
        length = self.tell()
        whole = round_up(self._filled, ALIGNMENT)
        zero_alone(self._buffer[self._filled : whole])
        self._filled = whole
        self._send()
        while self._writing:
            self._await_first()
        self._file.truncate(length)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Wait for writes in flight, then close the file."""
        if self._engine is not None:
            self._engine.close()
        if self._file is not None:
            self._file.close()
        os.close(self._descriptor)

    def _send(self) -> None:
        """Start writing the buffer, and take a free one."""
        if self._filled:
            ticket = self._engine.write(
                self._file,
                self._written,
                self._buffer.data_ptr(),
                self._filled,
                owner=self._memory,
            )
            self._writing.append((ticket, self._buffer))
        self._written += self._filled
        if not self._free:
            self._await_first()
        self._buffer, self._filled = self._free.popleft(), 0

    def _await_first(self) -> None:
        ticket, buffer = self._writing[0]
        ticket.wait()
        self._writing.popleft()
        self._free.append(buffer)


class _ItemRun(NamedTuple):
    """Items that are adjacent in a file. One read brings all of them."""

    file: str
    offset: int
    length: int
    places: list[ItemPlace]


class ReadAhead:
    """Iterates over the bytes of items in the given order, and reads the next items ahead. Used by
    one thread. `close` waits for reads in flight.

    `open_file(name)` returns a descriptor of a data file.
    """

    def __init__(
        self,
        places: Iterable[ItemPlace],
        longest: int,
        open_file: Callable[[str], int],
        path: Path,
        io_engine: str,
    ) -> None:
        """`longest`: bytes of the longest item in `places`. `path`: the directory, for errors."""
        self._open_file, self._path = open_file, path
        self._most = max(longest, RUN_BYTES)
        self._runs = self._joined(places)
        self._engine = native.make_engine(io_engine)
        self._memory = huge_pages(SLOTS * (round_up(self._most, ALIGNMENT) + ALIGNMENT))
        self._free = deque(self._memory.chunk(SLOTS))
        self._coming: deque[tuple[Any, _ItemRun, torch.Tensor]] = deque()  # reads in flight
        self._file: tuple[str, Any] = "", None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield each item as uint8. Its address equals its file offset modulo 4096. A tensor is
        valid until the next one is requested. Raises `NvmeError`."""
        while True:
            while self._free and (run := next(self._runs, None)) is not None:
                self._start(run)
            if not self._coming:
                return
            ticket, run, slot = self._coming[0]
            ticket.wait()
            self._coming.popleft()
            for place in run.places:
                begin = run.offset % ALIGNMENT + place.offset - run.offset
                yield slot[begin : begin + place.length]
            self._free.append(slot)

    def close(self) -> None:
        self._engine.close()
        if self._file[1] is not None:
            self._file[1].close()

    def _joined(self, places: Iterable[ItemPlace]) -> Iterator[_ItemRun]:
        run: _ItemRun | None = None
        for place in places:
            joins = (
                run is not None
                and place.file == run.file
                and place.offset == run.offset + run.length
                and run.length + place.length <= self._most
            )
            if run is not None and joins:
                run.places.append(place)
                run = run._replace(length=run.length + place.length)
                continue
            if run is not None:
                yield run
            run = _ItemRun(place.file, place.offset, place.length, [place])
        if run is not None:
            yield run

    def _start(self, run: _ItemRun) -> None:
        slot = self._free.popleft()
        address = slot.data_ptr() + run.offset % ALIGNMENT
        ticket = self._engine.read(
            self._get(run.file), run.offset, address, run.length, owner=self._memory
        )
        self._coming.append((ticket, run, slot))

    def _get(self, name: str) -> Any:
        """The file called `name`. One file is open at a time. Reads in flight keep theirs open."""
        known, file = self._file
        if known != name:
            if file is not None:
                file.close()
            self._file = "", None
            descriptor = self._open_file(name)
            try:
                file = native.aio().File(_path_of(descriptor), name=os.fsencode(self._path / name))
            finally:
                os.close(descriptor)
            self._file = name, file
        return file


def _path_of(descriptor: int) -> str:
    """A path to an open file that stays valid after a rename."""
    return f"/proc/self/fd/{descriptor}"
