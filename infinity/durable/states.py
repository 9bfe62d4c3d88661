"""States that outlive their process: the files in the directories beside the states files, and the
checks before an engine adopts them. `infinity.tiers.manifest` has the manifests.

[Note: one run of several ranks]
Every rank has directories of its own, and its number in their manifests. All ranks have one run. A
rank keeps the record before its last record until all ranks have the last one (`settle`). So there
is always a step that all ranks have, and `common_step` finds it. From `settle` on the step counts
as committed, also in the manifest. If no step is committed, records of some ranks are not used. A
rank without states to resume searches for committed states of other ranks beside its own. If it
finds any, the directories were exchanged.
"""

from __future__ import annotations

import logging
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
)

from infinity.directories.commits import COMMIT_NAMES, Commit, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.durable.record import CommittedStep
from infinity.errors import CheckpointError, ConfigError
from infinity.tiers.manifest import (
    MANIFEST_NAME,
    ONE_RANK,
    STATES_NAME,
    VERSION,
    Count,
    Id,
    Member,
    StatesManifest,
    StoredBlock,
    has_manifest,
    holds_committed,
    read_manifest,
    reason_of,
    refusal_of,
    remove_records,
)

log = logging.getLogger("infinity")

_HEAD = struct.Struct("<32s32sQQ32s")
HEAD_BYTES = _HEAD.size
"""Bytes of the head of a record: its run, its life, and its key without the number."""
_OF_A_RANK = re.compile(r"rank\d+")


class RecordKey(NamedTuple):
    """The identity of a record. Records of two ranks with one key and one life agree in everything
    that ranks have in common.

    `sequence` is the number of the record in its run, from 1. `step` is its step. `writes` counts
    the writes to parameters or states outside of steps since the record before. `closed` is "" if
    the record was fixed at a place that the program reaches on all ranks. If it was fixed when the
    engine was closed, `closed` is 32 hex digits that identify the changes until then
    (`infinity.durable.session`).
    """

    sequence: Count
    step: Count
    writes: Count
    closed: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]

    @property
    def moment(self) -> str:
        """The moment of the record, for messages."""
        after = f" and {self.writes} writes after it" * (self.writes > 0)
        return f"step {self.step}{after}" + ", as its engine was closed" * bool(self.closed)


NO_RECORD = RecordKey(0, 0, 0, "")
"""The key before the first record of a run."""


class KeptRecord(NamedTuple):
    """The key of a record that is whole, and the `life` that made it. A life begins with each
    `wrap`, on all ranks together."""

    key: RecordKey
    life: Id


class LeftStates(NamedTuple):
    """The states of an earlier run in the directories of one rank, the first of which is `path`.
    `records` are its records, newest first. Without records there is nothing to continue, and of
    the other fields only `beside` is set: the path of committed states of another rank, or ""."""

    path: str
    run: str = ""
    member: Member = ONE_RANK
    is_committed: bool = False
    records: tuple[KeptRecord, ...] = ()
    beside: str = ""

    @classmethod
    def of(cls, values: Sequence[Any]) -> LeftStates:
        """The value that JSON has made of a `LeftStates`."""
        return _LEFT.validate_python(values)


_LEFT = TypeAdapter(LeftStates)
_KEPT = TypeAdapter(KeptRecord)


