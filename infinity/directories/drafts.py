"""New files that replace others whole.

[Note: a file that takes another's place]
A new file is written in a locked folder beside its place, `.infinity-*.tmp`. It is renamed when it
is whole and on the drive. So a kill leaves the old file, and the folder. `infinity gc` removes
folders that no process holds.

A new directory is such a folder. It gets its name when all of its files are on the drive. A
directory that had this name before exchanges its name with the folder, and is then removed. A kill
in between leaves it as a folder that `infinity gc` removes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infinity.directories.directory import Directory, make_durable, temporary_name
from infinity.directories.lock import LOCK_NAME, Lock, lock
from infinity.errors import ConfigError, PathInUseError, naming

_TRIES = 100  # to create a folder that another process removes
_TEMPORARY = re.compile(r"\.infinity-[0-9a-f]{16}\.tmp")


@contextmanager
def drafting(directory: Directory) -> Iterator[Drafts]:
    """A place for new files that get their names in `directory` inside the block. Files without a
    name there are gone after the block."""
    folder, lock = _new_folder(directory)
    drafts = Drafts(directory, folder)
    try:
        with folder, lock:
            try:
                yield drafts
            finally:
                for name in drafts.names():
                    folder.remove(name)
    finally:
        directory.remove_directory(folder.path.name)


@contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """A path for a file that is at `path` after the block, whole and durable. After an exception
    `path` is unchanged.

    Raises `ConfigError` if `path` is not a plain file. `what` is the name of its directory in
    messages.
    """
    with Directory(path.parent, what) as directory:
        directory.check(path.name)
        with drafting(directory) as drafts:
            yield drafts.path / path.name
            make_durable(drafts.path / path.name)
            drafts.publish(path.name)


@contextmanager
def drafting_directory(path: Path, what: str) -> Iterator[Drafts]:
    """A place for the files of the directory `path`, which exists with all of them after the block.
    After an exception it is unchanged, or already replaced whole.

    A directory of plain files is replaced. Raises `ConfigError` if `path` is anything else. `what`
    is its name in messages.
    """
    with Directory(path.parent, what) as directory:
        folder, lock = _new_folder(directory)
        name = folder.path.name
        try:
            with folder, lock:
                drafts = Drafts(directory, folder)
                try:
                    yield drafts
                    with naming(path):
                        os.fchmod(folder.descriptor, 0o777 & ~_umask())
                    folder.sync()
                    _replace(directory, name, path.name)
                except BaseException:
                    if not directory.is_same(path.name, folder.descriptor):
                        for draft in drafts.names():
                            folder.remove(draft)
                    raise
        finally:
            directory.remove_directory(name)


def _replace(directory: Directory, name: str, to: str) -> None:
    """Give the folder `name` the name `to`. A directory of plain files that has this name gets the
    name `name`, and is emptied."""
    if directory.status(to) is None:
        directory.rename(name, to)
        directory.sync()
        return
    with directory.below(to) as replaced:
        for inner in replaced.names():
            replaced.check(inner)
        directory.exchange(name, to)
        directory.sync()
        for inner in replaced.names():
            replaced.remove(inner)


def _umask() -> int:
    """The bits that this process removes from the modes of new files. They can only be read by
    setting them."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _new_folder(directory: Directory) -> tuple[Directory, Lock]:
    """A new locked folder. If `infinity gc` removes it before it is locked, make another one."""
    for _ in range(_TRIES):
        folder = directory.below(temporary_name(), 0o700, new=True)
        try:
            return folder, lock(folder)
        except PathInUseError:
            folder.close()
        except BaseException:
            folder.close()
            directory.remove_directory(folder.path.name)
            raise
    raise PathInUseError(
        f"{directory.what} {directory.path} is cleaned up all the time; write elsewhere"
    )


def leftovers(directory: Directory) -> dict[str, int]:
    """The folders of drafts that dead processes left, with their bytes on disk."""
    found = {}
    for name in directory.names():
        status = directory.status(name)
        if _TEMPORARY.fullmatch(name) and status is not None and stat.S_ISDIR(status.st_mode):
            with (
                suppress(PathInUseError, ConfigError),
                directory.below(name) as folder,
                lock(folder),
            ):
                ours = [folder.check(inner) for inner in folder.names()]
                found[name] = sum(one.st_blocks * 512 for one in ours if one is not None)
    return found


def remove_leftovers(directory: Directory) -> dict[str, int]:
    """Remove the folders that `leftovers` returns, and return them."""
    found = leftovers(directory)
    for name in found:
        with suppress(PathInUseError), directory.below(name) as folder, lock(folder):
            for inner in folder.names():
                if inner != LOCK_NAME:
                    folder.reclaim(inner)
        directory.remove_directory(name)
    return found


class Drafts:
    """New files in `folder`, which no other process uses; see [Note: a file that takes another's
    place]."""

    def __init__(self, directory: Directory, folder: Directory) -> None:
        self._directory, self.folder = directory, folder

    @property
    def path(self) -> Path:
        """A path to the folder for libraries. It is right while the folder is open, even if a name
        changes."""
        return Path(f"/proc/self/fd/{self.folder.descriptor}")

    def names(self) -> list[str]:
        """The drafts that have no place yet."""
        return [name for name in self.folder.names() if name != LOCK_NAME]

    def write(self, name: str, content: bytes) -> None:
        """Write a draft, whole and durable."""
        created = self.folder.create(name, 0o666)
        with naming(self.folder.path / name), os.fdopen(created, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, name: str, to: str = "") -> None:
        """Move a draft, which is whole and durable, to its place, under its own name or `to`.

        Returns when the name would survive a power cut.
        """
        self.folder.check(name)
        self.folder.rename(name, to or name, self._directory)
        self._directory.sync()
