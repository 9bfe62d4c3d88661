"""The collectives of one engine with several ranks: on a thread of their own, in the order in which
they are posted.

The same thread brings gradients to a home in host memory: with one rank and a GPU, and on each
rank alone where they are reduced once per step (stage 1).

[Note: one order]
All ranks must join the same collectives in the same order (invariant I6). The thread that runs the
model posts them, at points that follow from the uses of units alone. They are joined first come,
first served. So the first one in the queue waits for this rank's part, a shard that is still being
read or updated. A later one could perhaps go on at once, but its part need not have arrived on
other ranks. Before each one the ranks compare what they have posted so far, a few bytes. Units
often have one size, so ranks that run different modules would otherwise take each other's data for
their own. Where sizes differ, gloo would end the process.

[Note: groups of its own]
They run in copies of the process groups that the engine was given. The user's code, or a
checkpoint, may meanwhile join collectives in the given groups from another thread. Their order
would differ from rank to rank.

[Note: who waits for a gather]
The model's stream, and its thread only until all ranks have come and the gather is queued
(`Collective.await_queued`). From then on it ends without this process doing anything, so a rank
that is stuck is found before, on the host.

[Note: a place that is being gathered into]
A gather is posted when the unit has its place, ahead of its use. Until it has ended, no other unit
gets the place and no update rewrites it: both wait (`DeviceCopy.gathering`). To evict something
else instead would be a choice that depends on time. An update whose gather is posted must be able
to end without the thread that waits: it is posted after all that `Residency.begin_update` may have
to wait for.

[Note: ranks that are stuck]
A thread that waits for a collective reads the notes of other ranks now and then
(`infinity.sharding.watch`). It gives up in three cases: the first one in the queue has waited for
`Tuning.collective_timeout`; another rank gave up or failed; the orders differ. A rank that fails
for good, for example in a background update, notes that at once. torch's own call goes on in this
thread meanwhile, and ends by its own timeout, which is a little longer.

[Note: the watchdog of NCCL]
Where that timeout passes in NCCL, torch ends the whole process, whatever it does by then. So over
NCCL the timeout leaves `WATCHDOG_SECONDS` more, for who catches the error to save what he has, and
the error says how many there are.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from infinity.device import ComputeDevice, Copy
from infinity.errors import EngineClosedError, InfinityError, NvmeError
from infinity.observe import Recorder
from infinity.sharding import collectives
from infinity.sharding.alike import Facts, check_alike
from infinity.sharding.ranks import Ranks
from infinity.sharding.watch import RECENT, Note, Watch, diverged, state_of
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

CLOSING_SECONDS = 30.0
"""How long `Exchange.close` waits for the other ranks to join what was posted."""

WATCHDOG_SECONDS = 600.0
"""How long a process goes on at least after `Tuning.collective_timeout` where torch then ends
it."""


Look = tuple[float, Callable[[], None]]
"""What who waits does now and then, and how often: every so many seconds."""


class Collective:
    """One collective on its way, number `number` of its engine, called `name`. Any thread may wait
    for it."""

    def __init__(
        self,
        number: int,
        name: str,
        join: Callable[[], Any],
        sent: float,
        arrive: Callable[[], object],
        watch: Look,
    ) -> None:
        self.number, self.name, self.join, self.sent, self.arrive = number, name, join, sent, arrive
        self.after: Any = None
        """The work of a stream device that it comes after, as `ComputeDevice.mark`."""
        self.order = self.alike = 0
        """`Calls.value` with this one; and what all ranks bring alike, else it is not joined."""
        self.idle: Callable[[], Any] | None = None
        """On a rank that brings zeros: what is called instead of `join` where all ranks do."""
        self.groups: Sequence[ProcessGroup] = ()
        """Among whom it is joined, one after the other."""
        self._watch = watch
        self.arrived = math.inf
        """When what this rank brings was there, in seconds of `time.perf_counter`."""
        self._queued, self._ended = threading.Event(), threading.Event()
        self._copy = Copy()
        self._result: Any = None
        self._error: EngineClosedError | None = None

    def queued(self) -> bool:
        """Whether `await_queued` would not wait."""
        return self._queued.is_set()

    def ended(self) -> bool:
        """Whether `wait` would not wait."""
        return self._ended.is_set()

    def start(self, copy: Copy) -> None:
        """All ranks have come, and what it does on the device is queued, and ends with `copy`."""
        self._copy = copy
        self._queued.set()

    def end(self, result: Any = None, error: EngineClosedError | None = None) -> None:
        """It was joined and gave `result`, or never will be. What it holds is let go."""
        self._result, self._error, self.groups = result, error, ()
        self._copy = Copy()
        self.join = self.arrive = lambda: None
        self.idle = None
        self._ended.set()
        self._queued.set()

    def await_queued(self) -> Copy:
        """Block until what it does on the device is queued: what it ends with. Raises like
        `wait`."""
        self._await(self._queued)
        copy = self._copy
        self._check()
        return copy

    def await_end(self) -> None:
        """Block until it has ended, well or not."""
        self._await(self._ended)

    def wait(self) -> Any:
        """Block until it has ended; its result. Raises `EngineClosedError` when it, or one before
        it, failed."""
        self.await_end()
        self._check()
        return self._result

    def _await(self, event: threading.Event) -> None:
        pause, look = self._watch
        while not event.wait(pause):
            look()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineClosedError(str(self._error)) from self._error.__cause__


class Exchange:
    """The collectives among `ranks`, which are copied: every rank must make one. Methods are for
    the thread that runs the model. `timeout` is `Tuning.collective_timeout`, in seconds.

    An error is told to the store, so that it reaches the user's next call, and nothing is joined
    any more.
    """

    def __init__(
        self, ranks: Ranks, device: ComputeDevice, store: Store, recorder: Recorder, timeout: float
    ) -> None:
        self.device, self._store, self._recorder = device, store, recorder
        self._is_watched = any(map(collectives.is_watched, ranks.groups()))
        self._torch_timeout = max(
            1.25 * timeout + 1, timeout + WATCHDOG_SECONDS if self._is_watched else 0
        )
        self.ranks = ranks.copy(self._torch_timeout)
        self.room = collectives.receiving(self.ranks.groups())
        """What reductions receive in."""
        self._watch = Watch(self.ranks, timeout)
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._count = 0  # how many were posted
        self.averages = True
        """Whether gradients are averaged over the replicas as they come; else when they are needed
        (`Engine.no_sync`)."""
        self.bytes_per_second: float | None = None
        """For tests and benchmarks: every collective takes at least as long as sending at this rate
        what this rank sends."""
        self._calls, self._part_calls = collectives.Calls(), collectives.Calls()
        self._lock = threading.Lock()
        self._open: dict[Collective, None] = {}  # posted, and not ended
        self._posted: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._error: EngineClosedError | None = None
        self._closing = threading.Event()
        store.latch.add_listener(self._tell)
        self._thread = threading.Thread(target=self._run, name="infinity-exchange", daemon=True)
        self._thread.start()

    def post(
        self,
        operation: str,
        unit: str,
        join: Callable[[], Any],
        sent: float = 0,
        arrive: Callable[[], object] = lambda: None,
        everywhere: bool = True,
        tensor: bool = False,
        alone: bool = False,
        alike: int = 0,
        idle: Callable[[], Any] | None = None,
    ) -> Collective:
        """Have `join` called after all that was posted before, and when `arrive` has returned.

        Among all data parallel ranks if `everywhere`, else among those that the shards are divided
        among; with `tensor` among the tensor parallel ranks, too. What this rank does `alone` is
        not counted: others need not do it. On a stream device it runs after what the caller has
        queued so far. This rank sends `sent` bytes in it. Where ranks differ in `alike`, fewer than
        64 bits, it is not joined on any of them, and gives None. A rank that brings nothing but
        zeros may say what is called instead of `join` where that is so on all ranks: `idle`.
        """
        groups = () if alone else self._groups(everywhere, tensor)
        collective = self._new(operation, unit, join, sent, arrive, groups)
        collective.alike, collective.idle = alike, idle
        with self._lock:
            if not alone:
                self._calls.note(operation, unit)
                self._recent.append(collective.name)
                self._count += 1
            collective.order = self._calls.value
            self._put(collective)
        return collective

    def post_among_parts(
        self, operation: str, unit: str, join: Callable[[], Any], sent: float
    ) -> Collective:
        """Like `post`, among the tensor parallel ranks alone. It is compared with what these have
        posted so, and is not counted: data parallel ranks may post more of them, or fewer."""
        groups = Ranks(tensor=self.ranks.tensor).groups()
        collective = self._new(operation, unit, join, sent, lambda: None, groups)
        with self._lock:
            self._part_calls.note(operation, unit)
            collective.order = self._part_calls.value
            self._put(collective)
        return collective

    def _new(
        self,
        operation: str,
        unit: str,
        join: Callable[[], Any],
        sent: float,
        arrive: Callable[[], object],
        groups: Sequence[ProcessGroup],
    ) -> Collective:
        look = self._watch.pause, self._look
        collective = Collective(self._count, f"{operation} {unit}", join, sent, arrive, look)
        collective.after, collective.groups = self.device.mark(), groups
        return collective

    def _put(self, collective: Collective) -> None:
        """Queue it, under the lock."""
        if self._closing.is_set() or self._error is not None:
            collective.end(error=self._error or EngineClosedError("the engine was closed"))
        else:
            self._open[collective] = None
            self._posted.put(collective)

    def sum(self, values: Sequence[float], what: str, everywhere: bool = True) -> list[float]:
        """The sums of `values` over all ranks, or without replicas; for `what` says a report."""
        join = functools.partial(
            collectives.all_reduce_sum, values, self._groups(everywhere, tensor=True)
        )
        found: list[float] = self.post("sum", what, join, everywhere=everywhere, tensor=True).wait()
        return found

    def sum_alike(self, values: Sequence[float], what: str, alike: int) -> list[float] | None:
        """Like `sum`, where all ranks call it with the same `alike`; else None on all of them. Then
        they need not have as many `values`."""
        groups = self._groups(everywhere=True, tensor=True)
        join = functools.partial(collectives.all_reduce_sum, values, groups)
        found: list[float] | None = self.post("sum", what, join, tensor=True, alike=alike).wait()
        return found

    def explain(self, facts: Facts, way_out: str) -> None:
        """Raise `ConfigError` where ranks differ in `facts`; see `check_alike`."""
        check_alike(self.ranks, self._watch.timeout, facts, way_out)

    def most(self, values: Sequence[float], what: str) -> Collective:
        """Begin to find the largest of each of `values` over all ranks; for `what` says a
        report."""
        groups = self._groups(everywhere=True, tensor=True)
        join = functools.partial(collectives.all_reduce_most, values, groups)
        return self.post("most", what, join, tensor=True)

    def sum_by_rank(self, values: Sequence[float], what: str) -> list[float]:
        """As `sum` without replicas, with the bits of `add_by_rank`."""
        join = functools.partial(self.add_by_rank, values)
        found: list[float] = self.post("sum", what, join, everywhere=False, tensor=True).wait()
        return found

    def add_by_rank(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks but replicas, for who joins a collective: on the
        thread of the exchange."""
        return collectives.sum_by_rank(values, self._groups(everywhere=False, tensor=True))

    def _groups(self, everywhere: bool, tensor: bool) -> list[ProcessGroup]:
        shards, replicas, parts = self.ranks
        return Ranks(shards, replicas if everywhere else None, parts if tensor else None).groups()

    def rest(self) -> None:
        """Block until everything that was posted has ended."""
        with self._lock:
            last = next(reversed(self._open), None)
        if last is not None:
            last.await_end()

    def fail(self, error: EngineClosedError) -> None:
        """Nothing is joined any more, and who waits, now or later, gets `error`. May be called by
        any thread."""
        with self._lock:
            self._error = self._error or error
            waited_for, self._open = list(self._open), {}
        for collective in waited_for:
            collective.end(error=self._error)

    def close(self) -> None:
        """Join what was posted, as the other ranks do, and end the thread; after an error, or
        `CLOSING_SECONDS`, give it up.

        What was given up on ends when torch.distributed ends it. May be called twice.
        """
        self._store.latch.remove_listener(self._tell)
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._posted.put(None)
        self._thread.join(CLOSING_SECONDS if self._error is None else 1.0)
        if self._thread.is_alive():
            going = [collective.name for collective in self._open]
            log.warning(
                "the engine was closed although other ranks have not joined %s",
                ", then ".join(going) or "all",
            )
            self.fail(EngineClosedError("the engine was closed"))
        else:
            ranks, self.ranks = self.ranks, Ranks()
            ranks.end()

    # When it takes long

    def _note(self, going: Collective | None, failed: bool = False, reason: str = "") -> Note:
        with self._lock:
            at = (
                (self._count, "", False)
                if going is None
                else (going.number, going.name, going.arrived < math.inf)
            )
            return Note(*at, failed, self._count, list(self._recent), reason)

    def _tell(self, error: EngineClosedError) -> None:
        """Something failed on this rank for good, on whatever thread: the others are told now,
        whatever they wait for."""
        self._watch.write(self._note(None, failed=True, reason=str(error)))
        self.fail(error)

    def _look(self) -> None:
        """Somebody waits: say so to the other ranks, and give up where that has no end."""
        with self._lock:
            going = next(iter(self._open), None)
        if going is None:
            return
        mine = self._note(going)
        self._watch.write(mine)
        others = self._watch.others()
        # Less than none while this rank's own part is not there.
        waited = time.perf_counter() - going.arrived
        reason = diverged(self._watch.rank, mine, others)
        if not reason and any(note is not None and note.failed for note in others.values()):
            reason = self._in_vain(mine, others)
        elif not reason and waited > self._watch.timeout:
            reason = (
                f"rank {self._watch.rank} waited {waited:.0f} s for the others in collective "
                f"{mine.number}; {state_of(others)}. See what they do (py-spy dump --pid ...); if "
                "a rank may compute for longer than that, raise "
                f"Config(tuning=Tuning(collective_timeout={self._watch.timeout:g}))"
            )
        if reason:
            self._watch.write(mine._replace(failed=True))
            reason += self._deadline(going, waited)
            self.fail(self._store.latch.fail(InfinityError(reason), going.name))

    def _deadline(self, going: Collective, waited: float) -> str:
        """What becomes of the process when this rank has `waited` and gives up on `going`; see
        [Note: the watchdog of NCCL]."""
        if not (self._is_watched and going.groups and going.arrived < math.inf):
            return ""
        return (
            f". torch ends this process in about {self._torch_timeout - waited:.0f} s, when NCCL's "
            "watchdog gives up, too: save what you need before, or set "
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 to keep it"
        )

    def _in_vain(self, mine: Note, others: Mapping[int, Note | None]) -> str:
        return (
            f"rank {self._watch.rank} waits in collective {mine.number} in vain; {state_of(others)}"
        )

    def _explain(self, collective: Collective, error: BaseException) -> BaseException:
        """What torch raised, with what the other ranks are at, which they may have yet to find
        out."""
        mine = self._note(collective, failed=True)
        others = self._watch.others(patience=2 * self._watch.pause)
        if any(note is not None and note.reason for note in others.values()):
            # Whatever torch met is what became of it.
            return InfinityError(self._in_vain(mine, others))
        explained = InfinityError(
            diverged(self._watch.rank, mine, others) or f"{error} ({state_of(others)})"
        )
        explained.__cause__ = error
        return explained

    # On the thread

    def _run(self) -> None:
        self.device.begin_thread()
        while (collective := self._posted.get()) is not None:
            if not collective.ended():
                try:
                    self._join(collective)
                except BaseException as error:
                    self._give_up(collective, error)

    def _join(self, collective: Collective) -> None:
        with (
            self._recorder.range("collective", collective.name),
            self.device.side_stream(collective.after) as copy,
        ):
            collective.arrive()
            start = time.perf_counter()
            if collective.groups:  # else nobody waits for others
                collective.arrived = start
            idle = collective.idle
            brought = collective.order, collective.alike, int(idle is None)
            ordered, alike, as_here = collectives.same_values(brought, collective.groups)
            if not ordered:
                raise InfinityError("the ranks have posted different collectives")
            call = collective.join if idle is None or not as_here else idle
            result = call() if alike else None
        if self.bytes_per_second is not None:
            self._closing.wait(
                start + collective.sent / self.bytes_per_second - time.perf_counter()
            )
        collective.start(copy)
        copy.wait()
        self._recorder.add("collective", collective.name, start, time.perf_counter())
        with self._lock:
            going = collective in self._open  # else `fail` has ended it meanwhile
            self._open.pop(collective, None)
        if going:
            collective.end(result)
            if self._watch.noted:
                self._watch.write(None)

    def _give_up(self, collective: Collective, error: BaseException) -> None:
        """`error` ended the first in the queue: nothing is joined any more, whatever else fails
        here."""
        if collective.ended():
            # Somebody has given up on it.
            log.debug("%s had ended when it failed: %s", collective.name, error)
            return
        told = error
        try:
            # It may be the other ranks' doing.
            if collective.arrived < math.inf and not isinstance(error, NvmeError):
                self._watch.write(self._note(collective, failed=True))
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
                else self._store.latch.fail(told, collective.name)
            )
            self.fail(closed)
            if not collective.ended():  # it was joined, and failed then
                collective.end(error=closed)
