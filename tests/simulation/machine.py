"""A machine: folders of a disk from its boot to its end, and what is to happen to it.

Every operation has an identity: what it does, where, and how many times that was done there since
the boot. A `Blow` names one. So what happens does not depend on which thread came first.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simulation.chance import Chance
from simulation.disk import Folder

if TYPE_CHECKING:
    from simulation.drive import Request

LONGEST = 2e-3
"""Seconds that an operation takes at most."""


class Place(NamedTuple):
    """What an operation does, and where: `name` is that of a file with the number of its folder
    before it."""

    kind: str
    name: str
    offset: int = 0


class Operation(NamedTuple):
    """The operation number `number` of those at its place."""

    place: Place
    number: int


class Blow(NamedTuple):
    """What happens at an operation: the machine stops "before", "during" or "after" it, or it
    "fails" with an errno; 0 is a transfer that stops too soon."""

    operation: Operation
    moment: str
    code: int = 0


class PowerOff(OSError):
    """The machine has stopped."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the machine has stopped")


class Machine:
    """Folders in use. `blow` is what happens to it, if anything; `chance` says what takes long.
    Its `boot` is a number of its own among those with these folders."""

    def __init__(
        self, folders: Sequence[Folder], chance: Chance, blow: Blow | None = None, boot: int = 0
    ) -> None:
        self.folders = list(folders)
        self.chance = chance
        self.lock = threading.RLock()
        self.counts: Counter[Place] = Counter()
        self.under_way: list[Request] = []
        self.is_off = False
        self.was_struck = False
        """Whether the blow has come."""
        self.wrongs: list[str] = []
        """What the engine must never do, and did."""
        self.stopped: Callable[[], None] = lambda: None
        """What is told that the machine has stopped (under the lock)."""
        self.moved: Counter[str] = Counter()
        """Bytes that were asked of the drives, by operation."""
        self._blow, self._boot = blow, boot
        # Some machines are slow at one thing, so that all else overtakes it.
        self._slow = chance.one(("", "", "flush", "flush", "sync", "write", "read"), "slow")

    def key(self, operation: Operation) -> tuple[int, Operation]:
        """`operation` among those of all machines with these folders."""
        return self._boot, operation

    # What happens

    def check(self) -> None:
        """Raise where the machine has stopped."""
        if self.is_off:
            raise PowerOff

    def begin(self, kind: str, name: str, offset: int = 0) -> Operation:
        """An operation begins (under the lock). Raises where it fails, or the machine has
        stopped."""
        self.check()
        place = Place(kind, name, offset)
        operation = Operation(place, self.counts[place])
        self.counts[place] += 1
        self.strike(operation, "before")
        if self.fails(operation) is not None and kind not in ("read", "write"):
            code = self.fails(operation) or errno.EIO
            raise OSError(code, os.strerror(code), name)
        return operation

    def fails(self, operation: Operation) -> int | None:
        """The error of `operation`, if it is to fail."""
        blow = self._blow
        if blow is None or blow.moment != "fails" or blow.operation != operation:
            return None
        self.was_struck = True
        return blow.code

    def strike(self, operation: Operation, moment: str) -> None:
        """Stop, if that is to come at this moment (under the lock)."""
        blow = self._blow
        if blow is not None and blow.moment == moment and blow.operation == operation:
            self.was_struck = self.is_off = True
            self.stopped()
        self.check()

    def stop(self) -> None:
        """From now on nothing has any effect."""
        with self.lock:
            self.is_off = True
            self.stopped()

    def take_time(self, operation: Operation) -> None:
        """As long as the operation lasts (not under the lock)."""
        share = self.chance.of("time", operation)
        if operation.place.kind == self._slow or share < 0.05:
            time.sleep(share * LONGEST)
        elif share < 0.2:
            time.sleep(0)

    # What is left

    def left(self, power: bool, chance: Chance) -> list[Folder]:
        """The folders after the process has ended, or after a power cut with `power`."""
        with self.lock:
            self.is_off = True
            for request in self.under_way:
                if request.change is not None:
                    request.file.arrive([request.change], chance)
            if not power:
                return self.folders
            return [folder.left(chance.child(number)) for number, folder in enumerate(self.folders)]
