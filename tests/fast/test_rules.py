"""One record for each update rule: the tables that stand elsewhere, because of a layer or in a
page, say the same."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

import infinity
from infinity.config import Config
from infinity.optim.family import BY_ALGORITHM, FAMILY, states_of, typical_update
from infinity.optim.optimizer import Optimizer
from infinity.placement.spec import MOMENTS

DOCS = Path(__file__).parents[2] / "docs"
AMOUNTS = {0: "none", 1: "one", 2: "two moments", 3: "three"}


def test_algorithms_are_those_of_the_configuration() -> None:
    known = get_args(Config.model_fields["algorithm"].annotation)
    assert set(known) == {*BY_ALGORITHM, "other"} == set(MOMENTS)


def test_placement_has_room_for_the_states_of_every_rule() -> None:
    for algorithm in BY_ALGORITHM:
        assert list(states_of(algorithm).values()) == list(MOMENTS[algorithm])
    for kind in FAMILY:
        assert set(kind.rule.states.values()) == {
            each for algorithm in kind.rule.algorithms for each in MOMENTS[algorithm]
        }


@pytest.mark.parametrize("kind", FAMILY)
def test_settings_are_the_arguments_of_the_constructor(kind: type[Optimizer]) -> None:
    usual = kind.usual_settings()
    for name, allowed in kind.rule.settings.items():
        assert allowed.contains(usual[name]), name
    assert getattr(infinity, kind.__name__) is kind


@pytest.mark.parametrize("algorithm", BY_ALGORITHM)
def test_a_typical_update_uses_all_states(algorithm: str) -> None:
    update = typical_update(algorithm)
    group = {**BY_ALGORITHM[algorithm].usual_settings(), **update.values}
    assert BY_ALGORITHM[algorithm].algorithms(group)[0] == algorithm
    assert update.values["weight_decay"] > 0


def test_the_half_life_of_a_slow_average_grows_by_the_same_each_step() -> None:
    """Section 3 of arXiv 2409.03137."""

    def rates(*betas: float) -> list[float]:
        group = infinity.AdEMAMix.usual_settings() | {"betas": betas, "t_beta3": 10}
        return [infinity.AdEMAMix.hyper(group, step).values["beta3"] for step in range(1, 13)]

    for start in (0.0, 0.5, 0.9):
        found = rates(start, 0.999, 0.9999)
        lives = [math.log(0.5) / math.log(rate) for rate in found]
        steps = [after - before for before, after in pairwise(lives[:10])]
        assert steps == pytest.approx([steps[0]] * 9) and steps[0] > 0
        assert found[9:] == [0.9999] * 3
    assert rates(0.9, 0.999, 0.0) == [0.0] * 12
    assert rates(0.9, 0.999, 0.5)[-1] == 0.5 == max(rates(0.9, 0.999, 0.5))


def test_pages_have_a_row_for_every_rule() -> None:
    training = (DOCS / "training.md").read_text().splitlines()
    reference = (DOCS / "reference" / "optimizers.md").read_text()
    for kind in FAMILY:
        names = " or ".join(f'`"{name}"`' for name in sorted(kind.rule.algorithms))
        counts = sorted({len(MOMENTS[each]) for each in kind.rule.algorithms}, reverse=True)
        called = f"`infinity.{kind.__name__}`"
        (row,) = (line for line in training if line.startswith("| `infi") and called in line)
        assert row.split(" | ")[1].removesuffix(" (default)") == names
        assert row.split(" | ")[2].removesuffix(" |") == " or ".join(AMOUNTS[n] for n in counts)
        assert f"::: {kind.__module__}.{kind.__name__}\n" in reference


def test_pages_name_what_a_trainer_calls_the_rules() -> None:
    rows = [line for line in (DOCS / "frameworks.md").read_text().splitlines() if "optim=" in line]
    for kind in FAMILY:
        for name in kind.rule.trainer:
            (row,) = (line for line in rows if f'"{name}"' in line)
            assert f"`infinity.{kind.__name__}`" in row, name
