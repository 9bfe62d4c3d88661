"""The pages of README and docs, and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

PART = re.compile(
    r"^<!-- setup:\n(?P<setup>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>[^\n]+) -->$"
    r"|^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block, or hidden setup, of a page."""

    kind: str
    code: str
    line: int
    reason: str | None
    """Why it is not run."""


def blocks(page: Path) -> Iterator[Block]:
    text, reason = page.read_text(), None
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["reason"] is not None:
            reason = part["reason"]
        elif part["setup"] is not None:
            yield Block("python", part["setup"], line, None)
        else:
            indent = part["indent"]
            code = "".join(
                row.removeprefix(indent) for row in part["code"].splitlines(keepends=True)
            )
            yield Block(part["kind"], code, line, reason)
            reason = None
