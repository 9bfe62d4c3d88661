"""Roads by which users of other libraries reach the engine: tests mark what they try, and
docs/frameworks.md has a table of it.

`pytest -p support.roads -m road ...` is a run that writes the table, unless one of its tests fails
or is skipped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- roads: `make roads-table` writes this -->\n", "<!-- end of roads -->\n"
API = "DeepSpeed's API"
OWN = "wrapped"
"""The stage of a model that an integration wraps."""
EQUAL, PASSES = "equal to plain", "passes its own checks"


class Road(NamedTuple):
    """What a user combines, and what comes of it. `adapters` is "none" where all is trained."""

    library: str
    what: str
    launcher: str
    stage: int | str
    adapters: str = "none"
    precision: str = "fp32"
    ranks: int = 1
    result: str = EQUAL


HEAD = ("library", "what", "launcher", "stage", "adapters", "precision", "ranks", "result")
LAUNCHED = "`infinity run accelerate launch`"
CUDA = "not tried: it asks for CUDA"
NOT_TRIED = (
    Road("accelerate", "`test_peak_memory_usage`", LAUNCHED, 3, result=CUDA),
    Road("accelerate", "`test_zero3_integration`", LAUNCHED, 3, result=CUDA),
)


def road(
    library: str,
    what: str,
    launcher: str,
    stage: int | str,
    adapters: str = "none",
    precision: str = "fp32",
    ranks: int = 1,
    result: str = EQUAL,
) -> pytest.MarkDecorator:
    """The mark of a test, or of a parameter of one, that tries this road."""
    found = Road(library, what, launcher, stage, adapters, precision, ranks, result)
    return pytest.mark.road(found)


COLLECTED = pytest.StashKey[frozenset[tuple[Path, Road]]]()
"""Of a run of pytest: the roads of its tests, also of those that are deselected."""


def marked(items: Iterable[pytest.Item]) -> frozenset[tuple[Path, Road]]:
    """The roads that tests are marked with, each with the file of its test."""
    return frozenset(
        (item.path, mark.args[0]) for item in items for mark in item.iter_markers("road")
    )


def versions() -> dict[str, str]:
    """The versions in constraints.txt, by the name of the library in small letters."""
    text = (ROOT / "constraints.txt").read_text()
    return {name.lower(): number for name, number in re.findall(r"^([\w-]+)==(\S+)", text, re.M)}


def joined(rows: Iterable[Sequence[str]], column: int) -> list[tuple[str, ...]]:
    """Rows that differ in one column alone become one, with all their values in it."""

    def rest(row: Sequence[str]) -> tuple[str, ...]:
        return (*row[:column], *row[column + 1 :])

    found = []
    for same, group in itertools.groupby(sorted(rows, key=rest), rest):
        values = ", ".join(sorted({row[column] for row in group}, key=str.lower))
        found.append((*same[:column], values, *same[column:]))
    return found


def table(found: Iterable[Road]) -> str:
    """The table of these roads, and of those that are not tried. Rows are sorted."""
    known = versions()
    rows: list[tuple[str, ...]] = [
        tuple(
            map(
                str,
                each._replace(
                    library=f"{each.library} {known.get(each.library.lower(), '')}".strip()
                ),
            )
        )
        for each in {*found, *NOT_TRIED}
    ]
    for name in ("stage", "adapters", "precision", "ranks", "what"):
        rows = joined(rows, HEAD.index(name))
    lines = [
        HEAD,
        ("---",) * len(HEAD),
        *sorted(rows, key=lambda row: [word.lower() for word in row]),
    ]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


# Hooks, where this file is a plugin


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if exitstatus or skipped:
        session.exitstatus = exitstatus or 1
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    found = {each for _, each in marked(session.items)}
    PAGE.write_text(before + BEGIN + table(found) + END + after)
