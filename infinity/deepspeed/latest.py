"""The file `latest` of a directory of checkpoints, which has the name of one of them.

Another user may have made the directory. So the file is checked before it is read or replaced, and
its content must be the name of a directory beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from infinity.directories.directory import Directory
from infinity.directories.drafts import replacing
from infinity.errors import CheckpointError, ConfigError

LATEST = "latest"
"""The name of the file."""
_MOST_BYTES = 255
"""The longest name of a file system."""
_WHAT = "directory of checkpoints"


def is_name(tag: str) -> bool:
    """Whether `tag` can name a checkpoint: a single name inside its directory."""
    return tag not in ("", ".", "..") and "/" not in tag and "\0" not in tag


def read_latest(directory: Path) -> str | None:
    """The tag in `latest`. None if there is no such file. Raises `CheckpointError`."""
    path = directory / LATEST
    if not directory.is_dir():
        return None
    try:
        with Directory(directory, _WHAT) as opened:
            if opened.status(LATEST) is None:
                return None
            with os.fdopen(opened.open(LATEST, os.O_RDONLY), "rb") as file:
                content = file.read(_MOST_BYTES + 1)
    except (ConfigError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give a tag") from error
    try:
        tag = content.decode().strip()
    except UnicodeDecodeError:
        tag = ""
    if len(content) > _MOST_BYTES or not is_name(tag):
        raise CheckpointError(
            f"{path} says {content[:40]!r}, which is no name of a checkpoint in {directory}; give "
            "a tag"
        )
    return tag


def write_latest(directory: Path, tag: str) -> None:
    """Replace `latest` by a file with `tag`, all or nothing. Raises `ConfigError` if it is not a
    plain file, and `OSError` of the system."""
    with replacing(directory / LATEST, _WHAT) as path:
        path.write_text(tag)
