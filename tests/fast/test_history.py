"""What a run keeps of its history when it goes on: no more for more steps."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.history import (
    KEPT,
    History,
    StepRecord,
    Validation,
    packed,
    thinned,
    unpacked_steps,
    unpacked_validations,
)


def step(number: int) -> StepRecord:
    return StepRecord(number, 1 / number, 3e-4, None if number % 3 else 0.5, number, number + 0.5)


@given(st.integers(0, 9000), st.integers(0, 3000))
def test_what_is_thinned_twice_is_what_is_thinned_once(first: int, more: int) -> None:
    before = [step(number) for number in range(1, first + 1)]
    rest = [step(number) for number in range(first + 1, first + more + 1)]
    kept = thinned(thinned(before) + rest)
    assert kept == thinned(before + rest)
    assert len(kept) <= 2 * KEPT + 1
    assert kept[:1] == (before + rest)[:1] and kept[-KEPT:] == (before + rest)[-KEPT:]
    assert History(1, steps=kept).done == first + more
    if first + more <= KEPT:
        assert len(kept) == first + more


def test_the_example_in_the_docstring() -> None:
    kept = [each.number for each in thinned([step(number) for number in range(1, 5001)])]
    assert kept == [1, *range(16, 4489, 16), *range(4489, 5001)]


@pytest.mark.parametrize("every", [1, 100, 250])
def test_validations_are_thinned_by_their_count(every: int) -> None:
    all_of_them = [Validation(every * (number + 1), 0.5) for number in range(700)]
    kept = thinned(all_of_them, every)
    older, recent = all_of_them[1:188], all_of_them[188:]
    even = [each for each in older if each.step // every % 2 == 0]
    assert kept == [all_of_them[0], *even, *recent]


def test_what_is_packed_comes_back_and_takes_as_much_for_any_number_of_steps() -> None:
    sizes = []
    for count in (3 * KEPT, 40 * KEPT):
        rows = thinned([step(number) for number in range(1, count + 1)])
        assert unpacked_steps(packed(rows)) == rows
        stream = io.BytesIO()
        torch.save(packed(rows), stream)
        sizes.append(stream.tell())
    assert max(sizes) < (2 * KEPT + 1) * 7 * 8 + 4096
    scaled = [step(1)._replace(loss_scale=1024.0, grad_norm=None)]
    assert unpacked_steps(packed(scaled)) == scaled
    assert unpacked_steps(packed([])) == unpacked_validations(packed([])) == []
    rated = [Validation(3, 0.125), Validation(6, 2.0)]
    assert unpacked_validations(packed(rated)) == rated
