"""The tensors of `optimizer.state_dict()` are those of the optimizer, as in torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import infinity
from support.pairs import Side, close, pair

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = {"adamw": "exp_avg", "momentum": "momentum_buffer", "adagrad": "sum"}


def states(side: Side, name: str = "adamw") -> list[torch.Tensor]:
    """The first moments in a state dict, of the parameters that were updated."""
    found = side.optimizer.state_dict()["state"]
    return [found[number][FIRST[name]] for number in sorted(found)]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zero": lambda moment: moment.zero_(),
    "view": lambda moment: moment.view(-1)[1:5].mul_(3.0),
    "rows": lambda moment: moment.__setitem__(slice(1, 3), 0.25),
    "detached": lambda moment: moment.detach().add_(0.125),
    "data": lambda moment: moment.data.mul_(0.5),
    "transposed": lambda moment: moment.t().fill_(0.125) if moment.dim() == 2 else None,
    "out": lambda moment: torch.mul(moment.clone(), 0.5, out=moment),
    "initialized": lambda moment: torch.nn.init.constant_(moment, 0.25),
    "list": lambda moment: torch._foreach_mul_([moment], 0.5),
    "operator": lambda moment: moment.__imul__(2.0),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_a_write_into_the_states(write: str, name: str, tmp_path: Path) -> None:
    with pair(tmp_path, name, "cpu", tiles=False) as sides:
        for side in sides:
            side.train(range(2))
            for moment in states(side, name):
                WRITES[write](moment)
            side.train(range(2, 4))
        close(*sides)


@pytest.mark.parametrize("tiles", [False, True])
def test_a_write_after_a_step_is_one_into_the_states_of_then(tiles: bool, tmp_path: Path) -> None:
    with pair(tmp_path, "adamw", "nvme", tiles) as sides:
        for side in sides:
            side.train(range(2))
            kept = states(side)
            side.train(range(2, 4))
            for moment in kept:
                moment.mul_(0.5)
            side.train(range(4, 6))
        close(*sides)


def test_they_are_read_as_they_are_now(tmp_path: Path) -> None:
    with pair(tmp_path) as sides:
        found = []
        for side in sides:
            side.train(range(2))
            saved = side.optimizer.state_dict()
            kept = copy.deepcopy(saved["state"][1])
            side.train(range(2, 4))
            state = saved["state"][1]
            found.append([state["step"].item(), state["exp_avg"] * 1, kept["step"].item()])
        torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)
        assert (found[0][0], found[0][2]) == (4.0, 2.0)


def test_one_that_left_its_entry_keeps_what_it_was(tmp_path: Path) -> None:
    with pair(tmp_path) as sides:
        found = []
        for side in sides:
            side.train(range(2))
            kept = states(side)
            side.train(range(2, 3))
            side.optimizer.state.clear()
            side.train(range(3, 4))
            found.append([moment.clone() for moment in kept])
            for moment in kept:
                moment.zero_()
            side.train(range(4, 5))
        torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)
        close(*sides)


def test_the_count_is_one_of_them(tmp_path: Path) -> None:
    with pair(tmp_path) as sides:
        for side in sides:
            side.train(range(3))
            for state in side.optimizer.state_dict()["state"].values():
                state["step"].fill_(1.0)
            side.train(range(3, 5))
        close(*sides)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.update(state={}),
        lambda saved: [state["exp_avg"].zero_() for state in saved["state"].values()],
        lambda saved: [state.update(step=torch.tensor(9.0)) for state in saved["state"].values()],
        lambda saved: saved["state"].pop(0),
        lambda saved: saved["param_groups"][0].update(lr=0.05),
    ],
)
def test_a_state_dict_that_was_changed_is_loaded(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    with pair(tmp_path) as sides:
        for side in sides:
            side.train(range(2))
            saved = side.optimizer.state_dict()
            change(saved)
            side.optimizer.load_state_dict(saved)
            side.train(range(2, 4))
        close(*sides)


def test_what_is_saved_is_plain(tmp_path: Path) -> None:
    """No class of the engine is in the file, so `weights_only` loads it."""
    with pair(tmp_path) as (ours, _):
        ours.train(range(2))
        file = io.BytesIO()
        saved = ours.optimizer.state_dict()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for number, state in loaded["state"].items():
            for name, value in state.items():
                assert type(value) is torch.Tensor
                assert torch.equal(value, saved["state"][number][name])
        copied = copy.deepcopy(saved)["state"][0]["exp_avg"]
        assert type(copied) is torch.Tensor


def test_numpy_gets_them_read_only(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        ours.train(range(1))
        moment = states(ours)[0]
        with pytest.raises(ValueError, match="read-only"):
            moment.numpy()[:] = 0
        with pytest.raises(infinity.ShardedParameterError, match="wrapped model"):
            moment.__dlpack__()
        with pytest.raises(infinity.ShardedParameterError, match="wrapped model"):
            moment.data = torch.zeros(())


def test_a_closed_engine_leaves_copies(tmp_path: Path) -> None:
    with pair(tmp_path) as (ours, _):
        ours.train(range(1))
        moment = states(ours)[0]
        values = moment.clone()
    assert torch.equal(moment, values)
    moment.zero_()
    assert not moment.any()


# The state dict functions of torch


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd", "adagrad"])
@pytest.mark.parametrize("before", [0, 2])
def test_the_functions_of_torch_change_what_they_change_in_torch(
    before: int, name: str, tier: str, tmp_path: Path
) -> None:
    """Before the first step they take one of zeros, at a rate of 0."""
    with pair(tmp_path, name, tier) as sides:
        counted = []
        for side in sides:
            side.model.uses_late = True
            side.train(range(before))
            first = side.weights()
            saved = get_optimizer_state_dict(side.model, side.optimizer)
            for key, value in side.weights().items():
                assert torch.equal(value, first[key])
            counted.append(
                {
                    key: float(state["step"])
                    for key, state in saved["state"].items()
                    if name in ("adamw", "adagrad")
                }
            )
            side.train(range(10, 12))
        assert counted[0] == counted[1]
        close(*sides)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_they_load_what_they_saved(name: str, tmp_path: Path) -> None:
    with pair(tmp_path / "a", name) as sides, pair(tmp_path / "b", name) as others:
        for side, other in zip(sides, others, strict=True):
            side.model.uses_late = other.model.uses_late = True
            side.train(range(2))
            saved = copy.deepcopy(get_optimizer_state_dict(side.model, side.optimizer))
            other.model.load_state_dict(side.weights())
            set_optimizer_state_dict(other.model, other.optimizer, saved)
            other.train(range(2, 4))
        close(*others)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_dcp_loads_into_them(tmp_path: Path) -> None:
    """`dcp.load` writes into the tensors that it is given, which are the optimizer's."""
    with pair(tmp_path / "a") as sides:
        for number, side in enumerate(sides):
            side.train(range(2))
            folder = tmp_path / f"saved{number}"
            dcp.save({"optimizer": side.optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
            side.train(range(2, 4))
            dcp.load({"optimizer": side.optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
            side.train(range(4, 6))
        close(*sides)
