"""Which step all ranks have made durable: notes in torch.distributed's store.

[Note: one clock]
A rank numbers its records. All ranks make the same records in the same order, because the program
fixes a record, and never the time that something takes. So the number is the clock of all ranks. A
rank that has made a record adds one to the count of its key (`RecordKey`). The key is more than the
number: one rank may be closed where another rank continues, takes a step of its scheduler, or
writes to parameters. When the count is full, all ranks have the record, and each releases its
record before. After a kill in between, some ranks have one record more. All have the record before.

[Note: which threads wait]
The committer's thread waits for other ranks. The model's thread waits for the committer: a step
begins when all ranks have committed the step before. The count is one question to the store,
however many ranks there are. A rank that has waited for a while reads the notes of other ranks, to
see whether one of them has failed, has ended, or has made another step.

[Note: no circle]
An update that begins in backward may wait for a commit of all ranks. A commit waits for updates
that are final. Final updates never wait for a commit or a collective. But a final update may wait
for its place on the compute device, which the forward gives it. If another rank waits for the
record of this rank, the update runs without a place (`is_awaited`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from infinity.durable.states import NO_RECORD, RecordKey
from infinity.errors import EngineClosedError, InfinityError
from infinity.tiers.latch import Latch

CLOSING_SECONDS = 30.0
"""Seconds that `close` waits for other ranks to make the records before its last one."""
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks at the count
_PAUSE = 2.0  # and between looks at the notes of other ranks, at most


class LastRecord(NamedTuple):
    """The last record of a rank, and why the rank makes no other: "" while it does."""

    key: RecordKey = NO_RECORD
    end: str = ""

    @classmethod
    def of(cls, note: bytes) -> LastRecord:
        """The `note` of a rank, decoded."""
        key, end = json.loads(note)
        return cls(RecordKey(*key), end)


class Agreement:
    """Which records all ranks have. The thread that commits calls it; any thread may call `end`.

    All `members`, ranks by their number among all processes, make an agreement of the same unique
    `name`. They have the record `last`, of an earlier run, or `NO_RECORD`.
    `timeout` is `Tuning.collective_timeout`, in seconds.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        name: str,
        last: RecordKey,
        timeout: float,
        latch: Latch,
    ) -> None:
        self._rank, self._members, self._timeout, self._latch = rank, members, timeout, latch
        self.pause = min(timeout / 8, _PAUSE)
        """Seconds that a rank waits before it reads the notes of other ranks."""
        self._notes = distributed_c10d.PrefixStore(
            f"infinity/commits/{name}", distributed_c10d._get_default_store()
        )
        self._lock = threading.Lock()
        self._last = LastRecord(last)
        self._counted = ""  # the name of the count of the last record
        self._refusals = 0  # how often ranks have asked each other for some
        latch.add_listener(self._fail)

    def is_awaited(self, key: RecordKey) -> bool:
        """Whether another rank has made the record `key`, which comes next here."""
        return self._notes.add(_count_of(key), 0) > 0

    def reach(self, key: RecordKey, gives_up: Callable[[float], bool]) -> bool:
        """This rank has made the record `key`. Returns True when all ranks have it. Returns False
        if `gives_up(seconds waited)` is true.

        Raises `EngineClosedError` when this rank failed. Raises `InfinityError` when another rank
        failed, has ended, has made another record, or does not come.
        """
        before, self._counted = self._counted, _count_of(key)
        try:
            self._tell(LastRecord(key))
            if not self._await_all(gives_up):
                return False
        except dist.DistError as error:
            raise InfinityError(
                f"rank {self._rank} cannot ask the others for step {key.step}: the store of "
                f"torch.distributed is gone with the process that held it ({error})"
            ) from error
        if before and self._rank == self._members[0]:
            with suppress(Exception):  # it is not needed any more; not all stores can delete
                self._notes.delete_key(before)
        return True

    def _await_all(self, gives_up: Callable[[float], bool]) -> bool:
        """Count this rank, and see `reach`."""
        count = self._notes.add(self._counted, 1)
        start, look, asks = time.monotonic(), _FIRST_LOOK, self.pause
        while count < len(self._members):
            waited = time.monotonic() - start
            if gives_up(waited):
                return False
            self._latch.check()
            if waited > asks:
                asks += self.pause
                self._ask(waited)
            time.sleep(look)
            look = min(2 * look, _LAST_LOOK)
            count = self._notes.add(self._counted, 0)
        return True

    def refusals(self, reason: str, meet: Callable[[bool], bool]) -> str:
        """The ranks that refuse to begin something together, and their reasons, as text; "" if no
        rank refuses. This rank refuses for `reason`, unless it is "". All ranks call it equally
        often, on the thread that runs the model. `meet` returns whether any rank passes True.

        A rank that refuses writes its reason before it meets the other ranks.
        """
        self._refusals += 1
        name = f"refusal {self._refusals} of rank "
        if reason:
            with suppress(Exception):  # the store may be gone with the process that held it
                self._notes.set(f"{name}{self._rank}", reason)
        if not meet(bool(reason)):
            return ""
        found = []
        with suppress(Exception):
            for rank in self._members:
                if self._notes.check([f"{name}{rank}"]):
                    found.append(
                        f"rank {rank} refuses it: {self._notes.get(f'{name}{rank}').decode()}"
                    )
        return "; ".join(found) or "another rank refuses it"

    def end(self, reason: str = "its engine was closed") -> None:
        """This rank makes no other record, for this `reason`. May be called twice."""
        self._latch.remove_listener(self._fail)
        with suppress(Exception):  # the store may be gone with the process that held it
            self._tell(self._last._replace(end=reason))

    def _fail(self, error: EngineClosedError) -> None:
        self.end(str(error))

    def _tell(self, progress: LastRecord) -> None:
        with self._lock:
            if not self._last.end:
                self._last = progress
                self._notes.set(str(self._rank), json.dumps(progress))

    def _ask(self, waited: float) -> None:
        """Raise `InfinityError` if a note of another rank says that its record will not come, or
        if the wait is too long."""
        mine, found = self._last.key, {}
        for rank in self._members:
            known = self._notes.check([str(rank)])
            found[rank] = LastRecord.of(self._notes.get(str(rank))) if known else LastRecord()
        late = {rank: note for rank, note in found.items() if note.key != mine}
        for rank, (key, end) in late.items():
            if key.closed and key[:3] == mine[:3]:
                end = "its engine was closed at an earlier or later place in the program"
            elif key.sequence >= mine.sequence:
                raise InfinityError(
                    f"record {key.sequence} of rank {rank} is of {key.moment}, and record "
                    f"{mine.sequence} of rank {self._rank} of {mine.moment}; all ranks must "
                    "take the same steps, and write to parameters at the same places"
                )
            if end:
                raise InfinityError(f"rank {rank} does not commit step {mine.step}: {end}")
        if waited > self._timeout:
            said = "; ".join(
                f"rank {rank} has step {key.step} (record {key.sequence})"
                for rank, (key, _) in late.items()
            )
            raise InfinityError(
                f"rank {self._rank} waited {waited:.0f} s for the others to commit step "
                f"{mine.step}; {said}. See what they do (py-spy dump --pid ...); if a rank may "
                "compute for longer than that, raise "
                f"Config(tuning=Tuning(collective_timeout={self._timeout:g}))"
            )


def _count_of(key: RecordKey) -> str:
    closed = f", closed {key.closed}" * bool(key.closed)
    return f"record {key.sequence} of step {key.step}, {key.writes} writes{closed}"
