"""Counts the lines of the package that run: work that does not depend on how busy a machine is."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import infinity

_ROOT = str(Path(infinity.__file__).parent) + "/"


class LineCounter:
    """Counts lines by the file that has them, on the threads of this process.

    A turn of a loop counts each of its lines, and one in a comprehension counts once. What runs in
    native code, a search of a list say, is one line however long it takes.
    """

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        """Lines that ran, by the path of their file below the package."""
        self._is_counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, count what this thread runs, and threads that are begun inside."""
        before = sys.gettrace(), threading.gettrace()
        self._is_counting = True
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before[0])
            threading.settrace(before[1])
            self._is_counting = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside `counting`, count nothing of what this thread runs."""
        before = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(_ROOT):
            return None
        name = path[len(_ROOT) :]

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and self._is_counting:
                self.lines[name] += 1
            return trace

        return trace
