"""The async-IO extension keeps its contract (native/aio/aio.h), the same for both engines."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import native
from infinity.device import HostMemory
from infinity.errors import NvmeError
from support.children import CHILD
from support.liburing_binding import liburing_binding
from support.threads import in_threads

aio = native.aio()
BLOCK = aio.ALIGNMENT
AVAILABLE, REASON = aio.io_uring_available()
KINDS = [
    pytest.param("posix"),
    pytest.param("io_uring", marks=pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")),
]
each_engine = pytest.mark.parametrize("kind", KINDS)


def memory(content: bytes | int, shift: int = 0) -> np.ndarray:
    """Bytes (or so many zeros) at an address that is `shift` past a multiple of 4096."""
    size = content if isinstance(content, int) else len(content)
    base = np.zeros(size + 2 * BLOCK, np.uint8)
    start = -base.ctypes.data % BLOCK + shift
    view = base[start : start + size]
    if isinstance(content, bytes):
        view[:] = np.frombuffer(content, np.uint8)
    return view


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def outcome(ticket: Any) -> tuple[int, int, int]:
    """errno (0 with fewer bytes: the file ended), and the bytes asked and done."""
    try:
        moved = ticket.wait()
    except NvmeError as error:
        return error.errno or 0, error.asked, error.done
    return 0, moved, moved


def details(error: NvmeError) -> tuple[Any, ...]:
    return error.operation, error.path, error.offset, error.errno, error.asked, error.done


class Held:
    """A ticket that keeps its memory until it is complete, as the contract asks of a caller."""

    def __init__(
        self, submit: Callable[..., Any], file: Any, offset: int, data: np.ndarray
    ) -> None:
        self.data = data
        self.ticket = submit(file, offset, data.ctypes.data, data.size)

    def done(self) -> bool:
        return self.ticket.done()

    def wait(self) -> int:
        return self.ticket.wait()


def write(engine: Any, file: Any, offset: int, data: np.ndarray) -> Held:
    return Held(engine.write, file, offset, data)


def read(engine: Any, file: Any, offset: int, data: np.ndarray) -> Held:
    return Held(engine.read, file, offset, data)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    file = aio.File(str(tmp_path / "data"), create=True)
    yield file
    file.close()


# Every request moves exactly its bytes.

SPAN = 48 * 1024
places = st.one_of(
    st.integers(0, SPAN), st.integers(0, SPAN // BLOCK).map(lambda block: block * BLOCK)
)
steps = st.tuples(st.booleans(), places, places, st.sampled_from([0, 0, 1, 64, 512, 4095]))


@each_engine
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(steps, max_size=12), short=st.sampled_from([0.0, 0.5, 1.0]), direct=st.booleans()
)
def test_any_offset_length_and_address_matches_a_model(
    kind: str, steps: list, short: float, direct: bool
) -> None:
    model = bytearray(2 * SPAN)
    with tempfile.TemporaryDirectory() as folder:
        engine = aio.Engine(kind, depth=3, request_bytes=4 * BLOCK)
        engine.set_faults(seed=len(steps), short_fraction=short)
        file = aio.File(folder + "/data", create=True, direct=direct)
        file.truncate(len(model))
        for number, (writing, offset, size, shift) in enumerate(steps):
            data = memory(noise(size, number) if writing else size, shift)
            ticket = (write if writing else read)(engine, file, offset, data)
            assert outcome(ticket) == (0, size, size)
            if writing:
                model[offset : offset + size] = data.tobytes()
            assert data.tobytes() == model[offset : offset + size]
        file.close()
        engine.close()
        assert Path(folder, "data").read_bytes() == model


@each_engine
@pytest.mark.parametrize(
    ("offset", "size"), [(1, 1), (100, BLOCK), (BLOCK - 1, 2), (5, 3 * BLOCK), (BLOCK, 10)]
)
def test_neighbours_of_an_unaligned_write_are_untouched(
    kind: str, file: Any, offset: int, size: int
) -> None:
    engine = aio.Engine(kind)
    before = noise(5 * BLOCK)
    assert outcome(write(engine, file, 0, memory(before)))[0] == 0
    after = noise(size, 1)
    assert outcome(write(engine, file, offset, memory(after, shift=8))) == (0, size, size)
    engine.close()
    assert Path(file.path).read_bytes() == before[:offset] + after + before[offset + size :]


@each_engine
def test_short_transfers_are_continued(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, request_bytes=64 * BLOCK)
    engine.set_faults(seed=1, short_fraction=1.0)
    data = noise(256 * BLOCK)
    assert outcome(write(engine, file, 0, memory(data))) == (0, len(data), len(data))
    back = memory(len(data))
    assert outcome(read(engine, file, 0, back)) == (0, len(data), len(data))
    assert back.tobytes() == data
    counters = engine.counters()
    assert counters["continued"] >= 8  # each of the 2 * 4 device requests was short at least once
    assert counters["device_requests"] == 8 + counters["continued"]
    assert counters["bytes_read"] == counters["bytes_written"] == len(data)


@each_engine
def test_an_interrupted_request_is_repeated(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    for code in (errno.EINTR, errno.EAGAIN):
        engine.set_faults(fail_write_at=0, fail_read_at=0, fail_errno=code)
        assert outcome(write(engine, file, 0, memory(noise(BLOCK)))) == (0, BLOCK, BLOCK)
        back = memory(BLOCK)
        assert outcome(read(engine, file, 0, back)) == (0, BLOCK, BLOCK)
        assert back.tobytes() == noise(BLOCK)
    assert engine.counters()["continued"] == 4


@each_engine
def test_aligned_requests_are_not_copied(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, request_bytes=4 * BLOCK)
    data = memory(noise(10 * BLOCK))
    write(engine, file, 0, data).wait()
    read(engine, file, 0, data).wait()
    assert engine.counters()["bounced_bytes"] == 0
    assert engine.counters()["device_requests"] == 2 * 3
    write(engine, file, 0, memory(noise(10), shift=1)).wait()
    assert engine.counters()["bounced_bytes"] == (10 if file.direct else 0)


@each_engine
def test_a_direct_file_grows_to_the_aligned_end(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    write(engine, file, 1, memory(noise(BLOCK - 2))).wait()  # leaves its bytes in a bounce buffer
    write(engine, file, 2 * BLOCK + 1, memory(noise(10))).wait()
    assert file.size() == (3 * BLOCK if file.direct else 2 * BLOCK + 11)
    written = b"\0" + noise(BLOCK - 2) + bytes(BLOCK + 2) + noise(10)
    assert Path(file.path).read_bytes() == written.ljust(file.size(), b"\0")


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_what_one_engine_writes_the_other_reads(file: Any) -> None:
    engines = [aio.Engine(kind) for kind in ("posix", "io_uring")]
    for seed, (writer, reader) in enumerate([engines, engines[::-1]]):
        data = noise(3_000_001, seed)
        assert outcome(write(writer, file, 7, memory(data)))[0] == 0
        back = memory(len(data))
        assert outcome(read(reader, file, 7, back))[0] == 0
        assert back.tobytes() == data


@each_engine
@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_an_independent_io_uring_binding_reads_the_same_bytes(kind: str, file: Any) -> None:
    liburing = liburing_binding()
    data = noise(2_500_000)
    assert outcome(write(aio.Engine(kind), file, 0, memory(data)))[0] == 0

    back = bytearray(len(data))
    ring, completion = liburing.Ring(), liburing.Cqe()
    liburing.io_uring_queue_init(4, ring)
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        liburing.io_uring_prep_read(liburing.io_uring_get_sqe(ring), descriptor, back, 0)
        liburing.io_uring_submit(ring)
        liburing.io_uring_wait_cqe(ring, completion)
        entry = completion[0]
        assert entry.res == len(data)
        liburing.io_uring_cqe_seen(ring, entry)
    finally:
        os.close(descriptor)
        liburing.io_uring_queue_exit(ring)
    assert back == data


# Every failure is reported, with the bytes before it.


@each_engine
@pytest.mark.parametrize("nth", [0, 1, 6])
def test_the_nth_failure_gives_the_bytes_before_it(kind: str, file: Any, nth: int) -> None:
    piece = 2 * BLOCK
    engine = aio.Engine(kind, depth=4, request_bytes=piece)
    old, new = noise(7 * piece), noise(7 * piece, 1)
    write(engine, file, 0, memory(old)).wait()

    engine.set_faults(fail_read_at=nth, fail_errno=errno.ENXIO)
    back = memory(len(old))
    assert outcome(read(engine, file, 0, back)) == (errno.ENXIO, len(old), nth * piece)
    assert back.tobytes()[: nth * piece] == old[: nth * piece]

    engine.set_faults(fail_write_at=nth)
    assert outcome(write(engine, file, 0, memory(new))) == (errno.EIO, len(new), nth * piece)
    on_disk = Path(file.path).read_bytes()
    assert on_disk[: nth * piece] == new[: nth * piece]
    assert on_disk[nth * piece : (nth + 1) * piece] == old[nth * piece : (nth + 1) * piece]
    assert outcome(write(engine, file, 0, memory(new)))[0] == 0


@each_engine
def test_what_is_left_of_a_failed_request_is_not_started(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=1, request_bytes=BLOCK)
    engine.set_faults(fail_write_at=2)
    assert outcome(write(engine, file, 0, memory(10 * BLOCK))) == (errno.EIO, 10 * BLOCK, 2 * BLOCK)
    assert engine.counters()["device_requests"] == 3
    assert engine.counters()["bytes_written"] == 2 * BLOCK


@each_engine
def test_a_failed_read_of_a_read_modify_write_writes_nothing(kind: str, file: Any) -> None:
    if not file.direct:
        pytest.skip("needs O_DIRECT")
    engine = aio.Engine(kind)
    write(engine, file, 0, memory(noise(BLOCK))).wait()
    engine.set_faults(fail_read_at=0)
    assert outcome(write(engine, file, 10, memory(bytes(5)))) == (errno.EIO, 5, 0)
    assert Path(file.path).read_bytes() == noise(BLOCK)


@each_engine
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK - 3])
def test_the_end_of_the_file_is_reported(
    kind: str, tmp_path: Path, size: int, direct: bool
) -> None:
    path = tmp_path / "data"
    path.write_bytes(noise(size))
    file, engine = aio.File(str(path), direct=direct), aio.Engine(kind, request_bytes=2 * BLOCK)
    for extra in (1, BLOCK, 3 * BLOCK + 1):
        back = memory(size + extra)
        assert outcome(read(engine, file, 0, back)) == (0, size + extra, size)
        assert back.tobytes() == noise(size) + bytes(extra)
    back = memory(size)
    assert outcome(read(engine, file, 0, back)) == (0, size, size)


@each_engine
def test_an_error_says_of_what_it_is(kind: str, tmp_path: Path) -> None:
    """Of the file by the name that it was given, and of the whole that the request is a part of."""
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    file = aio.File(str(tmp_path / "data"), create=True, name=name)
    assert file.path == os.fsdecode(name)
    engine, data = aio.Engine(kind, request_bytes=BLOCK), memory(noise(4 * BLOCK))
    whole = 3 * BLOCK + 1, 9 * BLOCK
    for values in ({}, {"what": "grad of unit 7"}, {"what": "weights", "whole": whole}):
        engine.set_faults(fail_write_at=2, fail_errno=errno.ENOSPC)
        ticket = engine.write(file, 4 * BLOCK, data.ctypes.data, data.size, **values)
        with pytest.raises(NvmeError, match="No space left on device") as failure:
            ticket.wait()
        offset, asked, done = (
            (*whole, 3 * BLOCK - 1) if "whole" in values else (4 * BLOCK, 4 * BLOCK, 2 * BLOCK)
        )
        assert details(failure.value) == (
            "write",
            os.fsdecode(name),
            offset,
            errno.ENOSPC,
            asked,
            done,
        )
        assert (
            (f" (for {values['what']})" in str(failure.value))
            if values
            else ("for" not in str(failure.value))
        )
        with pytest.raises(NvmeError) as again:
            ticket.wait()
        assert again.value is not failure.value and details(again.value) == details(failure.value)
    file.close()


@each_engine
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seen", ["done", "wait"])
def test_a_ticket_that_is_seen_to_be_complete_keeps_nothing_alive(
    kind: str, tmp_path: Path, seen: str, fails: bool
) -> None:
    file = aio.File(str(tmp_path / "data"), create=True)
    engine = aio.Engine(kind)
    data = memory(noise(BLOCK))
    engine.set_faults(fail_write_at=0 if fails else -1)
    alive = weakref.ref(data)
    ticket = engine.write(file, 0, data.ctypes.data, data.size, owner=data)
    file.close()
    del data
    assert alive() is not None
    if seen == "wait":
        outcome(ticket)
    while not ticket.done():
        pass
    assert alive() is None
    assert descriptors(str(tmp_path)) == set()
    assert outcome(ticket) == ((errno.EIO, BLOCK, 0) if fails else (0, BLOCK, BLOCK))


@pytest.mark.root
@each_engine
def test_a_full_file_system_is_reported(kind: str, mount: Callable[[str], Path]) -> None:
    path = str(mount("size=256k") / "data")
    file, engine = aio.File(path, create=True), aio.Engine(kind, request_bytes=1 << 20)
    data = noise(1 << 20)
    error, asked, done = outcome(write(engine, file, 0, memory(data)))
    assert error == errno.ENOSPC
    assert asked == len(data)
    assert 0 < done <= 256 * 1024
    assert Path(path).read_bytes()[:done] == data[:done]
    with pytest.raises(OSError) as failure:
        file.allocate(1 << 20)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, path)
    file.close()


# Queues are bounded, any thread may use them, and nothing in flight is lost.


@each_engine
@pytest.mark.parametrize("depth", [1, 2, 64])
def test_hundreds_of_requests_from_many_threads(kind: str, file: Any, depth: int) -> None:
    engine = aio.Engine(kind, depth=depth, request_bytes=2 * BLOCK)
    # Several device requests each, the last one bounced.
    threads, requests, size = 6, 50, 3 * BLOCK + 50
    stride = 4 * BLOCK

    def work(thread: int) -> None:
        data = [memory(noise(size, thread * requests + i)) for i in range(requests)]
        back = [memory(size, shift=i % 2) for i in range(requests)]
        for move, buffers in ((write, data), (read, back)):
            tickets = [
                move(engine, file, (i * threads + thread) * stride, buffers[i])
                for i in range(requests)
            ]
            assert all(outcome(ticket) == (0, size, size) for ticket in tickets)
        assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))

    in_threads(threads, work)
    assert engine.counters()["bytes_read"] == threads * requests * size


@each_engine
@pytest.mark.parametrize("depth", [1, 3])
def test_submitting_blocks_while_the_queue_is_full(kind: str, file: Any, depth: int) -> None:
    engine = aio.Engine(kind, depth=depth)
    engine.set_faults(bytes_per_second=1 << 20)
    data = memory(noise(BLOCK))
    tickets = []
    for count in range(1, 31):
        tickets.append(write(engine, file, count * BLOCK, data))
        # `depth` may be on the device and `depth` in the queue; the others had to be complete
        # first.
        assert sum(not ticket.done() for ticket in tickets) <= 2 * depth
    engine.drain()


@each_engine
def test_many_threads_may_wait_for_one_ticket(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    engine.set_faults(bytes_per_second=1 << 20)
    data = memory(noise(16 * BLOCK))
    ticket = write(engine, file, 0, data)
    results: list[tuple[int, int, int]] = []
    in_threads(8, lambda _: results.append(outcome(ticket)))
    assert results == [(0, data.size, data.size)] * 8
    assert ticket.done()


@each_engine
def test_close_drains(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    file, engine = aio.File(str(path), create=True), aio.Engine(kind, depth=2, request_bytes=BLOCK)
    # So that most requests are still in flight at close().
    engine.set_faults(bytes_per_second=4 << 20)
    data = memory(noise(64 * BLOCK))
    tickets = [write(engine, file, i * BLOCK, data[i * BLOCK : (i + 1) * BLOCK]) for i in range(62)]
    write(engine, file, 62 * BLOCK, data[62 * BLOCK :])  # `data` stays, the ticket does not
    file.close()
    engine.close()
    assert all(ticket.done() and outcome(ticket) == (0, BLOCK, BLOCK) for ticket in tickets)
    assert path.read_bytes() == data.tobytes()


@each_engine
def test_drain_waits_for_all(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    engine.drain()
    engine.set_faults(bytes_per_second=1 << 20)
    data = memory(noise(8 * BLOCK))
    tickets = [write(engine, file, i * BLOCK, data[i * BLOCK : (i + 1) * BLOCK]) for i in range(8)]
    engine.drain()
    assert all(ticket.done() for ticket in tickets)


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
@pytest.mark.timeout(30)
def test_waiting_releases_the_gil(tmp_path: Path) -> None:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    file, engine, byte = aio.File(path, direct=False), aio.Engine("io_uring"), memory(1)
    ticket = read(engine, file, 0, byte)
    about_to_wait = threading.Event()

    def wait(_: int) -> None:
        about_to_wait.set()
        assert outcome(ticket) == (0, 1, 1)

    def feed(_: int) -> None:
        about_to_wait.wait()
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, b"x")
        os.close(descriptor)

    in_threads(2, lambda index: (wait, feed)[index](index))
    assert byte.tobytes() == b"x"


@each_engine
@pytest.mark.parametrize("threads", [1, 4])
def test_the_throttle_bounds_the_rate(kind: str, file: Any, threads: int) -> None:
    engine = aio.Engine(kind, threads=threads, request_bytes=16 * BLOCK)
    rate, size = 16 << 20, 4 << 20
    engine.set_faults(bytes_per_second=rate)
    data = memory(noise(size // 2))
    begin = time.monotonic()
    tickets = [write(engine, file, offset, data) for offset in (0, data.size)]
    assert [outcome(ticket)[0] for ticket in tickets] == [0, 0]
    assert time.monotonic() - begin >= size / rate * 0.9


# Background requests wait for the others; batches are one request; registered memory changes
# nothing but the cost.


@each_engine
def test_a_foreground_request_passes_background_ones(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=1, threads=1, request_bytes=BLOCK)
    engine.set_faults(bytes_per_second=1 << 20)
    data, urgent = memory(noise(64 * BLOCK)), memory(noise(BLOCK, 1))
    # It fills the queue of the background; the foreground has one of its own.
    ticket = engine.write(file, 0, data.ctypes.data, data.size, background=True)
    assert outcome(write(engine, file, data.size, urgent)) == (0, BLOCK, BLOCK)
    assert not ticket.done()
    assert outcome(ticket) == (0, data.size, data.size)
    assert Path(file.path).read_bytes() == data.tobytes() + urgent.tobytes()


@each_engine
def test_a_promoted_request_is_taken_in_order(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=1, threads=1, request_bytes=BLOCK)
    engine.set_faults(bytes_per_second=1 << 20)
    data, urgent = memory(noise(32 * BLOCK)), memory(noise(BLOCK, 1))
    first = engine.write(file, data.size, urgent.ctypes.data, urgent.size)
    slow = engine.write(file, 0, data.ctypes.data, data.size, background=True)
    first.promote()
    slow.promote()
    slow.promote()
    last = write(engine, file, data.size + BLOCK, urgent)
    assert outcome(last) == (0, BLOCK, BLOCK)
    assert slow.done()
    assert outcome(slow) == (0, data.size, data.size)
    slow.promote()
    assert Path(file.path).read_bytes() == data.tobytes() + 2 * urgent.tobytes()


@each_engine
def test_a_promoted_request_that_fails_in_part_ends_once(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=2, threads=1, request_bytes=BLOCK)
    engine.set_faults(bytes_per_second=1 << 20, fail_write_at=3)
    data, urgent = memory(noise(32 * BLOCK)), memory(noise(BLOCK, 1))
    slow = engine.write(file, 0, data.ctypes.data, data.size, background=True)
    engine.set_faults(bytes_per_second=1 << 20)
    # A part of it is cut, and goes on as what it was cut as.
    while engine.counters()["device_requests"] == 0:
        pass
    foreground = [write(engine, file, (32 + i) * BLOCK, urgent) for i in range(2)]
    slow.promote()
    code, asked, done = outcome(slow)
    assert (code, asked) == (5, data.size) and done <= 3 * BLOCK
    assert [outcome(ticket) for ticket in foreground] == 2 * [(0, BLOCK, BLOCK)]
    engine.drain()
    assert engine.counters()["device_requests"] < 12  # what is left of it was not started


@each_engine
@pytest.mark.parametrize("depth", [1, 4])
def test_background_requests_end_while_the_foreground_never_rests(
    kind: str, file: Any, depth: int
) -> None:
    engine = aio.Engine(kind, depth=depth, threads=1, request_bytes=BLOCK)
    # So that the queue of the foreground is never empty below.
    engine.set_faults(bytes_per_second=64 << 20)
    data, urgent, blocks = memory(noise(8 * BLOCK)), memory(noise(BLOCK, 1)), 8
    ticket = engine.write(file, 0, data.ctypes.data, data.size, background=True)
    foreground = []
    while not ticket.done():
        foreground.append(write(engine, file, data.size, urgent))
    assert outcome(ticket) == (0, data.size, data.size)
    assert len(foreground) <= blocks * 32 + 2 * depth
    engine.drain()


@each_engine
def test_a_full_background_queue_leaves_slots_and_buffers_to_the_foreground(
    kind: str, file: Any
) -> None:
    engine = aio.Engine(kind, depth=8, request_bytes=BLOCK)
    data = memory(noise(64 * BLOCK), shift=1)  # bounced
    tickets = [
        engine.write(file, i * data.size, data.ctypes.data, data.size, background=True)
        for i in range(8)
    ]
    back = memory(data.size, shift=1)
    for i, ticket in enumerate(tickets):
        assert outcome(write(engine, file, (8 + i) * data.size, data)) == (0, data.size, data.size)
        assert outcome(ticket) == (0, data.size, data.size)
        assert outcome(read(engine, file, i * data.size, back)) == (0, data.size, data.size)
        assert np.array_equal(back, data)


def batch(
    submit: Callable[..., Any],
    file: Any,
    offsets: list[int],
    views: list[np.ndarray],
    **options: Any,
) -> Any:
    return submit(
        file,
        offsets,
        [view.ctypes.data for view in views],
        [view.size for view in views],
        **options,
    )


@each_engine
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(places, st.integers(0, SPAN), st.sampled_from([0, 0, 64, 4095])), max_size=8
    ),
    short=st.sampled_from([0.0, 0.7]),
    background=st.booleans(),
)
def test_a_batch_moves_each_of_its_parts(
    kind: str, parts: list, short: float, background: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = aio.Engine(kind, depth=3, request_bytes=4 * BLOCK)
        engine.set_faults(seed=len(parts), short_fraction=short, short_unit=1)
        file = aio.File(folder + "/data", create=True)
        model = noise(2 * SPAN)
        assert outcome(write(engine, file, 0, memory(model)))[0] == 0
        offsets = [offset for offset, _, _ in parts]
        views = [memory(size, shift) for _, size, shift in parts]
        total = sum(view.size for view in views)
        assert outcome(batch(engine.read_batch, file, offsets, views, background=background)) == (
            0,
            total,
            total,
        )
        for offset, view in zip(offsets, views, strict=True):
            assert view.tobytes() == model[offset : offset + view.size]
        # Written side by side, each at a place of its own.
        places = list(np.cumsum([0] + [view.size + BLOCK for view in views])[:-1])
        ticket = batch(engine.write_batch, file, places, views, background=background)
        assert outcome(ticket) == (0, total, total)
        engine.close()
        content = Path(folder, "data").read_bytes()
        for place, view in zip(places, views, strict=True):
            assert content[place : place + view.size] == view.tobytes()
        file.close()


@each_engine
@pytest.mark.parametrize("nth", [0, 3, 7])
def test_a_batch_gives_its_first_part_that_failed_and_the_bytes_before_it(
    kind: str, file: Any, nth: int
) -> None:
    engine = aio.Engine(kind, depth=4, request_bytes=2 * BLOCK)
    assert outcome(write(engine, file, 0, memory(noise(16 * BLOCK))))[0] == 0
    views = [memory(4 * BLOCK) for _ in range(4)]  # two device requests each
    engine.set_faults(fail_read_at=nth, fail_errno=errno.ENODATA)
    ticket = batch(engine.read_batch, file, [3 * BLOCK * i for i in range(4)], views)
    with pytest.raises(NvmeError) as failure:
        ticket.wait()
    at, before = divmod(nth, 2)
    assert details(failure.value) == (
        "read",
        file.path,
        3 * BLOCK * at,
        errno.ENODATA,
        4 * BLOCK,
        before * 2 * BLOCK,
    )
    for i, view in enumerate(views[: nth // 2]):
        assert view.tobytes() == noise(16 * BLOCK)[3 * BLOCK * i : (3 * i + 4) * BLOCK]


@each_engine
def test_wrong_batches_are_value_errors(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    assert outcome(engine.read_batch(file, [], [], [])) == (0, 0, 0)
    with pytest.raises(ValueError, match="same length"):
        engine.read_batch(file, [0, 1], [1], [1])
    with pytest.raises(ValueError, match="null"):
        engine.read_batch(file, [0, 1], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="largest file"):
        engine.write_batch(file, [2**63], [1], [1])
    assert engine.counters()["device_requests"] == 0


@each_engine
def test_a_batch_is_one_request_for_the_queue(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=2)
    engine.set_faults(bytes_per_second=1 << 20)
    data = memory(noise(64 * BLOCK))
    numbers = np.arange(64, dtype=np.uint64) * np.uint64(BLOCK)
    sizes = np.full(64, BLOCK, np.uint64)
    # Returns before it is done.
    ticket = engine.write_batch(file, numbers, numbers + np.uint64(data.ctypes.data), sizes)
    assert not ticket.done()
    assert outcome(ticket) == (0, data.size, data.size)
    assert Path(file.path).read_bytes() == data.tobytes()


@each_engine
def test_registered_memory_moves_the_same_bytes(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, request_bytes=4 * BLOCK)
    pool = memory(32 * BLOCK)
    address, half = pool.ctypes.data, 16 * BLOCK
    pool[:half] = np.frombuffer(noise(half), np.uint8)
    engine.register_memory(address, pool.size)
    assert outcome(write(engine, file, 0, pool[:half])) == (0, half, half)
    assert outcome(read(engine, file, 0, pool[half:])) == (0, half, half)
    assert pool[half:].tobytes() == noise(half)
    assert engine.counters()["fixed_requests"] == (8 if kind == "io_uring" and file.direct else 0)
    # What lies outside, or only partly inside, is moved as ever.
    engine.forget_memory(address)
    engine.forget_memory(address)
    engine.register_memory(address, 6 * BLOCK)
    before = engine.counters()["fixed_requests"]
    pool[:half] = 0
    assert outcome(read(engine, file, 0, pool[:half])) == (0, half, half)
    assert pool[:half].tobytes() == noise(half)
    assert engine.counters()["fixed_requests"] == before + (
        1 if kind == "io_uring" and file.direct else 0
    )


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_memory_that_cannot_be_registered_changes_nothing(file: Any) -> None:
    engine, pool = aio.Engine("io_uring"), memory(noise(8 * BLOCK))
    address = pool.ctypes.data
    engine.register_memory(address + BLOCK, 2 * BLOCK)
    for start, size in ((0, 2), (2, 1), (0, 8), (2, 3), (1, 2)):
        with pytest.raises(ValueError, match="registered"):
            engine.register_memory(address + start * BLOCK, size * BLOCK)
    engine.register_memory(address, BLOCK)
    engine.register_memory(address + 3 * BLOCK, BLOCK)
    with mmap.mmap(-1, 4 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as gone:
        hole = np.frombuffer(gone, np.uint8).ctypes.data
    with pytest.raises(OSError) as failure:
        engine.register_memory(hole, 4 * BLOCK)
    assert failure.value.errno == errno.EFAULT
    assert outcome(write(engine, file, 0, pool)) == (0, pool.size, pool.size)
    assert Path(file.path).read_bytes() == pool.tobytes()


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_registering_goes_on_beside_requests_in_flight(file: Any) -> None:
    engine, pool = aio.Engine("io_uring", depth=8, request_bytes=BLOCK), memory(noise(64 * BLOCK))
    assert outcome(write(engine, file, 0, pool))[0] == 0

    def work(thread: int) -> None:
        mine = memory(64 * BLOCK)
        for turn in range(60):
            engine.register_memory(mine.ctypes.data, mine.size)
            ticket = read(engine, file, 0, mine)
            if (thread + turn) % 2:
                engine.forget_memory(mine.ctypes.data)  # under way
            assert outcome(ticket) == (0, mine.size, mine.size)
            engine.forget_memory(mine.ctypes.data)
            assert np.array_equal(mine, pool)
            mine[:] = 0

    in_threads(6, work)
    assert engine.counters()["fixed_requests"] > 0


@each_engine
def test_an_owner_lives_until_its_request_is_done(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=1, request_bytes=BLOCK)
    engine.set_faults(bytes_per_second=1 << 20)
    data = memory(noise(16 * BLOCK))
    alive = weakref.ref(data)
    ticket = engine.write(file, 0, data.ctypes.data, data.size, owner=data)
    del data
    assert alive() is not None
    assert outcome(ticket)[0] == 0
    assert alive() is None
    # Dropping the ticket waits, and only then lets go of the memory.
    data = memory(noise(16 * BLOCK, 1))
    engine.write(file, 0, data.ctypes.data, data.size, owner=data)
    assert Path(file.path).read_bytes() == noise(16 * BLOCK, 1)


def bytes_on_huge_pages(address: int) -> int:
    """Of the mapping that `address` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


