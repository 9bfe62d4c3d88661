"""The NVMe directories: opened, locked, and with the states files of one engine."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from infinity import native
from infinity.directories.directory import Directory
from infinity.directories.lock import lock
from infinity.errors import BudgetError, ConfigError, with_way_out
from infinity.quantities import format_bytes
from infinity.tiers.manifest import STATES_NAME, StatesManifest, refuse_kept

log = logging.getLogger("infinity")

TRIAL_NAME = "infinity-trial.bin"
"""A file that exists while GPUDirect Storage is tried."""
UNNAMED = "(unnamed)"
"""The name in errors of a file without a name."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a file system without room."""


def check_directories(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` unless all of them are there and differ."""
    for directory in directories:
        try:
            kind = "is not a directory" if directory.exists() else "does not exist"
            is_there = directory.is_dir()
        except OSError as error:  # such as a name that is too long
            raise ConfigError(
                f"nvme directory {directory} cannot be used: {with_way_out(error.errno or 0)}"
            ) from None
        if not is_there:
            raise ConfigError(
                f"nvme directory {directory} {kind}; create it on the drive to be "
                f"used: mkdir -p {directory}"
            )
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError(f"the nvme directories must differ: {', '.join(map(str, directories))}")


class KeptStates(Protocol):
    """The content of the directories that outlives an engine. `infinity.durable` implements it."""

    found: StatesManifest | None
    """The manifest that `find` read; None before `find`, and in new directories."""

    @property
    def taken_over(self) -> StatesManifest | None:
        """The manifest of the states that the engine resumes; None if its states are new."""

    @property
    def outlive(self) -> bool:
        """Whether the content of the directories stays after `close`."""

    def refuse_other_ranks(self, place: Directory, own: str) -> None:
        """Raise `ConfigError` where `place` holds committed states of another number of ranks."""

    def find(self, places: Sequence[Directory], around: Sequence[Directory]) -> None:
        """Read the manifests of an earlier run in the locked directories `places`. Changes nothing.
        `around` has the parents of `places`, if every rank has a directory of its own."""

    def check(self) -> None:
        """Raise `ConfigError` where the states that are there are not those of the engine."""

    def remove(self, places: Sequence[Directory]) -> None:
        """Remove the files beside the states. Called if they do not outlive the engine."""


class Places:
    """The NVMe directories of one engine. `find` opens and locks them, `open_files` gives each a
    states file, and `close` undoes both.

    With `own`, the files lie in directories of that name below `paths`, which are made and removed.
    With `kept`, the files may outlive the engine, and files of an earlier engine are taken over.
    """

    def __init__(
        self, paths: Sequence[Path], own: str = "", kept: KeptStates | None = None
    ) -> None:
        self.paths = list(paths)
        """As configured; after `find`, the directories of the files."""
        self.kept = kept
        self._own = own
        self._open: list[Directory] = []
        self._around: list[Directory] = []  # the parents of `_open`, with `own`
        self._ours: list[Directory] = []  # with a states file that `close` may remove
        self._parts = ExitStack()  # undone by `close` in reverse order

    @property
    def found(self) -> StatesManifest | None:
        """The manifest of the earlier run whose files are taken over; None for new files."""
        return None if self.kept is None else self.kept.taken_over

    def find(self) -> None:
        """Open and lock the directories, and read the manifests of an earlier run. Changes nothing
        else. A second call does nothing.

        Raises `ConfigError` (no such directory, not writable) and `PathInUseError` (another
        process).
        """
        if self._open:
            return
        check_directories(self.paths)
        for path in self.paths:
            self._open.append(self._open_place(path))
        self.paths = [place.path for place in self._open]
        for place in self._open:
            self._parts.callback(lock(place).release)
        if self.kept is not None:
            self.kept.find(self._open, self._around)

    def _open_place(self, path: Path) -> Directory:
        """The directory of the files, open until `close`."""
        place = Directory(path, "nvme directory")
        self._parts.callback(place.close)
        if self.kept is not None:
            self.kept.refuse_other_ranks(place, self._own)
        if not self._own:
            return place
        self._around.append(place)
        # A directory that is not empty stays.
        self._parts.callback(place.remove_directory, self._own)
        inner = place.below(self._own)
        self._parts.callback(inner.close)
        if self.kept is not None:
            place.sync()  # a later run must find the commits in it
        return inner

    def open_files(self) -> Iterator[Any]:
        """The states file of each directory, as a native file: the file that is taken over, or a
        new file. A new file replaces the file of a dead run. The caller closes each file."""
        self._parts.callback(self._remove)
        for place in self._open:
            file = self._open_file(place)
            if not file.direct:
                log.warning(
                    "%s does not support O_DIRECT; I/O goes through the page cache and is slower",
                    place.path,
                )
            yield file

    def _open_file(self, place: Directory) -> Any:
        path = str(place.path / STATES_NAME)
        if self.found is not None:
            self._ours.append(place)
            return native.file_at(place.open(STATES_NAME), path)
        if self.kept is None:
            refuse_kept(place)
        elif self.kept.found is not None:
            raise RuntimeError(f"{place.path} has committed states, which nothing took over")
        status = place.check(STATES_NAME)
        if status is not None:
            place.reclaim(STATES_NAME)
            log.warning(
                "reclaimed %s that an earlier run left in %s",
                format_bytes(status.st_size),
                place.path,
            )
        self._ours.append(place)
        return native.file_at(place.create_in_place(STATES_NAME), path)

    def _remove(self) -> None:
        """Remove the files, unless they outlive the engine. If a file beside the states cannot be
        removed, the states stay too: a record may name them."""
        if self.kept is not None:
            if self.kept.outlive:
                return
            self.kept.remove(self._ours)
        with ExitStack() as stack:  # a failure does not stop the rest
            for place in self._ours:
                stack.callback(place.remove, STATES_NAME)

    @contextmanager
    def scratch(self, named: bool = False) -> Iterator[list[Any]]:
        """An empty native file in each directory, to try its drive. At the end the files are gone,
        and their space is free. The files have no name, so a kill leaves none. A `named` file is
        removed by the next call with `named`.

        Raises `BudgetError` or `ConfigError` where a directory takes no file.
        """
        with ExitStack() as stack:
            files = []
            for place in self._open:
                name = TRIAL_NAME if named else UNNAMED
                try:
                    if named:
                        place.reclaim(name)
                    descriptor = place.create_in_place(name) if named else place.unnamed()
                except OSError as error:
                    kind = BudgetError if error.errno in FULL else ConfigError
                    raise kind(
                        f"{place.path} takes no file to try its drive with ({error.strerror}); "
                        "free some of its space, or choose another directory"
                    ) from error
                if named:
                    stack.callback(place.remove, name)
                files.append(native.file_at(descriptor, str(place.path / name)))
                stack.callback(files[-1].close)
                # Some file systems free the space of a file some time after it was closed.
                stack.callback(files[-1].truncate, 0)
            yield files

    def free_bytes(self) -> int:
        """Free bytes of the file systems, each counted once."""
        return sum({place.device(): place.free_bytes() for place in self._open}.values())

    def close(self) -> None:
        """Remove the files, the locks and empty directories, even after failures. A second call
        does nothing."""
        self._parts.close()
