"""Names of the files of a checkpoint, safe opening, and the lock of a save."""

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
METADATA = ".metadata"  # the index of DCP
ENGINE = "infinity"
"""The checkpoint of the engine in a checkpoint of a Trainer or of Lightning."""
METRICS = "metrics.jsonl"
"""The log of a Trainer, in its output directory."""
DRAFT = ".saving"
"""Where `checkpoint-N` is until it is whole, in the output directory of a Trainer."""
DATA_NAME = re.compile(r"__\d+_\d+\.distcp")
"""The pattern of the names of data files."""


def sibling(directory: Path, what: str) -> Path:
    """A path beside the checkpoint, for the temporary directories of a save."""
    return directory.with_name(f".{directory.name}.{what}")


def is_whole(directory: Path) -> bool:
    """Whether `directory` is a complete checkpoint, of any version."""
    return any((directory / name).is_file() for name in (MANIFEST, METADATA))


def open_plain(path: Path) -> IO[bytes]:
    """Open the plain file `path` for reading. Raises `CheckpointError` if it is missing, a link, a
    named pipe, or unreadable. It does not follow links or block on pipes."""
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
    """Return a descriptor that locks `directory`. `is_held` returns True until the descriptor is
    closed or the process ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_held(directory: Path) -> bool:
    """Whether a save in any process is writing to `directory`."""
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
