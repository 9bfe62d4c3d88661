"""The PyPI package `liburing`, an independent check of what `_aio` does."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

_USE = """
import liburing

ring = liburing.Ring()
liburing.io_uring_queue_init(4, ring)
liburing.io_uring_queue_exit(ring)
"""


@cache
def _is_foreign_to_this_cpu() -> bool:
    """Whether its wheel has instructions that this CPU lacks, which end the process."""
    ended = subprocess.run([sys.executable, "-c", _USE], capture_output=True)
    return ended.returncode == -signal.SIGILL


def liburing_binding() -> Any:
    """The package; skips the test where there is none that runs."""
    found = pytest.importorskip("liburing")
    if _is_foreign_to_this_cpu():
        pytest.skip("the wheel of liburing has instructions that this CPU lacks")
    return found
