"""Trainings of a Trainer that are killed or cut off, and resumed: the same weights and the same log
as of one that nothing disturbed."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.durable_trainers import (
    SET_UPS,
    Cut,
    compare,
    in_processes,
    train,
)

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

KILLED = ["dataset that draws, accumulation", "two ranks, layer-major, evaluation"]
"""The set-ups whose processes are killed each time."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in KILLED)) for name in SET_UPS],
)
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """At random events, twice in a row."""
    set_up, dice = SET_UPS[name], random.Random(name)
    assert in_processes(name, tmp_path / "whole", port=free_port()) == 0
    expected = json.loads((tmp_path / "whole" / "result.json").read_text())
    for _ in range(2):
        event = dice.randrange(expected["events"] // 2)
        ended = in_processes(name, tmp_path / "killed", event=event, port=free_port())
        assert ended in (-set_up.signal, 128 + set_up.signal)
    assert in_processes(name, tmp_path / "killed", port=free_port()) == 0
    compare(json.loads((tmp_path / "killed" / "result.json").read_text()), expected)


ALONE = [name for name, each in SET_UPS.items() if each.ranks == 1 and each.trainer == "Trainer"]


@pytest.mark.parametrize("name", ALONE)
def test_an_exception_in_any_callback_costs_no_bit(tmp_path: Path, name: str) -> None:
    """The engine is closed then, and commits a step of which the trainer has done a part."""
    set_up, dice = SET_UPS[name], random.Random(name)
    expected = train(set_up, tmp_path / "whole")
    for event in sorted(dice.sample(range(expected["events"] // 2), 2)):
        with pytest.raises(Cut):
            train(set_up, tmp_path / "cut", event=event, cuts=True)
    compare(train(set_up, tmp_path / "cut"), expected)
