"""What is changed in `param_groups` counts from the next step on, as in torch, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from support.pairs import Side, close, pair

pytestmark = pytest.mark.usefixtures("one_thread")


def group(side: Side) -> dict[str, Any]:
    return side.optimizer.param_groups[0]


def moved(side: Side, members: Callable[[Side], list[torch.Tensor]]) -> None:
    group(side)["params"] = members(side)


def without_head(side: Side) -> list[torch.Tensor]:
    head = set(map(id, side.model.head.parameters()))
    return [p for p in group(side)["params"] if id(p) not in head]


EDITS: dict[str, Callable[[Side], Any]] = {
    "lr": lambda side: group(side).update(lr=0.05),
    "negative lr": lambda side: group(side).update(lr=-0.01),
    "zero lr": lambda side: group(side).update(lr=0.0),
    "tensor lr": lambda side: group(side).update(lr=torch.tensor(0.02)),
    "weight decay": lambda side: group(side).update(weight_decay=0.3),
    "maximize": lambda side: group(side).update(maximize=True),
    "without head": lambda side: moved(side, without_head),
    "reversed": lambda side: group(side)["params"].reverse(),
    "two groups": lambda side: (
        moved(side, without_head),
        side.optimizer.param_groups.append(
            dict(group(side), params=list(side.model.head.parameters()), lr=0.03)
        ),
    ),
    "no group": lambda side: side.optimizer.param_groups.clear(),
}
RULES: dict[str, dict[str, Callable[[Side], Any]]] = {
    "adamw": {
        "betas": lambda side: group(side).update(betas=(0.5, 0.9)),
        "betas in a list": lambda side: group(side).update(betas=[0.6, 0.95]),
        "eps": lambda side: group(side).update(eps=1e-2),
    },
    "momentum": {
        "momentum": lambda side: group(side).update(momentum=0.5),
        "nesterov": lambda side: group(side).update(nesterov=True, dampening=0.0),
        "no momentum": lambda side: group(side).update(momentum=0.0),
    },
    "adagrad": {"lr decay": lambda side: group(side).update(lr_decay=0.5)},
}
CASES = [(rule, name) for rule in RULES for name in (*EDITS, *RULES[rule])]


@pytest.mark.pairs
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("rule", "edit"), CASES)
def test_an_edit_counts(rule: str, edit: str, tiles: bool, tmp_path: Path) -> None:
    edits = EDITS | RULES[rule]
    with pair(tmp_path, rule, tiles=tiles) as sides:
        for side in sides:
            side.train(range(2))
            edits[edit](side)
            side.train(range(2, 5))
        close(*sides)


def test_a_step_after_the_backward_sees_an_edit(tmp_path: Path) -> None:
    """Also where the update has begun inside of the backward."""
    with pair(tmp_path, "adamw", update="speculative") as sides:
        for side in sides:
            side.train(range(4))
            for step in range(4, 8):
                x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
                side.model(x).square().mean().backward()
                group(side).update(lr=0.01 * step, maximize=bool(step % 2))
                side.optimizer.step()
                side.optimizer.zero_grad()
        close(*sides)


def test_momentum_begins_with_the_first_step_that_has_one(tmp_path: Path) -> None:
    with pair(tmp_path, "momentum") as sides:
        for side in sides:
            for momentum in (0.0, 0.9, 0.0, 0.8):
                group(side)["momentum"] = momentum
                side.train(range(2))
        close(*sides)


@pytest.mark.parametrize("tiles", [False, True])
def test_a_parameter_leaves_its_group_and_comes_back(tiles: bool, tmp_path: Path) -> None:
    """It keeps its states, and `zero_grad` leaves its gradients alone meanwhile."""
    with pair(tmp_path, tiles=tiles) as sides:
        for side in sides:
            side.train(range(2))
            members = list(group(side)["params"])
            moved(side, without_head)
            side.train(range(2, 4))
            assert side.model.head.weight.grad is not None
            group(side)["params"] = members
            side.train(range(4, 6))
        close(*sides)


@pytest.mark.parametrize("tiles", [False, True])
def test_a_parameter_joins_a_group(tiles: bool, tmp_path: Path) -> None:
    """One that no optimizer had before. In tiles it joins as a whole."""
    with pair(tmp_path, tiles=tiles, parameters=lambda m: list(m.head.parameters())) as sides:
        for side in sides:
            side.train(range(2))
            group(side)["params"].append(side.model.up.weight)
            side.train(range(2, 4))
            assert side.optimizer.state[side.model.up.weight]["step"] == 2
            assert side.optimizer.state[side.model.head.weight]["step"] == 4
            group(side)["params"] += [side.model.down.weight]
            side.train(range(4, 6))
        close(*sides)


REFUSED: dict[str, tuple[str, Callable[[Side], Any], str]] = {
    "amsgrad": ("adamw", lambda side: group(side).update(amsgrad=True), "amsgrad=True is not"),
    "differentiable": (
        "adamw",
        lambda side: group(side).update(differentiable=True),
        "differentiable=True is not",
    ),
    "coupled": (
        "adamw",
        lambda side: group(side).update(decoupled_weight_decay=False),
        "use infinity.Adam$",
    ),
    "momentum": ("sgd", lambda side: group(side).update(momentum=0.9), "algorithm='momentum'"),
    "twice": (
        "adamw",
        lambda side: group(side)["params"].append(side.model.head.weight),
        "got head.weight twice",
    ),
    "plain": (
        "adamw",
        lambda side: group(side)["params"].append(torch.nn.Parameter(torch.zeros(2))),
        "of no wrapped model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_changes_nothing(case: str, tmp_path: Path) -> None:
    rule, edit, match = REFUSED[case]
    with pair(tmp_path, rule) as (ours, _):
        ours.train(range(2))
        before = ours.weights()
        ours.model(torch.randn(5, 8)).square().mean().backward()
        edit(ours)
        with pytest.raises(infinity.ConfigError, match=match):
            ours.optimizer.step()
        after = ours.weights()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_states_without_a_group_have_no_number(tmp_path: Path) -> None:
    """torch fails with a KeyError."""
    with pair(tmp_path) as (ours, _):
        ours.train(range(2))
        moved(ours, without_head)
        with pytest.raises(infinity.ConfigError, match="was taken out of its group"):
            ours.optimizer.state_dict()
        for parameter in ours.model.head.parameters():
            del ours.optimizer.state[parameter]
        assert len(ours.optimizer.state_dict()["state"]) == 3


MORE = st.lists(st.sampled_from([*EDITS, *RULES["adamw"], "train", "train"]), max_size=6)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=MORE)
def test_any_edits_come_to_what_they_come_to_in_torch(names: list[str], tmp_path: Path) -> None:
    edits = EDITS | RULES["adamw"]
    seen: set[str] = set()
    with pair(tmp_path, "adamw", "cpu") as sides:
        for number, name in enumerate(names):
            if name in seen & {"two groups"} or (
                seen & {"no group", "two groups"} and name in edits
            ):
                continue
            seen.add(name)
            for side in sides:
                if name == "train":
                    side.train(range(number, number + 1))
                else:
                    edits[name](side)
        for side in sides:
            side.train(range(10, 12))
        close(*sides)
