"""Which step all ranks have made durable: notes in torch.distributed's store.

[Note: one clock]
A rank numbers its records, and all ranks make the same ones in the same order: what fixes a record
is in the program, never in the time that something takes. So the number is the clock of all. A rank
that has made a record adds one to the count of that number and step, and of the writes outside of
steps that came before: one rank may have been closed where another one goes on and writes. When the
count is full, all have it, and each gives up its record before. A kill in between leaves ranks that
have one record more than others, and the one before, which all have.

[Note: who waits]
The thread that commits, and whoever waits for it: a step begins when all ranks have committed the
one before. The count is one question to the store, however many ranks there are. Only who has
waited for a while reads the notes of the others, to see whether one has failed, has ended, or has
made another step.

[Note: no circle]
An update that begins in backward may wait for a commit of all ranks. A commit waits for updates
that are final. None of these waits for a commit or for a collective, but one may wait for its place
on the compute device, which the forward gives it. Where another rank waits for this one's record,
it goes without (`is_awaited`).
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

from infinity.errors import EngineClosedError, InfinityError
from infinity.tiers.latch import Latch

CLOSING_SECONDS = 30.0
"""How long who closes waits for other ranks to make what comes before its last record."""
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks at the count
_PAUSE = 2.0  # and between looks at the notes of the others, at most


class LastRecord(NamedTuple):
    """The last record of a rank, how many writes outside of steps came between the one before and
    it, and why the rank makes no other: "" while it does."""

    sequence: int = 0
    step: int = 0
    writes: int = 0
    end: str = ""

    @property
    def moment(self) -> str:
        """What it is of, for people."""
        return f"step {self.step}" + f" and {self.writes} writes after it" * (self.writes > 0)


class Agreement:
    """Which records all ranks have. For the thread that commits; `end` for any.

    All `members`, ranks by their number among all processes, make one under the same `name`, which
    no other one has. They have the record `last`, of an earlier run; 0 for none. `timeout` is
    `Tuning.collective_timeout`, in seconds.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        name: str,
        last: int,
        timeout: float,
        latch: Latch,
    ) -> None:
        self._rank, self._members, self._timeout, self._latch = rank, members, timeout, latch
        self.pause = min(timeout / 8, _PAUSE)
        """Seconds after which who waits asks what the others are at."""
        self._notes = distributed_c10d.PrefixStore(
            f"infinity/commits/{name}", distributed_c10d._get_default_store()
        )
        self._lock = threading.Lock()
        self._last = LastRecord(last)
        self._key = ""  # of the count of the last record
        latch.add_listener(self._fail)

    def is_awaited(self, step: int, writes: int = 0) -> bool:
        """Whether another rank has made the record of `step`, which comes next here."""
        return self._notes.add(_key(self._last.sequence + 1, step, writes), 0) > 0

    def reach(
        self, sequence: int, step: int, gives_up: Callable[[float], bool], writes: int = 0
    ) -> bool:
        """This rank has made a record, of `step` and so many `writes` outside of steps: return when
        all have it, or False when it `gives_up` after so many seconds.

        Raises `EngineClosedError` when this rank failed. Raises `InfinityError` when another one
        did or has ended, has made another step, or does not come.
        """
        before, self._key = self._key, _key(sequence, step, writes)
        try:
            self._tell(LastRecord(sequence, step, writes))
            if not self._await_all(gives_up):
                return False
        except dist.DistError as error:
            raise InfinityError(
                f"rank {self._rank} cannot ask the others for step {step}: the store of "
                f"torch.distributed is gone with the process that held it ({error})"
            ) from error
        if before and self._rank == self._members[0]:
            with suppress(Exception):  # nobody asks for it any more; not all stores can
                self._notes.delete_key(before)
        return True

    def _await_all(self, gives_up: Callable[[float], bool]) -> bool:
        """Count this rank, and see `reach`."""
        count = self._notes.add(self._key, 1)
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
            count = self._notes.add(self._key, 0)
        return True

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
        """Raise `InfinityError` where the others' notes say that to wait is vain, or too long."""
        mine, found = self._last, {}
        for rank in self._members:
            known = self._notes.check([str(rank)])
            found[rank] = (
                LastRecord(*json.loads(self._notes.get(str(rank)))) if known else LastRecord()
            )
        late = {rank: note for rank, note in found.items() if note[:3] != mine[:3]}
        for rank, note in late.items():
            if note.sequence >= mine.sequence:
                raise InfinityError(
                    f"record {note.sequence} of rank {rank} is of {note.moment}, and record "
                    f"{mine.sequence} of rank {self._rank} of {mine.moment}; all ranks must "
                    "take the same steps, and write to parameters at the same places"
                )
            if note.end:
                raise InfinityError(f"rank {rank} does not commit step {mine.step}: {note.end}")
        if waited > self._timeout:
            said = "; ".join(
                f"rank {rank} has step {note.step} (record {note.sequence})"
                for rank, note in late.items()
            )
            raise InfinityError(
                f"rank {self._rank} waited {waited:.0f} s for the others to commit step "
                f"{mine.step}; {said}. See what they do (py-spy dump --pid ...); if a rank may "
                "compute for longer than that, raise "
                f"Config(tuning=Tuning(collective_timeout={self._timeout:g}))"
            )


def _key(sequence: int, step: int, writes: int) -> str:
    return f"record {sequence} of step {step}, {writes} writes"
