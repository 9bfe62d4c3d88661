"""Tickets: I/O in flight. One class for a range on several drives, for the tensors of a call, and
for a staged piece."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from infinity.errors import NvmeError

MANY_TICKETS = 256


def check_process(process: int) -> None:
    """Raise `ValueError` in a child of `process`."""
    if os.getpid() != process:
        raise ValueError(
            f"this belongs to process {process}, which was forked; make an "
            "infinity.nvme.Io of your own"
        )


class Ticket:
    """I/O in flight that is waited for together. Any thread may use it, several times; it may
    outlive its engine, which waits.

    `requests` are tickets of native engines, or others of these. Native code reads their
    completions and raises `NvmeError`. `ended` is called once, with the ticket, by the thread that
    first finds it complete.
    """

    def __init__(
        self, requests: Iterable[Any] = (), ended: Callable[[Ticket], object] | None = None
    ) -> None:
        self._requests = list(requests)
        self._ended = ended
        self._process = os.getpid()
        self._settled = 0  # of the requests
        # A collection inside may end another ticket of the same thread.
        self._lock = threading.RLock()
        self._complete = False
        self._stopped: Any = None  # the first request that failed
        self.check: Callable[[], object] | None = None
        """Called by `wait` when all bytes have moved, until it has returned once: it raises where
        they are not what they should be."""
        self.reported = False
        """Whether `wait` has raised what failed, or nobody will ask."""

    @property
    def failed(self) -> bool:
        """Whether it is complete and did not move all bytes; does not block."""
        return self._stopped is not None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if not self._complete:
            check_process(self._process)
            if all(request.done() for request in self._requests):
                self.finish()
        return self._complete

    def wait(self) -> None:
        """Block until every byte has moved; raises `NvmeError` with path, offset, errno, asked and
        done, and what `check` raises.

        Where several requests failed the error is that of the first.
        """
        if not self._complete:
            check_process(self._process)
            self.finish()
        self.reported = True
        if self._stopped is not None:
            self._stopped.wait()  # raises a new error each time: one that is raised grows
        if self.check is not None:
            self.check()
            self.check = None

    def promote(self) -> None:
        """Somebody waits for it now: what was submitted in the background goes on in the
        foreground."""
        for request in self._requests:
            request.promote()

    def add(self, request: Any) -> None:
        """One more request, before any other thread has this. Lets go of what those that are
        complete keep alive."""
        while self._settled < len(self._requests) and self._requests[self._settled].done():
            self._settled += 1
        self._requests.append(request)

    def finish(self) -> None:
        """Wait without raising, so that the memory may be used again."""
        stopped = None
        for request in self._requests:
            try:
                request.wait()
            except NvmeError:
                stopped = request if stopped is None else stopped
        with self._lock:
            first = not self._complete
            if first:
                self._stopped, self._requests, self._complete = stopped, [], True
        if first and self._ended is not None:
            self._ended(self)


class Tickets:
    """The tickets of one `Io` that are not complete: it keeps them, so that their tensors live as
    long as the I/O."""

    def __init__(self) -> None:
        # A collection inside these few lines may end another Io of the same thread: reentrant.
        self.lock = threading.RLock()
        self.process = os.getpid()
        self._tickets: dict[Ticket, None] = {}
        self._lost: Ticket | None = None  # the first that failed and that nobody has waited for

    def add(self, ticket: Ticket) -> None:
        """Keep `ticket`, and let go of those that are complete: the oldest, or all when there are
        many."""
        with self.lock:
            for older in list(self._tickets):
                if older.done():
                    self.ended(older)
                elif len(self._tickets) <= MANY_TICKETS:
                    break
            self._tickets[ticket] = None

    def ended(self, ticket: Ticket) -> None:
        """Let go of a complete ticket, but not of a failure that nobody has seen."""
        with self.lock:
            self._tickets.pop(ticket, None)
            seen = self._lost is None or self._lost.reported
            if ticket.failed and not ticket.reported and seen:
                self._lost = ticket

    def drain(self) -> Ticket | None:
        """Wait for every ticket; the first that failed without `wait` having said so, if any."""
        with self.lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.finish()
            self.ended(ticket)
        with self.lock:
            lost, self._lost = self._lost, None
        return None if lost is None or lost.reported else lost
