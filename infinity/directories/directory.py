"""A directory that other processes can write to. It is opened once, and its files are opened
without following links.

[Note: files in a directory]
Another process may put anything into a directory that we write to, at any moment. So a `Directory`
is opened once, and every name is looked up relative to that descriptor. If the directory is moved
or replaced later, names still lead into the opened one.

1. A file that must not exist is created with O_EXCL. It never opens an existing file, nor a
   dangling link.
2. A file that may exist is opened with O_NOFOLLOW, and only if it is a plain file with one name. A
   second name (a hard link) may belong to another user. A named pipe would block, and opening a
   device may act on it, so these are not even opened.
3. Nothing is truncated or written before these checks and before the lock is held.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import secrets
import stat
import struct
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from infinity.errors import ConfigError, naming, with_way_out
from infinity.quantities import format_bytes

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_MOST_BYTES = 3800
"""Of a path. The system takes 4,095, and the files of a directory have names, too."""
_MOST_NAME = 255
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISREG, ""),
)

# Of linux/fs.h. The flags are an int, although the numbers of the calls name another size.
_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000


_RENAME_EXCHANGE = 2  # of linux/fs.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def _exchange(directory: int, name: str, other: str) -> int:
    """Exchange two names in one step. Returns 0, or the errno."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return errno.ENOSYS
    names = os.fsencode(name), os.fsencode(other)
    failed = call(directory, names[0], directory, names[1], _RENAME_EXCHANGE)
    return ctypes.get_errno() if failed else 0


def overwrite_in_place(descriptor: int) -> bool:
    """Make an empty file no-copy-on-write, so that writes never need new space once it was
    allocated. Returns False, and changes nothing, if the file system has no such files: it
    overwrites in place anyway, or always copies."""
    try:
        flags = _flags(descriptor)
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("I", flags | _NO_COPY_ON_WRITE))
        return bool(_flags(descriptor) & _NO_COPY_ON_WRITE)
    except OSError:
        return False


def _flags(descriptor: int) -> int:
    (flags,) = struct.unpack("I", fcntl.ioctl(descriptor, _GET_FLAGS, bytes(4)))
    return int(flags)


def make_durable(path: Path) -> None:
    """Return when the content of the file `path`, or the names in the directory `path`, would
    survive a power cut."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_length(path: Path, what: str) -> None:
    """Raise `ConfigError` if the path of the directory, or the paths of its files, are too long for
    the system. `what` is its name in messages."""
    if len(os.fsencode(path)) > _MOST_BYTES or len(os.fsencode(path.name)) > _MOST_NAME:
        raise ConfigError(
            f"{what} {path} is too long: at most {_MOST_BYTES} bytes, and {_MOST_NAME} for a "
            "name, leave room for its files; choose a shorter path"
        )


def file_limit() -> int | None:
    """The most bytes that a file of this process may have. None without a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if most == resource.RLIM_INFINITY else most


def limit_text(most: int) -> str:
    """The way out of `file_limit`, for messages."""
    return (
        f"files of this process may have {format_bytes(most)} (RLIMIT_FSIZE); raise that with "
        "ulimit -f"
    )


