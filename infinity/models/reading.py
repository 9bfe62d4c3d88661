"""Opens files that a user names, if they are regular files, and reads JSON with a size limit."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from infinity.errors import naming
from infinity.quantities import format_bytes

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
"""Other kinds of files."""


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading. Raises `ValueError` for any other kind of file, and
    `OSError` like `open`.

    It does not block, even on a pipe without a writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno != errno.ENXIO:  # the error for a socket
            raise
        raise _refusal(path, path.stat().st_mode) from None
    try:
        with naming(path):
            mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(path, mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refusal(path: Path, mode: int) -> ValueError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return ValueError(
        f"{path} is {kind}, and only regular files are read; write what it gives to a file first"
    )


def read_json(path: Path, most: int) -> Any:
    """The JSON value in the file `path`.

    Raises `ValueError` that names `path` if it has more than `most` bytes, is no JSON in UTF-8, or
    is nested too deeply. Raises `OSError` if it cannot be read.
    """
    with naming(path), open_regular(path) as handle:
        content = handle.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"{path} has more than {format_bytes(most)}, so it is not what its name says"
        )
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> Any:
    """The value of JSON in UTF-8. Raises `ValueError` that begins with `where`."""
    try:
        return json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON (character {error.pos + 1}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from None
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read: it is nested too deeply") from None
    except ValueError:  # the interpreter limits the number of digits
        raise ValueError(
            f"{where}: not JSON that can be read: it has a number with too many digits"
        ) from None