@each_engine
def test_only_ordinary_pages_on_a_virtual_disk_are_copied(kind: str, file: Any) -> None:
    """Which kind of memory goes straight to the device: see [Note: ordinary memory] in engine.h."""
    engine, size = aio.Engine(kind), 4 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        view = np.frombuffer(area, np.uint8)
        view[:] = np.frombuffer(noise(size), np.uint8)
        small = view.ctypes.data
        assert outcome(engine.write(file, 0, small, size)) == (0, size, size)
        status = Path(file.path).stat()
        device = f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        can_tell = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 7)
        copied = size if file.direct and can_tell and "/virtio" in os.path.realpath(device) else 0
        assert engine.counters()["bounced_bytes"] == copied
        assert Path(file.path).read_bytes() == noise(size)
        # Registered memory goes straight, and so do few pages.
        before = engine.counters()["bounced_bytes"]
        assert outcome(engine.write(file, 0, small, 4 * BLOCK))[0] == 0
        engine.register_memory(small, size)
        assert outcome(engine.read(file, 0, small, size)) == (0, size, size)
        if kind == "io_uring":
            assert engine.counters()["bounced_bytes"] == before
        engine.forget_memory(small)
        assert view.tobytes() == noise(size)
        del view

    host = HostMemory(size)
    if bytes_on_huge_pages(host.tensor.data_ptr()) >= size:
        before = engine.counters()["bounced_bytes"]
        assert outcome(engine.read(file, 0, host.tensor.data_ptr(), size)) == (0, size, size)
        assert host.tensor.numpy().tobytes() == noise(size)
        assert engine.counters()["bounced_bytes"] == before
    host.close()


