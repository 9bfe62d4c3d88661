"""Durable steps, broken on purpose: the simulation must find each of these.

To plant another one, add a `Bug` with a seed that finds it: `python -m simulation.planted NAME`
looks for one. `make planted-seeds` looks for all, after a change of what seeds draw.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from infinity.checkpoint import saving
from infinity.directories import commits
from infinity.directories.commits import CommitLog
from infinity.directories.directory import Directory
from infinity.durable.committer import Committer
from infinity.durable.home import DurableHome
from infinity.durable.record import RandomStates
from infinity.durable.states import DurableStates, KeptRecord, RecordKey
from infinity.durable.store import DurableStore
from infinity.nvme.ticket import Ticket
from infinity.optim.job import Job
from infinity.optim.job_queue import JobQueue
from infinity.tiers.block import Block
from infinity.tiers.block_io import BlockIo
from infinity.tiers.drives import NvmeTier
from simulation.drive import DriveFile
from simulation.many import simulating
from simulation.processes import here
from simulation.system import SimulatedSystem
from support.threads import one_thread

WITHIN = 2000
"""Seeds in which each bug is to be found."""


class Bug(NamedTuple):
    """Inside of `plant()` the package is broken. Seed `found_by` finds that, or most times where it
    depends on threads."""

    breaks: str
    plant: Callable[[], AbstractContextManager[object]]
    found_by: int


def _record_before_the_flush() -> AbstractContextManager[object]:
    record, flush = DurableStore.record, NvmeTier.flush

    def late(store: DurableStore, *values: Any) -> None:
        drives: list[NvmeTier] = []
        with mock.patch.object(NvmeTier, "flush", lambda tier: drives.append(tier)):
            record(store, *values)
        for each in drives:
            flush(each)

    return mock.patch.object(DurableStore, "record", late)


def _always_free() -> AbstractContextManager[object]:
    return mock.patch.object(DurableHome, "is_free", lambda home, left=0: True)


def _half_written() -> AbstractContextManager[object]:
    return mock.patch.object(commits, "_digest", lambda sequence, content: bytes(32))


def _other_random_numbers() -> AbstractContextManager[object]:
    return mock.patch.object(RandomStates, "restore", lambda states, device: None)


@contextmanager
def _record_before_the_last_write() -> Iterator[None]:
    """The committer waits for the updates of a step when it has written the record."""
    await_ended, record = JobQueue.await_ended, DurableStates.record
    awaited: list[Callable[[], object]] = []

    def put_off(queue: JobQueue, jobs: Sequence[Job], *patience: float) -> bool:
        awaited.append(lambda: await_ended(queue, jobs))
        return True

    def early(states: DurableStates, *values: Any) -> None:
        record(states, *values)
        while awaited:
            awaited.pop()()

    with (
        mock.patch.object(JobQueue, "await_ended", put_off),
        mock.patch.object(DurableStates, "record", early),
    ):
        yield


def _checksums_are_skipped() -> AbstractContextManager[object]:
    return mock.patch.object(BlockIo, "compare", lambda io, *values: None)


def _cached_part_in_memory_alone() -> AbstractContextManager[object]:
    """What is cached is not written: the extents have what an earlier step left there."""
    write = BlockIo.write

    def skipping(io: BlockIo, block: Block, extent: Any, at: int, *values: Any) -> Ticket:
        if at < block.placed.cached_bytes:
            return Ticket()
        return write(io, block, extent, at, *values)

    return mock.patch.object(BlockIo, "write", skipping)


def _record_in_memory() -> AbstractContextManager[object]:
    return mock.patch.object(CommitLog, "flush", lambda log: None)


def _own_last_record() -> AbstractContextManager[object]:
    take = DurableStates.take

    def own(states: DurableStates, record: KeptRecord | None, life: str) -> None:
        take(states, None if record is None else states.left.records[0], life)

    return mock.patch.object(DurableStates, "take", own)


def _given_up_at_once() -> AbstractContextManager[object]:
    write = CommitLog.write

    def hasty(log: CommitLog, content: bytes) -> int:
        sequence = write(log, content)
        log.settle()
        return sequence

    return mock.patch.object(CommitLog, "write", hasty)


def _unflushed_directories() -> AbstractContextManager[object]:
    """Those of ranks have a name, until the power is cut."""
    sync = Directory.sync

    def skipping(directory: Directory) -> None:
        if here() is None or directory.path.name.startswith("rank"):
            sync(directory)

    return mock.patch.object(Directory, "sync", skipping)


def _closed_like_a_forward() -> AbstractContextManager[object]:
    """A rank that is closed before its scheduler steps, and one that goes on after that, make
    records that look the same."""
    seal = Committer.seal

    def same(committer: Committer, key: RecordKey, content: Any) -> None:
        seal(committer, key._replace(closed=""), content)

    return mock.patch.object(Committer, "seal", same)


def _flushed_alone() -> AbstractContextManager[object]:
    """The same bytes are not written again, which a flush that failed may have dropped."""
    write = SimulatedSystem.pwrite

    def sparing(system: SimulatedSystem, descriptor: int, data: Any, offset: int) -> int:
        if system.pread(descriptor, len(data), offset) == bytes(data):
            return len(data)
        return write(system, descriptor, data, offset)

    return mock.patch.object(SimulatedSystem, "pwrite", sparing)


def _flushed_again() -> AbstractContextManager[object]:
    """A flush of the states that fails is tried once more."""
    sync = DriveFile.sync

    def patiently(file: DriveFile) -> None:
        try:
            sync(file)
        except OSError:
            sync(file)

    return mock.patch.object(DriveFile, "sync", patiently)


def _nothing_is_pinned() -> AbstractContextManager[object]:
    never: Any = lambda home, left=0: False  # noqa: E731
    return mock.patch.multiple(DurableHome, is_pinned=never, is_rewrite_pinned=False)


def _unflushed_checkpoint() -> AbstractContextManager[object]:
    """Its names and `.metadata` are there, until the power is cut."""
    return mock.patch.object(saving, "make_durable", lambda path: None)


def _extents_as_they_are() -> AbstractContextManager[object]:
    """A snapshot reads what blocks have now in place of what was committed, and checks nothing."""
    read = BlockIo.read_version

    def reading(io: BlockIo, block: Block, extent: Any, *values: int) -> Ticket:
        ticket = read(io, block, block.home.extent, *values)
        ticket.check = lambda: None
        return ticket

    return mock.patch.object(BlockIo, "read_version", reading)


@contextmanager
def _one_record_too_few() -> Iterator[None]:
    """Where one of N steps is committed, the second rank gives its older record up before the
    others have the last one."""
    record_all, record = DurableStore.record, DurableStates.record
    hasty = threading.local()

    def recording_all(store: DurableStore, *values: Any) -> int:
        rank = here()
        hasty.now = store.has_spares and rank is not None and rank.number == 1
        return record_all(store, *values)

    def recording(states: DurableStates, *values: Any) -> int:
        sequence = record(states, *values)
        if hasty.now:
            states.settle()
        return sequence

    with (
        mock.patch.object(DurableStore, "record", recording_all),
        mock.patch.object(DurableStates, "record", recording),
    ):
        yield


BUGS = (
    Bug("the record is written before the states are flushed", _record_before_the_flush, 0),
    Bug("an extent is used again before a commit frees it", _always_free, 33),
    Bug("a record that is half written is taken", _half_written, 237),
    Bug("a record that is read is not flushed", _record_in_memory, 122),
    Bug("a checksum is not compared", _checksums_are_skipped, 2),
    Bug("what is cached in host memory is not written", _cached_part_in_memory_alone, 7),
    Bug("random generators are not restored", _other_random_numbers, 0),
    Bug("the record is written before the last write has ended", _record_before_the_last_write, 71),
    Bug("one rank is a step ahead", _own_last_record, 10),
    Bug("a rank gives its older record up before all have the last one", _given_up_at_once, 10),
    Bug("the name of a rank's directory is not flushed", _unflushed_directories, 10),
    Bug("a rank closed within a step is not told from others", _closed_like_a_forward, 196),
    Bug("a record that is read is flushed, and not written again", _flushed_alone, 1768),
    Bug("a flush that failed is tried again", _flushed_again, 29),
    Bug("a snapshot does not pin its extents", _nothing_is_pinned, 30),
    Bug("a snapshot reads what a later step wrote", _extents_as_they_are, 30),
    Bug("the names of a checkpoint are not flushed", _unflushed_checkpoint, 2),
    Bug("a rank keeps one record too few of every N-th step", _one_record_too_few, 41),
)


def find(bug: Bug, most: int = WITHIN) -> tuple[int, str] | None:
    """The first seed that finds `bug`, and what it says."""
    with one_thread(), simulating() as simulation:
        for seed in range(most):
            simulation.shape(seed)  # as it is
            with bug.plant():
                found = simulation.run(seed)
            if found.text:
                return seed, found.text
    return None


def derive(names: Sequence[str]) -> int:
    """Print the first seed that finds each bug of which the name has one of `names`, as `found_by`
    is to be, in two processes; returns how many were not found."""
    numbers = [at for at, bug in enumerate(BUGS) if any(name in bug.breaks for name in names)]
    missing = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for at, found in zip(numbers, pool.map(_find_number, numbers), strict=True):
            missing += found is None
            seed, text = found or (-1, "nothing")
            said = text.splitlines()[-1]
            is_new = "" if seed == BUGS[at].found_by else f" (it was {BUGS[at].found_by})"
            print(f"{seed}{is_new}: {BUGS[at].breaks}: {said}", flush=True)
    return missing


def _find_number(at: int) -> tuple[int, str] | None:
    return find(BUGS[at])


if __name__ == "__main__":
    from simulation import planted  # functions of a module that other processes can import

    sys.exit(min(planted.derive(sys.argv[1:] or [""]), 1))
