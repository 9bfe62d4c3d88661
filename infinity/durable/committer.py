"""Commits steps: when the last update of one has been written, its record becomes the last one.

[Note: what may be overwritten]
Where every step is committed, a block has two extents, and every update writes the one that does
not hold the content. After step N is committed, step N+1 writes the extents of step N-1, and step
N+2 those of step N. So an update waits until the extent that it writes is in no commit that is
still needed (`DurableHome.is_free`): until step N+1 is committed. Between them lie a forward and a
backward, so as a rule nobody waits. With fewer commits there is a spare extent (`durable/home`).

[Note: what is sealed]
Record and versions are fixed at one moment between two steps (`seal`): from then on an update may
begin that belongs to the next one. The versions are those that the blocks will have when the
updates that are posted have ended. The thread waits for these, flushes the drives, and writes the
record.

[Note: several ranks]
A step is committed when all ranks have its record (`infinity.durable.agreement`). Until then this
rank has two, and what either speaks of stays. Who closes does not wait for the others to make the
last one: they may be gone, and a resume finds what all have.
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
    """What becomes durable when `jobs` have ended."""

    key: RecordKey
    jobs: Sequence[Job]
    versions: Sequence[Version]
    content: bytes


class Committer:
    """A thread that commits what was sealed, in that order. Methods are for the thread that runs
    the model, and for the one that closes."""

    def __init__(
        self,
        store: DurableStore,
        jobs: JobQueue,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of all ranks; None for one."""
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
        """Have what the blocks are after all posted updates committed, as the record `key` that
        `content` makes of it; returns at once."""
        jobs, versions = self._versions()
        sealed = _Sealed(key, jobs, versions, content(versions))
        self._store.seal(versions)
        with self._changed:
            self._sealed.put(sealed)
            self._open += 1

    def will_be_whole(self) -> bool:
        """Whether a commit may speak of what the blocks are after all posted updates."""
        with self._jobs.changed:
            _, left = self._jobs.going()
            return all(
                home_of(block).will_be_whole(left[block])
                if block in left
                else home_of(block).is_whole
                for block in self._store.state_blocks()
            )

    def _versions(self) -> tuple[list[Job], list[Version]]:
        """The jobs that are CONFIRMED, and what each block has when they have ended."""
        with self._jobs.changed:
            jobs, left = self._jobs.going()
            return jobs, [
                Version(block.home.target(left[block]), True)
                if block in left
                else Version(block.home.version, block.home.written)
                for block in self._store.state_blocks()
            ]

    def rest(self) -> bool:
        """Block until all that was sealed is committed; False where it never will be."""
        with self._jobs.hurry(), self._changed:
            self._changed.wait_for(lambda: self._open == 0 or self._ended)
            return self._open == 0

    def close(self) -> None:
        """Commit what was sealed, and end the thread. May be called twice."""
        with self._changed:
            self._is_closing = True
        self._sealed.put(None)
        with self._jobs.hurry():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._commit_next():
                pass  # without what was committed, which may be large
        except EngineClosedError:
            log.debug("an update failed, so its step is not committed")
        except BaseException as error:
            self._store.latch.fail(self._with_way_out(error), "a commit")
            self._jobs.refuse()  # what waits for a commit waits in vain
            self._jobs.end_jobs()
        finally:
            if self._agreement is not None:
                self._agreement.end()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._jobs.poke()

    def _commit_next(self) -> bool:
        """Have what was sealed next committed; False when that was given up, and at the end."""
        sealed = self._sealed.get()
        return sealed is not None and self._commit(sealed)

    def _commit(self, sealed: _Sealed) -> bool:
        """Have `sealed` committed; False when that was given up."""
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
        """Return when the updates of `sealed` have ended. Where other ranks wait for that, they
        need no place."""
        if self._agreement is None:
            self._jobs.await_ended(sealed.jobs)
            return
        while not self._jobs.await_ended(sealed.jobs, self._agreement.pause):
            if self._agreement.is_awaited(sealed.key):
                with self._jobs.hurry():
                    self._jobs.await_ended(sealed.jobs)

    def _with_way_out(self, error: BaseException) -> BaseException:
        """`error`, which ended a commit; where a drive or the system did that, it says what to do.

        A flush that failed may have dropped what was written, and the next one would not tell. So
        nothing more is committed over these bytes. They are written again by who goes on from the
        last committed step.
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
        """Whether to wait no more for other ranks: nobody needs them for the last record."""
        with self._changed:
            return self._is_closing and (self._open == 1 or waited > CLOSING_SECONDS)
