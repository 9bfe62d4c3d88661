"""The checkpoints of a run: one folder per step. Only the last ones are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from infinity.checkpoint.files import DATA_NAME, is_held, is_whole
from infinity.checkpoint.progress import Told
from infinity.directories.directory import check_length
from infinity.directories.lock import Lock, lock_directory

_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.(step-\d+)\.(partial|old|removed)")


class Saver(Protocol):
    """An object that saves and loads its state: `infinity.Engine`."""

    def save_checkpoint(
        self, directory: str | Path, optimizer: Any, extra: Any, *, progress: Told | None
    ) -> None: ...
    def load_checkpoint(
        self, directory: str | Path, optimizer: Any, *, progress: Told | None
    ) -> dict[str, Any]: ...


class CheckpointFolders:
    """The folders `step-<number>` in `directory`. One job at a time writes there, from `prepare` to
    `close`.

    A checkpoint is due every `every` steps. The last `keep` checkpoints are kept. All ranks save,
    and the rank with `prunes` removes old checkpoints.
    """

    def __init__(self, directory: Path, every: int, keep: int, prunes: bool = True) -> None:
        self.directory, self._every, self._keep, self._prunes = directory, every, keep, prunes
        self._lock: Lock | None = None
        self.describe: Callable[[Path], None] = _nothing
        """Writes the files that an export of a checkpoint needs: config and tokenizer of the
        model."""

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
            self._put_back()
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

    def is_due(self, number: int) -> bool:
        """Whether to save after step `number` (from 1)."""
        return number % self._every == 0

    def save(
        self,
        engine: Saver,
        optimizer: Any,
        number: int,
        extra: dict[str, Any],
        told: Told | None = None,
    ) -> None:
        """Save the state after step `number`. Then remove old checkpoints and leftovers of killed
        saves. `told` receives the progress."""
        place = self.directory / f"step-{number}"
        engine.save_checkpoint(place, optimizer, extra, progress=told)
        if not self._prunes:
            return
        self.describe(place)
        remove(self._whole()[: -self._keep] + leftovers(self.directory))

    def _put_back(self) -> None:
        """Rename back each checkpoint of a save that was killed between its two renames."""
        for path in self.directory.iterdir():
            name = _LEFTOVER.fullmatch(path.name)
            if (
                name
                and name[2] == "old"
                and is_whole(path)
                and not (self.directory / name[1]).exists()
            ):
                path.rename(self.directory / name[1])

    def _whole(self) -> list[Path]:
        """All checkpoints, in the order of their steps."""
        numbers = {path: _NAME.fullmatch(path.name) for path in self.directory.iterdir()}
        whole = {path: int(name[1]) for path, name in numbers.items() if name and is_whole(path)}
        return sorted(whole, key=lambda path: whole[path])


def _nothing(place: Path) -> None:
    """Describes nothing."""


def leftovers(directory: Path) -> list[Path]:
    """The folders in `directory` that killed jobs left: interrupted saves and removals. A folder
    with the only copy of a whole checkpoint is not among them. Earlier versions removed in place,
    and left `step-<number>` with data files alone."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_dir() and not path.is_symlink() and _is_leftover(path)
    ]


def remove(paths: list[Path]) -> dict[str, int]:
    """Remove folders of checkpoints. Returns their paths and bytes on disk.

    A folder is renamed first, so that a partly removed folder never looks like a checkpoint.
    """
    removed = {}
    for path in paths:
        hidden = path
        if _NAME.fullmatch(path.name):
            hidden = path.with_name(f".{path.name}.removed")
            if hidden.exists():
                shutil.rmtree(hidden)
            path.rename(hidden)
        removed[str(path)] = sum(
            file.lstat().st_blocks * 512 for file in (hidden, *hidden.rglob("*"))
        )
        shutil.rmtree(hidden)
    return removed


def _is_leftover(path: Path) -> bool:
    name = _LEFTOVER.fullmatch(path.name)
    if name is not None:
        if name[2] == "partial":
            return not is_held(path)
        return name[2] == "removed" or not is_whole(path) or is_whole(path.with_name(name[1]))
    return _NAME.fullmatch(path.name) is not None and all(
        DATA_NAME.fullmatch(file.name) for file in path.iterdir()
    )
