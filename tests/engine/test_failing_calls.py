"""Every call of the system that a public entry point makes may fail: each ends in an error of ours
that names the path and the way out, and what was committed before stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from failing_calls.entries import entries
from failing_calls.walk import Walk, chosen

LONG = {"finetune": 4, "finetune, resume": 4, "bench io": 2, "generate": 3, "plan": 2, "doctor": 4}
"""How many calls of commands that take long."""
MOST = 8
"""How many of others; `make failing-calls` takes all of them."""


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    log = logging.getLogger("infinity")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


@pytest.mark.parametrize("name", list(entries()))
def test_each_call_may_fail(name: str, tmp_path: Path) -> None:
    walk = Walk(name, entries()[name], tmp_path)
    cases = chosen(walk.cases(), 1)[: LONG.get(name, MOST)]
    assert cases
    wrong = [f"{case}: {text}" for case in cases if (text := walk.wrong(case)) is not None]
    assert not wrong, "\n".join(wrong)
