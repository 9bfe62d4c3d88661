"""Tests that are marked `pairs` run combinations in which every two values meet."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from support.covering import cover, mark_the_rest


def combinations(*axes: int) -> list[dict[str, int]]:
    """All, of axes with so many values."""
    names = "abcdef"[: len(axes)]
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*map(range, axes))]


def pairs(some: list[dict[str, int]]) -> set[Any]:
    return {two for each in some for two in itertools.combinations(each.items(), 2)}


@pytest.mark.parametrize(
    ("axes", "most"), [((3, 3, 3), 10), ((2, 5, 4, 5), 27), ((2, 2, 2, 2, 2), 7), ((4, 6), 24)]
)
def test_every_two_values_meet_in_few_combinations(axes: tuple[int, ...], most: int) -> None:
    every = combinations(*axes)
    chosen = [every[number] for number in cover(every)]
    assert pairs(chosen) == pairs(every)
    assert len(chosen) <= most


def test_pairs_that_no_combination_has_are_not_missed() -> None:
    every = [each for each in combinations(3, 3, 3) if each["a"] <= each["b"]]
    assert pairs([every[number] for number in cover(every)]) == pairs(every)


def test_every_value_of_one_axis_is_needed() -> None:
    assert cover(combinations(5)) == [0, 1, 2, 3, 4]


SOME = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize(("b", "also"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("c", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_some(a, b, also, c): ...

@pytest.mark.parametrize("a", range(3))
def test_other(a): ...
"""


def test_the_other_combinations_are_marked_long(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOME)
    collected: list[pytest.Function] = []

    class Plugin:
        def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
            mark_the_rest(items)
            collected.extend(items)

    words = ["--collect-only", "--quiet", "-p", "no:cacheprovider", "-c", os.devnull]
    assert pytest.main([*words, str(tmp_path)], plugins=[Plugin()]) == 0
    found = {
        name: [
            each.callspec.params
            for each in collected
            if each.originalname == name and each.get_closest_marker("long") is None
        ]
        for name in ("test_some", "test_other")
    }
    of_some = [{name: each[name] for name in ("a", "b", "c")} for each in found["test_some"]]
    assert pairs(of_some) == pairs(combinations(3, 3, 3)) and len(of_some) < 12
    assert len(found["test_other"]) == 3