# Whatever the kernel says, a ticket gives the right bytes or that error, and always ends.

READ_ERRORS = ["EBADF", "EFAULT", "EINVAL", "EIO", "EISDIR"]
WRITE_ERRORS = [
    "EBADF",
    "EDESTADDRREQ",
    "EDQUOT",
    "EFAULT",
    "EFBIG",
    "EINVAL",
    "EIO",
    "ENOSPC",
    "EPERM",
    "EPIPE",
]
RING_ERRORS = [
    "EACCES",
    "EBADFD",
    "EBUSY",
    "ECANCELED",
    "EEXIST",
    "ENOBUFS",
    "ENODEV",
    "ENOMEM",
    "ENXIO",
    "EOPNOTSUPP",
]
DEVICE_ERRORS = [
    "EREMOTEIO",
    "ENODATA",
    "EILSEQ",
    "ETIMEDOUT",
    "EBADE",
    "ENOLINK",
    "EROFS",
    "ESTALE",
    "ETIME",
    "EOVERFLOW",
]
TO_CONTINUE = ["EINTR", "EAGAIN"]
EVERY_ERROR = [
    getattr(errno, name)
    for name in dict.fromkeys(
        READ_ERRORS + WRITE_ERRORS + RING_ERRORS + DEVICE_ERRORS + TO_CONTINUE
    )
]


