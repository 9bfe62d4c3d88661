"""New files that take their place whole.

[Note: a file that takes another's place]
A new file is written in a folder beside its place, `.infinity-*.tmp`, which is locked. It is
renamed when it is whole and on the drive, so a kill leaves what was there before, and the folder.
`infinity gc` removes folders that nobody holds any more.

A new directory is such a folder, which gets its name when all of its files are on the drive. A
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

_TRIES = 100  # to make a folder that others clean up
_TEMPORARY = re.compile(r"\.infinity-[0-9a-f]{16}\.tmp")


@contextmanager
def drafting(directory: Directory) -> Iterator[Drafts]:
    """A place for new files that then get their names here; what has got none is gone after the
    block."""
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
    """A path to write the file that is at `path` after the block, whole and durable. After an
    exception `path` is as it was. Raises `ConfigError` for anything else than a plain file there;
    `what` is how messages call its directory."""
    with Directory(path.parent, what) as directory:
        directory.check(path.name)
        with drafting(directory) as drafts:
            yield drafts.path / path.name
            make_durable(drafts.path / path.name)
            drafts.publish(path.name)


@contextmanager
def drafting_directory(path: Path, what: str) -> Iterator[Drafts]:
    """A place for the files of the directory `path`, which is there, with all of them, after the
    block. After an exception it is as it was, or already replaced whole.

    A directory of plain files that is there already is replaced. Raises `ConfigError` for anything
    else of that name; `what` is how messages call it.
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
    """What this process takes from the modes of new files; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _new_folder(directory: Directory) -> tuple[Directory, Lock]:
    """A locked folder; another one when somebody who removes leftovers was faster than our lock."""
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
    """Remove what `leftovers` gives, and give it."""
    found = leftovers(directory)
    for name in found:
        with suppress(PathInUseError), directory.below(name) as folder, lock(folder):
            for inner in folder.names():
                if inner != LOCK_NAME:
                    folder.reclaim(inner)
        directory.remove_directory(name)
    return found


class Drafts:
    """New files in `folder`, which nobody else uses; see [Note: a file that takes another's
    place]."""

    def __init__(self, directory: Directory, folder: Directory) -> None:
        self._directory, self.folder = directory, folder

    @property
    def path(self) -> Path:
        """A path to the folder for libraries that take one. It is right as long as the folder is
        open, whatever is renamed."""
        return Path(f"/proc/self/fd/{self.folder.descriptor}")

    def names(self) -> list[str]:
        """The drafts that have no place yet."""
        return [name for name in self.folder.names() if name != LOCK_NAME]

    def write(self, name: str, content: bytes) -> None:
        """Make a draft that is whole and durable."""
        created = self.folder.create(name, 0o666)
        with naming(self.folder.path / name), os.fdopen(created, "wb") as file:
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
