"""Calls of the system on files below one directory: counted, and one of them fails.

Python's own calls go through functions of `os`, `io.open`, `mmap` and `fcntl.flock`; what an opened
file reads and writes goes through `_Raw`. Native files are `native.file_at` and `_aio.File`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from infinity import native

_ANY = ("EACCES", "EIO", "ENOMEM")
_NAME = ("EACCES", "ENAMETOOLONG", "ELOOP", "ENOTDIR", "ENOENT", "EIO", "ENOMEM")
_MADE = (*_NAME, "EPERM", "EROFS", "ENOSPC", "EDQUOT")
_WRITTEN = ("EIO", "ENOSPC", "EDQUOT", "EFBIG", "EPERM")
ERRORS: dict[str, tuple[str, ...]] = {
    "open": (*_MADE, "EMFILE", "ENFILE", "EBUSY", "ENODEV", "ETXTBSY"),
    "mkdir": (*_MADE, "EEXIST", "EMLINK"),
    "rename": (*_MADE, "EBUSY", "EXDEV", "EISDIR", "ENOTEMPTY", "EINVAL"),
    "unlink": (*_NAME, "EPERM", "EROFS", "EBUSY", "EISDIR"),
    "rmdir": (*_NAME, "EPERM", "EROFS", "EBUSY", "ENOTEMPTY"),
    "link": (*_MADE, "EEXIST", "EXDEV", "EMLINK"),
    "stat": _NAME,
    "fstat": ("EIO", "ENOMEM"),
    "scandir": (*_NAME, "EMFILE", "ENFILE"),
    "statvfs": (*_NAME, "ENOSYS"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EINVAL"),
    "ftruncate": (*_WRITTEN, "EINVAL"),
    "chmod": ("EPERM", "EROFS", "EIO"),
    "read": ("EIO", "EISDIR"),
    "write": _WRITTEN,
    "mmap": ("EACCES", "ENODEV", "ENOMEM", "EAGAIN"),
    "flock": ("EIO", "ENOLCK", "EWOULDBLOCK", "EINVAL"),
    "allocate": (*_WRITTEN, "EOPNOTSUPP"),
}
"""The errors that a call may give."""

_OS = {
    **{name: name for name in ("open", "mkdir", "rename", "unlink", "rmdir", "link", "stat")},
    **{name: name for name in ("fstat", "scandir", "statvfs", "fsync", "ftruncate")},
    "replace": "rename",
    "remove": "unlink",
    "lstat": "stat",
    "listdir": "scandir",
    "fdatasync": "fsync",
    "fstatvfs": "statvfs",
    "posix_fallocate": "allocate",
    "fchmod": "chmod",
    "chmod": "chmod",
    "access": "stat",
    "readlink": "stat",
    "pread": "read",
    "read": "read",
    "pwrite": "write",
    "write": "write",
    "truncate": "ftruncate",
}
"""Functions of `os`, and the call that each makes."""


_NATIVE = {"__init__": "open", "allocate": "allocate", "truncate": "ftruncate", "sync": "fsync"}
"""Methods of a native file."""


class Call(NamedTuple):
    """A kind of call, made by `site` (a line of the package) on files that `name` stands for."""

    kind: str
    site: str
    name: str


class Calls:
    """What was `made`; the first one that is `fails` gives `code`, and `failed` says so."""

    def __init__(self, root: Path, fails: Call | None = None, code: int = 0) -> None:
        self.root, self.fails, self.code = os.path.realpath(root), fails, code
        self.made: dict[Call, int] = {}
        self.failed: str | None = None

    def before(self, kind: str, at: object, dir_fd: int | None = None) -> None:
        """Count a call on `at`, a path or a descriptor, and raise where it is to fail."""
        path = _path(at, dir_fd)
        if path is None or not (path == self.root or path.startswith(self.root + "/")):
            return
        site = _site()
        if site is None:
            return
        call = Call(kind, site, _general(path[len(self.root) :]))
        self.made[call] = self.made.get(call, 0) + 1
        if call == self.fails and self.failed is None:
            self.failed = path
            shown = at if not isinstance(at, int) else None
            raise OSError(self.code, os.strerror(self.code), *([shown] if shown else []))


def _path(at: object, dir_fd: int | None) -> str | None:
    if isinstance(at, io.IOBase):
        at = at.fileno()
    if isinstance(at, int):
        path = _link(at)
    elif isinstance(at, (str, bytes, os.PathLike)):
        path = os.fsdecode(at)
        if dir_fd is not None:
            path = str(Path(_link(dir_fd) or "", path))
    else:
        return None
    found = re.match(r"/proc/self/fd/(\d+)(.*)", path or "", re.DOTALL)
    if found is not None:
        path = (_link(int(found[1])) or "") + found[2]
    return None if path is None else os.path.normpath(Path.cwd() / path)


def _link(descriptor: int) -> str | None:
    try:
        return _readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None


_readlink = os.readlink


def _general(path: str) -> str:
    """A name that is the same in the next run."""
    return re.sub(r"[0-9a-f]{16,}|tmp\w{8}|#\d+", "*", path)


def _site() -> str | None:
    """The innermost line of the package, whichever library is between; None for calls of others."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/failing_calls/" not in name and "/infinity/" in name:
            return f"{name.rpartition('/infinity/')[2]}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextmanager
