"""The table of roads in docs/frameworks.md is that of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import roads

TESTS = Path(__file__).parents[1]


def test_the_page_has_the_roads_of_the_tests(request: pytest.FixtureRequest) -> None:
    """Where all files with roads are collected, as in `make test`."""
    tried = request.config.stash[roads.COLLECTED]
    assert roads.written().startswith("| library |")
    if not {path for path, _ in tried} >= files_with_roads():
        pytest.skip("needs all files with roads")
    assert roads.written() == roads.table({each for _, each in tried})


def files_with_roads() -> set[Path]:
    return {
        path
        for path in TESTS.rglob("test_*.py")
        if "\nfrom support.roads import" in path.read_text()
    }


def test_rows_that_differ_in_one_column_become_one() -> None:
    rows = [("a", "1", "x"), ("a", "2", "x"), ("b", "2", "x")]
    assert roads.joined(rows, 1) == [("a", "1, 2", "x"), ("b", "2", "x")]
