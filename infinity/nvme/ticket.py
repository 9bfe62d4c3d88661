"""Tickets: I/O in flight. One class serves a range on several drives, the tensors of a call, and a
staged piece."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from infinity.errors import NvmeError

MANY_TICKETS = 256


def check_process(process: int) -> None:
    """Raise `ValueError` unless this process is `process`."""
    if os.getpid() != process:
        raise ValueError(
            f"this belongs to process {process}, which was forked; make an "
            "infinity.nvme.Io of your own"
        )


class Ticket:
    """I/O in flight, for the caller to wait for. Any thread may use it, several times. It may
    outlive its engine, which waits for the I/O when it closes.

    `requests` are tickets of native engines or of this class. Native code reads their completions
    and raises `NvmeError`. The thread that first finds the ticket complete calls `ended` with it,
    once.
    """

    def __init__(
        self, requests: Iterable[Any] = (), ended: Callable[[Ticket], object] | None = None
    ) -> None:
        self._requests = list(requests)
        self._ended = ended
        self._process = os.getpid()
        self._settled = 0  # the first requests, known to be complete
        # Reentrant: a garbage collection inside may end another ticket on the same thread.
        self._lock = threading.RLock()
        self._complete = False
        self._stopped: Any = None  # the first request that failed
        self.check: Callable[[], object] | None = None
        """Checks the bytes after all have moved, and raises if they are damaged. `wait` calls it
        until it has returned once."""
        self.reported = False
        """Whether the caller knows the outcome: `wait` has ended, or the call that started the I/O
        raised."""

    @property
    def failed(self) -> bool:
        """Whether the ticket is known to be complete and some bytes did not move; does not
        block."""
        return self._stopped is not None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Raises `ValueError` in a forked child
        unless the ticket was complete before the fork."""
        if not self._complete:
            check_process(self._process)
            if all(request.done() for request in self._requests):
                self.finish()
        return self._complete

    def wait(self) -> None:
        """Block until every byte has moved.

        Raises the `NvmeError` of the first request that failed, with path, offset, errno, asked and
        done. Raises the errors of `check`. Raises `ValueError` as `done` does.
        """
        if not self._complete:
            check_process(self._process)
            self.finish()
        self.reported = True
        if self._stopped is not None:
            self._stopped.wait()  # a new error each time: raising one again grows its traceback
        if self.check is not None:
            self.check()
            self.check = None

    def promote(self) -> None:
        """Continue background requests in the foreground, because a thread waits for them now."""
        for request in self._requests:
            request.promote()

    def add(self, request: Any) -> None:
        """Add a request, before any other thread has the ticket. Requests at the front that are
        complete release their tensors."""
        while self._settled < len(self._requests) and self._requests[self._settled].done():
            self._settled += 1
        self._requests.append(request)

    def finish(self) -> None:
        """Block until no request uses its memory. Raises no `NvmeError`: `wait` does."""
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
    """Owns the incomplete tickets of one `Io`, so that their tensors live as long as the I/O."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection inside may close another Io on the same thread.
        self.lock = threading.RLock()
        self.process = os.getpid()
        self._tickets: dict[Ticket, None] = {}
        self._lost: Ticket | None = None  # the first failure that `wait` has not raised

    def add(self, ticket: Ticket) -> None:
        """Keep `ticket`. Drop the oldest tickets if complete, or every complete ticket if there are
        more than `MANY_TICKETS`."""
        with self.lock:
            for older in list(self._tickets):
                if older.done():
                    self.ended(older)
                elif len(self._tickets) <= MANY_TICKETS:
                    break
            self._tickets[ticket] = None

    def ended(self, ticket: Ticket) -> None:
        """Drop a complete ticket, but keep the first failure that `wait` has not raised."""
        with self.lock:
            self._tickets.pop(ticket, None)
            seen = self._lost is None or self._lost.reported
            if ticket.failed and not ticket.reported and seen:
                self._lost = ticket

    def drain(self) -> Ticket | None:
        """Wait for every ticket. Returns the first failed ticket if its `wait` has not raised the
        error, else None."""
        with self.lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.finish()
            self.ended(ticket)
        with self.lock:
            lost, self._lost = self._lost, None
        return None if lost is None or lost.reported else lost
