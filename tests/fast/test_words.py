"""Docstrings and comments are plain technical English: a first reader understands each sentence at
the first reading."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "infinity"


class Turn(NamedTuple):
    """A turn of speech that stops a reader, an example of it, and words to use instead."""

    pattern: str
    example: str
    instead: str


TURNS = (
    Turn(r"\bwho(ever|m)?\b", "who asks", "the object by its name: the caller, another rank"),
    Turn(r"\b(no|some|any|every)body\b", "nobody reads", "the noun: no thread, another rank"),
    Turn(
        r"(^|[.:;] |\b(of|with|to|by|in|from|on|reads|writes|keeps|and|than|as|holds) )"
        r"what (is|was|are|were|lies|has|comes|stays|it|the|a|an)\b",
        "Reads what is on NVMe.",
        "the noun: 'bytes on NVMe', not 'what is on NVMe'",
    ),
    Turn(
        r"[,;] for (it|they|its|their|nothing|(the|a|an|each|no|all|this|that|these) \w+"
        r" (is|are|has|have|may|might|can|could|must|would|does|do|was|were))\b",
        "waits, for the block is in use",
        "because, or since",
    ),
    Turn(r"\b(go|goes|went|gone|going) on\b", "training goes on", "continues, or resumes"),
    Turn(r"\b(that one|those that are|the ones)\b", "the ones that wait", "the noun again"),
    Turn(r"\b(as far as|where that is)\b", "as far as there is room", "if, and the condition"),
    Turn(r"\banew\b", "looked for anew", "again"),
    Turn(r"\b(give|gives|gave|given|giving)( \w+){0,2} up\b", "gives the buffer up", "releases"),
)
UNREAD = {
    "bench",
    "deepspeed",
    "directories",
    "measure",
    "plan",
    "sharding",
    "tiers",
}
"""Rooms whose words were not yet read once through."""


def texts(source: str) -> Iterator[str]:
    """Each docstring of a file, also those below attributes, and each of its comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)  # of a lambda or a conditional expression: no list
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(getattr(value, "value", None), str):
                yield value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def turns_in(source: str) -> Iterator[str]:
    for text in texts(source):
        line = " ".join(text.split())
        for turn in TURNS:
            for match in re.finditer(turn.pattern, line, re.IGNORECASE):
                around = line[max(0, match.start() - 30) : match.end() + 30]
                yield f"...{around}...: write {turn.instead}"


def _rooms() -> list[str]:
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    return sorted({path.parts[0] if len(path.parts) > 1 else "" for path in files})


@pytest.mark.parametrize("room", sorted(set(_rooms()) - UNREAD))
def test_docstrings_and_comments_use_plain_words(room: str) -> None:
    files = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    found = [f"{path.name}: {turn}" for path in files for turn in turns_in(path.read_text())]
    assert not found, "\n".join(found)


def test_rooms_that_were_not_read_exist() -> None:
    assert set(_rooms()) >= UNREAD


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.example)
def test_each_turn_is_found_in_docstrings_and_comments(turn: Turn) -> None:
    for source in (f'"""{turn.example}"""', f"x = 1\n# {turn.example}\n", f"x = '{turn.example}'"):
        found = list(turns_in(source))
        assert [turn.instead in each for each in found] == [True] * (not source.startswith("x = '"))
