"""The history of a run that goes on begins with the log of the earlier one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.history import History, StepRecord, Validation

SECONDS = st.floats(0.001, 100.0)


def entries(seconds: list[float]) -> list[dict[str, Any]]:
    """The log of steps that took so long, with a validation after every third, and what Trainer
    writes at the end."""
    found: list[dict[str, Any]] = []
    for number, each in enumerate(seconds, start=1):
        step = {"loss": 1 / number, "learning_rate": 3e-4, "step_seconds": each, "step": number}
        found.append(step if number % 2 else step | {"grad_norm": 0.5, "loss_scale": 2.0})
        if number % 3 == 0:
            found.append({"eval_loss": 2 / number, "step": number})
    return [*found, {"train_runtime": 1.0, "step": len(seconds)}]


@given(st.lists(SECONDS, max_size=9))
def test_steps_come_back_with_their_durations_one_after_another(seconds: list[float]) -> None:
    history = History(tokens_per_step=8)
    history.restore(entries([1.0, 2.0]))
    history.restore(entries(seconds))
    assert [each.end - each.start for each in history.steps] == pytest.approx(seconds)
    for before, after in zip(history.steps, history.steps[1:], strict=False):
        assert after.start == pytest.approx(before.end)
    assert [each.number for each in history.steps] == list(range(1, len(seconds) + 1))
    assert history.validations == [
        Validation(number, 2 / number) for number in range(3, len(seconds) + 1, 3)
    ]
    assert history.done == len(seconds)


def test_a_step_has_what_its_entry_says() -> None:
    history = History(tokens_per_step=8)
    for entry in entries([0.5, 0.25]):
        history.add(entry, 10.0)
    assert history.steps == [
        StepRecord(1, 1.0, 3e-4, None, 9.5, 10.0, None),
        StepRecord(2, 0.5, 3e-4, 0.5, 9.75, 10.0, 2.0),
    ]
