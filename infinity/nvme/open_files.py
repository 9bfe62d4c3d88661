"""The files of one call of `infinity.nvme`: opens each once, and reserves the blocks of writes."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from infinity import native
from infinity.directories.directory import file_limit, limit_text
from infinity.errors import FileError, naming
from infinity.nvme.requests import IoRequest
from infinity.quantities import format_bytes

RESERVE_BYTES = 4 << 20  # a smaller growth is not worth the system call
OPEN_FILES = 64  # of one call; I/O in flight keeps its own descriptors


class Files:
    """The files of one call, each opened once; at most `OPEN_FILES` at a time.

    I/O in flight keeps its descriptor, so closing the files does not wait. Each call opens its
    files again, which costs microseconds: a replaced or removed file is never mistaken for its
    successor.
    """

    def __init__(self, writes: Iterable[IoRequest] = (), name: bytes = b"") -> None:
        """`writes` are all writes of the call. Errors show `name` instead of a path that is a
        descriptor."""
        self._name = name
        self._open: OrderedDict[tuple[bytes, bool], Any] = OrderedDict()
        # For each file to be written: the bytes of its writes, and the largest end of one.
        self._writes: dict[bytes, tuple[int, int]] = {}
        for request in writes:
            total, end = self._writes.get(request.path, (0, 0))
            self._writes[request.path] = (
                total + request.nbytes,
                max(end, request.offset + request.nbytes),
            )

    def get(self, path: bytes, direct: bool = True) -> Any:
        """Return the open native file. If `direct`, it has O_DIRECT where the file system allows
        it. Raises `FileError` if the file cannot be opened or has no room for its writes."""
        file = self._open.get((path, direct))
        if file is not None:
            self._open.move_to_end((path, direct))
            return file
        shown = os.fsdecode(self._name or path)
        with naming(shown):
            if path in self._writes:
                self._check_room(path, shown)
            file = native.aio().File(
                path, create=path in self._writes, mode=0o666, direct=direct, name=self._name
            )
        self._open[path, direct] = file
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        if direct and path in self._writes:
            self._reserve(file, path)
        return file

    def _check_room(self, path: bytes, shown: str) -> None:
        """Raise `FileError` if the writes need more than the free bytes or pass the file size
        limit. Otherwise a partial file could fill the drive."""
        total, end = self._writes[path]
        try:
            now, space = os.stat(path), os.statvfs(path)  # noqa: PTH116, a Path takes longer
        except FileNotFoundError:
            size, space = 0, os.statvfs(os.path.dirname(path) or b".")  # noqa: PTH120
        else:
            size = now.st_size if stat.S_ISREG(now.st_mode) else end
        growth, most = min(total, end - size), file_limit()
        if growth > 0 and most is not None and end > most:
            text = f"{os.strerror(errno.EFBIG)}: {limit_text(most)}"
            raise FileError(errno.EFBIG, shown, text)
        free = space.f_bavail * space.f_frsize
        if growth > free and space.f_blocks > 0:  # some file systems report 0 blocks
            need = f"{format_bytes(growth)} are to be added, and {format_bytes(free)} are free"
            text = f"{os.strerror(errno.ENOSPC)}: {need}; free some of its space"
            raise FileError(errno.ENOSPC, shown, text)

    def _reserve(self, file: Any, path: bytes) -> None:
        """Allocate the blocks of a growing file at once, because the kernel does writes past the
        end of a file one after another."""
        total, end = self._writes[path]
        growth = end - file.size()
        if growth < RESERVE_BYTES or total < growth:  # leave gaps sparse
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
    """Reserve blocks for the first `nbytes` of a native `file`. Raises `FileError` if there is no
    room (ENOSPC, EDQUOT, EFBIG), and ignores every other error."""
    try:
        with naming(file.path):
            file.allocate(nbytes)
    except FileError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