@each_engine
@pytest.mark.parametrize("code", EVERY_ERROR, ids=lambda code: errno.errorcode[code])
def test_every_errno_is_given_or_continued(kind: str, file: Any, code: int) -> None:
    engine = aio.Engine(kind, depth=4, request_bytes=2 * BLOCK)
    old, new = noise(7 * BLOCK), noise(7 * BLOCK, 1)
    assert outcome(write(engine, file, 0, memory(old)))[0] == 0
    engine.set_faults(fail_read_at=2, fail_write_at=1, fail_errno=code)
    back = memory(len(old))
    goes_on = errno.errorcode[code] in TO_CONTINUE
    assert outcome(read(engine, file, 0, back)) == (
        (0, len(old), len(old)) if goes_on else (code, len(old), 4 * BLOCK)
    )
    assert back.tobytes()[: 4 * BLOCK] == old[: 4 * BLOCK]
    assert outcome(write(engine, file, 0, memory(new))) == (
        (0, len(new), len(new)) if goes_on else (code, len(new), 2 * BLOCK)
    )
    assert outcome(write(engine, file, 0, memory(new))) == (0, len(new), len(new))
    assert outcome(read(engine, file, 0, back)) == (0, len(old), len(old))
    assert back.tobytes() == new


@each_engine
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_an_errno_that_never_goes_away_is_given_in_the_end(kind: str, file: Any, code: int) -> None:
    engine = aio.Engine(kind)
    engine.set_faults(error_fraction=1.0, errnos=[code])
    assert outcome(write(engine, file, 0, memory(BLOCK))) == (code, BLOCK, 0)
    assert engine.counters()["device_requests"] == 64


