"""The checkpoints of a run: one folder per step, of which the last ones stay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Protocol

METADATA = ".metadata"  # there in a checkpoint that is whole
_NAME, _LEFTOVER = re.compile(r"step-(\d+)"), re.compile(r"\.step-\d+\.(partial|old)")


class Saver(Protocol):
    """What can be saved and loaded: `infinity.Engine`."""

    def save_checkpoint(self, directory: str | Path, optimizer: Any, extra: Any) -> None: ...
    def load_checkpoint(self, directory: str | Path, optimizer: Any) -> dict[str, Any]: ...


class Checkpoints:
    """The folders `step-<number>` in `directory`. One job at a time writes there.

    A checkpoint is due `every` so many steps; the last `keep` of them are kept. Of several ranks all save, and the one that
    `prunes` removes.
    """

    def __init__(self, directory: Path, every: int, keep: int, prunes: bool = True) -> None:
        self.directory, self._every, self._keep, self._prunes = directory, every, keep, prunes

    def prepare(self, resume: bool) -> Path | None:
        """Create `directory`; returns the last checkpoint in it, if there is any.

        Raises `ValueError` when there is one although the run is not to go on from it, and `OSError` when `directory` cannot be
        created.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(f"--checkpoint {self.directory} is not a directory")
        self.directory.mkdir(parents=True, exist_ok=True)
        found = self._whole()
        if found and not resume:
            raise ValueError(
                f"--checkpoint {self.directory} has checkpoints of an earlier run, up to {found[-1].name}; go on from it with "
                "--resume, or choose another directory"
            )
        return found[-1] if found else None

    def is_due(self, number: int) -> bool:
        """Whether step `number` (from 1) is to be saved."""
        return number % self._every == 0

    def save(self, engine: Saver, optimizer: Any, number: int, extra: dict[str, Any]) -> None:
        """Save the state after step `number`, and remove what is too old, or was left by a save that was killed."""
        engine.save_checkpoint(self.directory / f"step-{number}", optimizer, extra)
        if not self._prunes:
            return
        leftovers = [path for path in self.directory.iterdir() if _LEFTOVER.fullmatch(path.name)]
        for path in self._whole()[: -self._keep] + leftovers:
            shutil.rmtree(path)

    def _whole(self) -> list[Path]:
        """All checkpoints in the order of their steps."""
        numbers = {path: _NAME.fullmatch(path.name) for path in self.directory.iterdir()}
        whole = {path: int(name[1]) for path, name in numbers.items() if name and (path / METADATA).is_file()}
        return sorted(whole, key=lambda path: whole[path])
