"""The loss scale of a DeepSpeed configuration, against its own."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.deepspeed.scaling import HIGHEST, DeepSpeedScaler


def scales(
    steps: list[bool], initial: float, window: int, hysteresis: int, consecutive: bool
) -> list[float]:
    """The scale after each step, finite or not."""
    scaler = DeepSpeedScaler(initial, window, hysteresis, 1.0, consecutive)
    found = []
    for finite in steps:
        assert scaler.update(finite)
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("steps", "consecutive", "expected"),
    [
        ("gggggg", False, [8, 8, 16, 16, 32, 32]),  # with finite steps 3, 5, ...
        ("bggggg", False, [8, 8, 8, 16, 16, 32]),
        ("bbgggg", False, [8, 4, 4, 4, 8, 8]),
        ("bgbgbg", False, [8, 8, 4, 4, 2, 2]),
        ("bgbgbb", True, [8, 8, 8, 8, 8, 4]),
        ("bbgbb", True, [8, 4, 4, 4, 2]),
    ],
)
def test_scales(steps: str, consecutive: bool, expected: list[float]) -> None:
    assert scales([step == "g" for step in steps], 8.0, 2, 2, consecutive) == expected


def test_the_scale_stays_in_its_range() -> None:
    scaler = DeepSpeedScaler(1.0, 1, 1, 1.0, False)
    assert not scaler.update(False) and scaler.scale == 1.0
    grown = DeepSpeedScaler(HIGHEST, 1, 1, 1.0, False)
    assert all(grown.update(True) for _ in range(5)) and grown.scale == HIGHEST
    state = grown.state_dict()
    other = DeepSpeedScaler(1.0, 1, 1, 1.0, False)
    other.load_state_dict(state)
    assert other.state_dict() == state


THEIRS = """
import json, sys
from deepspeed.runtime.fp16 import loss_scaler
loss_scaler.dist.get_rank = lambda: 1
found = []
for steps, initial, window, hysteresis, consecutive in json.loads(sys.argv[1]):
    scaler = loss_scaler.DynamicLossScaler(initial, window, 1.0, hysteresis, consecutive)
    found.append([])
    for finite in steps:
        scaler.update_scale(not finite)
        found[-1].append(scaler.cur_scale)
print(json.dumps(found))
"""


FOUND = importlib.util.find_spec("deepspeed")


@pytest.mark.skipif(FOUND is None, reason="DeepSpeed 0.19.8 is not on the path")
def test_scales_are_those_of_deepspeed() -> None:
    assert FOUND is not None and FOUND.origin is not None
    draw = random.Random(0)
    cases = [
        (
            [draw.random() < 0.8 for _ in range(20)],
            2.0**12,
            draw.randint(1, 5),
            draw.randint(1, 3),
            draw.random() < 0.5,
        )
        for _ in range(200)
    ]
    path = os.pathsep.join([str(Path(FOUND.origin).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert [scales(*case) for case in cases] == theirs
