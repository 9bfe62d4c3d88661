"""Changed files of every kind are read, or refused by an error of ours: see `foreign_files`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from foreign_files.changes import of_json
from foreign_files.kinds import Kind
from foreign_files.many import Misread, count
from support.children import CHILD

FILES = 3000


def test_changed_files_are_read_or_refused() -> None:
    """In a process of its own, which has the limits."""
    command = [sys.executable, "-m", "foreign_files", "--files", str(FILES)]
    done = subprocess.run(command, capture_output=True, **CHILD)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.replace(",", "").split(": ")[1].split() for line in done.stdout.splitlines()]
    assert sum(int(words[0]) + int(words[2]) for words in found) >= FILES
    assert all(int(words[0]) > 0 and int(words[2]) > 0 for words in found), done.stdout


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("b"), MemoryError()])
def test_another_error_is_told_with_its_file(error: Exception) -> None:
    def read(content: bytes) -> Any:
        if b"NaN" in content:
            raise error

    kind = Kind(json.dumps({"a": [1, 2]}).encode(), of_json, read, (ValueError,))
    with pytest.raises(Misread, match="NaN"):
        count("a kind", kind, 200, 0)
