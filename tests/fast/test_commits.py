"""Records in two files that take turns: whatever cuts a write off, the last one is read, and none
that was replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import CheckpointError
from infinity.directories.commits import (
    COMMIT_NAMES,
    CommitLog,
    DurableFiles,
    decoded,
    encoded,
)
from infinity.directories.directory import Directory
from infinity.durable.states import (
    KeptRecord,
    LeftStates,
    RecordKey,
    common_step,
)
from infinity.tiers.manifest import Member

SECTOR = 16  # bytes that are written as a whole; small, so that records have many


class Killed(Exception):
    """The process ends."""


class SimulatedFiles(DurableFiles):
    """In memory. The write number `kill_at` is cut off: of it any sectors are there, as `mask`
    says, and of a new name or a removal all or nothing. `flushed` is what a power cut does not
    touch."""

    def __init__(self) -> None:
        self.path = Path("simulated")
        self.content: dict[str, bytes] = {}
        self.flushed: dict[str, bytes] = {}
        self.kill_at, self.mask = -1, 0

    def cut_power(self) -> None:
        """Of what was not flushed any sectors, and any names, are there."""
        for name in self.content.keys() | self.flushed.keys():
            if name in self.content and name in self.flushed:
                self.content[name] = self._torn(self.flushed[name], self.content[name])
            elif not self.mask & 2:
                self.content.pop(name, None)
            elif name in self.flushed:
                self.content[name] = self.flushed[name]
        self.flushed = dict(self.content)

    def keep(self, names: Iterable[str]) -> None:
        if self._is_killed():
            raise Killed
        self.flushed |= {name: self.content[name] for name in names if name in self.content}

    def _is_killed(self) -> bool:
        self.kill_at -= 1
        return self.kill_at == -1

    def read(self, name: str) -> bytes | None:
        return self.content.get(name)

    def size(self, name: str) -> int | None:
        return len(self.content[name]) if name in self.content else None

    def create(self, name: str, content: bytes) -> None:
        killed = self._is_killed()
        if not killed or self.mask & 1:
            self.content[name] = content
        if killed:
            raise Killed
        self.flushed[name] = content

    def overwrite(self, name: str, content: bytes) -> None:
        assert name in self.content
        old = self.content[name]
        content += old[len(content) :]
        if self._is_killed():
            self.content[name] = self._torn(old, content)
            raise Killed
        self.content[name] = self.flushed[name] = content

    def remove(self, name: str) -> None:
        killed = self._is_killed()
        if not killed or self.mask & 1:
            self.content.pop(name, None)
        if killed:
            raise Killed
        self.flushed.pop(name, None)

    def _torn(self, old: bytes, new: bytes) -> bytes:
        """Each sector, and the length, is the old or the new one; what nobody wrote is zeros."""
        length = len(new) if self.mask & 1 else len(old)
        found = bytearray(old[:length].ljust(length, b"\0"))
        for number, begin in enumerate(range(0, min(length, 24 * SECTOR), SECTOR)):
            source = new if self.mask >> number + 1 & 1 else old
            part = source[begin : begin + SECTOR]
            found[begin : begin + len(part)] = part
        return bytes(found[:length])


class FullAt(DurableFiles):
    """On a drive that has no room for one file."""

    def __init__(self, directory: Directory, name: str) -> None:
        super().__init__(directory)
        self._name = name

    def create(self, name: str, content: bytes) -> None:
        if name == self._name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        super().create(name, content)


@settings(max_examples=400, deadline=None)
@given(
    kills=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, (1 << 24) - 1), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_the_last_record_survives_every_kill_and_power_cut(
    kills: list[tuple[int, int, bool]], lengths: list[int]
) -> None:
    files = SimulatedFiles()
    written, number = 0, 0
    for files.kill_at, files.mask, cuts_power in kills:
        log = CommitLog(files)
        found = log.last()
        if found is None:
            assert written == 0
        else:
            # What `write` was cut off in may be there, too.
            assert written <= int(found.content.split(b" ")[0]) <= number
        try:
            if found is not None:
                log.settle()
                written = int(found.content.split(b" ")[0])
            while True:
                number += 1
                log.write(b"%d " % number + b"x" * lengths[number % len(lengths)])
                written = number
                log.settle()
        except Killed:
            if cuts_power:
                files.cut_power()


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 4), at=st.integers(0, 4000), bit=st.integers(0, 7))
def test_no_older_record_is_taken_for_the_last_one(count: int, at: int, bit: int) -> None:
    """A bit of the last one flips: what an older one speaks of is overwritten by now."""
    files = SimulatedFiles()
    log = CommitLog(files)
    for number in range(count):
        log.write(b"record %d" % number * 9)
        log.settle()
    name = COMMIT_NAMES[(count - 1) % 2]
    damaged = bytearray(files.content[name])
    damaged[at % len(encoded(count, b"record 0" * 9))] ^= 1 << bit
    files.content[name] = bytes(damaged)
    with pytest.raises(CheckpointError, match="is damaged; go on from a checkpoint"):
        CommitLog(files).last()


@pytest.mark.parametrize("begins", ["writes", "only looks"])
def test_a_kill_before_the_older_record_was_emptied(begins: str) -> None:
    """The next job empties it before it overwrites what that spoke of."""
    files = SimulatedFiles()
    log = CommitLog(files)
    log.write(b"first")
    log.settle()
    log.write(b"second")
    files.kill_at, files.mask = 0, 0
    with pytest.raises(Killed):
        log.settle()
    files.kill_at = -1
    again = CommitLog(files)
    last = again.last()
    assert last is not None and last.content == b"second"
    with pytest.raises(RuntimeError, match="is still needed"):
        again.write(b"third")
    again.settle()
    assert [decoded(files.content[name]) for name in COMMIT_NAMES] == [None, last]
    if begins == "writes":
        assert again.write(b"third") == 3


def test_real_files(tmp_path: Path) -> None:
    with Directory(tmp_path) as directory:
        log = CommitLog(DurableFiles(directory))
        assert log.last() is None
        for number in range(5):
            content = b"%d" % number * (1000 - 200 * number)
            assert log.write(content) == number + 1
            assert [each.sequence for each in CommitLog(DurableFiles(directory)).kept()] == [
                each for each in (number + 1, number) if each
            ]
            log.settle()
            again = CommitLog(DurableFiles(directory))
            assert again.last() == (number + 1, content)
        assert again.write(b"after a restart") == 6
        again.settle()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(COMMIT_NAMES)
        again.remove()
        assert CommitLog(DurableFiles(directory)).last() is None
        assert list(tmp_path.iterdir()) == []


def test_records_have_room_from_the_first_one_on(tmp_path: Path) -> None:
    """Twice the length of the first one, in both files, written and not only reserved."""

    def blocks() -> list[int]:
        return [(tmp_path / name).stat().st_blocks * 512 for name in COMMIT_NAMES]

    with Directory(tmp_path) as directory:
        log = CommitLog(DurableFiles(directory))
        log.write(bytes(100_000))
        had = blocks()
        assert min(had) >= 200_000
        for length in (0, 90_000, 200_000 - len(encoded(1, b""))):
            log.settle()
            log.write(bytes(length))
            assert blocks() == had
        log.settle()
        log.write(bytes(300_000))  # it has outgrown its file
        assert max(blocks()) >= 600_000 and min(blocks()) == min(had)
        last = CommitLog(DurableFiles(directory)).last()
        assert last is not None and last.content == bytes(300_000)


def test_a_full_drive_at_the_first_record_leaves_none(tmp_path: Path) -> None:
    """So the next job begins anew, as nothing was committed."""
    with Directory(tmp_path) as directory:
        for name in reversed(COMMIT_NAMES):
            files = FullAt(directory, name)
            with pytest.raises(OSError, match="No space left"):
                CommitLog(files).write(b"first")
            assert CommitLog(DurableFiles(directory)).last() is None
        assert CommitLog(DurableFiles(directory)).write(b"first") == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"somebody else's")
    folder = tmp_path / "nvme"
    folder.mkdir()
    (folder / COMMIT_NAMES[0]).symlink_to(victim)
    with Directory(folder) as directory:
        log = CommitLog(DurableFiles(directory))
        with pytest.raises(ValueError, match="is a link, which infinity never makes"):
            log.last()
    assert victim.read_bytes() == b"somebody else's"


# Several ranks, which keep two records


class Rank:
    """The log of one of several ranks that make the same records; `records` are those whose states
    are whole on its drives."""

    def __init__(self) -> None:
        self.files = SimulatedFiles()
        self.records: set[int] = set()
        self.log = CommitLog(self.files)

    def left(self, rank: int, ranks: int) -> LeftStates:
        """What a resume finds."""
        self.files.kill_at = -1
        self.log = CommitLog(self.files)
        kept = self.log.kept()
        member = Member(rank, ranks)
        assert all(int(each.content) in self.records for each in kept), "states are overwritten"
        keys = [RecordKey(each.sequence, int(each.content), 0, "") for each in kept]
        records = tuple(KeptRecord(key, "a life") for key in keys)
        return LeftStates(f"rank{rank}", "a run", member, is_committed=True, records=records)

    def make(self, sequence: int) -> None:
        """Write a record; its states take the place of those before the last one's."""
        self.records -= {each for each in self.records if each <= sequence - 2}
        self.records.add(sequence)
        assert self.log.write(b"%d" % sequence) == sequence


