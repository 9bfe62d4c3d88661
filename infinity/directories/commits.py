"""The last records of a job, in two files that take turns.

[Note: what a kill leaves]
1. A new record goes to the file that does not hold the last one, and is flushed (`write`). What
   cuts that off leaves the last one as it is. From then on there are two: with several ranks, the
   job may have to go back to the older one (`keep`).
2. When nobody has to, the head of the record before is overwritten with zeros, and that is flushed
   (`settle`). From then on nobody can take it for the last one, even where the new one is damaged.
   So what it alone spoke of may be overwritten. A record that is there is one whose states are
   whole.
3. A process that is killed before it has flushed its record leaves it in memory. The next one reads
   it there, and a power cut may still take it. So both files are written once more and flushed,
   before anything relies on what was read, be it another rank (`flush`). An fsync alone is not
   enough. One that failed may leave bytes in the memory of the system that it takes for written,
   and the next fsync succeeds.

A name that is new comes by a rename, when its content is on the drive. The file of the second
record comes first, and has zeros; that of the first record comes with it. So where the first one is
there and no record is whole, it is damaged, and that is said: nobody goes on from an older one.

[Note: room for records]
A drive may be full when a step is committed. So both files are there from the first record on,
twice as long as it. They are written in place, and never become shorter. A record that has outgrown
its file makes it twice as long as itself.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

from infinity.directories.directory import Directory
from infinity.errors import CheckpointError, naming

COMMIT_NAMES = ("infinity-commit-0.bin", "infinity-commit-1.bin")
DRAFT_NAME = "infinity-commit.draft"
MOST_BYTES = 1 << 30
"""The longest record: of a trillion parameters in a hundred thousand tensors it has about 30 MB."""
_MAGIC = b"infinity commit\n"
_HEAD = struct.Struct("<16sQQ32s")  # magic, sequence, length, digest of the rest
_ROOM_UNIT = 64 << 10


class DurableFiles:
    """Small files of a directory that is ours. Every method that changes one returns when that
    would survive a power cut."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.path = directory.path

    def read(self, name: str) -> bytes | None:
        """What the file has, as far as a record may be long; None where there is none."""
        try:
            descriptor = self._directory.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with naming(self.path / name), os.fdopen(descriptor, "rb") as file:
            return file.read(_HEAD.size + MOST_BYTES)

    def size(self, name: str) -> int | None:
        """The bytes of the file; None where there is none."""
        status = self._directory.check(name)
        return None if status is None else status.st_size

    def create(self, name: str, content: bytes) -> None:
        """A new file, which is there as a whole or not at all."""
        self._directory.remove(DRAFT_NAME)  # of a job that was killed here
        try:
            self._write(DRAFT_NAME, self._directory.create_in_place(DRAFT_NAME), content)
            self._directory.rename(DRAFT_NAME, name)
        except BaseException:
            self._directory.remove(DRAFT_NAME)
            raise
        self._directory.sync()

    def overwrite(self, name: str, content: bytes) -> None:
        """Other bytes where a file that is there begins; what lies behind them stays. What is cut
        off may leave any part of them."""
        self._write(name, self._directory.open(name), content)

    def keep(self, names: Iterable[str]) -> None:
        """What these files have, where they are there, has come from another process: write the
        same bytes once more."""
        for name in names:
            content = self.read(name)
            if content is not None:
                self.overwrite(name, content)
        self._directory.sync()

    def remove(self, name: str) -> None:
        """The file is gone."""
        self._directory.remove(name)
        self._directory.sync()

    def _write(self, name: str, descriptor: int, content: bytes) -> None:
        with naming(self.path / name), os.fdopen(descriptor, "r+b") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class Commit(NamedTuple):
    """A record: the `sequence` numbers those of one directory, from 1."""

    sequence: int
    content: bytes