class DurableStates:
    """The files in the directories of one rank that outlive its engine. The caller calls `find`
    first, then `take`, then `record` and `settle` in turn, on one thread. One class, because all of
    its methods read and write the same files in these directories."""

    def __init__(self, resume: bool, member: Member = ONE_RANK) -> None:
        """`resume`: adopt existing states; without it they are refused."""
        self._resume, self._member = resume, member
        self._places: list[Directory] = []
        self._log: CommitLog | None = None
        self._kept: list[Commit] = []
        self._life = self._beside = ""
        self._blocks: tuple[StoredBlock, ...] = ()
        self._taken: RecordKey | None = None
        self._is_committed = self._is_discarded = False
        self.found: StatesManifest | None = None
        """The manifest of the adopted states; None if the engine begins a run."""
        self.content: bytes | None = None
        """The adopted record, with `found`, until `keep`."""

    def find(self, places: Sequence[Directory], around: Sequence[Directory] = ()) -> None:
        """Find the states of an earlier run in the directories, which are locked. Changes nothing.
        `around`: the directories around them, if every rank has its own.

        Raises `ConfigError` if there are states and `resume` is False, or directories are missing,
        exchanged or of several runs. Raises `CheckpointError` for damaged files.
        """
        self._places = list(places)
        self._log = CommitLog(DurableFiles(places[0]))
        kept = {place: read_manifest(place) for place in places if has_manifest(place)}
        self._kept = self._log.kept()
        if not self._kept and not any(manifest.is_committed for manifest in kept.values()):
            if self._resume:  # killed before the first commit, or exchanged
                beside = (_committed_beside(each, places[0].path.name) for each in around)
                self._beside = next(filter(None, beside), "")
            return
        if not self._resume:
            raise refusal_of(next(iter(kept), places[0]))
        found = kept.get(places[0])
        if (
            not self._kept
            or found is None
            or any(_run_of(commit) != found.run for commit in self._kept)
        ):
            raise CheckpointError(
                f"{places[0].path} lacks a part of the states of an earlier run "
                f"({MANIFEST_NAME}, {' and '.join(COMMIT_NAMES)}), or it is of another run; give "
                "all nvme directories of that run in the order in which they were, or go on from a "
                "checkpoint, in another directory"
            )
        runs = [(manifest.run, manifest.directory) for manifest in kept.values()]
        if len(found.shares) != len(places) or runs != [
            (found.run, at) for at in range(len(places))
        ]:
            numbers = ", ".join(
                f"{place.path} is number {manifest.directory + 1} of run {manifest.run[:8]}"
                for place, manifest in kept.items()
            )
            raise ConfigError(
                f"the nvme directories do not hold the states of one run together: {numbers}; it "
                f"has {len(found.shares)}, to be given in the order in which they were"
            )
        missing = [place.path for place in places if place.check(STATES_NAME) is None]
        if missing:
            raise CheckpointError(
                f"{missing[0] / STATES_NAME} is gone, and with it the states of an earlier run; go "
                "on from a checkpoint, in another directory"
            )
        self._log.flush()  # before other ranks know of them
        self.found = found

    def refuse_other_ranks(self, place: Directory, own: str) -> None:
        """See `KeptStates`. Several ranks have directories of their `own`."""
        if own and holds_committed(place):
            raise ConfigError(
                f"{place.path} holds the committed states of a run on one rank, and here are "
                f"several; {_OTHER_NUMBER}"
            )
        for inner in () if own else _of_ranks(place):
            if holds_committed(inner):
                raise ConfigError(
                    f"{inner.path} holds the committed states of a run on several ranks, and here "
                    f"is one; {_OTHER_NUMBER}"
                )

    @property
    def path(self) -> Path:
        """The first directory, which contains the records."""
        return self._places[0].path

    @property
    def left(self) -> LeftStates:
        """The result of `find`, for the other ranks."""
        path = str(self.path)
        if self.found is None:
            return LeftStates(path, beside=self._beside)
        try:
            records = tuple(map(_kept, self._kept))
        except ValidationError as error:
            raise self.unreadable(error) from error
        return LeftStates(path, self.found.run, self.found.member, self.found.is_committed, records)

    @property
    def taken(self) -> RecordKey:
        """The key of the adopted record; `NO_RECORD` if there is none."""
        return NO_RECORD if self._taken is None else self._taken

    def take(self, record: KeptRecord | None, life: str) -> None:
        """Continue from `record`, which all ranks have. None: begin a run, which has the name of
        its first `life`. `keep` drops the record after it."""
        self._life = life
        if record is None:
            if self.found is not None and self._log is not None:
                self._log.remove()  # of a run that was killed before all ranks had committed
            self.found, self._kept = None, []
            if self._resume and self._member.rank == 0:
                log.info("%s: no step is committed, so training begins anew", self._places[0].path)
            return
        self._taken = record.key
        commit = next(each for each in self._kept if each.sequence == record.key.sequence)
        self.content, self._is_committed = commit.content[_HEAD.size :], True
        self._kept = []

    @property
    def taken_over(self) -> StatesManifest | None:
        """The manifest of the adopted states; None if they are new, and after `keep`."""
        return None if self.content is None else self.found

    @property
    def outlive(self) -> bool:
        """Whether the files in the directories stay after `close`."""
        return self._is_committed and not self._is_discarded

    def remove(self, places: Sequence[Directory]) -> None:
        """Remove the files beside the states in `places`."""
        remove_records(places)

    def discard(self) -> None:
        """Committed states are not needed any more."""
        self._is_discarded = True

    def describe(self, blocks: Sequence[StoredBlock]) -> None:
        """These are the states of the engine, in their order."""
        self._blocks = tuple(blocks)

    def check(self) -> None:
        """Raise `ConfigError` if the states that `find` found do not fit the engine."""
        if self.found is not None and (difference := self.found.difference(self._blocks)):
            raise ConfigError(
                f"{self._places[0].path} holds the states of another model or configuration: "
                f"{difference}; wrap the same model with the same Config, or take another directory"
            )

    def begin(self, stripe_bytes: int, shares: Sequence[float], rooms: Sequence[int]) -> None:
        """Describe states in this arrangement, without a commit, in new manifests. They replace the
        manifests of a run that was killed before its first commit."""
        self.found = shown = StatesManifest(
            version=VERSION,
            directory=0,
            run=self._life,
            member=self._member,
            is_committed=False,
            stripe_bytes=stripe_bytes,
            shares=tuple(shares),
            rooms=tuple(rooms),
            blocks=self._blocks,
        )
        for place in reversed(self._places):
            DurableFiles(place).remove(MANIFEST_NAME)
        if self._log is not None:
            self._log.remove()
        self._write_manifests(shown)

    def keep(self) -> None:
        """Drop all records except the adopted record."""
        if self._log is not None and self._taken is not None:
            self._log.keep(self._taken.sequence)
        self.content = None

    def record(self, key: RecordKey, content: bytes) -> None:
        """Make `content` the last record, when the states that it refers to are on the drives. The
        record before stays."""
        if self._log is None or self.found is None:
            raise RuntimeError("no directory was looked at")
        if self._log.next_sequence != key.sequence:
            raise RuntimeError(f"record {self._log.next_sequence} would be number {key.sequence}")
        head = _HEAD.pack(
            self.found.run.encode(), self._life.encode(), key.step, key.writes, key.closed.encode()
        )
        self._log.write(head + content)
        self._is_committed = True

    def read(self, key: RecordKey) -> bytes:
        """The content of the record with this key, which was not dropped. Raises `CheckpointError`
        if it cannot be read."""
        commit = None if self._log is None else self._log.read(key.sequence)
        if commit is None:
            raise self.unreadable(ValueError(f"record {key.sequence} is not there"))
        return commit.content[_HEAD.size :]

    def settle(self) -> None:
        """All ranks have the last record: drop the record before."""
        if self._log is None or self.found is None:
            raise RuntimeError("no directory was looked at")
        self._log.settle()
        if not self.found.is_committed:
            self.found = self.found.model_copy(update={"is_committed": True})
            self._write_manifests(self.found)

    def _write_manifests(self, manifest: StatesManifest) -> None:
        for number, place in enumerate(self._places):
            of_this = manifest.model_copy(update={"directory": number})
            DurableFiles(place).create(MANIFEST_NAME, of_this.encode())

    def decode(self, content: bytes, step: int) -> CommittedStep:
        """Decode a record of `step`. Raises `CheckpointError` if it is damaged."""
        try:
            return CommittedStep.of(content, step)
        except ValueError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> CheckpointError:
        """The error for a record that is whole, but not a valid record."""
        return CheckpointError(
            f"{self.path}: the record of the committed states cannot be read: "
            f"{reason_of(error)}; go on from a checkpoint, in another directory"
        )