@settings(max_examples=300, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 4))
def test_all_ranks_have_one_step_whatever_kills_which(data: st.DataObject, ranks: int) -> None:
    """A record is given up when all have the next one, and a rank that is ahead goes back."""
    run_with_kills(data, ranks, settles_at_once=False)


def test_a_rank_that_gives_a_record_up_at_once_is_found() -> None:
    """By the test above: it has teeth."""

    @settings(max_examples=300, deadline=None, database=None)
    @given(data=st.data())
    def planted(data: st.DataObject) -> None:
        run_with_kills(data, 2, settles_at_once=True)

    with pytest.raises(CheckpointError, match="have no committed step in common"):
        planted()


def run_with_kills(data: st.DataObject, ranks: int, settles_at_once: bool) -> None:
    group = [Rank() for _ in range(ranks)]
    members = {number: Member(number, ranks) for number in range(ranks)}
    for rank in group:
        rank.make(1)
        rank.log.settle()
    common = 1

    def make(rank: Rank) -> None:
        rank.make(common + 1)
        if settles_at_once:
            rank.log.settle()

    for _ in range(data.draw(st.integers(1, 6), "lives")):
        found = common_step({at: each.left(at, ranks) for at, each in enumerate(group)}, members)
        assert found is not None and found.key.sequence in (common, common + 1)
        common = found.key.sequence
        for rank in group:
            rank.files.kill_at = data.draw(st.integers(-1, 9), "kill")
            rank.files.mask = data.draw(st.integers(0, (1 << 24) - 1), "mask")
        if not all(alive([partial(rank.log.keep, common) for rank in group])):
            continue  # they meet before anything is written
        for rank in group:
            rank.records = {each for each in rank.records if each <= common}
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            if not all(alive([partial(make, rank) for rank in group])):
                break
            common += 1
            if not settles_at_once and not all(alive([each.log.settle for each in group])):
                break


def alive(work: list[Callable[[], None]]) -> list[bool]:
    """Which of the ranks whose `work` this is are not killed in it."""
    found = []
    for each in work:
        try:
            each()
            found.append(True)
        except Killed:
            found.append(False)
    return found
