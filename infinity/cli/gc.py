"""`infinity gc`: removes leftovers of dead runs from NVMe and checkpoint directories. It touches
nothing that a live run uses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from infinity.bench.io.workspace import leftovers, remove
from infinity.cli import checkpoints
from infinity.cli.failure import plain_failures
from infinity.cli.options import AsJson, Debug, parse_directory
from infinity.cli.ranks import own_directories
from infinity.directories.directory import Directory
from infinity.directories.drafts import remove_leftovers
from infinity.directories.lock import LOCK_NAME, lock
from infinity.errors import naming
from infinity.quantities import format_bytes
from infinity.tiers.manifest import (
    DURABLE_NAMES,
    STATES_NAME,
    holds_committed,
    remove_records,
    run_of,
)


def collect(
    *directories: Path, committed: bool = False, removed: dict[str, int] | None = None
) -> dict[str, int]:
    """Remove leftovers of dead runs from `directories` and from the directories of their ranks and
    engines. Returns the removed paths with their bytes on disk. Each is also added to `removed` at
    once.

    Committed states stay, unless `committed`. Then `directories` must be all directories of a run.

    Raises `PathInUseError` if a live process trains or measures in one of them, and
    `NotADirectoryError` for a path that is no directory. Raises `ConfigError` if a foreign file has
    the name of one of our files, or lies in the folder of a benchmark. Nothing is removed then.
    """
    for directory in directories:
        if not directory.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "not a directory; choose another one", str(directory)
            )
    with ExitStack() as stack:
        places = list(_open_all(stack, directories))
        left = [_look(each.place, committed) for each in places]
        found = {} if removed is None else removed
        with ExitStack() as locks:
            for each in left:
                if each.is_any:
                    locks.enter_context(lock(each.place))
            left = [_without_new(each, committed) for each in left]
            # All records before any states, because states may be striped over several directories.
            remove_records([each.place for each in left if each.is_any and each.has_states])
            for each in left:
                found |= _remove(each)
        for inner in reversed(places):
            if inner.parent is not None and any(
                Path(path).is_relative_to(inner.place.path) for path in found
            ):
                inner.parent.remove_directory(inner.name)  # stays if other files are in it
    return found


def committed_runs(*directories: Path) -> set[str]:
    """The ids of runs with committed states in `directories`, or in directories of their ranks and
    engines."""
    with ExitStack() as stack:
        places = [each.place for each in _open_all(stack, directories)]
        return {run_of(place) for place in places if holds_committed(place)}


class _OpenPlace(NamedTuple):
    """A directory. The directory of a rank or an engine also has its `parent`."""

    place: Directory
    name: str = ""
    parent: Directory | None = None


def _open_all(stack: ExitStack, directories: Iterable[Path]) -> Iterator[_OpenPlace]:
    """All directories, each once, parents first. They stay open as long as `stack`."""
    seen = set[tuple[int, int]]()
    coming = [
        _OpenPlace(stack.enter_context(Directory(each, "nvme directory"))) for each in directories
    ]
    while coming:
        each = coming.pop(0)
        with naming(each.place.path):
            status = os.fstat(each.place.descriptor)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield each
        for own in own_directories(each.place.path):
            inner = stack.enter_context(each.place.below(own.name))
            coming.append(_OpenPlace(inner, own.name, each.place))


class _Leftovers(NamedTuple):
    """Leftovers of dead runs in one directory: the folders of benchmarks, and all paths with their
    bytes."""

    place: Directory
    has_states: bool
    benchmark: list[Path]
    found: dict[str, int]
    is_any: bool  # of files that are removed under the lock


def _look(place: Directory, committed: bool) -> _Leftovers:
    benchmark = leftovers(place.path)
    has_states = committed or not holds_committed(place)
    states = (STATES_NAME, *DURABLE_NAMES) if has_states else ()
    ours = {name: place.check(name) for name in (*states, LOCK_NAME)}
    found = {
        str(place.path / name): status.st_blocks * 512
        for name, status in ours.items()
        if status is not None
    }
    found |= {str(path): path.lstat().st_blocks * 512 for path in benchmark}
    is_any = bool(found or checkpoints.leftovers(place.path))
    return _Leftovers(place, has_states, benchmark, found, is_any)


def _without_new(left: _Leftovers, committed: bool) -> _Leftovers:
    """`left` under the lock, without states that a run has committed since `_look`."""
    if committed or not left.has_states or not holds_committed(left.place):
        return left
    states = {str(left.place.path / name) for name in (STATES_NAME, *DURABLE_NAMES)}
    found = {path: nbytes for path, nbytes in left.found.items() if path not in states}
    return left._replace(has_states=False, found=found)


def _remove(left: _Leftovers) -> dict[str, int]:
    """Remove the leftovers of one directory. Returns paths and bytes. The records of all
    directories are removed before."""
    place, found = left.place, dict(left.found)
    if left.is_any:
        if left.has_states:
            place.reclaim(STATES_NAME)
        remove(place, left.benchmark)
        # Search again, because a save may have ended since.
        found |= checkpoints.remove(checkpoints.leftovers(place.path))
    return found | {str(place.path / name): used for name, used in remove_leftovers(place).items()}


def gc(
    directories: Annotated[
        list[Path],
        typer.Argument(
            parser=parse_directory,
            help="NVMe and checkpoint directories of earlier runs.",
            metavar="DIR...",
        ),
    ],
    committed: Annotated[
        bool,
        typer.Option(
            "--committed", help="Also remove states that were committed, of --durability."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove leftovers of dead runs from NVMe and checkpoint directories. Refuses a directory that
    a live process uses."""
    with plain_failures(debug):
        removed: dict[str, int] = {}
        try:
            collect(*directories, committed=committed, removed=removed)
        finally:
            if as_json:
                typer.echo(json.dumps({"removed": removed, "bytes": sum(removed.values())}))
            else:
                for path, count in removed.items():
                    typer.echo(f"removed {path} ({format_bytes(count)})")
        if not removed and not as_json:
            typer.echo("nothing to remove")
