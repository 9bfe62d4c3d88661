"""Runs pieces on the native engine and measures bytes, seconds, CPU seconds, and the latency of
each request.

[Note: two ways of measuring]
Bandwidth and CPU time are measured with transfers that are waited for in order, as in training.
That costs nearly no CPU time, but sees a request that overtook others late. Latency is measured in
separate runs, which poll every request. Their CPU time does not count.
"""

from __future__ import annotations

import itertools
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity import native
from infinity.bench.io.patterns import ReplayStage, Transfer
from infinity.bench.io.search import Setting
from infinity.device import HostMemory
from infinity.measure.speed import finish_all
from infinity.placement.budget import STAGED_SETS
from infinity.quantities import round_up
from infinity.tiers.drives import ALIGNMENT
from infinity.tiers.extents import STRIPE_BYTES
from infinity.tiers.stripes import Stripes

PIECE_BYTES = 4 << 20
"""A transfer of the sequential modes, unless one request is larger. The engine cuts it into
requests."""
READING_STAGES = 2  # staged sets that are read; the others are written

Pieces = Callable[[int], Iterable[Transfer]]
"""From the size of a file to its transfers."""


class Measured(NamedTuple):
    """One run: moved bytes, wall seconds, CPU seconds of this process."""

    bytes_read: int
    bytes_written: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_second(self) -> float:
        """10^9 bytes per second, both directions together."""
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """CPU seconds of this process per 10^9 bytes."""
        return self.cpu_seconds / (self.bytes_read + self.bytes_written) * 1e9


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of ascending values: the smallest value such that at least
    `percent` of all values do not exceed it."""
    if not ordered or not 0 < percent <= 100:
        raise ValueError("a percentile needs a value, and a share above 0 and up to 100")
    return ordered[max(math.ceil(percent / 100 * len(ordered) - 1e-9), 1) - 1]


@dataclass(frozen=True)
class Drive:
    """The file of one path, which is written already, and the memory for its transfers."""

    file: Any
    size: int
    memory: HostMemory

    @property
    def address(self) -> int:
        """The start of the memory."""
        return self.memory.tensor.data_ptr()

    @property
    def memory_bytes(self) -> int:
        """The length of the memory."""
        return self.memory.tensor.numel()


class _Submitted(NamedTuple):
    pieces: Sequence[Transfer]  # several: a batch, with one ticket
    ticket: Any

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Rig:
    """One engine per drive, with one setting. The thread that created it calls it. With several
    drives, each has a thread."""

    def __init__(self, drives: Sequence[Drive], setting: Setting) -> None:
        self.drives, self.setting = list(drives), setting
        self.moved = {"read": 0, "write": 0}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._stripes = Stripes(STRIPE_BYTES, [1.0] * len(self.drives))
        with ExitStack() as stack:
            self.engines = [stack.enter_context(closing(make_engine(setting))) for _ in self.drives]
            pinned = [_register(engine, drive) for engine in self.engines for drive in self.drives]
            self.registered = all(pinned)
            """Whether the kernel let the rings pin their memory."""
            self._stack = stack.pop_all()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def stream(
        self,
        pieces: Pieces,
        piece_bytes: int,
        seconds: float | None = None,
        only: int | None = None,
        batch: int = 1,
    ) -> Measured:
        """Run the pieces of every drive, or of drive `only`, at once, for `seconds` or to their
        end.

        `pieces` returns the pieces of a file of some size. None is longer than `piece_bytes`.
        `batch` pieces of one operation are submitted together, with one ticket.
        """
        return self._timed(
            self._each(
                lambda number: self._stream(
                    number, pieces(self.drives[number].size), piece_bytes, seconds, batch
                ),
                only,
            )
        )

    def latencies(self, pieces: Pieces, piece_bytes: int, seconds: float, only: int) -> list[float]:
        """Seconds per piece of one drive, ascending, with `depth` pieces in flight; see [Note: two
        ways of measuring]."""
        return sorted(self._polled(only, pieces(self.drives[only].size), piece_bytes, seconds))

    def replay(self, stages: Iterable[ReplayStage]) -> Measured:
        """Run `stages` to their end, striped over all drives. Two are read while earlier ones are
        written."""
        return self._timed(lambda: self._replay(stages))

    def _timed(self, run: Callable[[], None]) -> Measured:
        before, usage, start = dict(self.moved), _cpu_seconds(), time.perf_counter()
        run()
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - usage
        return Measured(
            self.moved["read"] - before["read"], self.moved["write"] - before["write"], seconds, cpu
        )

    def _each(self, work: Callable[[int], None], only: int | None) -> Callable[[], None]:
        numbers = range(len(self.drives)) if only is None else [only]
        if len(numbers) == 1:
            return lambda: work(numbers[0])

        def together() -> None:
            failures: list[BaseException] = []

            def guarded(number: int) -> None:
                try:
                    work(number)
                except BaseException as error:
                    failures.append(error)
                    self._stopping.set()

            threads = [
                threading.Thread(target=guarded, args=(number,), name=f"bench-{number}")
                for number in numbers
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:  # only the main thread gets an interrupt
                self._stopping.set()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                self._stopping.clear()
            if failures:
                raise failures[0]

        return together

    def _submit(
        self, number: int, pieces: Sequence[Transfer], addresses: Sequence[int]
    ) -> _Submitted:
        engine, file, (first, *others) = self.engines[number], self.drives[number].file, pieces
        reading = first.operation == "read"
        if others:
            submit = engine.read_batch if reading else engine.write_batch
            sizes = [piece.nbytes for piece in pieces]
            return _Submitted(
                pieces, submit(file, [piece.offset for piece in pieces], addresses, sizes)
            )
        submit = engine.read if reading else engine.write
        return _Submitted(pieces, submit(file, first.offset, addresses[0], first.nbytes))

    def _finished(self, submitted: _Submitted) -> None:
        submitted.ticket.wait()
        with self._lock:
            self.moved[submitted.pieces[0].operation] += submitted.nbytes

    def _stream(
        self,
        number: int,
        pieces: Iterable[Transfer],
        piece_bytes: int,
        seconds: float | None,
        batch: int,
    ) -> None:
        slots = _Slots(self.drives[number], self.setting, piece_bytes)
        until = None if seconds is None else time.perf_counter() + seconds
        in_flight: deque[_Submitted] = deque()
        waiting, turn, batch = iter(pieces), 0, min(batch, slots.count // 2)
        try:
            while together := tuple(itertools.islice(waiting, batch)):
                if self._stopping.is_set() or (until is not None and time.perf_counter() >= until):
                    break
                if len(in_flight) >= max(slots.busy // batch, 2):
                    self._finished(in_flight.popleft())
                in_flight.append(
                    self._submit(
                        number, together, [slots.address(turn + at) for at in range(len(together))]
                    )
                )
                turn += batch
        finally:
            finish_all(in_flight, self._finished)

    def _polled(
        self, number: int, pieces: Iterable[Transfer], piece_bytes: int, seconds: float
    ) -> Iterator[float]:
        slots = _Slots(self.drives[number], self.setting, piece_bytes)
        until = time.perf_counter() + seconds
        free = list(range(min(self.setting.depth, slots.count)))
        live: dict[int, tuple[_Submitted, float]] = {}
        waiting: Iterator[Transfer] | None = iter(pieces)
        try:
            while waiting is not None or live:
                while waiting is not None and free:
                    piece = next(waiting, None)
                    if piece is None or time.perf_counter() >= until:
                        waiting = None
                        break
                    slot, start = free.pop(), time.perf_counter()
                    live[slot] = self._submit(number, [piece], [slots.address(slot)]), start
                now = time.perf_counter()
                done = [slot for slot, (submitted, _) in live.items() if submitted.ticket.done()]
                for slot in done:
                    submitted, start = live.pop(slot)
                    self._finished(submitted)
                    free.append(slot)
                    yield now - start
                if not done:
                    time.sleep(0)  # let another thread run
        finally:
            finish_all(deque(submitted for submitted, _ in live.values()), self._finished)

    def _replay(self, stages: Iterable[ReplayStage]) -> None:
        memory = self.drives[0]
        room = memory.memory_bytes // STAGED_SETS // ALIGNMENT * ALIGNMENT
        reading: deque[tuple[ReplayStage, int, deque[_Submitted]]] = deque()
        writing: deque[deque[_Submitted]] = deque()
        waiting = iter(stages)
        try:
            for number in itertools.count():
                stage = next(waiting, None)
                if stage is not None:
                    if stage.nbytes > room:
                        raise ValueError(
                            f"a stage of {stage.nbytes} bytes does not fit into {room} "
                            "bytes of staging"
                        )
                    while len(writing) > STAGED_SETS - READING_STAGES - 1:
                        finish_all(writing.popleft(), self._finished)
                    address = memory.address + number % STAGED_SETS * room
                    reading.append(
                        (stage, address, self._submit_ranges("read", stage.reads, address))
                    )
                if reading and (stage is None or len(reading) > READING_STAGES - 1):
                    done, address, tickets = reading.popleft()
                    finish_all(tickets, self._finished)
                    writing.append(self._submit_ranges("write", done.writes, address))
                elif stage is None:
                    break
        finally:
            finish_all(
                deque(itertools.chain(*(tickets for _, _, tickets in reading), *writing)),
                self._finished,
            )

    def _submit_ranges(
        self, operation: Any, ranges: Sequence[tuple[int, int]], address: int
    ) -> deque[_Submitted]:
        tickets: deque[_Submitted] = deque()
        for position, nbytes in ranges:
            for number, offset, length in self._stripes.pieces(position, nbytes):
                tickets.append(
                    self._submit(number, [Transfer(operation, offset, length)], [address])
                )
                address += length
        return tickets


class _Slots:
    """The memory of a drive in slots of `piece_bytes`, used in turns, and the number of transfers
    that keep the device busy."""

    def __init__(self, drive: Drive, setting: Setting, piece_bytes: int) -> None:
        self._address, self._slot = drive.address, round_up(piece_bytes, ALIGNMENT)
        self.count = drive.memory_bytes // self._slot
        if self.count < 2:
            raise ValueError(
                f"transfers of {piece_bytes} bytes are too large for {drive.memory_bytes} "
                "bytes of memory"
            )
        # Pieces with `depth` requests, and some that wait in the queue, so that the device
        # never waits.
        in_flight = -(-setting.depth // max(piece_bytes // setting.request_bytes, 1))
        self.busy = min(
            self.count, in_flight + max(1, min(setting.depth, PIECE_BYTES // piece_bytes))
        )

    def address(self, number: int) -> int:
        """The address of slot `number`. Slots are used in turns, so any number is valid."""
        return self._address + number % self.count * self._slot


def _register(engine: Any, drive: Drive) -> bool:
    """Pin the memory of the drive for the engine. A replay reads all paths into the memory of one
    drive. Returns False if the kernel refuses it."""
    try:
        engine.register_memory(drive.address, drive.memory_bytes)
    except OSError:  # RLIMIT_MEMLOCK, or an old kernel; everything works without
        return False
    return True


def make_engine(setting: Setting) -> Any:
    """A native engine with this setting."""
    return native.make_engine(
        setting.engine,
        depth=setting.depth,
        threads=setting.threads,
        request_bytes=setting.request_bytes,
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
