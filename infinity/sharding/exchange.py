"""The thread that joins the collectives of one engine, in the order in which they are posted.

The same thread brings gradients to a home in host memory: with one rank and a GPU, and on each rank
by itself if they are reduced once per step (stage 1). `sharding/posted` has [Note: one order].

[Note: groups of its own]
Collectives run in copies of the process groups that the engine got. Code of the user, or a
checkpoint, may meanwhile join collectives in the given groups from another thread. Their order
would differ from rank to rank.

[Note: waits for a gather]
The stream of the model waits for a gather. Its thread waits only until all ranks have come and the
gather is queued (`Collective.await_queued`). After that the gather ends without action of this
process. So a rank that is stuck is found before, on the host.

[Note: a place that is being gathered into]
A gather is posted when the unit has its place, before its use. Until it has ended, no other unit
gets the place and no update rewrites it: both wait (`DeviceCopy.gathering`). To evict another unit
instead would be a choice that depends on time. An update whose gather is posted must be able to end
without the waiting thread: the gather is posted after everything that `Residency.begin_update` may
have to wait for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError, InfinityError
from infinity.observe import Recorder
from infinity.sharding import collectives
from infinity.sharding.lookout import Lookout
from infinity.sharding.posted import Collective, Contribution, Posted
from infinity.sharding.ranks import Among, Ranks
from infinity.sharding.watch import Watch
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

CLOSING_SECONDS = 30.0
"""The time that `Exchange.close` waits for the other ranks to join posted collectives."""

WATCHDOG_SECONDS = 600.0
"""The least time from `Tuning.collective_timeout` until torch ends the process, if it does."""


class Exchange:
    """The collectives among `ranks`. Every rank must make an exchange, because it copies their
    groups. The thread that runs the model calls all methods, but for `add_by_rank`.

    `timeout` is `Tuning.collective_timeout`, in seconds. A failure goes to the latch of the store,
    so it reaches the next call of the user. After it no collective is joined.
    """

    def __init__(
        self, ranks: Ranks, device: ComputeDevice, store: Store, recorder: Recorder, timeout: float
    ) -> None:
        self.device, self._latch, self._recorder = device, store.latch, recorder
        is_watched = any(map(collectives.is_watched, ranks.groups()))
        ends_after = max(1.25 * timeout + 1, timeout + WATCHDOG_SECONDS if is_watched else 0)
        self.ranks = ranks.copy(ends_after)
        self.room = collectives.receiving(self.ranks.groups())
        """Memory in which reductions receive."""
        self.averages = True
        """Whether gradients are averaged over the replicas when they arrive. False: when they are
        needed (`Engine.no_sync`)."""
        self.bytes_per_second: float | None = None
        """For tests and benchmarks: the highest rate at which this rank sends."""
        self._watch, self._posted = Watch(self.ranks, timeout), Posted()
        self._lookout = Lookout(
            self._posted, self._watch, store.latch, ends_after if is_watched else None
        )
        self._closing = threading.Event()
        self._latch.add_listener(self._lookout.tell)
        self._thread = threading.Thread(target=self._run, name="infinity-exchange", daemon=True)
        self._thread.start()

    def post(
        self,
        operation: str,
        unit: str,
        contribution: Contribution,
        among: Among = Among.DATA,
    ) -> Collective:
        """Post the collective `operation` on `unit`: it is joined after all earlier ones. On a
        stream device it runs after the work that the caller has queued so far."""
        collective = Collective(
            self._posted.count,
            f"{operation} {unit}",
            contribution,
            self.ranks.groups(among),
            self.device.mark(),
            (self._watch.pause, self._lookout.look),
        )
        self._posted.add(collective, operation, unit, among)
        return collective

    def sum(self, values: Sequence[float], what: str, among: Among = Among.ALL) -> list[float]:
        """The sums of `values` over the ranks `among`. `what` names them in a report."""
        join = functools.partial(collectives.all_reduce_sum, values, self.ranks.groups(among))
        return self.post("sum", what, Contribution(join), among).wait()

    def sum_alike(self, values: Sequence[float], what: str, alike: int) -> list[float] | None:
        """Like `sum` over all ranks. None on all of them if they differ in `alike`; then the number
        of `values` may differ, too."""
        join = functools.partial(collectives.all_reduce_sum, values, self.ranks.groups())
        contribution = Contribution(join, alike=alike)
        return self.post("sum", what, contribution, Among.ALL).wait()

    def most(self, values: Sequence[float], what: str) -> Collective:
        """Begin to find the largest of each of `values` over all ranks. `what` names them in a
        report."""
        join = functools.partial(collectives.all_reduce_most, values, self.ranks.groups())
        return self.post("most", what, Contribution(join), Among.ALL)

    def sum_by_rank(self, values: Sequence[float], what: str) -> list[float]:
        """Like `sum` among one copy of the model, with the bits of `add_by_rank`."""
        contribution = Contribution(functools.partial(self.add_by_rank, values))
        return self.post("sum", what, contribution, Among.COPY).wait()

    def add_by_rank(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over one copy of the model. On the thread of the exchange."""
        return collectives.sum_by_rank(values, self.ranks.groups(Among.COPY))

    def rest(self) -> None:
        """Block until all posted collectives have ended."""
        last = self._posted.last()
        if last is not None:
            last.await_end()

    def close(self) -> None:
        """Join the posted collectives, as the other ranks do, and end the thread. After an error,
        or `CLOSING_SECONDS`, stop waiting.

        Calls of torch that are still waiting then end with torch.distributed. May be called twice.
        """
        self._latch.remove_listener(self._lookout.tell)
        self._closing.set()
        self._posted.close()
        self._thread.join(CLOSING_SECONDS if self._posted.error is None else 1.0)
        if self._thread.is_alive():
            log.warning(
                "the engine was closed although other ranks have not joined %s",
                ", then ".join(self._posted.names()) or "all",
            )
            self._posted.fail(EngineClosedError("the engine was closed"))
        else:
            ranks, self.ranks = self.ranks, Ranks()
            ranks.end()

    # On the thread

    def _run(self) -> None:
        self.device.begin_thread()
        while (collective := self._posted.take()) is not None:
            if not collective.ended():
                try:
                    self._join(collective)
                except BaseException as error:
                    self._lookout.failed(collective, error)

    def _join(self, collective: Collective) -> None:
        with (
            self._recorder.range("collective", collective.name),
            self.device.side_stream(collective.after) as copy,
        ):
            collective.contribution.arrive()
            start = time.perf_counter()
            if collective.groups:  # else it waits for no other rank
                collective.arrived = start
            idle = collective.contribution.idle
            brought = collective.order, collective.contribution.alike, int(idle is None)
            ordered, alike, as_here = collectives.same_values(brought, collective.groups)
            if not ordered:
                raise InfinityError("the ranks have posted different collectives")
            mine = collective.contribution  # empty, if another thread has ended it meanwhile
            call = mine.join if idle is None or not as_here else idle
            result = call() if alike else None
        if self.bytes_per_second is not None:
            self._closing.wait(start + mine.sent / self.bytes_per_second - time.perf_counter())
        collective.start(copy)
        copy.wait()
        self._recorder.add("collective", collective.name, start, time.perf_counter())
        if self._posted.remove(collective):
            collective.end(result)
            if self._watch.noted:
                self._watch.write(None)
