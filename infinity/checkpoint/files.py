"""The files of a checkpoint: their names, how they are opened, and who writes them."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from infinity.errors import CheckpointError

MANIFEST = "infinity.json"
METADATA = ".metadata"  # the name that DCP gives to its own
DATA_NAME = re.compile(r"__\d+_\d+\.distcp")
"""What data files are called."""


def sibling(directory: Path, what: str) -> Path:
    """Where a save that is under way keeps something, beside the checkpoint."""
    return directory.with_name(f".{directory.name}.{what}")


def is_whole(directory: Path) -> bool:
    """Whether `directory` is a checkpoint of any version whose save has ended."""
    return any((directory / name).is_file() for name in (MANIFEST, METADATA))


def open_plain(path: Path) -> IO[bytes]:
    """The plain file `path`, to read. A link is not followed and a named pipe not waited for:
    `CheckpointError`."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; take an earlier checkpoint") from None
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link, which no save makes; put the file itself there"
            ) from error
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; take an earlier checkpoint"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no plain file; take an earlier checkpoint")
    return os.fdopen(descriptor, "rb")


def hold(directory: Path) -> int:
    """A descriptor of `directory`; `is_held` tells others until it is closed, or this process
    ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_held(directory: Path) -> bool:
    """Whether a save writes to `directory` now, in whatever process."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
