"""The sizes of classes and functions: what fits in a head, and the reason for what does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "infinity"
MOST_METHODS, MOST_ATTRIBUTES, MOST_LINES = 25, 12, 70
REASON = "One class, because "


def large_classes(source: str) -> Iterator[ast.ClassDef]:
    """The classes with more methods, or more attributes of `self`, than the limits."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            attributes = {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            if len(methods) > MOST_METHODS or len(attributes) > MOST_ATTRIBUTES:
                yield node


def long_functions(source: str) -> Iterator[str]:
    """The names of the functions with more lines than the limit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES:
                yield node.name


def test_a_large_class_says_why_it_is_one() -> None:
    silent = [
        f"{path.name}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in large_classes(path.read_text())
        if REASON not in " ".join((ast.get_docstring(node) or "").split())
    ]
    assert not silent, f'split them, or write "{REASON}..." into their docstrings: {silent}'


def test_only_a_large_class_says_so() -> None:
    """A reason that is left behind when a class shrinks is untrue."""
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        reasons = " ".join(source.split()).count(REASON)
        assert reasons <= len(list(large_classes(source))), path.name


def test_no_function_is_long() -> None:
    found = [
        f"{path.name}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in long_functions(path.read_text())
    ]
    assert not found, f"more than {MOST_LINES} lines: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(26)),
        "class A:\n    def m(self):\n" + "".join(f"        self.a{n} = 1\n" for n in range(13)),
    ],
    ids=["methods", "attributes"],
)
def test_a_large_class_is_found(source: str) -> None:
    assert [node.name for node in large_classes(source)] == ["A"]


def test_a_long_function_is_found() -> None:
    assert list(long_functions("def f():\n" + "    pass\n" * 70)) == ["f"]
