"""Covering arrays: few combinations of values in which every two values of two axes meet.

A fault that needs two knobs at certain values shows in one of them. `make test` runs such
combinations of the parameters of a test with the marker `pairs`. `make long-test` runs the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def cover(combinations: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of few combinations that have every pair of values which any combination has.

    A combination is a value by axis. The search is greedy and takes the first of equals, so the
    numbers are the same each time. With one axis all combinations are needed.
    """
    pairs = [
        set(itertools.combinations(sorted(each.items()), min(2, len(each))))
        for each in combinations
    ]
    missing, chosen = set[Any]().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark as `long` the combinations of tests with the marker `pairs` that add no pair."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        marked = item.get_closest_marker("pairs") and not item.get_closest_marker("long")
        if marked and isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in tests.values():
        # Combinations share the values themselves, some of which have no hash.
        chosen = [{key: id(value) for key, value in each.callspec.params.items()} for each in same]
        needed = set(cover(chosen))
        for number, each in enumerate(same):
            if number not in needed:
                each.add_marker(pytest.mark.long)