def _of_ranks(place: Directory) -> Iterator[Directory]:
    """The directories of ranks in `place` that have a manifest, each open until the next one."""
    for name in filter(_OF_A_RANK.fullmatch, place.names()):
        status = place.status(name)
        # Without a manifest its rank may be about to remove it, and to open it would make it.
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        if place.status(f"{name}/{MANIFEST_NAME}") is not None:
            with place.below(name) as inner:
                yield inner


def _committed_beside(place: Directory, own: str) -> str:
    """The first path in `place` of states that all ranks of a run have committed, except `own`; ""
    if there is none."""
    for inner in _of_ranks(place):
        try:
            is_committed = inner.path.name != own and read_manifest(inner).is_committed
        except CheckpointError:
            is_committed = True  # the manifest cannot be read
        if is_committed:
            return str(inner.path)
    return ""


_OTHER_NUMBER = (
    "another number of ranks goes on from a checkpoint (Engine.save_checkpoint), in another "
    "directory"
)

_AS_THEY_WERE = (
    "give every rank the nvme directories that it had, or go on from a checkpoint, in other "
    "directories"
)


def common_step(left: Mapping[int, LeftStates], members: Mapping[int, Member]) -> KeptRecord | None:
    """The last record that all ranks have, by the states `left` of each rank; None if there is
    nothing to continue. `members`: the ranks now.

    Raises `ConfigError` or `CheckpointError`, the same on every rank, if they have none in common.
    """
    has = {rank: each for rank, each in left.items() if each.records}
    for rank, each in sorted(has.items()):
        now, then = members[rank], each.member
        if then.ranks != now.ranks:
            raise ConfigError(
                f"{each.path} (of rank {rank}) holds the states of a run on {then.ranks} "
                f"rank{'s' * (then.ranks != 1)}, and here are {now.ranks}; {_OTHER_NUMBER}"
            )
        if then != now:
            raise ConfigError(
                f"{each.path} (of rank {rank}) holds the states of rank {then.rank} ({then.part}), "
                f"and here is rank {now.rank} ({now.part}); give every rank the nvme directories "
                "that it had, and the same groups of ranks"
            )
    lacking = sorted(left.keys() - has.keys())
    if lacking and not any(each.is_committed for each in has.values()):
        exchanged = next((rank for rank in lacking if left[rank].beside), None)
        if exchanged is None:
            return None  # killed before all ranks had committed: nothing is lost
        path, beside = left[exchanged].path, left[exchanged].beside
        raise CheckpointError(
            f"{path} (of rank {exchanged}) has no committed states, and {beside} has those of rank "
            f"{Path(beside).name.removeprefix('rank')}; {_AS_THEY_WERE}"
        )
    first = min(has)
    for rank in sorted(left):
        if rank in lacking or left[rank].run != left[first].run:
            what = "has no committed states" if rank in lacking else "is of another run"
            newest = left[first].records[0].key
            raise CheckpointError(
                f"{left[rank].path} (of rank {rank}) {what}, and {left[first].path} (of rank "
                f"{first}) has those of step {newest.step}; {_AS_THEY_WERE}"
            )
    common = set.intersection(*(set(each.records) for each in has.values()))
    if not common:
        steps = ", ".join(
            f"{each.path} (of rank {rank}) has step "
            + " and ".join(
                f"{key.step} (record {key.sequence} of {life[:8]})" for key, life in each.records
            )
            for rank, each in sorted(has.items())
        )
        raise CheckpointError(
            f"the ranks have no committed step in common: {steps}; a record is damaged, or a "
            "directory is a copy of another time: go on from a checkpoint, in other directories"
        )
    return max(common)


def _run_of(commit: Commit) -> str:
    """The run of a record; "" if the record is too short."""
    if len(commit.content) < _HEAD.size:
        return ""
    return _text(_HEAD.unpack_from(commit.content)[0])


def _kept(commit: Commit) -> KeptRecord:
    _, life, step, writes, closed = _HEAD.unpack_from(commit.content)
    values = commit.sequence, step, writes, _text(closed)
    key = dict(zip(RecordKey._fields, values, strict=True))
    return _KEPT.validate_python({"key": key, "life": _text(life)})


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