@each_engine
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(steps, max_size=10),
    errors=st.sampled_from([0.0, 0.1, 0.5]),
    codes=st.lists(st.sampled_from(EVERY_ERROR), min_size=1, max_size=4),
    short=st.sampled_from([0.0, 0.5, 1.0]),
    unit=st.sampled_from([1, 7, 512, BLOCK, 5000]),
    delays=st.sampled_from([0.0, 0.3]),
    direct=st.booleans(),
)
def test_under_any_faults_a_ticket_gives_bytes_or_an_error(
    kind: str,
    seed: int,
    steps: list,
    errors: float,
    codes: list[int],
    short: float,
    unit: int,
    delays: float,
    direct: bool,
) -> None:
    """Requests under way together, each in a region of its own."""
    with tempfile.TemporaryDirectory() as folder:
        engine = aio.Engine(kind, depth=4, request_bytes=4 * BLOCK)
        file = aio.File(folder + "/data", create=True, direct=direct)
        before = noise(2 * SPAN * max(1, len(steps)))
        assert outcome(write(engine, file, 0, memory(before)))[0] == 0
        engine.set_faults(
            seed=seed, error_fraction=errors, errnos=codes, short_fraction=short, short_unit=unit,
            delay_fraction=delays, delay_seconds=0.001,
        )  # fmt: skip
        under_way = []
        for number, (writing, offset, size, shift) in enumerate(steps):
            data = memory(noise(size, number + 1) if writing else size, shift)
            place = 2 * SPAN * number + offset
            under_way.append(
                (writing, place, data, (write if writing else read)(engine, file, place, data))
            )
        for writing, place, data, ticket in under_way:
            error, asked, done = outcome(ticket)
            assert asked == data.size
            assert (error == 0) == (done == asked)
            assert error in (0, *codes)
            if not writing:
                assert data.tobytes()[:done] == before[place : place + done]
        engine.set_faults()
        content = Path(folder, "data").read_bytes()
        for writing, place, data, ticket in under_way:
            done = outcome(ticket)[2]
            if writing:
                assert content[place : place + done] == data.tobytes()[:done]
            begin, end = place // (2 * SPAN) * 2 * SPAN, place // (2 * SPAN) * 2 * SPAN + 2 * SPAN
            assert content[begin:place] == before[begin:place]
            assert content[place + data.size : end] == before[place + data.size : end]
        file.close()
        engine.close()


