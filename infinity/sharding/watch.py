"""Notes of the ranks of an engine in torch.distributed's store. They explain the error of a rank
that waits too long.

A rank writes a note only after it has waited for a while, or has failed. A rank without a note
computes, or has ended.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from infinity.errors import InfinityError
from infinity.sharding.ranks import Ranks

T = TypeVar("T")

RECENT = 64
"""The number of collectives that a note lists."""
_SHOWN = 4
_PAUSE = 2.0
_GLANCE = 0.02


class Note(NamedTuple):
    """A rank waits in collective `number`, counted from 0, or has `failed` in it. `recent` ends
    with the last collective that it posted. A rank with a `reason` failed by itself and joins no
    further collective."""

    number: int
    name: str
    arrived: bool
    failed: bool
    posted: int
    recent: Sequence[str]
    reason: str = ""

    def at(self, number: int) -> str | None:
        """The name of collective `number`; None if this note does not have it."""
        back = self.posted - number
        return self.recent[-back] if 0 < back <= len(self.recent) else None

    def until(self, number: int) -> str:
        """The last collectives up to `number`, as text."""
        first = max(number - _SHOWN, self.posted - len(self.recent), 0)
        return ", ".join(
            name for each in range(first, number + 1) if (name := self.at(each)) is not None
        )

    def __str__(self) -> str:
        if self.reason:
            return f"failed: {self.reason}"
        if self.failed:
            return f"gave up in collective {self.number}, {self.name}"
        doing = (
            "waits for the others in"
            if self.arrived
            else "still brings its own part (reading or updating it) to"
        )
        return f"{doing} collective {self.number}, {self.name}"


class Watch:
    """Writes the note of this process, and reads the notes of the other `ranks`. No other engine
    uses their groups. Any thread may call it."""

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.timeout = timeout
        self.pause = min(timeout / 8, _PAUSE)
        """Seconds before the first note, and between reads of the other notes."""
        groups = ranks.groups()
        self.rank = dist.get_rank() if groups else 0
        self.noted = False
        self._is_final = False
        self._is_deaf = False
        """Whether the store ended with its process. Torch would log each further try with its C++
        frames."""
        self._lock = threading.Lock()
        self._groups = [
            (
                distributed_c10d.PrefixStore(
                    f"infinity/{group.group_name}", distributed_c10d._get_default_store()
                ),
                dist.get_process_group_ranks(group),
            )
            for group in groups
        ]

    def write(self, note: Note | None) -> None:
        """Write the note of this rank; None says that it does not wait. A note of a failure is its
        last note."""
        with self._lock:
            if self._is_final:
                return
            self.noted, self._is_final = note is not None, note is not None and note.failed
            for store, _ in self._groups:
                self._ask(lambda store=store: store.set(str(self.rank), json.dumps(note)))  # type: ignore[misc]

    def others(self, patience: float = 0.0) -> dict[int, Note | None]:
        """The last note of every other rank. Waits `patience` seconds for missing notes."""
        found: dict[int, Note | None] = {}
        until = time.monotonic() + patience
        for store, ranks in self._groups:
            for rank in ranks:
                while rank != self.rank:
                    found[rank] = self._ask(lambda store=store, rank=rank: _read(store, rank))  # type: ignore[misc]
                    if found[rank] is not None or self._is_deaf or time.monotonic() > until:
                        break
                    time.sleep(0.05)
        return found

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The result of `question`, a call of a store. None after an error; when the store is gone,
        all later results are None."""
        if not self._is_deaf:
            try:
                return question()
            except dist.DistNetworkError:
                self._is_deaf = True
            except Exception:  # a note only explains an error, and that error is the one to raise
                return None
        return None


def announce(ranks: Ranks) -> None:
    """Tell the other `ranks` the machine of this process."""
    if ranks.groups():
        _machines().set(str(dist.get_rank()), _this_machine())


def ranks_of_this_node(ranks: Ranks) -> int:
    """The number of ranks that share the host memory of this node: LOCAL_WORLD_SIZE of torchrun,
    else the number of ranks that have announced this machine; 1 without groups.

    Each rank announces before it asks. So the last rank of a node that asks counts all.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if not ranks.groups():
        return 1
    machines, here = _machines(), _this_machine().encode()
    announced = (rank for rank in map(str, range(dist.get_world_size())) if machines.check([rank]))
    return sum(machines.get(rank) == here for rank in announced)


def _machines() -> distributed_c10d.Store:
    store = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore("infinity/machines", store)


def _this_machine() -> str:
    """A name that all processes on one kernel share, in any container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def together(ranks: Ranks, timeout: float) -> Iterator[list[float]]:
    """The block inside ends well on all `ranks`, or on none: if it fails on one rank, the other
    ranks raise `InfinityError` at its end.

    It gives a list for numbers to agree on. At the end each number is the least that any rank has
    put at its place. The list is as short as the shortest one. All ranks enter the context equally
    often. An error is told to the other ranks and raised at once. Without an error a rank waits
    `timeout` seconds for the other ranks. It joins no collective, so an absent rank is named.
    """
    rank, meetings = str(dist.get_rank()) if ranks.groups() else "", _meetings(ranks, "together")
    numbers: list[float] = []
    try:
        yield numbers
    except BaseException as error:
        for notes, _ in meetings:
            with suppress(Exception):  # this error is the one to raise
                notes.set(rank, json.dumps(f"rank {rank} failed: {type(error).__name__}: {error}"))
        raise
    failure = ""
    for notes, members in meetings:
        notes.set(rank, json.dumps(failure or numbers))
        failure = failure or _hear(notes, members, timeout, numbers)
    if failure:
        raise InfinityError(failure)


