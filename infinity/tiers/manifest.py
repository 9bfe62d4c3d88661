"""The manifest of a directory of states, beside the states file.

[Note: a directory that holds states]
Every directory has a manifest, `infinity-manifest.json`: the run, its number among the directories,
how the address space is striped over them, where each block lies, and whether anything was
committed. The first directory also has the record of the last commit
(`infinity.directories.commits`), which names the run. The manifests come before the first commit,
and say so after it. Committed states are never reclaimed: a later run adopts them (`resume`), or
raises an error. Uncommitted states are reclaimed, as those of any dead run.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    model_validator,
)

from infinity.directories.commits import COMMIT_NAMES, DRAFT_NAME, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.errors import CheckpointError, ConfigError, first_problem, in_words, naming
from infinity.placement.spec import Kind

MANIFEST_NAME = "infinity-manifest.json"
DURABLE_NAMES = (*COMMIT_NAMES, DRAFT_NAME, MANIFEST_NAME)
"""The files beside the states. The manifest is last: without it, no code reads the other files."""
STATES_NAME = "infinity-states.bin"
VERSION = 4
_MOST_BYTES = 1 << 30
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""Of a run or a life."""
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Member(NamedTuple):
    """The owner of the states: `rank` of `ranks`, and in words the `part` of the states that it
    has."""

    rank: int = 0
    ranks: int = 1
    part: str = "all"


ONE_RANK = Member()


class _Stored(BaseModel):
    """A part of a manifest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class StoredBlock(_Stored):
    """A block on NVMe, and the byte at which each of its extents begins."""

    name: str
    kind: Annotated[str, AfterValidator(lambda kind: Kind(kind).value)]
    format: str
    elements: Count
    nbytes: Count
    extents: tuple[Count, ...]


def _whole(member: Any) -> Any:
    if not isinstance(member, (list, tuple)) or len(member) != len(Member._fields):
        raise ValueError(f"it is not {', '.join(Member._fields)}")
    return member


def _known(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"it is of version {in_words(version)}, and {VERSION} is known")
    return version


class StatesManifest(_Stored):
    """Where the states of `member` in one run lie, for directory number `directory`.
    `stripe_bytes`, `shares` and `rooms` are those of `Stripes`."""

    version: Annotated[int, AfterValidator(_known)]
    directory: Count
    run: Id
    member: Annotated[Member, BeforeValidator(_whole)]
    is_committed: bool
    stripe_bytes: Count
    shares: tuple[NonNegativeFloat, ...]
    rooms: tuple[Count, ...]
    blocks: tuple[StoredBlock, ...]

    @model_validator(mode="after")
    def _fits(self) -> StatesManifest:
        if not 0 <= self.member.rank < self.member.ranks:
            raise ValueError(f"rank {self.member.rank} is none of {self.member.ranks}")
        if len(self.rooms) != len(self.shares) or self.directory >= len(self.shares):
            raise ValueError(
                f"directory {self.directory} has {len(self.shares)} shares and {len(self.rooms)} "
                "rooms"
            )
        if any(room and not share for share, room in zip(self.shares, self.rooms, strict=True)):
            raise ValueError("a directory has room, and no share")
        if self.nbytes > (room := sum(self.rooms) * self.stripe_bytes) or not room:
            raise ValueError(f"its blocks take {self.nbytes} bytes, and it has room for {room}")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the address space up to the end of the last extent."""
        return max((start + b.nbytes for b in self.blocks for start in b.extents), default=0)

    def encode(self) -> bytes:
        """The content of its file."""
        return json.dumps(self.model_dump(), indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> StatesManifest:
        """The inverse of `encode`. Raises `ValidationError` if `content` is no valid manifest."""
        return cls.model_validate_json(content)

    def difference(self, blocks: Sequence[StoredBlock]) -> str:
        """The first difference of `blocks` from these, in words; "" if there is none."""
        for mine, other in zip(self.blocks, blocks, strict=False):
            for key, value in mine:
                if (here := getattr(other, key)) != value:
                    of = f" of {mine.name}" * (key != "name")
                    return f"{key}{of} was {value}, and is {here} here"
        if len(self.blocks) != len(blocks):
            return f"there were {len(self.blocks)} blocks, and are {len(blocks)} here"
        return ""


def has_manifest(place: Directory) -> bool:
    """Whether states were, or are to be, committed there."""
    return place.check(MANIFEST_NAME) is not None


def holds_committed(place: Directory) -> bool:
    """Whether committed states lie there; also True if a record or manifest is unreadable."""
    if not has_manifest(place):
        return False
    try:
        committed = CommitLog(DurableFiles(place)).last() is not None
        return committed or read_manifest(place).is_committed
    except CheckpointError:
        return True


def run_of(place: Directory) -> str:
    """The run whose states lie there; "" if no readable manifest names one."""
    with suppress(CheckpointError):
        return read_manifest(place).run if has_manifest(place) else ""
    return ""


def refuse_kept(place: Directory) -> None:
    """Raise `ConfigError` if `place` holds committed states."""
    if holds_committed(place):
        raise refusal_of(place)


def remove_records(places: Sequence[Directory]) -> None:
    """Remove manifests and records in all directories of a run. The caller removes the states
    afterward.

    A kill in between leaves states that can still be resumed, or states that count as uncommitted.
    So does an error of the drive, which is raised and ends the removal; a full drive only keeps a
    manifest as it is. First the manifests say that nothing was committed. This counts once there is
    no record. Then the records are removed, the last one last, and then the other files.
    """
    for place in filter(has_manifest, places):
        try:
            manifest = read_manifest(place)
            if manifest.is_committed:
                shown = manifest.model_copy(update={"is_committed": False})
                DurableFiles(place).create(MANIFEST_NAME, shown.encode())
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            # else it is damaged, and is refused in any case
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # else what is removed is to make room
    for place in places:
        commits = CommitLog(DurableFiles(place))
        with suppress(CheckpointError):
            commits.kept()
        commits.remove()
    for place in places:
        for name in DURABLE_NAMES:
            place.remove(name)


def refusal_of(place: Directory) -> ConfigError:
    """The error for committed states in `place` that this run does not adopt."""
    return ConfigError(
        f"nvme directory {place.path} holds the committed states of an earlier run; go on "
        "from them with infinity.wrap(model, config, resume=True) or infinity finetune "
        "--resume, take another directory, begin anew with infinity finetune --overwrite, or "
        f"remove them with: infinity gc --committed {place.path}"
    )


def read_manifest(place: Directory) -> StatesManifest:
    """The manifest in `place`. Raises `CheckpointError` if it is damaged or unreadable."""
    path = place.path / MANIFEST_NAME
    try:
        with naming(path), os.fdopen(place.open(MANIFEST_NAME, os.O_RDONLY), "rb") as file:
            return StatesManifest.decode(file.read(_MOST_BYTES))
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{path} is damaged ({reason_of(error)}); go on from a checkpoint, in another directory"
        ) from error


def reason_of(error: Exception) -> str:
    """The problem of a record or a manifest, in words."""
    return first_problem(error) if isinstance(error, ValidationError) else str(error)
