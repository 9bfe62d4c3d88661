"""Commits steps: when the last update of one has been written, its record becomes the last one.

[Note: what may be overwritten]
If every step is committed, a block has two extents, and every update writes the extent without the
content. After step N is committed, step N+1 writes the extents of step N-1, and step N+2 the
extents of step N. So an update waits until its extent is in no commit that is still needed
(`DurableHome.is_free`): until step N+1 is committed. A forward and a backward lie between, so the
update rarely waits. With fewer commits there is a spare extent (`durable/home`).

[Note: sealed states]
The record and the versions are fixed at one moment between two steps (`seal`). From then on an
update of the next step may begin. The versions are those of the blocks after all posted updates.
The thread waits for these updates, flushes the drives, and writes the record.

[Note: several ranks]
A step is committed when all ranks have its record (`infinity.durable.agreement`). Until then this
rank has two records, and the states of both stay. `close` does not wait for the last record of
other ranks: they may be gone, and a resume finds the last record that all ranks have.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infinity.durable.agreement import CLOSING_SECONDS, Agreement
from infinity.durable.home import Version, home_of
from infinity.durable.states import RecordKey
from infinity.durable.store import DurableStore
from infinity.errors import EngineClosedError, InfinityError, sentence
from infinity.observe import Recorder
from infinity.optim.job import Job
from infinity.optim.job_queue import JobQueue

log = logging.getLogger("infinity")


class _Sealed(NamedTuple):
    """The states that become durable when `jobs` have ended."""

    key: RecordKey
    jobs: Sequence[Job]
    versions: Sequence[Version]
    content: bytes


class Committer:
    """A thread that commits sealed states, in their order. Its methods are called by the thread
    that runs the model, and by the thread that closes the engine."""

    def __init__(
        self,
        store: DurableStore,
        jobs: JobQueue,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of all ranks; None if there is one rank."""
        self._store = store
        self._jobs = jobs
        self._agreement = agreement
        self._recorder = recorder
        self._sealed: queue.SimpleQueue[_Sealed | None] = queue.SimpleQueue()
        self._open = 0  # sealed, and not committed
        self._changed = threading.Condition()
        self._ended = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="infinity-committer", daemon=True)
        self._thread.start()

    def seal(self, key: RecordKey, content: Callable[[Sequence[Version]], bytes]) -> None:
        """Commit the blocks after all posted updates, as the record `key`; returns at once.
        `content` makes the record from their versions."""
        jobs, versions = self._versions()
        sealed = _Sealed(key, jobs, versions, content(versions))
        self._store.seal(versions)
        with self._changed:
            self._sealed.put(sealed)
            self._open += 1

    def will_be_whole(self) -> bool:
        """Whether a commit may refer to the blocks after all posted updates."""
        with self._jobs.changed:
            _, left = self._jobs.going()
            return all(
                home_of(block).will_be_whole(left[block])
                if block in left
                else home_of(block).is_whole
                for block in self._store.state_blocks()
            )

    def _versions(self) -> tuple[list[Job], list[Version]]:
        """The jobs that are CONFIRMED, and the version of each block when they have ended."""
        with self._jobs.changed:
            jobs, left = self._jobs.going()
            return jobs, [
                Version(block.home.target(left[block]), True)
                if block in left
                else Version(block.home.version, block.home.written)
                for block in self._store.state_blocks()
            ]

    def rest(self) -> bool:
        """Block until all sealed states are committed; False if they never will be."""
        with self._jobs.hurry(), self._changed:
            self._changed.wait_for(lambda: self._open == 0 or self._ended)
            return self._open == 0

    def close(self) -> None:
        """Commit the sealed states, and end the thread. May be called twice."""
        with self._changed:
            self._is_closing = True
        self._sealed.put(None)
        with self._jobs.hurry():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._commit_next():
                pass  # holds no committed record, which may be large
        except EngineClosedError:
            log.debug("an update failed, so its step is not committed")
        except BaseException as error:
            self._store.latch.fail(self._with_way_out(error), "a commit")
            self._jobs.refuse()  # no commit will end the waits for it
            self._jobs.end_jobs()
        finally:
            if self._agreement is not None:
                self._agreement.end()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._jobs.poke()

    def _commit_next(self) -> bool:
        """Commit the next sealed states; False if the commit was abandoned, and at the end."""
        sealed = self._sealed.get()
        return sealed is not None and self._commit(sealed)

    def _commit(self, sealed: _Sealed) -> bool:
        """Commit `sealed`; False if the commit was abandoned."""
        self._await_updates(sealed)
        self._store.latch.check()
        start = time.perf_counter()
        self._store.record(sealed.key, sealed.versions, sealed.content)
        if self._agreement is not None and not self._agreement.reach(sealed.key, self._gives_up):
            if self._open > 1:
                log.warning("the last step is not committed: other ranks are gone")
            return False
        self._store.commit(sealed.key, sealed.versions)
        self._recorder.add("commit", f"step {sealed.key.step}", start, time.perf_counter())
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
        self._jobs.poke()
        return True

    def _await_updates(self, sealed: _Sealed) -> None:
        """Return when the updates of `sealed` have ended. If other ranks wait for them, they run
        without a place."""
        if self._agreement is None:
            self._jobs.await_ended(sealed.jobs)
            return
        while not self._jobs.await_ended(sealed.jobs, self._agreement.pause):
            if self._agreement.is_awaited(sealed.key):
                with self._jobs.hurry():
                    self._jobs.await_ended(sealed.jobs)

    def _with_way_out(self, error: BaseException) -> BaseException:
        """`error`, which ended a commit, with a way out if it is of a drive or the system.

        A failed flush may have dropped written bytes, and the next flush would not report it. So
        nothing more is committed over these bytes. A run that resumes the last committed step
        writes them again.
        """
        if not isinstance(error, OSError):
            return error
        step = self._store.committed_step
        way_out = (
            "nothing was committed yet"
            if step is None
            else f"wrap with resume=True goes on from step {step}, or from the commit after it"
        )
        failure = InfinityError(f"{sentence(error)}; {way_out}")
        failure.__cause__ = error
        return failure

    def _gives_up(self, waited: float) -> bool:
        """Whether to stop waiting for other ranks, which the last record does not need."""
        with self._changed:
            return self._is_closing and (self._open == 1 or waited > CLOSING_SECONDS)
