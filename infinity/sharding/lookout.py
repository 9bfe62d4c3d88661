"""Ends waits for collectives that ranks do not join, and explains why.

[Note: ranks that are stuck]
A thread that waits for a collective reads the notes of other ranks now and then
(`infinity.sharding.watch`). It ends the wait in three cases: the first collective in the queue has
waited for `Tuning.collective_timeout`; another rank has ended its wait or failed; the orders
differ. A rank that fails for good, for example in a background update, notes that at once.
Meanwhile torch's own call continues in the thread of the exchange. It ends by its own timeout,
which is a little longer.

[Note: the watchdog of NCCL]
If that timeout passes in NCCL, torch ends the whole process, whatever the process does by then. So
over NCCL the timeout leaves `WATCHDOG_SECONDS` more. Code that catches the error can save data in
that time, and the error says how long it is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from infinity.errors import EngineClosedError, InfinityError, NvmeError
from infinity.sharding.posted import Collective, Posted
from infinity.sharding.watch import Note, Watch, diverged, state_of
from infinity.tiers.latch import Latch

log = logging.getLogger("infinity")


class Lookout:
    """Looks after the waits for `posted` collectives. An error goes to the `latch`, so it reaches
    the next call of the user. Any thread may call it.

    `ends_after` is the number of seconds after which torch ends the process; None if it does not.
    """

    def __init__(
        self, posted: Posted, watch: Watch, latch: Latch, ends_after: float | None
    ) -> None:
        self._posted, self._watch, self._latch = posted, watch, latch
        self._ends_after = ends_after

    def tell(self, error: EngineClosedError) -> None:
        """This rank failed for good, on any thread: tell the other ranks now."""
        self._watch.write(self._posted.note(None, failed=True, reason=str(error)))
        self._posted.fail(error)

    def look(self) -> None:
        """A thread waits: tell the other ranks, and end the wait if it would not end."""
        going = self._posted.first()
        if going is None:
            return
        watch, mine = self._watch, self._posted.note(going)
        watch.write(mine)
        others = watch.others()
        # Negative while the data of this rank is not present.
        waited = time.perf_counter() - going.arrived
        reason = diverged(watch.rank, mine, others)
        if not reason and any(note is not None and note.failed for note in others.values()):
            reason = self._in_vain(mine, others)
        elif not reason and waited > watch.timeout:
            reason = (
                f"rank {watch.rank} waited {waited:.0f} s for the others in collective "
                f"{mine.number}; {state_of(others)}. See what they do (py-spy dump --pid ...); if "
                "a rank may compute for longer than that, raise "
                f"Config(tuning=Tuning(collective_timeout={watch.timeout:g}))"
            )
        if reason:
            watch.write(mine._replace(failed=True))
            reason += self._deadline(going, waited)
            self._posted.fail(self._latch.fail(InfinityError(reason), going.name))

    def _deadline(self, going: Collective, waited: float) -> str:
        """The end of the error for a wait of `waited` seconds in `going`; see [Note: the watchdog
        of NCCL]."""
        if self._ends_after is None or not going.groups or going.arrived == math.inf:
            return ""
        return (
            f". torch ends this process in about {self._ends_after - waited:.0f} s, when NCCL's "
            "watchdog gives up, too: save what you need before, or set "
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 to keep it"
        )

    def _in_vain(self, mine: Note, others: Mapping[int, Note | None]) -> str:
        return (
            f"rank {self._watch.rank} waits in collective {mine.number} in vain; {state_of(others)}"
        )

    def _explain(self, collective: Collective, error: BaseException) -> BaseException:
        """`error` of torch, with the states of the other ranks. These may learn of it later."""
        mine = self._posted.note(collective, failed=True)
        others = self._watch.others(patience=2 * self._watch.pause)
        if any(note is not None and note.reason for note in others.values()):
            # The failure of another rank is the cause of any error of torch.
            return InfinityError(self._in_vain(mine, others))
        explained = InfinityError(
            diverged(self._watch.rank, mine, others) or f"{error} ({state_of(others)})"
        )
        explained.__cause__ = error
        return explained

    def failed(self, collective: Collective, error: BaseException) -> None:
        """`error` ended `collective`, the first in the queue. No further collective is joined, even
        if this method fails, too. On the thread of the exchange."""
        if collective.ended():
            log.debug("%s had ended when it failed: %s", collective.name, error)
            return
        told = error
        try:
            # The cause may be on other ranks.
            if collective.arrived < math.inf and not isinstance(error, NvmeError):
                self._watch.write(self._posted.note(collective, failed=True))
                told = self._explain(collective, error)
        except BaseException as later:
            log.error(
                "%s failed (%s), and so did asking the other ranks: %s",
                collective.name,
                error,
                later,
                exc_info=later,
            )
        finally:
            closed = (
                told
                if isinstance(told, EngineClosedError)
                else self._latch.fail(told, collective.name)
            )
            self._posted.fail(closed)
            if not collective.ended():  # it was joined, and failed then
                collective.end(error=closed)
