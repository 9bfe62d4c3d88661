"""The user's own files as the home of blocks that no update writes.

[Note: a home in the user's files]
The values of a frozen unit may lie in safetensors files already, in the dtype of the unit. Then
these files are its home: nothing is copied, and the unit takes no space on NVMe. Tensors lie there
at any offset, in the order of their names. So the home of a block is a list of slices, each of one
file. The native engine reads any range: whole pages straight to memory that lies as far from a page
as the file has it, everything else through its bounce buffers. A unit is laid out in the order of
its files (`Build.group`), so most units are one slice.

The files are only read. Before code rewrites such a block, it gives the block an extent of its own
(`Store.make_writable`). Opening a file that has changed since `OriginalFile.of` raises an error.
After that, the descriptor keeps a deleted or replaced file readable.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.directories.mapped import mapped_range
from infinity.errors import WeightsError
from infinity.native import make_engine

PAGE = 4096
_WIDEST = 8  # bytes of the widest dtype in safetensors: a tensor of bytes can be viewed as any


class OriginalFile(NamedTuple):
    """A file of the user, as it was at the time of `of`."""

    path: Path
    device: int
    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> OriginalFile:
        """The file at `path` as it is now."""
        return cls._as(path, path.stat())

    @classmethod
    def _as(cls, path: Path, status: os.stat_result) -> OriginalFile:
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def open(self) -> int:
        """A descriptor for reading. Raises `WeightsError` if the file has changed, and `OSError` if
        it cannot be opened."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        if self._as(self.path, os.fstat(descriptor)) != self:
            os.close(descriptor)
            raise WeightsError(
                f"{self.path} has changed since its weights were opened, so its values may not be "
                "those of the model; build it again"
            )
        return descriptor


class StoredBytes(NamedTuple):
    """Where the bytes of a tensor lie: `nbytes` of `file`, from `offset` on."""

    file: OriginalFile
    offset: int
    nbytes: int

    def rows(self, rows: slice, nbytes: int) -> StoredBytes:
        """Where some rows of the tensor lie, which take `nbytes`."""
        each = nbytes // (rows.stop - rows.start)
        return StoredBytes(self.file, self.offset + rows.start * each, nbytes)


class FileSlice(NamedTuple):
    """Bytes [begin, begin + nbytes) of a block, which lie in `file` from `offset` on."""

    begin: int
    nbytes: int
    file: OriginalFile
    offset: int


class FileExtent:
    """A place in the user's files, from byte `start` of a block on; it is only read.

    `slices` are in the order of the block. Bytes between them are padding, which is not read.
    """

    def __init__(self, slices: Iterable[FileSlice], nbytes: int, start: int = 0) -> None:
        self.slices = tuple(_joined(slices))
        self.nbytes = nbytes - start
        self._block_nbytes = nbytes
        self._start = start
        self._begins = [each.begin for each in self.slices]

    def after(self, start: int) -> FileExtent:
        """The same without the first `start` bytes of the block."""
        return FileExtent(self.slices, self._block_nbytes, start)

    def parts(self, begin: int, nbytes: int) -> Iterator[tuple[int, FileSlice]]:
        """The parts to read for bytes [begin, begin + nbytes): the distance from `begin` in bytes,
        and the slice."""
        first = begin + self._start
        last = first + nbytes
        for each in self.slices[max(bisect_right(self._begins, first) - 1, 0) :]:
            low = max(each.begin, first)
            high = min(each.begin + each.nbytes, last)
            if each.begin >= last:
                return
            if low < high:
                offset = each.offset + low - each.begin
                yield low - first, FileSlice(low, high - low, each.file, offset)

    def shift(self, begin: int, nbytes: int) -> int:
        """The best distance, in bytes, of the target of bytes [begin, begin + nbytes) from the
        start of a page."""
        for at, part in self.parts(begin, nbytes):
            shift = (part.offset - at) % PAGE
            return shift if shift % _WIDEST == 0 else 0
        return 0


class Originals:
    """The user's files that are homes, open from `open` to `close`, and one native engine that
    reads them. Any thread may read."""

    def __init__(self, kind: str, request_bytes: int) -> None:
        self._kind = kind
        self._request_bytes = request_bytes
        self._parts = ExitStack()
        self._files: dict[OriginalFile, Any] = {}
        self.engine: Any = None
        """The native engine; None while no file is open."""

    def open(self, files: Iterable[OriginalFile]) -> None:
        """Open `files`. Raises `WeightsError` for one that has changed or is gone."""
        for file in files:
            if file in self._files:
                continue
            try:
                opened = native.file_at(file.open(), str(file.path))
            except OSError as error:
                raise WeightsError(
                    f"{file.path} cannot be read: {error.strerror}; the frozen parameters of the "
                    "model are in it"
                ) from error
            self._files[file] = opened
            self._parts.callback(opened.close)
        if self._files and self.engine is None:
            self.engine = make_engine(self._kind, request_bytes=self._request_bytes)
            self._parts.callback(self.engine.close)

    def requests(
        self, extent: FileExtent, begin: int, nbytes: int, address: int, name: str
    ) -> list[Any]:
        """Start reading bytes [begin, begin + nbytes) of `extent` to `address`."""
        return [
            self.engine.read(
                self._files[part.file], part.offset, address + at, part.nbytes, what=name
            )
            for at, part in extent.parts(begin, nbytes)
        ]

    def mapped(self, place: StoredBytes, dtype: torch.dtype) -> torch.Tensor:
        """The bytes at `place` as a memory-mapped tensor (n,) of `dtype`. Writes to it do not reach
        the file."""
        descriptor = self._files[place.file].duplicate()
        return mapped_range(descriptor, place.offset, place.nbytes, dtype)

    def close(self) -> None:
        """Wait for all reads in flight, and close the files. May be called twice."""
        self._parts.close()
        self.engine = None
        self._files.clear()


def _joined(slices: Iterable[FileSlice]) -> Iterator[FileSlice]:
    """`slices` in the order of the block. Slices that are adjacent in block and file are joined."""
    pending: FileSlice | None = None
    for each in sorted(slices, key=lambda each: each.begin):
        if (
            pending is not None
            and pending.file == each.file
            and pending.begin + pending.nbytes == each.begin
            and pending.offset + pending.nbytes == each.offset
        ):
            pending = pending._replace(nbytes=pending.nbytes + each.nbytes)
            continue
        if pending is not None:
            yield pending
        pending = each
    if pending is not None:
        yield pending
