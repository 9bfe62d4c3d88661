"""What the ranks of an engine are at, for the error of one that waits too long: notes in torch.distributed's store.

A rank writes a note only when it has waited for a while, so that nothing is written while all goes well. A rank without a note
computes, or has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from infinity.sharding.ranks import Ranks

RECENT = 64
"""How many collectives a note lists."""
_SHOWN = 4
_PAUSE = 2.0


class Note(NamedTuple):
    """A rank waits in collective `number`, counted from 0, or has `failed` in it; `recent` ends with the last one it posted."""

    number: int
    name: str
    arrived: bool
    failed: bool
    posted: int
    recent: Sequence[str]

    def at(self, number: int) -> str | None:
        """The name of collective `number`, where this note knows it."""
        back = self.posted - number
        return self.recent[-back] if 0 < back <= len(self.recent) else None

    def until(self, number: int) -> str:
        """What led to collective `number`, for people."""
        first = max(number - _SHOWN, self.posted - len(self.recent), 0)
        return ", ".join(name for each in range(first, number + 1) if (name := self.at(each)) is not None)

    def __str__(self) -> str:
        if self.failed:
            return f"gave up in collective {self.number}, {self.name}"
        doing = "waits for the others in" if self.arrived else "still brings its own part (reading or updating it) to"
        return f"{doing} collective {self.number}, {self.name}"


class Watch:
    """Notes of this process and of the others in `ranks`, whose groups no other engine has. Any thread may call it."""

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.timeout = timeout
        self.pause = min(timeout / 8, _PAUSE)
        """Seconds to wait before the first note, and between looks at others."""
        groups = ranks.groups()
        self.rank = dist.get_rank() if groups else 0
        self.noted = False
        self._groups = [
            (
                distributed_c10d.PrefixStore(f"infinity/{group.group_name}", distributed_c10d._get_default_store()),
                dist.get_process_group_ranks(group),
            )
            for group in groups
        ]

    def write(self, note: Note | None) -> None:
        """Let the others know; None: this rank waits no more."""
        self.noted = note is not None
        for store, _ in self._groups:
            with suppress(Exception):  # who holds the store may have ended
                store.set(str(self.rank), json.dumps(note))

    def others(self, patience: float = 0.0) -> dict[int, Note | None]:
        """The last note of every other rank; waits for those that there are not for `patience` seconds."""
        found: dict[int, Note | None] = {}
        until = time.monotonic() + patience
        for store, ranks in self._groups:
            for rank in ranks:
                while rank != self.rank:
                    found[rank] = _read(store, rank)
                    if found[rank] is not None or time.monotonic() > until:
                        break
                    time.sleep(0.05)
        return found


def _read(store: distributed_c10d.Store, rank: int) -> Note | None:
    with suppress(Exception):
        if store.check([str(rank)]):
            value = json.loads(store.get(str(rank)))
            return None if value is None else Note(*value)
    return None


def diverged(rank: int, mine: Note, others: Mapping[int, Note | None]) -> str:
    """Where the ranks' orders part, for people; "" as far as is known that they do not."""
    for other, note in sorted(others.items()):
        for number in range(mine.posted - len(mine.recent), mine.posted if note is not None else 0):
            theirs = None if note is None else note.at(number)
            if note is not None and theirs is not None and theirs != mine.at(number):
                return (
                    f"the ranks used the units of the model in different orders: collective {number} is {mine.at(number)} on "
                    f"rank {rank} (after {mine.until(number - 1) or 'nothing'}), and {theirs} on rank {other} (after "
                    f"{note.until(number - 1) or 'nothing'}); all ranks must run the same modules in one order (invariant I6)"
                )
    return ""


def state_of(others: Mapping[int, Note | None]) -> str:
    """What the other ranks are at, for people."""
    return "; ".join(
        f"rank {rank} {note or 'waits for no collective: it computes, is blocked in other code, or has ended'}"
        for rank, note in sorted(others.items())
    )
