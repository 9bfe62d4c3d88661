"""A checkpoint that is written while training goes on: the handle that a user has of it, and its
thread.

[Note: with several ranks]
The threads of all ranks meet in process groups that nobody else uses, as the ranks of a save do. So
what fails on one of them ends the snapshot on all, and a rank that is killed ends it, too.
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
    """A checkpoint of a committed step on its way to its directory, made by `Engine.snapshot`. Any
    thread may call its methods."""

    def __init__(
        self,
        step: int,
        directory: Path,
        write: Callable[[Told], object],
        end: Callable[[], object],
        progress: Told | None,
    ) -> None:
        """`write(told)` writes it, on the thread; `end` is called there when it has ended."""
        self.step = step
        """The step that it has: `Engine.committed_step` when it began."""
        self.directory = directory
        """Where it will be."""
        self._write, self._end, self._progress = write, end, progress
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        thread = threading.Thread(target=self._run, name="infinity-snapshot", daemon=True)
        thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the checkpoint is there, on all ranks; False when it is not after `timeout`
        seconds. Raises `CheckpointError` when it failed or was cancelled: what was in the directory
        before is there."""
        if not self.finish(timeout):
            return False
        if self._error is not None:
            cause = self._error.__cause__ or self._error
            raise CheckpointError(sentence(self._error)) from cause
        return True

    def finish(self, timeout: float | None = None) -> bool:
        """Like `wait`, but raises nothing."""
        return self._ended.wait(timeout)

    def cancel(self) -> None:
        """End it, on all ranks, and return when it has ended. What was in the directory before
        stays there, and nothing else. A checkpoint that is there by then stays, too."""
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
            self._write = self._end = _nothing  # what they held is let go
            self._progress = None
            self._ended.set()

    def _tell(self, done: int, total: int) -> None:
        if self._is_cancelled:
            raise CheckpointError(f"the snapshot of step {self.step} was cancelled")
        if self._progress is not None:
            self._progress(done, total)


def _nothing(*told: object) -> None:
    """It has ended."""
