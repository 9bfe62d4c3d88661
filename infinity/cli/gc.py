"""`infinity gc`: removes what a dead run left in an NVMe directory, and nothing that a live run uses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.failure import plain_failures
from infinity.errors import PathInUseError
from infinity.units import format_bytes

LOCK = "infinity.lock"
"""Every engine holds an exclusive flock on this file in each of its NVMe directories; the file holds its pid."""
STATES = "infinity-states.bin"
"""The preallocated extent file of one NVMe directory."""


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; raises `PathInUseError` that names the pid when a live process has it."""
    lock = directory / LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            owner = os.pread(descriptor, 64, 0).decode(errors="replace").split()
            who = f"process {owner[0]}" if owner else "a process that left no pid"
            raise PathInUseError(f"{directory} is in use by {who}; nothing was removed") from None
        yield
    finally:
        os.close(descriptor)


def collect(directory: Path) -> dict[str, int]:
    """Remove the leftovers of a dead run from `directory`; returns the removed paths with their bytes on disk.

    Raises `PathInUseError` while a live process trains there and `NotADirectoryError` for a path that is none.
    """
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(directory))
    leftovers = [directory / name for name in (STATES, LOCK) if os.path.lexists(directory / name)]
    if not leftovers:
        return {}
    removed: dict[str, int] = {}
    with _held(directory):
        for path in leftovers:
            removed[str(path)] = path.lstat().st_blocks * 512
            path.unlink()
        (directory / LOCK).unlink(missing_ok=True)
    return removed


def gc(
    directories: Annotated[list[Path], typer.Argument(help="NVMe directories of earlier runs.", metavar="DIR...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Remove what a dead run left in NVMe directories; refuses where a live process still uses one."""
    with plain_failures(debug):
        removed: dict[str, int] = {}
        try:
            for directory in directories:
                removed |= collect(directory)
        finally:
            if as_json:
                typer.echo(json.dumps({"removed": removed, "bytes": sum(removed.values())}))
            else:
                for path, count in removed.items():
                    typer.echo(f"removed {path} ({format_bytes(count)})")
        if not removed and not as_json:
            typer.echo("nothing to remove")