@each_engine
def test_a_delayed_request_is_overtaken(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, threads=1)
    data = memory(noise(BLOCK))
    engine.set_faults(seed=1, delay_fraction=1.0, delay_seconds=1.0)  # 0.13 s by this seed
    late = write(engine, file, 0, data)
    engine.set_faults()
    assert outcome(write(engine, file, BLOCK, data)) == (0, BLOCK, BLOCK)
    assert not late.done()
    assert outcome(late) == (0, BLOCK, BLOCK)


def descriptors(name: str) -> set[int]:
    """Of this process, whose target has `name` in it."""
    return {
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if name in os.path.realpath(entry)
    }


@each_engine
def test_a_descriptor_closed_under_way_is_an_error(kind: str, file: Any) -> None:
    engine = aio.Engine(kind, depth=1, threads=1, request_bytes=BLOCK)
    (number,) = descriptors(file.path)
    engine.set_faults(bytes_per_second=4 << 20)
    data = memory(noise(64 * BLOCK))
    ticket = write(engine, file, 0, data)
    os.close(number)
    error, asked, done = outcome(ticket)
    # The number is still the file's, which will close it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), number)
    assert (error, asked) == (errno.EBADF, data.size)
    assert done < asked
    assert Path(file.path).read_bytes()[:done] == data.tobytes()[:done]


