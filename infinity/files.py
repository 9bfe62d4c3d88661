"""Files in directories that others can write to: opened without following links, locked, replaced whole, durable.

[Note: what a directory may hold]
Somebody else may put anything in a directory that we write to, at any moment. So a `Directory` is opened once, and every
name is looked up relative to that descriptor: a directory that is moved or replaced later does not lead us elsewhere.

1. A file that must not exist is made with O_EXCL. It never opens what is there, be it a dangling link.
2. A file that may exist is opened with O_NOFOLLOW, and only if it is a plain file with one name. A second name (a hard link)
   may be somebody else's file. A named pipe would block, and opening a device may act on it, so these are not even opened.
3. Nothing is truncated or written before these checks and before the lock is held.

[Note: who holds a lock]
A lock is flock() on a file, which also refuses a second engine in one process. A forked child inherits it with the
descriptor, and a DataLoader worker may outlive a killed parent. So each child closes its copy as it starts, which leaves
the lock to the parent alone. A child that C code forked does not: it keeps the lock, and the error says so, because the
file has the process, its start, and where both numbers are valid.

A file system without flock() gets a file made with O_EXCL instead. A new process takes it over when
the process in it has ended. Only a process on the same machine and in the same pid namespace can
tell. Elsewhere the user has to remove the file.

[Note: a file that takes another's place]
A new file is written in a folder beside its place, `.infinity-*.tmp`, which is locked. It is renamed when it is whole and on
the drive, so a kill leaves what was there before, and the folder. `infinity gc` removes folders that nobody holds any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from infinity.errors import ConfigError, PathInUseError

LOCK_NAME = "infinity.lock"
_TRIES = 100  # to lock a file that others remove as they leave
_RECORD_BYTES = 512
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TEMPORARY = re.compile(r"\.infinity-[0-9a-f]{16}\.tmp")
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = (
    (stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISREG, ""),
)  # fmt: skip


def make_durable(path: Path) -> None:
    """Return when the content of the file `path`, or the names in the directory `path`, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Directory:
    """An open directory. Names are looked up in it wherever its path leads later; see [Note: what a directory may hold].

    `path` is what messages show, `what` is how they call it ("nvme directory"). Ends with `close` or a `with` block. Methods
    raise `ConfigError` for what is not ours, with the path and the way out, and `OSError` for what the system refuses.
    """

    def __init__(self, path: Path, what: str = "directory", parent: int | None = None) -> None:
        """Open `path`, through links if it is one, or its last name in the open directory `parent`, not through links.

        Raises `ConfigError` when it cannot be opened as a directory.
        """
        self.path, self.what = path, what
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if parent is None else os.O_NOFOLLOW)
        try:
            self.descriptor = os.open(path if parent is None else path.name, flags, dir_fd=parent)
        except OSError as error:
            kinds = {errno.ENOENT: "does not exist", errno.ENOTDIR: "is not a directory"}
            raise ConfigError(f"{what} {path} {kinds.get(error.errno or 0, f'cannot be opened: {error.strerror}')}") from error

    def below(self, name: str, mode: int = 0o777, new: bool = False) -> Directory:
        """The directory `name` in this one, which is made if need be; a link of that name is refused.

        Raises `FileExistsError` when it has to be `new` and is not.
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
            raise ConfigError(f"{self.what} {self.path} cannot be written: {error.strerror}") from error
        return Directory(self.path / name, self.what, self.descriptor)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
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
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208 (a descriptor, no path)

    def device(self) -> int:
        """The number of the file system it is on."""
        return os.fstat(self.descriptor).st_dev

    def free_bytes(self) -> int:
        """What its file system has left for us."""
        space = os.fstatvfs(self.descriptor)
        return space.f_bavail * space.f_frsize

    def status(self, name: str) -> os.stat_result | None:
        """What `name` itself is, not what it links to; None when there is nothing."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def check(self, name: str) -> os.stat_result | None:
        """The status of the plain file `name`, or None. Raises `ConfigError` for anything else of that name."""
        status = self.status(name)
        if status is not None:
            self._check_plain(name, status)
        return status

    def _check_plain(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise self._refused(name, status)

    def _refused(self, name: str, status: os.stat_result) -> ConfigError:
        kind = next(kind for is_one, kind in _KINDS if is_one(status.st_mode))
        return _refusal(self.path / name, kind or f"a file with {status.st_nlink} names (hard links)")

    def is_same(self, name: str, descriptor: int) -> bool:
        """Whether `name` means the open file `descriptor`."""
        status = self.status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    # Files

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Errors of the system show the whole path."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None

    def create(self, name: str, mode: int = 0o600) -> int:
        """A descriptor of the new file `name`, to read and write. Raises `FileExistsError` when anything has that name."""
        with self._naming(name):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode, dir_fd=self.descriptor)

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of the plain file `name`. Raises `FileNotFoundError`, and `ConfigError` for anything else."""
        self.check(name)
        try:
            with self._naming(name):
                descriptor = os.open(name, flags | _SAFE, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:  # put there since it was checked
                raise _refusal(self.path / name, "a link") from None
            raise
        try:
            self._check_plain(name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remove(self, name: str) -> None:
        """Remove the name; what it links to stays. Nothing happens when it is gone."""
        with suppress(FileNotFoundError), self._naming(name):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> bool:
        """Remove the directory `name` if it is empty; else nothing happens, and it is False."""
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def reclaim(self, name: str) -> int | None:
        """Remove the plain file `name` and give its space back; returns its bytes on disk, None when there is none.

        The file is emptied first: a child of a dead process may keep it open.
        """
        if self.check(name) is None:
            return None
        with suppress(FileNotFoundError, PermissionError):
            descriptor = self.open(name)
            try:
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
        """Give the file `name` the name `to`, here or in another `directory`, in place of what has it."""
        target = directory or self
        with target._naming(to):
            os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def sync(self) -> None:
        """Return when the names in it would survive a power cut."""
        os.fsync(self.descriptor)

    @contextmanager
    def drafting(self) -> Iterator[Drafts]:
        """A place for new files that then get their names here; what has got none is gone after the block."""
        folder, lock = self._new_folder()
        drafts = Drafts(self, folder)
        try:
            with folder, lock:
                try:
                    yield drafts
                finally:
                    for name in drafts.names():
                        folder.remove(name)
        finally:
            self.remove_directory(folder.path.name)

    def _new_folder(self) -> tuple[Directory, Lock]:
        """A locked folder; another one when somebody who removes leftovers was faster than our lock."""
        for _ in range(_TRIES):
            folder = self.below(_temporary_name(), 0o700, new=True)
            try:
                return folder, folder.lock()
            except PathInUseError:
                folder.close()
            except BaseException:
                folder.close()
                self.remove_directory(folder.path.name)
                raise
        raise PathInUseError(f"{self.what} {self.path} is cleaned up all the time; write elsewhere")

    def write(self, name: str, content: bytes) -> None:
        """Make the file `name`, or put `content` in its place: it is there whole and durable, or as before."""
        with self.drafting() as drafts:
            drafts.write(name, content)
            drafts.publish(name)

    def leftovers(self) -> dict[str, int]:
        """The folders of drafts that dead processes left, with their bytes on disk."""
        found = {}
        for name in self.names():
            status = self.status(name)
            if _TEMPORARY.fullmatch(name) and status is not None and stat.S_ISDIR(status.st_mode):
                with suppress(PathInUseError, ConfigError), self.below(name) as folder, folder.lock():
                    ours = [folder.check(inner) for inner in folder.names()]
                    found[name] = sum(one.st_blocks * 512 for one in ours if one is not None)
        return found

    def remove_leftovers(self) -> dict[str, int]:
        """Remove what `leftovers` gives, and give it."""
        found = self.leftovers()
        for name in found:
            with suppress(PathInUseError), self.below(name) as folder, folder.lock():
                for inner in folder.names():
                    if inner != LOCK_NAME:
                        folder.reclaim(inner)
            self.remove_directory(name)
        return found

    # Locks

    def lock(self, name: str = LOCK_NAME) -> Lock:
        """Lock this directory for us, in the file `name`; see [Note: who holds a lock].

        Raises `PathInUseError` with the holder's pid, and `ConfigError` when nothing can be written, or `name` is not ours.
        """
        for _ in range(_TRIES):
            lock = self._try_lock(name)
            if lock is not None:
                return lock
        raise PathInUseError(f"{self.what} {self.path} is locked and left again and again; give each job its own directory")

    def _try_lock(self, name: str) -> Lock | None:
        """None when the file was removed or replaced meanwhile."""
        path = self.path / name
        with _held.guard:  # no fork between the open and the note of it
            try:
                self.check(name)
                descriptor, made = self._open_lock(name)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise ConfigError(f"{self.what} {self.path} cannot be written: {error.strerror}") from error
            _held.add(descriptor)
        try:
            self._check_plain(name, os.fstat(descriptor))
            taken = self._take(name, descriptor, made)
            # The holder removes the file as it leaves: make sure that what we locked is still what the name means.
            if taken and self.is_same(name, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, Holder.us().text().encode(), 0)
                return Lock(self, name, descriptor)
        except OSError as error:
            _held.close(descriptor)
            raise ConfigError(f"{path} cannot be locked: {error.strerror}") from error
        except BaseException:
            _held.close(descriptor)
            raise
        _held.close(descriptor)
        return None

    def _open_lock(self, name: str) -> tuple[int, bool]:
        """The descriptor, and whether the file is new."""
        try:
            return self.create(name), True
        except FileExistsError:
            return self.open(name), False

    def _take(self, name: str, descriptor: int, made: bool) -> bool:
        """Take the lock; False when it is to be tried again. Raises `PathInUseError`."""
        content = os.pread(descriptor, _RECORD_BYTES, 0).strip(b"\0")  # zeros: what a power cut may leave
        holder = Holder.parse(content)
        if content and holder is None:
            raise ConfigError(f"{self.path / name} was not made by infinity; move it, or choose another directory")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise self._in_use(name, Holder.parse(os.pread(descriptor, _RECORD_BYTES, 0)), flock=True) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if made:
            return True
        if holder is None or not holder.has_ended():
            raise self._in_use(name, holder, flock=False)
        self._remove_dead(name, content)
        return False

    def _remove_dead(self, name: str, content: bytes) -> None:
        """Remove the lock file with this content; one that somebody else has made since then is put back."""
        temporary = _temporary_name()
        with suppress(FileNotFoundError):
            self.rename(name, temporary)
            descriptor = self.open(temporary)
            try:
                same = os.pread(descriptor, _RECORD_BYTES, 0).strip(b"\0") == content
            finally:
                os.close(descriptor)
            if not same:
                with suppress(OSError):
                    os.link(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            self.remove(temporary)

    def _in_use(self, name: str, holder: Holder | None, flock: bool) -> PathInUseError:
        pid = holder.pid if holder is not None else "unknown"
        where = f"{self.what} {self.path}"
        if flock and holder is not None and holder.has_ended():
            return PathInUseError(
                f"{where} was used by process {pid}, which has ended, but a process that it forked still holds the lock; "
                f"end that one (fuser {self.path / name} tells which), or choose another directory"
            )
        if not flock and (holder is None or not holder.is_on_this_machine()):
            return PathInUseError(
                f"{where} may be in use by process {pid}, perhaps of another machine, and its file system has no locks; "
                f"if no job uses it, remove {self.path / name}"
            )
        return PathInUseError(f"{where} is in use by process {pid}; give each job its own directory")


class Drafts:
    """New files in `folder`, which nobody else uses; see [Note: a file that takes another's place]."""

    def __init__(self, directory: Directory, folder: Directory) -> None:
        self._directory, self.folder = directory, folder

    @property
    def path(self) -> Path:
        """A path to the folder for libraries that take one. It is right as long as the folder is open, whatever is renamed."""
        return Path(f"/proc/self/fd/{self.folder.descriptor}")

    def names(self) -> list[str]:
        """The drafts that have no place yet."""
        return [name for name in self.folder.names() if name != LOCK_NAME]

    def write(self, name: str, content: bytes) -> None:
        """Make a draft that is whole and durable."""
        with os.fdopen(self.folder.create(name, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, name: str, to: str = "") -> None:
        """Give a draft its place, under its own name or `to`. It is whole and durable already.

        Returns when the name would survive a power cut.
        """
        self.folder.check(name)
        self.folder.rename(name, to or name, self._directory)
        self._directory.sync()


def _refusal(path: Path, kind: str) -> ConfigError:
    return ConfigError(f"{path} is {kind}, which infinity never makes; remove it, or choose another directory")


def _temporary_name() -> str:
    return f".infinity-{secrets.token_hex(8)}.tmp"


class Holder(NamedTuple):
    """A process, in the words of a lock file: numbers of pids and starts are valid for one boot and one pid namespace."""

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
        """The holder that a lock file names; None when it names none. Older versions wrote the pid alone."""
        match = re.fullmatch(rb"\s*(\d{1,10})(?:\s+(\S+) (\S+) (\S+) (\S+))?\s*", content)
        if match is None:
            return None
        return cls(int(match[1]), *((value or b"?").decode(errors="replace") for value in match.groups()[1:]))

    def text(self) -> str:
        return f"{self.pid}\n{self.start} {self.boot} {self.namespace} {self.host}\n"

    def is_on_this_machine(self) -> bool:
        """Whether we can tell if it lives."""
        return (self.boot, self.namespace, self.host) == _here() and "?" not in self

    def has_ended(self) -> bool:
        """Whether it surely has: also when this machine was started again since."""
        boot, _, host = _here()
        if "?" not in (*self, boot) and self.host == host and self.boot != boot:
            return True
        return self.is_on_this_machine() and _start(self.pid) != self.start


def _here() -> tuple[str, str, str]:
    """Boot, pid namespace and host; a "?" where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    except OSError:
        boot = namespace = "?"
    return boot, namespace, "".join(os.uname().nodename.split()) or "?"


def _start(pid: int) -> str | None:
    """When process `pid` started, in ticks since the boot; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


class _Held:
    """The descriptors that hold locks of this process. A forked child closes its copies; see [Note: who holds a lock]."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._descriptors: set[int] = set()
        os.register_at_fork(before=self.guard.acquire, after_in_parent=self.guard.release, after_in_child=self._leave)

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


class Lock:
    """A directory that is ours until `release`, or until this process ends."""

    def __init__(self, directory: Directory, name: str, descriptor: int, owned: bool = False) -> None:
        self._directory, self._name, self._descriptor = directory, name, descriptor
        self._owned = owned
        self._process = os.getpid()

    def own_directory(self) -> Lock:
        """Close the directory, too, on release."""
        self._owned = True
        return self

    def release(self) -> None:
        """Remove the file and let others in; may be called twice. In a forked child nothing happens: the lock is the parent's."""
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


def lock_directory(path: Path, what: str) -> Lock:
    """Lock the directory `path` for this process; `what` is how messages call it ("nvme directory", "--checkpoint").

    Lets one job at a time work there: another process, or a second engine of this one, gets `PathInUseError` with the holder's
    pid. Raises `ConfigError` when the directory is not there or cannot be written, or its `infinity.lock` is not a plain file of
    ours. Forked children do not hold it; it ends with `release`, a `with` block, or the process.
    """
    directory = Directory(path, what)
    try:
        return directory.lock().own_directory()
    except BaseException:
        directory.close()
        raise
