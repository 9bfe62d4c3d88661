"""A storage that autograd saved: where its bytes are, and when backward is likely to need them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.device import Copy
from infinity.errors import NvmeError
from infinity.nvme.ticket import Ticket
from infinity.tiers.states_files import Extent


class StorageState(Enum):
    """Where the bytes are; a copy on the compute device may be beside them in any state."""

    LEAVING = auto()
    """On their way from the compute device to their slot in host memory."""
    HELD = auto()
    """In the slot."""
    WRITING = auto()
    """In the slot, and on their way to the drive."""
    CLEAN = auto()
    """In the slot and on the drive."""
    AWAY = auto()
    """On the drive."""
    READING = auto()
    """On their way from the drive to a slot."""
    LOST = auto()
    """Nowhere: writing them failed."""
    ENDED = auto()
    """Nowhere: autograd dropped the storage, or the engine was closed."""


IN_SLOT = (StorageState.HELD, StorageState.WRITING, StorageState.CLEAN)
"""The states of a storage that can be copied to the device at once."""


class SavedStorage:
    """One storage of `nbytes` bytes that autograd saved. Only `Activations` and its parts use the
    other attributes, under its lock.

    One class, because each state of the storage decides which of its places are in use.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        source: torch.Tensor,
        leaving: Copy,
        start: int,
        slot: torch.Tensor,
    ) -> None:
        self.nbytes = storage.nbytes()
        self.state = StorageState.LEAVING
        # Of the slot, in the memory of the tier; None: the slot is memory of its own.
        self.start: int | None = start
        self.slot: torch.Tensor | None = slot
        self.extent: Extent | None = None
        self.checksum = 0  # of the extent, if reads are verified
        self.origin = StorageWeakRef(storage)
        self.address = storage.data_ptr()
        self.source: torch.Tensor | None = source  # keeps the origin while it is copied
        self.leaving: Copy | None = leaving
        self.ticket: Ticket | None = None
        self.memory: torch.Tensor | None = None  # a copy on the compute device
        self.coming: Copy | None = None  # into it
        self.saves = 1
        self.asked = 0  # how many of the saves have had `memory`
        self.passed = False  # all of them, once
        self.stack: Stack | None = None
        self.rank = 0
        self.above: SavedStorage | None = None
        self.below: SavedStorage | None = None

    def to_away(self) -> None:
        """-> AWAY: the bytes are on the drive only."""
        self.state = StorageState.AWAY
        if self.stack is not None:
            self.stack.went_away(self)

    def alive(self) -> torch.UntypedStorage | None:
        """The storage itself, if it is still alive with the same address and size; else None."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self.origin.cdata
        )
        if storage is None or storage.nbytes() != self.nbytes or storage.data_ptr() != self.address:
            return None
        return storage

    def in_flight(self) -> bool:
        """Whether a copy or I/O from or to its places is under way."""
        return any(
            each is not None and not each.done()
            for each in (self.leaving, self.coming, self.ticket)
        )

    def await_idle(self) -> None:
        """Block until nothing is in flight, and release all references, even if a copy fails."""
        with ExitStack() as stack:
            stack.callback(self._let_go)
            for each in (self.ticket, self.coming, self.leaving):
                if each is not None:
                    stack.callback(_end, each)

    def _let_go(self) -> None:
        self.source = self.leaving = self.coming = self.ticket = self.memory = None


def _end(going: Copy | Ticket) -> None:
    with suppress(NvmeError):  # the bytes are not needed
        going.wait()


class Stack:
    """The storages of one thread, in order, and a guess which is fetched next."""

    def __init__(self) -> None:
        self.top: SavedStorage | None = None
        self.next: SavedStorage | None = None  # to be asked for
        self.away: SavedStorage | None = None  # read next: each AWAY storage is this or below it

    def push(self, saved: SavedStorage, rank: int) -> None:
        """Put `saved` on top: backward needs it first."""
        saved.stack, saved.rank, saved.below, saved.above = self, rank, self.top, None
        if self.top is not None:
            self.top.above = saved
        self.top = self.next = saved
        if saved.state is StorageState.AWAY:
            self.away = saved

    def remove(self, saved: SavedStorage) -> None:
        """Take `saved` out of the stack."""
        above, below = saved.above, saved.below
        if above is not None:
            above.below = below
        if below is not None:
            below.above = above
        self.top = below if self.top is saved else self.top
        self.next = below if self.next is saved else self.next
        self.away = below if self.away is saved else self.away
        saved.stack = saved.above = saved.below = None

    def reach(self, saved: SavedStorage) -> None:
        """`saved` was fetched: the storage below it comes next. Backward fetches the storages of
        one operator in any order."""
        if saved.passed or self.next is None or saved.rank <= self.next.rank:
            self.next = saved.below

    def went_away(self, saved: SavedStorage) -> None:
        """`saved` is on the drive only."""
        if self.away is None or saved.rank > self.away.rank:
            self.away = saved

    def next_away(self) -> SavedStorage | None:
        """The next storage to read from the drive; None if no storage is AWAY."""
        while self.away is not None and self.away.state is not StorageState.AWAY:
            self.away = self.away.below
        return self.away


class Stacks:
    """The stacks of all threads that saved storages which autograd still keeps."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Stack] = {}
        self._ranks = itertools.count()

    def __len__(self) -> int:
        return len(self._by_thread)

    def __iter__(self) -> Iterator[Stack]:
        return iter(list(self._by_thread.values()))

    def push(self, saved: SavedStorage) -> None:
        """Put `saved` on top of the stack of the calling thread."""
        stack = self._by_thread.setdefault(threading.get_ident(), Stack())
        stack.push(saved, next(self._ranks))

    def remove(self, saved: SavedStorage) -> None:
        """Take `saved` out of its stack, if it is in one."""
        stack = saved.stack
        if stack is not None:
            stack.remove(saved)
            if stack.top is None:
                self._by_thread = {
                    thread: other for thread, other in self._by_thread.items() if other is not stack
                }