@each_engine
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", [BLOCK, 1 << 20])
def test_memory_that_is_gone_is_an_error(kind: str, file: Any, size: int, shift: int) -> None:
    engine = aio.Engine(kind)
    assert outcome(write(engine, file, 0, memory(size)))[0] == 0
    with mmap.mmap(-1, size + BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as gone:
        hole = np.frombuffer(gone, np.uint8).ctypes.data + shift
    assert outcome(engine.write(file, 0, hole, size)) == (errno.EFAULT, size, 0)
    assert outcome(engine.read(file, 0, hole, size)) == (errno.EFAULT, size, 0)


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
@pytest.mark.parametrize("nth", [0, 1, 5])
def test_a_ring_that_fails_ends_every_ticket(file: Any, nth: int) -> None:
    """natively in dead_ring.cpp, for every moment"""
    engine = aio.Engine("io_uring", depth=4, request_bytes=BLOCK)
    content = memory(noise(64 * BLOCK))
    assert outcome(write(engine, file, 0, content))[0] == 0
    engine.set_faults(fail_ring_at=nth, fail_errno=errno.EBADF)
    back = [memory(64 * BLOCK) for _ in range(3)]
    tickets = [read(engine, file, 0, view) for view in back]
    for view, ticket in zip(back, tickets, strict=True):
        error, asked, done = outcome(ticket)
        assert (error, asked) == (errno.EBADF, 64 * BLOCK)
        assert view.tobytes()[:done] == content.tobytes()[:done]
    assert outcome(read(engine, file, 0, back[0])) == (errno.EBADF, 64 * BLOCK, 0)
    with pytest.raises(OSError) as failure:
        engine.register_memory(content.ctypes.data, content.size)
    assert failure.value.errno == errno.EBADF
    engine.close()


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EAGAIN, errno.EINTR])
def test_a_full_completion_queue_is_emptied(file: Any, code: int) -> None:
    """EBUSY is how the ring says that it is full"""
    engine = aio.Engine("io_uring", depth=4096, request_bytes=BLOCK)
    content, back = memory(noise(5000 * BLOCK)), memory(5000 * BLOCK)
    assert outcome(write(engine, file, 0, content))[0] == 0
    engine.set_faults(fail_ring_at=2, fail_errno=code)
    assert outcome(read(engine, file, 0, back)) == (0, back.size, back.size)
    assert np.array_equal(back, content)


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_a_ring_whose_descriptor_is_closed_by_a_stranger_goes_on(file: Any) -> None:
    others = descriptors("io_uring")
    engine, data = aio.Engine("io_uring"), memory(noise(3 * BLOCK))
    (number,) = descriptors("io_uring") - others
    os.close(number)
    error, asked, done = outcome(write(engine, file, 0, data))
    os.dup2(os.open(os.devnull, os.O_RDONLY), number)
    assert (error == 0) == (done == asked)
    assert error in (0, errno.EBADF)  # 0 where the kernel lets a thread register its ring
    assert Path(file.path).read_bytes()[:done] == data.tobytes()[:done]


