"""A lock on a directory, so that jobs work there one at a time.

[Note: the holder of a lock]
A lock is flock() on a file, which also refuses a second engine in one process. A forked child
inherits it with the descriptor, and a DataLoader worker may outlive a killed parent. So each child
closes its copy as it starts, and only the parent keeps the lock. A child that C code forked does
not close it. It keeps the lock, and the error says so. The file has the process, its start, and the
boot and pid namespace in which both numbers are valid.

A file system without flock() gets a file created with O_EXCL instead. A new process takes it over
when the process in it has ended. Only a process on the same machine and in the same pid namespace
can see that. Elsewhere the user has to remove the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from infinity.directories.directory import Directory, temporary_name
from infinity.errors import ConfigError, FileError, PathInUseError, naming

LOCK_NAME = "infinity.lock"
_TRIES = 100  # to lock a file that its holder removes
_RECORD_BYTES = 512
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def lock_directory(path: Path, what: str) -> Lock:
    """Lock the directory `path` for this process. `what` is its name in messages ("nvme directory",
    "--checkpoint").

    One job at a time works there. Another process, or a second engine of this one, gets
    `PathInUseError` with the pid of the holder. Raises `ConfigError` if the directory is missing or
    cannot be written, or its `infinity.lock` is not a plain file of ours. Forked children do not
    hold the lock. It ends with `release`, a `with` block, or the process.
    """
    directory = Directory(path, what)
    try:
        return lock(directory).own_directory()
    except BaseException:
        directory.close()
        raise


def lock(directory: Directory, name: str = LOCK_NAME) -> Lock:
    """Lock `directory` in the file `name`; see [Note: the holder of a lock].

    Raises `PathInUseError` with the pid of the holder, and `ConfigError` if the directory cannot be
    written, or the file is not ours.
    """
    file = _LockFile(directory, name)
    for _ in range(_TRIES):
        taken = file.try_lock()
        if taken is not None:
            return taken
    where = f"{directory.what} {directory.path}"
    raise PathInUseError(
        f"{where} is locked and left again and again; give each job its own directory"
    )


class Lock:
    """A directory that is ours until `release`, or until this process ends."""

    def __init__(self, directory: Directory, name: str, descriptor: int) -> None:
        self._directory, self._name, self._descriptor = directory, name, descriptor
        self._owned = False  # whether `release` closes the directory
        self._process = os.getpid()

    def own_directory(self) -> Lock:
        """Also close the directory on release."""
        self._owned = True
        return self

    def release(self) -> None:
        """Remove the file and end the lock. May be called twice. Does nothing in a forked child,
        because the parent has the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0 or os.getpid() != self._process:
            return
        try:
            if self._directory.is_same(self._name, descriptor):
                self._directory.remove(self._name)
        finally:
            _held.close(descriptor)
            if self._owned:
                self._directory.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class _LockFile(NamedTuple):
    """The file `name` of a `directory`. The holder of the lock has its descriptor."""

    directory: Directory
    name: str

    @property
    def path(self) -> Path:
        return self.directory.path / self.name

    def try_lock(self) -> Lock | None:
        """The lock. None if the file was removed or replaced meanwhile."""
        directory, name = self
        with _held.guard:  # no fork before the descriptor is in `_held`
            where = f"{directory.what} {directory.path} cannot be written"
            try:
                directory.check(name)
                opened = self._open()
            except FileNotFoundError:  # in /proc
                raise ConfigError(f"{where}: it takes no files; choose another one") from None
            except OSError as error:
                raise ConfigError(f"{where}: {error.strerror}") from error
            if opened is None:
                return None
            descriptor, made = opened
            _held.add(descriptor)
        try:
            with naming(self.path):
                directory.check_plain(name, os.fstat(descriptor))
                taken = self._take(descriptor, made)
                # The last holder has removed the file: the name must still be the locked file.
                if taken and directory.is_same(name, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, Holder.us().text().encode(), 0)
                    return Lock(directory, name, descriptor)
        except FileError as error:
            _held.close(descriptor)
            raise ConfigError(f"{self.path} cannot be locked: {error.strerror}") from error
        except BaseException:
            _held.close(descriptor)
            raise
        _held.close(descriptor)
        return None

    def _open(self) -> tuple[int, bool] | None:
        """The descriptor, and whether the file is new. None if the file was removed meanwhile."""
        try:
            return self.directory.create(self.name), True
        except FileExistsError:
            with suppress(FileNotFoundError):
                return self.directory.open(self.name), False
            return None

    def _take(self, descriptor: int, made: bool) -> bool:
        """Take the lock. Returns False if the caller has to try again. Raises `PathInUseError`."""
        # A power cut may leave zeros.
        content = os.pread(descriptor, _RECORD_BYTES, 0).strip(b"\0")
        holder = Holder.parse(content)
        if content and holder is None:
            raise ConfigError(
                f"{self.path} was not made by infinity; move it, or choose another directory"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise self._in_use(
                Holder.parse(os.pread(descriptor, _RECORD_BYTES, 0)), flock=True
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if made:
            return True
        if holder is None or not holder.has_ended():
            raise self._in_use(holder, flock=False)
        self._remove_dead(content)
        return False

    def _remove_dead(self, content: bytes) -> None:
        """Remove the lock file with this `content`. The file of another process, created since
        then, is put back."""
        directory, name = self
        temporary = temporary_name()
        with suppress(FileNotFoundError):
            directory.rename(name, temporary)
            descriptor = directory.open(temporary)
            try:
                same = os.pread(descriptor, _RECORD_BYTES, 0).strip(b"\0") == content
            finally:
                os.close(descriptor)
            if not same:
                self._put_back(temporary)
            directory.remove(temporary)

    def _put_back(self, temporary: str) -> None:
        """Give the file `temporary` the name of the lock, unless another file has it."""
        at = self.directory.descriptor
        with suppress(FileExistsError):
            try:
                os.link(temporary, self.name, src_dir_fd=at, dst_dir_fd=at)
            except OSError as error:
                if isinstance(error, FileExistsError) or self.directory.status(self.name):
                    raise FileExistsError from error
                self.directory.rename(temporary, self.name)  # a file system without hard links

    def _in_use(self, holder: Holder | None, flock: bool) -> PathInUseError:
        pid = holder.pid if holder is not None else "unknown"
        where = f"{self.directory.what} {self.directory.path}"
        if flock and holder is not None and holder.has_ended():
            return PathInUseError(
                f"{where} was used by process {pid}, which has ended, but a process that it forked "
                f"still holds the lock; end that one (fuser {self.path} tells which), or choose "
                "another directory"
            )
        if not flock and (holder is None or not holder.is_on_this_machine()):
            return PathInUseError(
                f"{where} may be in use by process {pid}, perhaps of another machine, and its file "
                f"system has no locks; if no job uses it, remove {self.path}"
            )
        return PathInUseError(
            f"{where} is in use by process {pid}; give each job its own directory"
        )


class Holder(NamedTuple):
    """A process, in the words of a lock file. Numbers of pids and starts are valid for one boot and
    one pid namespace."""

    pid: int
    start: str
    boot: str
    namespace: str
    host: str

    @classmethod
    def us(cls) -> Holder:
        return cls(os.getpid(), _start(os.getpid()) or "?", *_here())

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """The holder that a lock file names. None if it names none. Older versions wrote only the
        pid."""
        match = re.fullmatch(rb"\s*(\d{1,10})(?:\s+(\S+) (\S+) (\S+) (\S+))?\s*", content)
        if match is None:
            return None
        return cls(
            int(match[1]),
            *((value or b"?").decode(errors="replace") for value in match.groups()[1:]),
        )

    def text(self) -> str:
        return f"{self.pid}\n{self.start} {self.boot} {self.namespace} {self.host}\n"

    def is_on_this_machine(self) -> bool:
        """Whether this process can see if the holder lives."""
        return (self.boot, self.namespace, self.host) == _here() and "?" not in self

    def has_ended(self) -> bool:
        """Whether it certainly has ended, also because the machine was started again."""
        boot, _, host = _here()
        if "?" not in (*self, boot) and self.host == host and self.boot != boot:
            return True
        return self.is_on_this_machine() and _start(self.pid) != self.start


def _here() -> tuple[str, str, str]:
    """Boot, pid namespace and host. An unknown one is "?"."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    except OSError:
        boot = namespace = "?"
    return boot, namespace, "".join(os.uname().nodename.split()) or "?"


def _start(pid: int) -> str | None:
    """The start of process `pid`, in ticks since the boot. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


class _Held:
    """The descriptors that hold locks of this process. A forked child closes its copies; see [Note:
    the holder of a lock]."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._descriptors: set[int] = set()
        os.register_at_fork(
            before=self.guard.acquire,
            after_in_parent=self.guard.release,
            after_in_child=self._leave,
        )

    def add(self, descriptor: int) -> None:
        with self.guard:
            self._descriptors.add(descriptor)

    def close(self, descriptor: int) -> None:
        with self.guard:
            if descriptor in self._descriptors:
                self._descriptors.remove(descriptor)
                os.close(descriptor)

    def _leave(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self.guard.release()


_held = _Held()
