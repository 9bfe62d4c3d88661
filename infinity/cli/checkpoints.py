"""The directory of a run's checkpoints: its lock, the last checkpoint, and leftovers of kills."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from infinity.checkpoint.files import DRAFT, ENGINE, is_whole
from infinity.directories.directory import Directory, check_length
from infinity.directories.lock import Lock, lock, lock_directory
from infinity.errors import ConfigError, PathInUseError

_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointFolder:
    """The `directory` of the folders `checkpoint-<number>`. One job at a time writes there, from
    `prepare` to `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: Lock | None = None

    def prepare(self, resume: bool) -> Path | None:
        """Create `directory`, lock it, and remove leftovers of killed runs. Returns the last
        checkpoint in it, or None.

        Raises `ValueError` if there is a checkpoint and the run does not `resume`. Raises
        `PathInUseError` if another job writes there, and `OSError` if `directory` cannot be
        created.
        """
        check_length(self.directory, "--checkpoint")
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(f"--checkpoint {self.directory} is not a directory")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(self.directory, "--checkpoint")
        try:
            found = self._whole()
            if found and not resume:
                raise ValueError(
                    f"--checkpoint {self.directory} has checkpoints of an earlier run, up to "
                    f"{found[-1].name}; go on from it with --resume, or choose another directory"
                )
            remove(leftovers(self.directory))
        except BaseException:
            self.close()
            raise
        return found[-1] if found else None

    def close(self) -> None:
        """Release the lock. May be called twice, and without `prepare`."""
        if self._lock is not None:
            self._lock.release()

    def _whole(self) -> list[Path]:
        """All checkpoints, in the order of their steps."""
        numbers = {path: _NAME.fullmatch(path.name) for path in self.directory.iterdir()}
        whole = {
            path: int(name[1]) for path, name in numbers.items() if name and is_whole(path / ENGINE)
        }
        return sorted(whole, key=lambda path: whole[path])


def step_of(checkpoint: Path) -> int:
    """The number in the name `checkpoint-<number>`."""
    return int(checkpoint.name.partition("-")[2])


def leftovers(directory: Path) -> list[Path]:
    """The folder in `directory` in which a killed job was saving, if there is one: with parts of a
    checkpoint, and with checkpoints that were being removed."""
    draft = directory / DRAFT
    if not draft.is_dir() or draft.is_symlink():
        return []
    try:
        with Directory(draft, "checkpoint") as place, lock(place):
            return [draft]
    except (PathInUseError, ConfigError):
        return []


def remove(paths: list[Path]) -> dict[str, int]:
    """Remove folders. Returns their paths and bytes on disk."""
    removed = {}
    for path in paths:
        removed[str(path)] = sum(file.lstat().st_blocks * 512 for file in (path, *path.rglob("*")))
        shutil.rmtree(path)
    return removed