class CommitLog:
    """The records in a directory that the caller has locked. Used by one thread at a time; `kept`
    is to be called before `write`."""

    def __init__(self, files: DurableFiles) -> None:
        self._files = files
        self._sequence = 0
        self._at = 1  # of the two files, the one with the last record
        self._is_settled = True
        self._is_flushed = True

    def kept(self) -> list[Commit]:
        """The last record, and the one before where that was not given up; none where there was
        none yet. Raises `CheckpointError` where they are damaged."""
        found = [self._files.read(name) for name in COMMIT_NAMES]
        whole = [
            (commit, at)
            for at, content in enumerate(found)
            if content is not None and (commit := decoded(content)) is not None
        ]
        if whole:
            whole.sort(reverse=True)
            last, self._at = whole[0]
            self._sequence = last.sequence
            self._is_settled = _is_blank(found[1 - self._at])
            self._is_flushed = False
            return [commit for commit, _ in whole]
        if found[0] is not None or not _is_blank(found[1]):
            raise CheckpointError(
                f"{self._files.path} holds the states of an earlier run, but the record of what "
                f"they are ({' and '.join(COMMIT_NAMES)}) is damaged; go on from a checkpoint, in "
                "another directory"
            )
        return []

    def last(self) -> Commit | None:
        """The last record; None where there was none yet. Raises like `kept`."""
        return next(iter(self.kept()), None)

    @property
    def next_sequence(self) -> int:
        """The number of the record that `write` makes next."""
        return self._sequence + 1

    def read(self, sequence: int) -> Commit | None:
        """The record of this number, as it is on the drive; None where it is not whole there. Any
        thread may call it, while nobody gives that record up."""
        found = (self._files.read(name) for name in COMMIT_NAMES)
        records = (decoded(content) for content in found if content is not None)
        return next((each for each in records if each and each.sequence == sequence), None)

    def write(self, content: bytes) -> int:
        """Make `content` the last record, beside the one before, which `settle` or `keep` gives up;
        returns its sequence when it would survive a power cut."""
        if not self._is_settled:
            raise RuntimeError("the record before the last one is still needed")
        self.flush()
        sequence, at = self.next_sequence, 1 - self._at
        name = COMMIT_NAMES[at]
        record = encoded(sequence, content)
        room = bytes(-2 * len(record) % _ROOM_UNIT + len(record))
        if self._files.size(COMMIT_NAMES[self._at]) is None:
            self._files.create(COMMIT_NAMES[self._at], bytes(len(record)) + room)
        size = self._files.size(name)
        if size is None:
            self._files.create(name, record + room)
        else:
            self._files.overwrite(name, record if len(record) <= size else record + room)
        self._is_settled = self._sequence == 0
        self._sequence, self._at = sequence, at
        return sequence

    def settle(self) -> None:
        """Nobody reads the record before the last one from now on; a kill may have come before
        that. A power cut leaves the last one."""
        self.flush()
        self._empty(1 - self._at)
        self._is_settled = True

    def keep(self, sequence: int) -> None:
        """Of what `kept` gave, this record alone is read from now on: the one after it is given up
        first. A power cut leaves it."""
        self.flush()
        if sequence < self._sequence:
            self._empty(self._at)
            self._sequence, self._at = sequence, 1 - self._at
        self.settle()

    def flush(self) -> None:
        """What was read would survive a power cut; its process may have been killed before."""
        if not self._is_flushed:
            self._files.keep(COMMIT_NAMES)
        self._is_flushed = True

    def remove(self) -> None:
        """Remove all records, the older one first."""
        for name in (COMMIT_NAMES[1 - self._at], COMMIT_NAMES[self._at]):
            if self._files.size(name) is not None:
                self._files.remove(name)
        self._sequence, self._at, self._is_settled = 0, 1, True

    def _empty(self, at: int) -> None:
        if self._files.size(COMMIT_NAMES[at]):
            self._files.overwrite(COMMIT_NAMES[at], bytes(_HEAD.size))


def _is_blank(content: bytes | None) -> bool:
    """Whether a file is not there, or was given up: nobody takes what it has for a record."""
    return content is None or not any(content[: _HEAD.size])


def encoded(sequence: int, content: bytes) -> bytes:
    """The record of commit number `sequence`, as a file has it: a head with a digest, and
    `content`."""
    head = _HEAD.pack(_MAGIC, sequence, len(content), _digest(sequence, content))
    return head + content


def decoded(record: bytes) -> Commit | None:
    """The record that a file begins with; None where it is not whole."""
    if len(record) < _HEAD.size:
        return None
    magic, sequence, length, digest = _HEAD.unpack_from(record)
    content = record[_HEAD.size :][:length]
    whole = magic == _MAGIC and length == len(content) and digest == _digest(sequence, content)
    return Commit(sequence, content) if whole else None


def _digest(sequence: int, content: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<QQ", sequence, len(content)) + content).digest()
