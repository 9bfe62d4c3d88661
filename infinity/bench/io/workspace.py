"""The files that a benchmark writes, in a folder of its own. They never replace other files, and
are always removed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infinity import native
from infinity.directories.directory import Directory
from infinity.directories.lock import LOCK_NAME, lock
from infinity.errors import ConfigError
from infinity.quantities import format_bytes

FOLDER = "infinity-bench"
MARKER = "made-by-infinity-bench"
DATA = "data.bin"


def leftovers(directory: Path) -> list[Path]:
    """The files of a benchmark in `directory`, and then their folder. Empty without such a folder.

    Raises `ConfigError` if a folder of that name is not of a benchmark, or contains anything else.
    """
    folder = directory / FOLDER
    with Directory(directory) as place:
        status = place.status(FOLDER)
        if status is None:
            return []
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{folder} was not made by infinity; remove it, or choose another directory"
            )
        with place.below(FOLDER) as inner:
            names = inner.names()
            foreign = [
                name for name in names if name not in (MARKER, DATA) or not _is_plain(inner, name)
            ]
    if foreign or (names and MARKER not in names):
        raise ConfigError(
            f"{folder} has files that infinity did not write ({', '.join(foreign or names)}); "
            "move them, or choose another directory"
        )
    return [*(folder / name for name in (DATA, MARKER) if name in names), folder]


def _is_plain(directory: Directory, name: str) -> bool:
    try:
        return directory.check(name) is not None
    except ConfigError:
        return False


def remove(place: Directory, paths: Sequence[Path]) -> None:
    """Remove the paths of `leftovers` from the open directory `place`."""
    if not paths:
        return
    with place.below(FOLDER) as inner:
        for path in paths[:-1]:
            inner.reclaim(path.name)
    place.remove_directory(FOLDER)


def check_owners(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` if other files have the names of ours."""
    for directory in directories:
        leftovers(directory)
        with Directory(directory) as place:
            place.check(LOCK_NAME)


def check_space(directories: Sequence[Path], size: int, reserve: int) -> None:
    """Raise `ConfigError` with the numbers unless `size` bytes fit into each directory and leave
    `reserve` bytes free.

    Files of a benchmark count as free, because those of a killed one are removed first, and ours
    are part of `size`.
    """
    on_device: dict[int, list[Path]] = {}
    for directory in directories:
        on_device.setdefault(directory.stat().st_dev, []).append(directory)
    for together in on_device.values():
        status = os.statvfs(together[0])
        ours = [path for directory in together for path in leftovers(directory) if path.is_file()]
        free = status.f_bavail * status.f_frsize + sum(path.stat().st_blocks * 512 for path in ours)
        count = len(together)
        if free - count * size < reserve:
            largest = max(free - reserve, 0) // count // (8 << 20)
            way_out = (
                f"the largest `size` that works is {8 * largest}MiB"
                if largest
                else "free some space, or lower `reserve`"
            )
            raise ConfigError(
                f"{' and '.join(map(str, together))}: {format_bytes(free)} free, but the benchmark "
                f"needs {format_bytes(count * size)} and {format_bytes(reserve)} have to stay free "
                f"(`reserve`); {way_out}"
            )


def check_directories(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` unless these are different directories."""
    for directory in directories:
        if not directory.is_dir():
            kind = "is not a directory" if directory.exists() else "does not exist"
            raise ConfigError(
                f"directory {directory} {kind}; create it on the drive to be measured: mkdir "
                f"-p {directory}"
            )
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError(f"the directories must differ: {', '.join(map(str, directories))}")


@contextmanager
def workspace(directories: Sequence[Path], size: int, reserve: int) -> Iterator[list[Any]]:
    """One native file of `size` bytes in each directory, allocated and not written. All are removed
    at the end.

    Takes the lock of training, so that neither disturbs the other. Files of a killed benchmark are
    removed first. Raises `ConfigError` (no such directory, other files, too little space) and
    `PathInUseError` before anything is written.
    """
    check_directories(directories)
    check_owners(directories)
    with ExitStack() as stack:
        places = [
            stack.enter_context(Directory(directory, "nvme directory")) for directory in directories
        ]
        for place in places:
            stack.enter_context(lock(place))
            remove(place, leftovers(place.path))
        check_space(directories, size, reserve)
        files = []
        for place in places:
            folder = stack.enter_context(place.below(FOLDER, 0o700, new=True))
            stack.callback(_remove_ours, place, folder)
            os.close(folder.create(MARKER))
            # In place, like states files.
            file = native.file_at(folder.create_in_place(DATA), str(folder.path / DATA))
            stack.callback(file.close)
            file.allocate(size)
            files.append(file)
        yield files


def _remove_ours(place: Directory, folder: Directory) -> None:
    """Remove the files that were created since the lock was taken. Another file stays there, and so
    does the folder."""
    for name in (DATA, MARKER):
        with contextlib.suppress(OSError):
            folder.remove(name)
    place.remove_directory(FOLDER)
