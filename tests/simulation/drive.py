"""What `native.file_at` and `native.make_engine` give, over files of a machine.

A request is under way until somebody asks for it: `wait`, `done` or `drain` end it. So nobody can
count on one that was not waited for. There are no threads.
"""

from __future__ import annotations

import ctypes
import errno
from contextlib import suppress
from typing import Any

from infinity.errors import NvmeError
from simulation.disk import Change, Plain
from simulation.machine import Machine, Operation, Place, PowerOff


class DriveFile:
    """A file as `_aio.File` has it."""

    direct = True

    def __init__(self, machine: Machine, file: Plain, name: str, path: str, end: Any) -> None:
        self.machine, self.file, self.name, self.path = machine, file, name, path
        self._end = end

    def size(self) -> int:
        self.machine.check()
        return len(self.file.now)

    def allocate(self, nbytes: int) -> None:
        if nbytes > self.size():
            self._resize("allocate", nbytes)

    def truncate(self, nbytes: int) -> None:
        if nbytes != self.size():
            self._resize("resize", nbytes)

    def _resize(self, kind: str, nbytes: int) -> None:
        machine = self.machine
        with machine.lock:
            operation = machine.begin(kind, self.name)
            self.file.change(Change(machine.key(operation), size=nbytes))
            machine.strike(operation, "after")

    def sync(self) -> None:
        flush(self.machine, "flush", self.name, self.file)

    def close(self) -> None:
        end, self._end = self._end, lambda: None
        end()


def flush(machine: Machine, kind: str, name: str, file: Plain) -> None:
    """What has ended before this begins survives a power cut when it returns."""
    with machine.lock:
        try:
            operation = machine.begin(kind, name)
        except OSError:
            if not machine.is_off:
                file.drop()
            raise
        changes = file.changes()
    machine.take_time(operation)
    with machine.lock:
        machine.strike(operation, "during")
        file.flush(changes)
        machine.strike(operation, "after")


class Request:
    """A request as `_aio.Ticket` has it; `change` is what it writes."""

    def __init__(
        self,
        target: DriveFile,
        operation: Operation,
        address: int,
        nbytes: int,
        what: str,
        code: int | None,
    ) -> None:
        self.file, self.change = target.file, None
        self._machine, self._target, self.operation = target.machine, target, operation
        self.begin, self.end = operation.place.offset, operation.place.offset + nbytes
        self._address, self._nbytes, self._what, self._code = address, nbytes, what, code
        self._asked = self._machine.chance.below(3, "asked", operation)
        self._is_done = False
        if operation.place.kind == "write":
            data = ctypes.string_at(address, nbytes)
            self.change = Change(self._machine.key(operation), self.begin, data)

    def done(self) -> bool:
        """Not yet, the first times."""
        if not self._is_done and not self._machine.is_off and self._asked > 0:
            self._asked -= 1
            return False
        self.complete()
        return True

    def wait(self) -> int:
        if not self._is_done and not self._machine.is_off:
            self._machine.take_time(self.operation)
        self.complete()
        if self._code is not None:
            done = 0 if self._code else self._nbytes // 2
            kind, name = self.operation.place.kind, self._target.path
            raise NvmeError(kind, name, self.begin, self._code, self._nbytes, done, self._what)
        return self._nbytes

    def promote(self) -> None:
        """Nothing goes before anything else here."""

    def complete(self) -> None:
        """It has ended."""
        machine = self._machine
        with machine.lock:
            if self._is_done:
                return
            self._is_done = True
            if machine.is_off:  # a write stays under way: it may arrive or not
                self._code = errno.EIO
                return
            machine.under_way.remove(self)
            if self._code is None:
                self._move()
            elif self.change is not None:  # as far as it got
                part = self.change.data[: 0 if self._code else self._nbytes // 2]
                self.file.change(self.change._replace(data=part))
            try:
                machine.strike(self.operation, "after")
            except PowerOff:
                self._code = errno.EIO

    def _move(self) -> None:
        if self.change is None:
            data = bytes(self.file.now[self.begin : self.end])
            ctypes.memmove(self._address, data, len(data))
            if len(data) < self._nbytes:
                self._code = 0
            return
        if ctypes.string_at(self._address, self._nbytes) != self.change.data:
            self._machine.wrongs.append(f"{self._what} changed while {self.operation} wrote it")
        self.file.change(self.change)


class DriveEngine:
    """An engine as `_aio.Engine` has it."""

    kind = "simulated"

    def __init__(self, **options: Any) -> None:
        self._requests: list[Request] = []
        self._is_closed = False

    def read(self, *values: Any, **named: Any) -> Request:
        return self._submit("read", *values, **named)

    def write(self, *values: Any, **named: Any) -> Request:
        return self._submit("write", *values, **named)

    def _submit(
        self,
        kind: str,
        file: DriveFile,
        offset: int,
        address: int,
        nbytes: int,
        background: bool = False,
        what: str = "",
    ) -> Request:
        if self._is_closed:
            raise ValueError("it is closed")
        machine = file.machine
        with machine.lock:
            try:
                operation = machine.begin(kind, file.name, offset)
                code = machine.fails(operation)
            except PowerOff:
                operation, code = Operation(Place(kind, file.name, offset), -1), errno.EIO
            request = Request(file, operation, address, nbytes, what, code)
            if machine.is_off:
                return request
            machine.moved[kind] += nbytes
            self._look(machine, request)
            self._requests = [each for each in self._requests if each in machine.under_way]
            self._requests.append(request)
            machine.under_way.append(request)
            with suppress(PowerOff):
                machine.strike(operation, "during")
        return request

    @staticmethod
    def _look(machine: Machine, request: Request) -> None:
        """Invariant I7: who writes is alone."""
        for other in machine.under_way:
            if (
                other.file is request.file
                and other.begin < request.end
                and request.begin < other.end
                and (other.change is not None or request.change is not None)
            ):
                machine.wrongs.append(
                    f"{request.operation} began before {other.operation} had ended"
                )

    def register_memory(self, address: int, nbytes: int) -> None:
        """Nothing is faster for it."""

    def forget_memory(self, address: int) -> None:
        """Nothing was kept."""

    def drain(self) -> None:
        for request in self._requests:
            request.complete()
        self._requests = []

    def close(self) -> None:
        self.drain()
        self._is_closed = True