class Directory:
    """An open directory. Names are looked up in it even if its path changes; see [Note: files in a
    directory may hold].

    `path` and `what` ("nvme directory") are its names in messages. Ends with `close` or a `with`
    block. Methods raise `ConfigError` for a file that is not ours, with the path and the way out,
    and `FileError` for an error of the system.
    """

    def __init__(self, path: Path, what: str = "directory", parent: int | None = None) -> None:
        """Open `path`, also through links. With the open directory `parent`, open the last name of
        `path` in it, and not through links.

        Raises `ConfigError` if it cannot be opened as a directory.
        """
        self.path, self.what = path, what
        if parent is None:
            check_length(path, what)
        flags = (
            os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if parent is None else os.O_NOFOLLOW)
        )
        try:
            with naming(path):
                name = path if parent is None else path.name
                self.descriptor = os.open(name, flags, dir_fd=parent)
        except OSError as error:
            code = error.errno or 0
            kinds = {errno.ENOENT: "does not exist", errno.ENOTDIR: "is not a directory"}
            reason = f"{kinds[code]}; choose another one" if code in kinds else ""
            raise ConfigError(
                f"{what} {path} {reason or f'cannot be opened: {with_way_out(code)}'}"
            ) from error

    def below(self, name: str, mode: int = 0o777, new: bool = False) -> Directory:
        """The directory `name` in this one, which is created if it is missing. A link of that name
        is refused.

        Raises `FileExistsError` if it has to be `new` and exists.
        """
        try:
            with self._naming(name):
                os.mkdir(name, mode, dir_fd=self.descriptor)
        except FileExistsError:
            status = self.status(name)
            if new:
                raise
            if status is not None and not stat.S_ISDIR(status.st_mode):
                raise self._refused(name, status) from None
        except OSError as error:
            raise ConfigError(
                f"{self.what} {self.path} cannot be written: {error.strerror}"
            ) from error
        return Directory(self.path / name, self.what, self.descriptor)

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Names

    def names(self) -> list[str]:
        """All names in it, sorted."""
        with naming(self.path):
            return sorted(os.listdir(self.descriptor))  # noqa: PTH208 (a descriptor, no path)

    def device(self) -> int:
        """The number of its file system."""
        with naming(self.path):
            return os.fstat(self.descriptor).st_dev

    def free_bytes(self) -> int:
        """The free bytes of its file system."""
        with naming(self.path):
            space = os.fstatvfs(self.descriptor)
        return space.f_bavail * space.f_frsize

    def status(self, name: str) -> os.stat_result | None:
        """The status of `name` itself, not of the target of a link. None if there is no such
        name."""
        with suppress(FileNotFoundError), self._naming(name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return None

    def check(self, name: str) -> os.stat_result | None:
        """The status of the plain file `name`, or None. Raises `ConfigError` for anything else of
        that name."""
        status = self.status(name)
        if status is not None:
            self.check_plain(name, status)
        return status

    def check_plain(self, name: str, status: os.stat_result) -> None:
        """Raise `ConfigError` unless `status`, of `name`, is that of a plain file with one name."""
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise self._refused(name, status)

    def _refused(self, name: str, status: os.stat_result) -> ConfigError:
        kind = next(kind for is_one, kind in _KINDS if is_one(status.st_mode))
        return _refusal(
            self.path / name, kind or f"a file with {status.st_nlink} names (hard links)"
        )

    def is_same(self, name: str, descriptor: int) -> bool:
        """Whether `name` is the open file `descriptor`."""
        status = self.status(name)
        with self._naming(name):
            return status is not None and os.path.samestat(status, os.fstat(descriptor))

    # Files

    def _naming(self, name: str) -> AbstractContextManager[None]:
        """Inside the context, errors of the system show the whole path."""
        return naming(self.path / name)

    def create(self, name: str, mode: int = 0o600) -> int:
        """A descriptor of the new file `name`, for reading and writing. Raises `FileExistsError` if
        the name exists."""
        with self._naming(name):
            return os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode, dir_fd=self.descriptor
            )

    def create_in_place(self, name: str) -> int:
        """`create` a file that is overwritten in place if the file system can do that."""
        return _in_place(self.create(name))

    def unnamed(self) -> int:
        """A descriptor of a new file without a name, for reading and writing, which is overwritten
        in place like `create_in_place`. Its space is free after it is closed, also after a kill."""
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
        try:
            with self._naming("a file without a name"):
                return _in_place(os.open(".", flags, 0o600, dir_fd=self.descriptor))
        except OSError as error:
            # The file system or an old kernel does not support files without a name.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        descriptor = self.create_in_place(name := temporary_name())
        try:
            self.remove(name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of the plain file `name`. Raises `FileNotFoundError`, and `ConfigError` for
        anything else."""
        self.check(name)
        try:
            with self._naming(name):
                descriptor = os.open(name, flags | _SAFE, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:  # created after the check
                raise _refusal(self.path / name, "a link") from None
            raise
        try:
            with self._naming(name):
                status = os.fstat(descriptor)
            self.check_plain(name, status)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remove(self, name: str) -> None:
        """Remove the name, and not the target of a link. Does nothing if the name is gone."""
        with suppress(FileNotFoundError), self._naming(name):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> bool:
        """Remove the directory `name` if it is empty. Otherwise do nothing, and return False."""
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def reclaim(self, name: str) -> int | None:
        """Remove the plain file `name` and free its space. Returns its bytes on disk, or None if
        there is no such file.

        The file is emptied first, because a child of a dead process may keep it open.
        """
        if self.check(name) is None:
            return None
        with suppress(FileNotFoundError, PermissionError):
            descriptor = self.open(name)
            try:
                with self._naming(name):
                    used = os.fstat(descriptor).st_blocks * 512
                    os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)
            self.remove(name)
            return used
        status = self.status(name)
        self.remove(name)
        return None if status is None else status.st_blocks * 512

    def rename(self, name: str, to: str, directory: Directory | None = None) -> None:
        """Give the file `name` the name `to`, here or in another `directory`. Replaces a file of
        that name."""
        target = directory or self
        with target._naming(to):
            os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def exchange(self, name: str, other: str) -> None:
        """Exchange two names. One step, so a kill leaves either the old names or the new ones.

        A file system that cannot do it in one step takes three. A kill may then leave `other`
        missing. Its file or directory has a name that `infinity gc` does not remove.
        """
        code = _exchange(self.descriptor, name, other)
        if code not in (0, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            with self._naming(other):
                raise OSError(code, os.strerror(code))
        if code == 0:
            return
        kept = f"infinity-{secrets.token_hex(8)}.old"
        try:
            self.rename(other, kept)
            self.rename(name, other)
        except BaseException:
            if self.status(other) is None:
                self.rename(kept, other)
            raise
        self.rename(kept, name)

    def sync(self) -> None:
        """Return when its names would survive a power cut."""
        with naming(self.path):
            os.fsync(self.descriptor)


def _in_place(descriptor: int) -> int:
    """The descriptor, after `overwrite_in_place`."""
    try:
        overwrite_in_place(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refusal(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{path} is {kind}, which infinity never makes; remove it, or choose another directory"
    )


def temporary_name() -> str:
    """A new name of the kind that `infinity gc` removes."""
    return f".infinity-{secrets.token_hex(8)}.tmp"