# Wrong use and a failing world.


def test_file_operations(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    file = aio.File(path, create=True, mode=0o700)
    assert (file.path, file.size()) == (path, 0)
    assert Path(path).stat().st_mode & 0o777 == 0o700
    file.allocate(10 * BLOCK)
    assert file.size() == 10 * BLOCK
    assert Path(path).stat().st_blocks * 512 >= 10 * BLOCK
    file.truncate(3)
    file.sync()
    assert file.size() == 3
    file.close()
    assert not aio.File(path, direct=False).direct


@each_engine
def test_a_file_system_without_direct_io_is_used_buffered(kind: str) -> None:
    file, name = aio.File("/proc/self/comm"), Path("/proc/self/comm").read_bytes()
    assert not file.direct
    back = memory(len(name), shift=1)
    assert outcome(read(aio.Engine(kind), file, 0, back)) == (0, len(name), len(name))
    assert back.tobytes() == name


@each_engine
def test_closed_objects_say_so(kind: str, tmp_path: Path) -> None:
    file, engine, data = aio.File(str(tmp_path / "data"), create=True), aio.Engine(kind), memory(1)
    file.close()
    file.close()
    for use in (file.size, file.sync, lambda: file.path, lambda: read(engine, file, 0, data)):
        with pytest.raises(ValueError, match="closed"):
            use()
    engine.close()
    engine.close()
    for use in (engine.drain, engine.counters, engine.set_faults, lambda: engine.kind):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_os_errors_carry_errno_and_filename(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        aio.File(str(tmp_path / "missing"))
    assert (missing.value.errno, missing.value.filename) == (
        errno.ENOENT,
        str(tmp_path / "missing"),
    )
    with pytest.raises(IsADirectoryError):
        aio.File(str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "aio"},
        {"kind": "posix", "depth": 0},
        {"kind": "posix", "threads": 0},
        {"kind": "posix", "request_bytes": 1000},
        {"kind": "posix", "request_bytes": 0},
    ],
)
def test_wrong_options_are_value_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        aio.Engine(**options)


@each_engine
def test_wrong_requests_are_value_errors(kind: str, file: Any) -> None:
    engine = aio.Engine(kind)
    assert engine.kind == kind
    with pytest.raises(ValueError, match="largest file"):
        engine.read(file, 2**63 - 1, 0, 1)
    with pytest.raises(ValueError):
        engine.set_faults(short_fraction=2.0)
    for wrong in (
        {"error_fraction": -1},
        {"delay_fraction": 2},
        {"delay_seconds": -1},
        {"errnos": []},
        {"errnos": [0]},
        {"short_unit": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.set_faults(**wrong)
    with pytest.raises(ValueError, match="null"):
        engine.read(file, 0, 0, BLOCK)
    assert outcome(engine.read(file, 0, 0, 0)) == (0, 0, 0)


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
def test_a_refused_ring_is_a_runtime_error_with_the_reason() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert aio.io_uring_available() == (False, "io_uring_setup: Too many open files")
        with pytest.raises(RuntimeError, match="Too many open files"):
            aio.Engine("io_uring")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FORKING = """
import os, signal, sys
import numpy as np
from infinity import native
kind, path = sys.argv[1:]
aio = native.aio()
engines = [aio.Engine(kind) for _ in range(3)]
file, data = aio.File(path, create=True), np.ones(1 << 20, np.uint8)
engines[0].set_faults(bytes_per_second=1 << 20)
ticket = engines[0].write(file, 0, data.ctypes.data, data.size)
child = os.fork()
if child == 0:
    signal.alarm(30)
    refused = 0
    read = lambda: engines[1].read(file, 0, data.ctypes.data, data.size)
    for use in (engines[0].drain, ticket.wait, read):
        try:
            use()
        except ValueError as error:
            refused += "a process that was forked" in str(error)
    engines.pop(0).close()
    engines.pop(0)  # dropped
    del ticket
    sys.exit(refused)  # one engine is left to the end of the process
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert ticket.wait() == data.size and np.array_equal(np.fromfile(path, np.uint8), data)
"""


@each_engine
def test_a_forked_child_may_drop_an_engine_and_not_use_it(tmp_path: Path, kind: str) -> None:
    subprocess.run(
        [sys.executable, "-c", FORKING, kind, str(tmp_path / "data")], **CHILD, check=True
    )