def told(ranks: Ranks, timeout: float, says: Any) -> dict[int, Any]:
    """The values that all `ranks` give, by number of the rank, as JSON returns them. This rank
    gives `says`. All ranks call it equally often.

    Raises `InfinityError` if a rank does not come in `timeout` seconds. Joins no collective.
    """
    found = {ranks.member.rank: says}
    for notes, members in _meetings(ranks, "told"):
        notes.set(str(ranks.member.rank), json.dumps(list(found.items())))
        for rank in members:
            if absence := _await_note(notes, rank, time.monotonic() + timeout, timeout):
                raise InfinityError(absence)
            found |= {int(each): said for each, said in json.loads(notes.get(str(rank)))}
    return found


def _meetings(ranks: Ranks, what: str) -> list[tuple[distributed_c10d.Store, list[int]]]:
    """A store for this meeting of the ranks of each group, and the ranks: along one dimension of a
    mesh, then along the other."""
    found: list[tuple[distributed_c10d.Store, list[int]]] = []
    for group in ranks.groups():
        all_times = distributed_c10d.PrefixStore(
            f"infinity/{what}/{group.group_name}", distributed_c10d._get_default_store()
        )
        time_number = all_times.add(f"times of {dist.get_rank()}", 1)
        this_time = distributed_c10d.PrefixStore(str(time_number), all_times)
        found.append((this_time, dist.get_process_group_ranks(group)))
    return found


def _hear(
    notes: distributed_c10d.Store, members: Sequence[int], timeout: float, numbers: list[float]
) -> str:
    """The text of the first of `members` that failed, or "". Lowers `numbers` to the least of all
    members."""
    until = time.monotonic() + timeout
    for rank in members:
        if absence := _await_note(notes, rank, until, timeout):
            return absence
        said = json.loads(notes.get(str(rank)))
        if isinstance(said, str):
            return said
        numbers[:] = [min(pair) for pair in zip(numbers, said, strict=False)]
    return ""


def _await_note(notes: distributed_c10d.Store, rank: int, until: float, timeout: float) -> str:
    """Wait `until` that time for a note of `rank`. Returns "", or a text if it did not come."""
    while not notes.check([str(rank)]):
        if time.monotonic() > until:
            return (
                f"rank {rank} did not come in {timeout:.0f} s "
                "(Tuning.collective_timeout): it is elsewhere, or gone"
            )
        time.sleep(_GLANCE)
    return ""


def _read(store: distributed_c10d.Store, rank: int) -> Note | None:
    if not store.check([str(rank)]):
        return None
    value = json.loads(store.get(str(rank)))
    return None if value is None else Note(*value)


OF_A_STEP = "of gradients that there are"
"""The name of the first sum of an optimizer step."""
_WITHOUT_BACKWARD = (
    "all ranks must go backward through the model before a step; let the loss of each use an "
    "output of the model, times 0 where it is to add nothing"
)
_OTHER_MODULES = (
    "all ranks must run the same modules in one order; where the data of a rank decides, make one "
    "unit of the module that does: infinity.wrap(model, config, units=[its class])"
)


def diverged(rank: int, mine: Note, others: Mapping[int, Note | None]) -> str:
    """The first known difference between the orders of the ranks, as text; "" if there is none."""
    for other, note in sorted(others.items()):
        for number in range(mine.posted - len(mine.recent), mine.posted if note is not None else 0):
            theirs = None if note is None else note.at(number)
            if note is not None and theirs is not None and theirs != mine.at(number):
                is_lone = {mine.at(number), theirs} & {f"sum {OF_A_STEP}"}
                way_out = _WITHOUT_BACKWARD if is_lone else _OTHER_MODULES
                return (
                    "the ranks used the units of the model in different orders: collective "
                    f"{number} is {mine.at(number)} on rank {rank} (after "
                    f"{mine.until(number - 1) or 'nothing'}), and {theirs} on rank {other} (after "
                    f"{note.until(number - 1) or 'nothing'}); {way_out}"
                )
    return ""


def state_of(others: Mapping[int, Note | None]) -> str:
    """The states of the other ranks, as text."""
    silent = "waits for no collective: it computes, is blocked in other code, or has ended"
    return "; ".join(f"rank {rank} {note or silent}" for rank, note in sorted(others.items()))
