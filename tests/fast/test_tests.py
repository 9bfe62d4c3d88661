"""Tests are in folders by subject; what several files need is in `tests/support/`."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
FROM_A_TEST = re.compile(r"^\s*(?:from|import) (?:[\w.]+\.)?(?:test_\w+|conftest)\b.*", re.MULTILINE)


def test_nothing_is_imported_from_a_test_or_from_conftest() -> None:
    found = {str(path.relative_to(TESTS)): FROM_A_TEST.findall(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_test_is_in_a_folder() -> None:
    assert [path.name for path in TESTS.glob("test_*.py")] == []
