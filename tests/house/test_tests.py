"""Tests are in folders by subject; what several files need is in `tests/support/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_nothing_is_imported_from_a_test_or_from_conftest() -> None:
    for path in TESTS.rglob("*.py"):
        for module in imported(path):
            last = module.rpartition(".")[2]
            assert last != "conftest" and not last.startswith("test_"), f"{path.relative_to(TESTS)} imports {module}"


def test_every_test_is_in_a_folder() -> None:
    assert [path.name for path in TESTS.glob("test_*.py")] == []
