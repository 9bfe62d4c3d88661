"""The file `latest` of a directory of checkpoints, which names one of them.

The directory may have been anybody's: what lies at that name is looked at before it is read or
replaced, and what it says is the name of a directory beside it, or an error.
"""

from __future__ import annotations

import os
from pathlib import Path

from infinity.directories.directory import Directory
from infinity.directories.drafts import replacing
from infinity.errors import CheckpointError, ConfigError

LATEST = "latest"
"""Its name."""
_MOST_BYTES = 255
"""A name that a file system takes."""
_WHAT = "directory of checkpoints"


def is_name(tag: str) -> bool:
    """Whether `tag` can name a checkpoint: one name, which stays in its directory."""
    return tag not in ("", ".", "..") and "/" not in tag and "\0" not in tag


def read_latest(directory: Path) -> str | None:
    """The tag that `latest` names; None where there is none. Raises `CheckpointError`."""
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
    """Have `latest` name `tag`, all or nothing. Raises `ConfigError` for anything else than a plain
    file of that name, and `OSError` for what the system refuses."""
    with replacing(directory / LATEST, _WHAT) as path:
        path.write_text(tag)
