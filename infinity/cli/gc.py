"""`infinity gc`: removes what a dead run left in an NVMe directory, and nothing that a live run
uses."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Annotated

import typer

from infinity.bench.io.workspace import leftovers, remove
from infinity.cli import checkpoints
from infinity.cli.failure import plain_failures
from infinity.cli.ranks import own_directories
from infinity.directories.directory import Directory
from infinity.directories.drafts import remove_leftovers
from infinity.directories.lock import LOCK_NAME, lock
from infinity.quantities import format_bytes
from infinity.tiers.durable import DURABLE_NAMES, STATES_NAME, holds_committed, remove_records


def collect(directory: Path, committed: bool = False) -> dict[str, int]:
    """Remove the leftovers of a dead run from `directory`, and from those of its ranks and engines;
    returns the removed paths with their bytes on disk. States that outlive their process are left
    there, unless what is `committed` shall go, too.

    Raises `PathInUseError` while a live process trains or measures there, and `NotADirectoryError`
    for a path that is not a directory. Raises `ConfigError` when a foreign file has the name of one
    of ours, or lies in the folder of a benchmark.
    """
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(directory))
    with Directory(directory, "nvme directory") as place:
        return _collect_all(place, committed)


def _collect_all(place: Directory, committed: bool) -> dict[str, int]:
    """`collect` in an open directory."""
    found = _collect(place, committed)
    for own in own_directories(place.path):
        with place.below(own.name) as inner:
            left = _collect_all(inner, committed)
        found |= left
        if left:
            place.remove_directory(own.name)  # unless somebody else's files are in it
    return found


def _collect(place: Directory, committed: bool) -> dict[str, int]:
    """`collect` without what is below."""
    benchmark = leftovers(place.path)
    kept = holds_committed(place) and not committed
    states = () if kept else (STATES_NAME, *DURABLE_NAMES)
    ours = {name: place.check(name) for name in (*states, LOCK_NAME)}
    found = {
        str(place.path / name): status.st_blocks * 512
        for name, status in ours.items()
        if status is not None
    }
    found |= {str(path): path.lstat().st_blocks * 512 for path in benchmark}
    if found or checkpoints.leftovers(place.path):
        with lock(place):
            if states:
                remove_records([place])
                place.reclaim(STATES_NAME)
            remove(place, benchmark)
            # Asked again: a save may have been under way.
            found |= checkpoints.remove(checkpoints.leftovers(place.path))
    found |= {str(place.path / name): used for name, used in remove_leftovers(place).items()}
    return found


def gc(
    directories: Annotated[
        list[Path],
        typer.Argument(help="NVMe and checkpoint directories of earlier runs.", metavar="DIR..."),
    ],
    committed: Annotated[
        bool,
        typer.Option(
            "--committed", help="Also remove states that were committed, of --durability."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """Remove what a dead run left in NVMe and checkpoint directories; refuses where a live process
    still uses one."""
    with plain_failures(debug):
        removed: dict[str, int] = {}
        try:
            for directory in directories:
                removed |= collect(directory, committed)
        finally:
            if as_json:
                typer.echo(json.dumps({"removed": removed, "bytes": sum(removed.values())}))
            else:
                for path, count in removed.items():
                    typer.echo(f"removed {path} ({format_bytes(count)})")
        if not removed and not as_json:
            typer.echo("nothing to remove")
