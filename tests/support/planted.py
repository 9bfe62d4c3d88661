"""What somebody else may have put where `infinity` is about to make a file."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MINE = b"mine, and not to be lost"
ADVICE = ", which infinity never makes; remove it, or choose another directory"


class Planted:
    """Something that is not ours at `path`; `kind` is how an error calls it."""

    def __init__(self, path: Path, precious: Path, what: str) -> None:
        self.path, self.what = path, what
        self._precious = precious
        precious.write_bytes(MINE)
        self.kind = getattr(self, f"_{what}")()

    @property
    def refusal(self) -> str:
        """The error for it."""
        return f"{self.path} is {self.kind}{ADVICE}"

    def check(self) -> None:
        """Nobody has touched it."""
        assert self._precious.read_bytes() == MINE
        mode = self.path.lstat().st_mode
        assert {
            "link": stat.S_ISLNK,
            "dangling": stat.S_ISLNK,
            "hard": stat.S_ISREG,
            "fifo": stat.S_ISFIFO,
            "socket": stat.S_ISSOCK,
            "directory": stat.S_ISDIR,
            "device": stat.S_ISLNK,
        }[self.what](mode)
        if self.what == "dangling":
            assert not self._absent.exists()

    def _link(self) -> str:
        self.path.symlink_to(self._precious)
        return "a link"

    def _dangling(self) -> str:
        self._absent = self._precious.with_name("absent")
        self.path.symlink_to(self._absent)
        return "a link"

    def _device(self) -> str:
        self.path.symlink_to("/dev/full")
        return "a link"

    def _hard(self) -> str:
        self.path.hardlink_to(self._precious)
        return "a file with 2 names (hard links)"

    def _fifo(self) -> str:
        os.mkfifo(self.path)
        return "a named pipe"

    def _socket(self) -> str:
        # A path for sockets may have 107 bytes.
        with socket.socket(socket.AF_UNIX) as made, inside(self.path.parent):
            made.bind(self.path.name)
        return "a socket"

    def _directory(self) -> str:
        self.path.mkdir()
        return "a directory"


PLANTED = ("link", "dangling", "device", "hard", "fifo", "socket", "directory")


@contextmanager
def inside(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
