"""States that outlive their process: what lies in the directories beside the states files, and who
may take it over.

[Note: a directory that holds states]
Every directory has a manifest, `infinity-manifest.json`: the run, its number among the directories,
how the address space is striped over them, where each block lies, and whether anything was
committed. The first directory also has the record of the last commit
(`infinity.directories.commits`), which names the run. The manifests come before the first commit,
and say so after it. Where something was committed, nobody reclaims the states: they are taken over
(`resume`), or refused. What was not is reclaimed as what any dead run left.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from infinity.directories.commits import COMMIT_NAMES, DRAFT_NAME, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.errors import CheckpointError, ConfigError

MANIFEST_NAME = "infinity-manifest.json"
DURABLE_NAMES = (*COMMIT_NAMES, DRAFT_NAME, MANIFEST_NAME)
"""What lies beside the states; the manifest last, because without it nobody looks at the others."""
STATES_NAME = "infinity-states.bin"
RUN_BYTES = 32
"""What a record begins with: the name of its run."""
VERSION = 2
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredBlock:
    """A block on NVMe: what it is, and the bytes at which each of its extents begins."""

    name: str
    kind: str
    format: str
    elements: int
    nbytes: int
    extents: tuple[int, ...]


@dataclass(frozen=True)
class StatesManifest:
    """Where the states of one run lie; `stripe_bytes`, `shares` and `rooms` are those of
    `Stripes`."""

    run: str
    is_committed: bool
    stripe_bytes: int
    shares: tuple[float, ...]
    rooms: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    def encode(self, directory: int) -> bytes:
        """That of directory number `directory`."""
        values = {"version": VERSION, "directory": directory, **asdict(self)}
        return json.dumps(values, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> tuple[StatesManifest, int]:
        """The manifest, and the number of its directory. Raises some `Exception`."""
        values = json.loads(content)
        version, directory = values.pop("version"), values.pop("directory")
        if version != VERSION:
            raise ValueError(f"it is of version {version!r}, and {VERSION} is known")
        blocks = tuple(
            StoredBlock(**block | {"extents": tuple(map(int, block["extents"]))})
            for block in values.pop("blocks")
        )
        shares = tuple(map(float, values.pop("shares")))
        rooms = tuple(map(int, values.pop("rooms")))
        return cls(shares=shares, rooms=rooms, blocks=blocks, **values), int(directory)

    def difference(self, blocks: Sequence[StoredBlock]) -> str:
        """In what other `blocks` differ from these first, in words; "" where they do not."""
        for mine, other in zip(self.blocks, blocks, strict=False):
            for key, value in asdict(mine).items():
                if (here := getattr(other, key)) != value:
                    of = f" of {mine.name}" * (key != "name")
                    return f"{key}{of} was {value}, and is {here} here"
        if len(self.blocks) != len(blocks):
            return f"there were {len(self.blocks)} blocks, and are {len(blocks)} here"
        return ""


class DurableStates:
    """What the directories of one engine hold beyond its life. `find` comes first, then `commit`
    again and again, by one thread."""

    def __init__(self, resume: bool) -> None:
        """`resume`: states that are there are taken over; without it they are refused."""
        self._resume = resume
        self._places: list[Directory] = []
        self._log: CommitLog | None = None
        self._blocks: tuple[StoredBlock, ...] = ()
        self._is_committed = self._is_discarded = False
        self.found: StatesManifest | None = None
        """Of the states that are taken over; None where the engine begins anew."""
        self.content: bytes | None = None
        """The last record, with `found`."""

    def find(self, places: Sequence[Directory]) -> None:
        """Look what an earlier run left in the directories, which are locked; changes nothing.

        Raises `ConfigError` where states are there and are not to be taken over, or directories are
        missing, exchanged or of several runs. Raises `CheckpointError` for what is damaged.
        """
        self._places = list(places)
        self._log = CommitLog(DurableFiles(places[0]))
        kept = {place: _read(place) for place in places if has_manifest(place)}
        commit = self._log.last()
        if commit is None and not any(manifest.is_committed for manifest, _ in kept.values()):
            return  # killed before the first commit: nothing is lost
        if not self._resume:
            raise _refusal(next(iter(kept), places[0]))
        found = kept[places[0]][0] if places[0] in kept else None
        if commit is None or found is None or commit.content[:RUN_BYTES] != found.run.encode():
            raise CheckpointError(
                f"{places[0].path} lacks a part of the states of an earlier run "
                f"({MANIFEST_NAME}, {' and '.join(COMMIT_NAMES)}), or it is of another run; give "
                "all nvme directories of that run in the order in which they were, or go on from a "
                "checkpoint, in another directory"
            )
        runs = [(manifest.run, number) for manifest, number in kept.values()]
        if len(found.shares) != len(places) or runs != [
            (found.run, at) for at in range(len(places))
        ]:
            numbers = ", ".join(
                f"{place.path} is number {number + 1} of run {manifest.run[:8]}"
                for place, (manifest, number) in kept.items()
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
        self.found, self.content = found, commit.content[RUN_BYTES:]
        self._is_committed = True

    @property
    def outlive(self) -> bool:
        """Whether what the directories hold is worth keeping."""
        return self._is_committed and not self._is_discarded

    def discard(self) -> None:
        """What was and will be committed is worth nothing any more."""
        self._is_discarded = True

    def describe(self, blocks: Sequence[StoredBlock]) -> None:
        """These are the states of the engine, in their order."""
        self._blocks = tuple(blocks)

    def check(self) -> None:
        """Raise `ConfigError` where the states that are there are not those of the engine."""
        if self.found is not None and (difference := self.found.difference(self._blocks)):
            raise ConfigError(
                f"{self._places[0].path} holds the states of another model or configuration: "
                f"{difference}; wrap the same model with the same Config, or take another directory"
            )

    def begin(self, stripe_bytes: int, shares: Sequence[float], rooms: Sequence[int]) -> None:
        """The states lie so, and nothing was committed yet: describe them, in place of those of a
        run that was killed before its first commit."""
        run = uuid.uuid4().hex
        shown = StatesManifest(run, False, stripe_bytes, tuple(shares), tuple(rooms), self._blocks)
        self.found = shown
        for place in reversed(self._places):
            DurableFiles(place).remove(MANIFEST_NAME)
        if self._log is not None:
            self._log.remove()
        self._write_manifests(shown)

    def settle(self) -> None:
        """From now on nobody reads a record before the last one."""
        if self._log is not None:
            self._log.settle()

    def commit(self, content: bytes) -> None:
        """Make `content` the last record, when all that it speaks of is on the drives."""
        if self._log is None or self.found is None:
            raise RuntimeError("no directory was looked at")
        self._log.write(self.found.run.encode() + content)
        self._is_committed = True
        if not self.found.is_committed:
            self.found = replace(self.found, is_committed=True)
            self._write_manifests(self.found)

    def _write_manifests(self, manifest: StatesManifest) -> None:
        for number, place in enumerate(self._places):
            DurableFiles(place).create(MANIFEST_NAME, manifest.encode(number))


def has_manifest(place: Directory) -> bool:
    """Whether states were, or are to be, committed there."""
    return place.check(MANIFEST_NAME) is not None


def holds_committed(place: Directory) -> bool:
    """Whether states that were committed lie there, as far as that can be read."""
    if not has_manifest(place):
        return False
    try:
        committed = CommitLog(DurableFiles(place)).last() is not None
        return committed or _read(place)[0].is_committed
    except CheckpointError:
        return True


def refuse_kept(place: Directory) -> None:
    """Raise `ConfigError` where `place` holds states that outlived their process."""
    if holds_committed(place):
        raise _refusal(place)


def _refusal(place: Directory) -> ConfigError:
    return ConfigError(
        f"nvme directory {place.path} holds the committed states of an earlier run; go on "
        "from them with infinity.wrap(model, config, resume=True) or infinity finetune "
        "--resume, take another directory, or remove them with: infinity gc --committed "
        f"{place.path}"
    )


def _read(place: Directory) -> tuple[StatesManifest, int]:
    path = place.path / MANIFEST_NAME
    try:
        with os.fdopen(place.open(MANIFEST_NAME, os.O_RDONLY), "rb") as file:
            return StatesManifest.decode(file.read(_MOST_BYTES))
    except ConfigError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); go on from a checkpoint, in another directory"
        ) from error
