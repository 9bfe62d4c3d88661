"""I/O in flight: the ticket of a call, and the tickets of an `Io` that are not complete."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import torch

from infinity.errors import NvmeError

MANY_TICKETS = 256


class Failure(NamedTuple):
    """What `NvmeError` is made from."""

    operation: str
    path: str
    offset: int
    code: int
    asked: int
    done: int


class Part:
    """One tensor's bytes in flight: native requests, in the order of the file, and what must live until they are complete."""

    __slots__ = ("failed", "nbytes", "offset", "path", "tensor", "tickets")

    def __init__(self, path: bytes, offset: int, nbytes: int, tensor: torch.Tensor) -> None:
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.tensor: torch.Tensor | None = tensor
        self.tickets: list[Any] = []
        self.failed: tuple[int, int] | None = None  # errno (0: the file ended) and the bytes done

    def done(self) -> bool:
        if not all(ticket.done() for ticket in self.tickets):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for all of it, for the memory may be reused after that; then let go of the tickets, which keep files open."""
        tickets, failed, done = self.tickets, self.failed, 0  # in this order: another thread may be in the next lines
        for ticket in tickets:
            code, _, moved = ticket.wait()
            done += moved if failed is None else 0
            if code != 0 and failed is None:
                failed = max(code, 0), done
        self.failed = failed
        self.tickets, self.tensor = [], None

    def failure(self, operation: str) -> Failure | None:
        """What stopped it, once it is finished."""
        if self.failed is None:
            return None
        return Failure(operation, os.fsdecode(self.path), self.offset, self.failed[0], self.nbytes, self.failed[1])


class InFlight:
    """The tickets of one `Io` that are not complete: it keeps them, so that their tensors live as long as the I/O."""

    def __init__(self) -> None:
        # A collection inside these few lines may end another Io of the same thread: reentrant.
        self.lock = threading.RLock()
        self.process = os.getpid()
        self._tickets: dict[Ticket, None] = {}
        self._lost: Ticket | None = None  # the first that failed and that nobody has waited for

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise ValueError(f"this belongs to process {self.process}, which was forked; make an infinity.nvme.Io of your own")

    def add(self, ticket: Ticket) -> None:
        """Keep `ticket`, and let go of those that are complete: the oldest, or all when there are many."""
        with self.lock:
            for older in list(self._tickets):
                if older.done():
                    self.end(older)
                elif len(self._tickets) <= MANY_TICKETS:
                    break
            self._tickets[ticket] = None

    def end(self, ticket: Ticket) -> None:
        """Let go of a complete ticket, but not of a failure that nobody has seen."""
        with self.lock:
            self._tickets.pop(ticket, None)
            if ticket.failed and not ticket.reported and self._lost is None:
                self._lost = ticket

    def drain(self) -> Ticket | None:
        """Wait for every ticket; the first that failed without `wait` having said so, if any."""
        with self.lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.finish()
            self.end(ticket)
        with self.lock:
            lost, self._lost = self._lost, None
        return None if lost is None or lost.reported else lost


class Ticket:
    """One call's I/O in flight. Any thread may use it, several times; it may outlive its `Io`, which waits for it."""

    def __init__(self, operation: str, in_flight: InFlight) -> None:
        self._operation, self._in_flight = operation, in_flight
        self._parts: list[Part] = []
        self._settled = 0  # of the parts
        self._lock = threading.RLock()  # reentrant as that of InFlight
        self._complete = False
        self._error: Failure | None = None
        self.reported = False  # whether `wait` has raised what failed

    @property
    def failed(self) -> bool:
        """Whether it is complete and did not move all bytes; does not block."""
        return self._error is not None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if not self._complete:
            self._in_flight.check_process()
            if all(part.done() for part in self._parts):
                self.finish()
        return self._complete

    def wait(self) -> None:
        """Block until every byte has moved; raises `NvmeError` with path, offset, errno, asked and done."""
        if not self._complete:
            self._in_flight.check_process()
            self.finish()
        self.reported = True
        self._in_flight.end(self)
        if self._error is not None:
            raise NvmeError(*self._error)  # a new one each time: a raised exception grows

    def finish(self) -> None:
        """Wait without raising."""
        parts = list(self._parts)
        for part in parts:
            part.finish()
        with self._lock:
            if not self._complete:
                failures = (part.failure(self._operation) for part in parts)
                self._error = next((failure for failure in failures if failure is not None), None)
                self._parts, self._complete = [], True

    def start(self, path: bytes, offset: int, nbytes: int, tensor: torch.Tensor) -> Part:
        """Note what is about to be started; the native requests go into the part. Lets go of parts that are complete."""
        while self._settled < len(self._parts) and self._parts[self._settled].done():
            self._settled += 1
        part = Part(path, offset, nbytes, tensor)
        self._parts.append(part)
        return part
