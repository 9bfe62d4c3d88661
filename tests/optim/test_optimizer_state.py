"""`optimizer.state` is a live mapping, with the meaning that torch gives it."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from support.optimizers import FAMILY
from support.pairs import Side, close, entries, pair

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("up.weight", "down.weight", "down.bias", "head.weight", "late.weight")
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
    "ademamix": ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
}
COUNTED = ("adamw", "adagrad", "ademamix")
"""Those that have "step" in their states."""
PLACES = [("nvme", False), ("nvme", True), ("cpu", False), ("cpu", True), ("gpu", False)]


def weight(side: Side, name: str) -> torch.Tensor:
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(side.model.get_submodule(owner), last)
    return found


def both(sides: tuple[Side, Side], act: Callable[[Side], Any]) -> None:
    """`act` on both, then two steps: the same states and weights."""
    ours, theirs = sides
    assert act(ours) == act(theirs)
    same_states(ours, theirs)
    for side in sides:
        side.train(range(10, 12))
    same_states(ours, theirs)
    close(ours, theirs)


def same_states(ours: Side, theirs: Side) -> None:
    mine, expected = entries(ours, NAMES), entries(theirs, NAMES)
    assert mine.pop("any") == expected.pop("any")
    for name, entry in expected.items():
        assert mine[name].keys() == entry.keys(), name
        for key, value in entry.items():
            torch.testing.assert_close(
                mine[name][key], value, rtol=2e-5, atol=2e-6, msg=f"{name} {key}"
            )


@pytest.mark.pairs
@pytest.mark.parametrize(("tier", "tiles"), PLACES)
@pytest.mark.parametrize("name", MOMENTS)
def test_it_has_what_torch_has(name: str, tier: str, tiles: bool, tmp_path: Path) -> None:
    with pair(tmp_path, name, tier, tiles) as sides:
        ours, theirs = sides
        same_states(ours, theirs)
        for side in sides:
            side.train(range(2))
        same_states(ours, theirs)
        assert weight(ours, "late.weight") in ours.optimizer.state or name != "adagrad"
        if not tiles:
            assert len(ours.optimizer.state) == len(theirs.optimizer.state)
            order = {id(p): n for n, p in ours.model.named_parameters()}
            expected = {id(p): n for n, p in theirs.model.named_parameters()}
            assert [order[id(p)] for p in ours.optimizer.state] == [
                expected[id(p)] for p in theirs.optimizer.state
            ]
        for side in sides:
            side.model.uses_late = True
            side.train(range(2, 4))
        same_states(ours, theirs)


@pytest.mark.pairs
@pytest.mark.parametrize(("tier", "tiles"), PLACES)
@pytest.mark.parametrize("name", MOMENTS)
def test_what_is_written_in_place_is_the_state(
    name: str, tier: str, tiles: bool, tmp_path: Path
) -> None:
    def act(side: Side) -> None:
        for number, moment in enumerate(MOMENTS[name]):
            up = side.optimizer.state[weight(side, "up.weight")]
            up[moment].mul_(0.25 + number)
            up[moment][2:5] = 0.5
            up[moment] *= 2
            side.optimizer.state[weight(side, "down.bias")][moment].zero_()
            head = side.optimizer.state[weight(side, "head.weight")][moment]
            head.data.add_(0.125)
            torch._foreach_mul_([head], 2.0)
        if name in COUNTED:
            side.optimizer.state[weight(side, "up.weight")]["step"].add_(3)
            side.optimizer.state[weight(side, "head.weight")]["step"].zero_()

    with pair(tmp_path, name, tier, tiles) as sides:
        for side in sides:
            side.train(range(2))
        both(sides, act)


RESETS: dict[str, Callable[[Side, torch.Tensor], Any]] = {
    "clear": lambda side, p: side.optimizer.state.clear(),
    "delete": lambda side, p: side.optimizer.state.__delitem__(p),
    "empty": lambda side, p: side.optimizer.state.__setitem__(p, {}),
    "emptied": lambda side, p: side.optimizer.state[p].clear(),
    "pop": lambda side, p: sorted(side.optimizer.state.pop(p)),
    "new": lambda side, p: setattr(side.optimizer, "state", defaultdict(dict)),
    "one left": lambda side, p: setattr(
        side.optimizer, "state", defaultdict(dict, {p: side.optimizer.state[p]})
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize(("tier", "tiles"), PLACES)
@pytest.mark.parametrize("name", ["adamw", "momentum", "lion"])
@pytest.mark.parametrize("reset", RESETS)
def test_an_entry_that_is_emptied_begins_anew(
    reset: str, name: str, tier: str, tiles: bool, tmp_path: Path
) -> None:
    with pair(tmp_path, name, tier, tiles) as sides:
        for side in sides:
            side.train(range(3))
        both(sides, lambda side: RESETS[reset](side, weight(side, "up.weight")))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("name", MOMENTS)
def test_an_entry_that_is_replaced_is_the_state(name: str, tiles: bool, tmp_path: Path) -> None:
    def act(side: Side) -> None:
        up, head = weight(side, "up.weight"), weight(side, "head.weight")
        entry = {moment: torch.full(up.shape, 0.25) for moment in MOMENTS[name]}
        if name in COUNTED:
            entry["step"] = torch.tensor(7.0)
        side.optimizer.state[up] = entry
        side.optimizer.state[head][MOMENTS[name][0]] = torch.full(head.shape, 0.5)

    with pair(tmp_path, name, tiles=tiles) as sides:
        for side in sides:
            side.train(range(2))
        both(sides, act)


@pytest.mark.parametrize("tiles", [False, True])
def test_a_tensor_that_was_put_there_counts_as_the_step_finds_it(
    tiles: bool, tmp_path: Path
) -> None:
    given: list[torch.Tensor] = []

    def act(side: Side) -> None:
        up = weight(side, "up.weight")
        given.append(torch.full(up.shape, 0.25))
        side.optimizer.state[up]["exp_avg"] = given[-1]
        given[-1][3:6] = 1.0

    with pair(tmp_path, tiles=tiles) as sides:
        ours, theirs = sides
        for side in sides:
            side.train(range(2))
            act(side)
            side.train(range(2, 4))
        close(ours, theirs)
        given[0].zero_()
        with pytest.raises(infinity.ShardedParameterError, match="changed in place after a step"):
            ours.train(range(4, 5))


def test_states_change_places(tmp_path: Path) -> None:
    def act(side: Side) -> None:
        head, late = (side.optimizer.state[weight(side, n)] for n in ("head.weight", "late.weight"))
        head["exp_avg"], late["exp_avg"] = late["exp_avg"], head["exp_avg"]

    with pair(tmp_path) as sides:
        for side in sides:
            side.model.uses_late = True
            side.train(range(2))
        both(sides, act)


@pytest.mark.parametrize("tiles", [False, True])
def test_one_tensor_of_two_entries_is_refused(tiles: bool, tmp_path: Path) -> None:
    with pair(tmp_path, tiles=tiles) as (ours, _):
        ours.model.uses_late = True
        ours.train(range(2))
        up, late = (weight(ours, name) for name in ("up.weight", "late.weight"))
        state = ours.optimizer.state
        for value in (up.detach(), state[up]["exp_avg"].view(-1).view(up.shape)):
            with pytest.raises(infinity.ShardedParameterError, match="would be the same memory as"):
                state[up]["exp_avg"] = value
        state[late]["exp_avg"] = state[late]["exp_avg_sq"]
        with pytest.raises(infinity.ShardedParameterError, match="is the state of two parameters"):
            ours.train(range(2, 3))


def test_a_state_that_left_its_entry_for_another_may_be_changed(tmp_path: Path) -> None:
    def act(side: Side) -> None:
        head, late = (side.optimizer.state[weight(side, n)] for n in ("head.weight", "late.weight"))
        given = head["exp_avg"]
        late["exp_avg"] = given
        head["exp_avg"] = torch.zeros_like(given)
        given.mul_(0.5)

    with pair(tmp_path) as sides:
        for side in sides:
            side.model.uses_late = True
            side.train(range(2))
            act(side)
            side.train(range(2, 3))
        close(*sides)


def test_a_tensor_that_left_its_entry_keeps_what_it_was(tmp_path: Path) -> None:
    with pair(tmp_path) as sides:
        ours, theirs = sides
        kept = []
        for side in sides:
            side.train(range(2))
            kept.append(side.optimizer.state[weight(side, "up.weight")]["exp_avg"])
            side.optimizer.state.clear()
            side.train(range(2, 4))
        torch.testing.assert_close(kept[0].clone(), kept[1], rtol=2e-5, atol=2e-6)
        kept[0].zero_()
        same_states(ours, theirs)


def test_copies_are_plain(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        ours.train(range(2))
        entry = ours.optimizer.state[weight(ours, "up.weight")]
        other = copy.deepcopy(entry)
        assert type(other) is dict and type(other["exp_avg"]) is torch.Tensor
        other["exp_avg"].zero_()
        assert entry["exp_avg"].abs().max() > 0
        other["more"] = 1  # nobody keeps a copy from having other things


def test_other_keys_are_refused(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        other = torch.zeros(3)
        for use in (
            lambda: ours.optimizer.state.__setitem__(other, {}),
            lambda: ours.optimizer.state["note"],
        ):
            with pytest.raises(infinity.ConfigError, match="parameters of this optimizer alone"):
                use()
        assert other not in ours.optimizer.state and ours.optimizer.state.get(other) is None


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"exp_avg": torch.zeros(24, 8)}, "it takes step and exp_avg and exp_avg_sq"),
        ({"more": torch.tensor(0.0)}, "it takes step and exp_avg and exp_avg_sq"),
        (
            {"step": 1, "exp_avg": torch.zeros(24, 8), "exp_avg_sq": torch.zeros(24, 8)},
            "'step' of .* is .*; give a tensor",
        ),
        (
            {
                "step": torch.tensor(-1.0),
                "exp_avg": torch.zeros(24, 8),
                "exp_avg_sq": torch.zeros(24, 8),
            },
            "no count",
        ),
        (
            {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros(8, 24),
                "exp_avg_sq": torch.zeros(24, 8),
            },
            r"of shape \(8, 24\)",
        ),
        (3, "give a dict of states"),
    ],
)
@pytest.mark.parametrize("tiles", [False, True])
def test_an_entry_that_torch_could_not_step_with_changes_nothing(
    entry: Any, match: str, tiles: bool, tmp_path: Path
) -> None:
    with pair(tmp_path, tiles=tiles) as (ours, theirs):
        for side in (ours, theirs):
            side.train(range(2))
        with pytest.raises(infinity.ConfigError, match=match) as caught:
            ours.optimizer.state[weight(ours, "up.weight")] = entry
        assert "wrapped model" in str(caught.value)
        with pytest.raises(infinity.ConfigError, match="give all of them"):
            del ours.optimizer.state[weight(ours, "up.weight")]["exp_avg"]
        same_states(ours, theirs)


def test_adagrad_cannot_step_without_states(tmp_path: Path) -> None:
    """The optimizer of torch fails in the next step, and here the reset does."""
    with pair(tmp_path, "adagrad") as (ours, theirs):
        for side in (ours, theirs):
            side.train(range(2))
        for reset in RESETS.values():
            with pytest.raises(infinity.ConfigError, match="could not step without"):
                reset(ours, weight(ours, "up.weight"))
        same_states(ours, theirs)


def test_while_parameters_are_in_use_states_are_read_and_not_written(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        ours.train(range(2))
        moment = ours.optimizer.state[weight(ours, "head.weight")]["exp_avg"]
        with infinity.gathered(ours.model.head):
            assert float(moment.abs().max()) > 0
            with pytest.raises(infinity.ShardedParameterError, match="of a wrapped model"):
                moment.zero_()
            with pytest.raises(infinity.ShardedParameterError, match="of a wrapped model"):
                ours.optimizer.state.clear()
        assert float(moment.abs().max()) > 0
        assert ours.optimizer.state[weight(ours, "head.weight")]["exp_avg"] is moment


def test_a_closed_engine_has_no_states(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        ours.train(range(1))
        entry = ours.optimizer.state[weight(ours, "up.weight")]
    with pytest.raises(infinity.EngineClosedError, match="wrapped model"):
        entry["exp_avg"].clone()


def test_an_optimizer_ends_when_its_user_lets_go_of_it(tmp_path: Path) -> None:
    """No reference of its states leads back to it, so another optimizer can follow at once."""
    with pair(tmp_path) as (side, _):
        side.train(range(1))
        parameters, engine = list(side.model.parameters()), side.engine
        entry = side.optimizer.state[weight(side, "up.weight")]
        gone = weakref.ref(side.optimizer)
        side = Side(side.model, torch.optim.SGD([torch.zeros(1)]), engine)
    del _
    assert gone() is None and entry and parameters


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("train", "train", "train", "scale", "zero", "rows", "set", "step"),
                *("clear", "delete", "empty", "emptied", "pop", "late", "entry", "touch"),
            ]
        ),
        st.sampled_from(NAMES),
    ),
    min_size=2,
    max_size=8,
)


def play(side: Side, kind: str, operations: list[tuple[str, str]]) -> list[Any]:
    """What the operations give, or that one cannot be done."""
    seen: list[Any] = []
    moment = MOMENTS[kind][0]
    counted = kind in COUNTED
    for number, (operation, name) in enumerate(operations):
        state, p = side.optimizer.state, weight(side, name)
        there = p in state and bool(state[p])
        seen.append((operation, there))
        if operation == "train":
            side.train(range(number, number + 1))
        elif operation == "late":
            side.model.uses_late = not side.model.uses_late
        elif operation == "touch":
            seen.append(len(state[p]))
        elif operation == "scale" and there:
            state[p][moment].mul_(0.5)
        elif operation == "zero" and there:
            state[p][moment].zero_()
        elif operation == "rows" and there:
            state[p][moment][1:4] = 0.25
        elif operation == "set" and there:
            state[p][moment] = torch.full(p.shape, 0.125)
        elif operation == "step" and there and counted:
            state[p]["step"].fill_(number)
        elif operation == "entry":
            entry: dict[str, Any] = {each: torch.full(p.shape, 0.25) for each in MOMENTS[kind]}
            state[p] = entry | ({"step": torch.tensor(2.0)} if counted else {})
        elif kind == "adagrad":
            continue  # torch cannot begin anew
        elif operation == "clear":
            state.clear()
        elif operation == "delete" and p in state:
            del state[p]
        elif operation == "empty":
            state[p] = {}
        elif operation == "emptied" and there:
            state[p].clear()
        elif operation == "pop":
            seen.append(sorted(state.pop(p, {})))
    return seen


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kind", MOMENTS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_operations_come_to_what_they_come_to_in_torch(
    kind: str, tiles: bool, operations: list[tuple[str, str]], tmp_path: Path
) -> None:
    with pair(tmp_path, kind, "cpu", tiles) as sides:
        both(sides, lambda side: play(side, kind, operations))


def test_the_family_is_tried() -> None:
    assert set(MOMENTS) <= set(FAMILY)