def failing(root: Path, fails: Call | None = None, code: int = 0) -> Iterator[Calls]:
    """Count the calls on files below `root`, and let one fail."""
    calls = Calls(root, fails, code)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, kind in _OS.items():
            patch(os, name, _counted(calls, kind, getattr(os, name)))
        opener = _opener(calls, os.open)
        patch(io, "open", opener)
        patch(sys.modules["builtins"], "open", opener)
        patch(os, "fdopen", opener)
        patch(mmap, "mmap", _mapping(calls))
        patch(fcntl, "flock", _counted(calls, "flock", fcntl.flock))
        file = native.aio().File
        for name, kind in _NATIVE.items():
            patch(file, name, _native(calls, kind, getattr(file, name)))
        yield calls


def _counted(calls: Calls, kind: str, call: Any) -> Any:
    def counted(*args: Any, **keywords: Any) -> Any:
        at = args[0] if args else "."
        dir_fd = keywords.get("dir_fd", keywords.get("src_dir_fd"))
        calls.before(kind, at, dir_fd)
        return call(*args, **keywords)

    return counted


def _opener(calls: Calls, open_file: Any) -> Any:
    """`open` with reads and writes that are counted."""
    plain = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        path = _path(file, None)
        if path is None or not path.startswith(calls.root) or _site() is None:
            return plain(file, mode, *args, **keywords)
        if not isinstance(file, int):
            calls.before("open", file)
        names = ("buffering", "encoding", "errors", "newline", "closefd", "opener")
        given = dict(zip(names, args, strict=False)) | keywords
        text = "b" not in mode
        raw = _Raw(
            file,
            mode.replace("b", "").replace("t", ""),
            closefd=given.get("closefd", True),
            opener=given.get("opener"),
        )
        raw.calls = calls
        if given.get("buffering", -1) == 0:
            return raw
        buffered: Any
        if raw.readable() and raw.writable():
            buffered = io.BufferedRandom(raw)
        else:
            buffered = io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw)
        if not text:
            return buffered
        return io.TextIOWrapper(
            buffered, given.get("encoding"), given.get("errors"), given.get("newline")
        )

    return opened


class _Raw(io.FileIO):
    """A file of which reads and writes are counted."""

    calls: Calls

    def readinto(self, buffer: Any) -> Any:
        self.calls.before("read", self.fileno())
        return super().readinto(buffer)

    def readall(self) -> Any:
        self.calls.before("read", self.fileno())
        return super().readall()

    def read(self, size: int = -1) -> Any:
        self.calls.before("read", self.fileno())
        return super().read(size)

    def write(self, data: Any) -> Any:
        self.calls.before("write", self.fileno())
        return super().write(data)

    def truncate(self, size: Any = None) -> Any:
        self.calls.before("ftruncate", self.fileno())
        return super().truncate(size)


def _mapping(calls: Calls) -> Any:
    class Counted(mmap.mmap):
        def __new__(cls, fileno: int, *args: Any, **keywords: Any) -> Any:
            if fileno >= 0:
                calls.before("mmap", fileno)
            return super().__new__(cls, fileno, *args, **keywords)

    return Counted


def _native(calls: Calls, kind: str, call: Any) -> Any:
    """A method of a native file, which names the file as it says."""

    def counted(file: Any, *args: Any, **keywords: Any) -> Any:
        at = args[0] if kind == "open" else file.path
        try:
            calls.before(kind, at)
        except OSError as error:
            shown = keywords.get("name") or at
            raise OSError(error.errno, error.strerror, os.fsdecode(shown)) from None
        return call(file, *args, **keywords)

    return counted


def code_of(name: str) -> int:
    return int(getattr(errno, name))
