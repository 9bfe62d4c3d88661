"""The files that a benchmark writes: in a folder of its own, never in place of others' files, gone whatever happens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infinity import native
from infinity.errors import ConfigError
from infinity.tiers.nvme import LOCK_NAME, lock_directory
from infinity.units import format_bytes

FOLDER = "infinity-bench"
MARKER = "made-by-infinity-bench"
DATA = "data.bin"


def leftovers(directory: Path) -> list[Path]:
    """The files of a benchmark in `directory`, and last their folder; none when there is no such folder.

    Raises `ConfigError` when there is one that is not a benchmark's, or holds anything else.
    """
    folder = directory / FOLDER
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{folder} was not made by infinity; remove it, or choose another directory")
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name not in (MARKER, DATA) or not _is_file(folder / name)]
    if foreign or (names and MARKER not in names):
        raise ConfigError(
            f"{folder} has files that infinity did not write ({', '.join(foreign or names)}); "
            "move them, or choose another directory"
        )
    return [*(folder / name for name in (DATA, MARKER) if name in names), folder]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def remove(paths: Sequence[Path]) -> None:
    """Remove what `leftovers` gave."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()


def check_owners(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` where files of others have the names of ours."""
    for directory in directories:
        leftovers(directory)
        if (directory / LOCK_NAME).is_symlink():
            raise ConfigError(f"{directory / LOCK_NAME} is a link, which no run makes; remove it yourself")


def check_space(directories: Sequence[Path], size: int, reserve: int) -> None:
    """Raise `ConfigError` with the numbers unless `size` bytes fit into each directory and leave `reserve` bytes free.

    A benchmark's own files count as free: those of a killed one are removed first, and ours are part of `size`.
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
            way_out = f"the largest --size that works is {8 * largest}MiB" if largest else "free some space, or lower --reserve"
            raise ConfigError(
                f"{' and '.join(map(str, together))}: {format_bytes(free)} free, but the benchmark needs "
                f"{format_bytes(count * size)} and {format_bytes(reserve)} have to stay free (--reserve); {way_out}"
            )


def check_directories(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` unless these are different directories."""
    for directory in directories:
        if not directory.is_dir():
            kind = "is not a directory" if directory.exists() else "does not exist"
            raise ConfigError(f"--path {directory} {kind}; create it on the drive to be measured: mkdir -p {directory}")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError(f"the directories must differ: {', '.join(map(str, directories))}")


@contextmanager
def workspace(directories: Sequence[Path], size: int, reserve: int) -> Iterator[list[Any]]:
    """One native file of `size` bytes, allocated and never written, in each directory; all of it is removed on the way out.

    Takes the lock that training takes, so that neither disturbs the other. What a killed benchmark left is removed first.
    Raises `ConfigError` (no such directory, files of others, too little space) and `PathInUseError` before anything is written.
    """
    check_directories(directories)
    check_owners(directories)
    with ExitStack() as stack:
        for directory in directories:
            descriptor = lock_directory(directory)
            stack.callback(os.close, descriptor)
            stack.callback((directory / LOCK_NAME).unlink, missing_ok=True)
            remove(leftovers(directory))
        check_space(directories, size, reserve)
        files = []
        for directory in directories:
            folder = directory / FOLDER
            folder.mkdir(mode=0o700)
            stack.callback(_remove_ours, folder)
            (folder / MARKER).touch(exist_ok=False)
            file = native.aio().File(str(folder / DATA), create=True, mode=0o600)
            stack.callback(file.close)
            file.allocate(size)
            files.append(file)
        yield files


def _remove_ours(folder: Path) -> None:
    """What we made since we hold the lock; a file that someone else put there stays, and so does the folder."""
    removals: tuple[Callable[[], None], ...] = ((folder / DATA).unlink, (folder / MARKER).unlink, folder.rmdir)
    for removal in removals:
        with contextlib.suppress(OSError):
            removal()
