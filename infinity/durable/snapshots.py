"""Snapshots of an engine: checkpoints of the last commit, written while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from infinity.checkpoint.snapshots import SnapshotTask
from infinity.durable.agreement import Agreement
from infinity.durable.committed_objects import CommittedObjects
from infinity.durable.committed_states import CommittedStates
from infinity.durable.store import DurableStore
from infinity.errors import ConfigError
from infinity.optim.job_queue import JobQueue

log = logging.getLogger("infinity")


class Snapshots:
    """Begins the snapshots of one engine, one at a time. Used by the thread that runs the model,
    and by the thread that closes the engine."""

    def __init__(
        self,
        store: DurableStore,
        objects: CommittedObjects,
        jobs: JobQueue,
        agreement: Agreement | None,
    ) -> None:
        """`agreement`: of all ranks; None if there is one rank."""
        self._store, self._objects, self._jobs = store, objects, jobs
        self._agreement = agreement
        self._task: SnapshotTask | None = None

    @property
    def under_way(self) -> SnapshotTask | None:
        """The snapshot that is being written, if any."""
        return None if self._task is None or self._task.done() else self._task

    def check(self) -> None:
        """Raise `ConfigError` while a snapshot is under way."""
        task = self.under_way
        if task is not None:
            raise ConfigError(
                f"a snapshot of step {task.step} is being written to {task.directory}, and there "
                "is one at a time: wait for it (wait()), or end it (cancel())"
            )

    def refusals(self, reason: str, meet: Callable[[bool], bool]) -> str:
        """See `Agreement.refusals`; if there is one rank, its `reason`."""
        return reason if self._agreement is None else self._agreement.refusals(reason, meet)

    def begin(
        self,
        write: Callable[[CommittedStates], SnapshotTask],
        on_all_ranks: Callable[[], AbstractContextManager[None]],
    ) -> SnapshotTask:
        """Have `write` write the states of the last commit. An error inside of `on_all_ranks()` on
        one rank is an error on all ranks."""
        with ExitStack() as undo:
            with on_all_ranks():
                committed = self._pin()
                undo.callback(committed.end)
            self._task = write(committed)
            undo.pop_all()
        return self._task

    def _pin(self) -> CommittedStates:
        """The states of the last commit, pinned. Raises `ConfigError` if its optimizer is gone."""
        pinned = self._store.pin()
        try:
            record = self._store.states.decode(pinned.content, pinned.step)
            if not record.is_whole:
                raise ConfigError(
                    "a checkpoint is being loaded: begin the snapshot when that has ended"
                )
            headers = {
                self._objects.maker_of(header, pinned.step): {
                    key: value for key, value in header.items() if key != "kind"
                }
                for header in record.headers
            }
        except BaseException:
            pinned.release()
            raise
        counts = record.posted, record.skipped
        return CommittedStates(
            pinned, counts, record.buffers, headers, self._jobs.first, self._jobs.poke
        )

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish the snapshot that is under way, if any, after the block. An exception meanwhile,
        such as of Ctrl-C, cancels it."""
        task = self.under_way
        try:
            yield
            if task is not None and not task.done():
                log.info("waiting for the snapshot of step %d in %s", task.step, task.directory)
                task.finish()
        except BaseException:
            if task is not None:
                task.cancel()
            raise
