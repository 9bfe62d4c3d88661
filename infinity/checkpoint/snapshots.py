"""Writes a checkpoint while training continues: its handle and its thread.

[Note: with several ranks]
The threads of all ranks meet in process groups of their own, as the ranks of a save do. So an error
on one rank, or a killed rank, ends the snapshot on all ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from infinity.checkpoint.progress import Told
from infinity.errors import CheckpointError, sentence

log = logging.getLogger("infinity")


class SnapshotTask:
    """A checkpoint of a committed step, in progress. `Engine.snapshot` starts it. Any thread may
    call its methods."""

    def __init__(
        self,
        step: int,
        directory: Path,
        write: Callable[[Told], object],
        end: Callable[[], object],
        progress: Told | None,
    ) -> None:
        """The thread calls `write(told)`, which writes the checkpoint, and then `end`."""
        self.step = step
        """The saved step: `Engine.committed_step` when the snapshot began."""
        self.directory = directory
        """The directory of the checkpoint."""
        self._write, self._end, self._progress = write, end, progress
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        thread = threading.Thread(target=self._run, name="infinity-snapshot", daemon=True)
        thread.start()

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the checkpoint is complete on all ranks. Returns False after `timeout`
        seconds. Raises `CheckpointError` if it failed or was cancelled. The earlier content of the
        directory is then unchanged."""
        if not self.finish(timeout):
            return False
        if self._error is not None:
            cause = self._error.__cause__ or self._error
            raise CheckpointError(sentence(self._error)) from cause
        return True

    def finish(self, timeout: float | None = None) -> bool:
        """Like `wait`, without raising errors."""
        return self._ended.wait(timeout)

    def cancel(self) -> None:
        """End the snapshot on all ranks, and block until it has ended. The earlier content of the
        directory is then unchanged. A checkpoint that was already complete stays."""
        self._is_cancelled = True
        self.finish()

    def _run(self) -> None:
        try:
            self._write(self._tell)
        except BaseException as error:
            self._error = error
            if not self._is_cancelled:
                log.warning(
                    "the snapshot of step %d in %s failed, and training goes on: %s",
                    self.step,
                    self.directory,
                    sentence(error),
                )
        finally:
            self._end()
            self._write = self._end = _nothing  # release the states that they refer to
            self._progress = None
            self._ended.set()

    def _tell(self, done: int, total: int) -> None:
        if self._is_cancelled:
            raise CheckpointError(f"the snapshot of step {self.step} was cancelled")
        if self._progress is not None:
            self._progress(done, total)


def _nothing(*told: object) -> None:
    """Stands for the callbacks of a snapshot that has ended."""
