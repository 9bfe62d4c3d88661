"""Ranks that tests start end together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.rank_group import run_ranks


def the_last_fails(directory: Path, rank: int, ranks: int) -> None:
    if rank == ranks - 1:
        raise ValueError("no good")
    threading.Event().wait()


def each_writes(directory: Path, rank: int, ranks: int) -> None:
    (directory / str(rank)).write_text(str(ranks))


def test_the_ranks_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ranks ended with \[-9, -9, 1\].*no good"):
        run_ranks(__file__, tmp_path, 3, the_last_fails.__name__)


def test_ranks_that_work_end_without_a_word(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, 2, each_writes.__name__)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]
