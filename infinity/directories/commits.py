"""The last records of a job, in two files that take turns.

[Note: records after a kill]
1. A new record goes to the file that does not have the last one, and is flushed (`write`). A kill
   meanwhile leaves the last one unchanged. From then on there are two records. With several ranks,
   the job may have to return to the older one (`keep`).
2. When no rank needs the older record, its head is overwritten with zeros and flushed (`settle`).
   From then on it cannot be taken for the last one, even if the new one is damaged. So the states
   that only the older record names may be overwritten. If a record exists, its states are whole.
3. A process that is killed before it has flushed its record leaves it in the page cache. The next
   process reads it there, and a power cut may still destroy it. So both files are written again and
   flushed before anything, another rank included, relies on them (`flush`). An fsync alone is not
   enough: one that failed may leave bytes in the page cache that the system takes for written, and
   the next fsync succeeds.

A new name comes by a rename, when its content is on the drive. The file of the second record comes
first, with zeros. The file of the first record comes with the record. So if the first file exists
and no record is whole, the record is damaged. This is an error, and the job does not resume from an
older record.

[Note: room for records]
A drive may be full when a step is committed. So both files exist from the first record on, and have
twice its length. They are written in place, and never become shorter. A record that is longer than
its file makes the file twice as long as itself.
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
"""The longest record. With a trillion parameters in a hundred thousand tensors it has about 30
MB."""
_MAGIC = b"infinity commit\n"
_HEAD = struct.Struct("<16sQQ32s")  # magic, sequence, length, digest of the rest
_ROOM_UNIT = 64 << 10


class DurableFiles:
    """Small files of a directory that is ours. Every method that changes a file returns when the
    change would survive a power cut."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.path = directory.path

    def read(self, name: str) -> bytes | None:
        """The content of a file, up to the longest record. None if there is no such file."""
        try:
            descriptor = self._directory.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with naming(self.path / name), os.fdopen(descriptor, "rb") as file:
            return file.read(_HEAD.size + MOST_BYTES)

    def size(self, name: str) -> int | None:
        """The bytes of a file. None if there is no such file."""
        status = self._directory.check(name)
        return None if status is None else status.st_size

    def create(self, name: str, content: bytes) -> None:
        """Create a file. After a kill it is whole, or missing."""
        self._directory.remove(DRAFT_NAME)  # of a job that was killed in `create`
        try:
            self._write(DRAFT_NAME, self._directory.create_in_place(DRAFT_NAME), content)
            self._directory.rename(DRAFT_NAME, name)
        except BaseException:
            self._directory.remove(DRAFT_NAME)
            raise
        self._directory.sync()

    def overwrite(self, name: str, content: bytes) -> None:
        """Overwrite the start of an existing file. The bytes after `content` stay. A kill may leave
        any part of it."""
        self._write(name, self._directory.open(name), content)

    def keep(self, names: Iterable[str]) -> None:
        """Another process has written these files, if they exist. Write the same bytes again."""
        for name in names:
            content = self.read(name)
            if content is not None:
                self.overwrite(name, content)
        self._directory.sync()

    def remove(self, name: str) -> None:
        """Remove the file."""
        self._directory.remove(name)
        self._directory.sync()

    def _write(self, name: str, descriptor: int, content: bytes) -> None:
        with naming(self.path / name), os.fdopen(descriptor, "r+b") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class Commit(NamedTuple):
    """A record. The `sequence` counts those of one directory, from 1."""

    sequence: int
    content: bytes


class CommitLog:
    """The records in a directory that the caller has locked. One thread at a time uses it. `kept`
    must be called before `write`."""

    def __init__(self, files: DurableFiles) -> None:
        self._files = files
        self._sequence = 0
        self._at = 1  # the number of the file with the last record
        self._is_settled = True
        self._is_flushed = True

    def kept(self) -> list[Commit]:
        """The last record, and the record before it unless it was released. Empty before the first
        record. Raises `CheckpointError` if they are damaged."""
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
        """The last record. None before the first. Raises like `kept`."""
        return next(iter(self.kept()), None)

    @property
    def next_sequence(self) -> int:
        """The number of the next record."""
        return self._sequence + 1

    def read(self, sequence: int) -> Commit | None:
        """The record of this number on the drive. None if it is not whole. Any thread may call it,
        unless another thread releases the record."""
        found = (self._files.read(name) for name in COMMIT_NAMES)
        records = (decoded(content) for content in found if content is not None)
        return next((each for each in records if each and each.sequence == sequence), None)

    def write(self, content: bytes) -> int:
        """Make `content` the last record, beside the record before, until `settle` or `keep`
        releases that. Returns its sequence when the record would survive a power cut."""
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
        """Release the record before the last one. A kill may leave both, and a power cut leaves the
        last one."""
        self.flush()
        self._empty(1 - self._at)
        self._is_settled = True

    def keep(self, sequence: int) -> None:
        """Keep only this record of those that `kept` returned. A later record is released first. A
        power cut leaves this record."""
        self.flush()
        if sequence < self._sequence:
            self._empty(self._at)
            self._sequence, self._at = sequence, 1 - self._at
        self.settle()

    def flush(self) -> None:
        """Return when the records that were read would survive a power cut. Their process may have
        been killed before its flush."""
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
    """Whether a file is missing, or its record was released."""
    return content is None or not any(content[: _HEAD.size])


def encoded(sequence: int, content: bytes) -> bytes:
    """The bytes of record number `sequence`: a head with a digest, and `content`."""
    head = _HEAD.pack(_MAGIC, sequence, len(content), _digest(sequence, content))
    return head + content


def decoded(record: bytes) -> Commit | None:
    """The record at the start of a file. None if it is not whole."""
    if len(record) < _HEAD.size:
        return None
    magic, sequence, length, digest = _HEAD.unpack_from(record)
    content = record[_HEAD.size :][:length]
    whole = magic == _MAGIC and length == len(content) and digest == _digest(sequence, content)
    return Commit(sequence, content) if whole else None


def _digest(sequence: int, content: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<QQ", sequence, len(content)) + content).digest()
