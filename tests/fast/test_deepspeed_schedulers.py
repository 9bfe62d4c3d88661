"""The schedules of DeepSpeed: their rates are those of the documented formulas, and they are
schedulers of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LRScheduler

from infinity.deepspeed.schedulers import SCHEDULES, scheduler
from infinity.deepspeed.settings import Named
from infinity.errors import ConfigError


def adam(lr: float = 0.1, groups: int = 1) -> torch.optim.Adam:
    return torch.optim.Adam(
        [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr
    )


def rates(kind: str, steps: int, lr: float = 0.1, **params: Any) -> list[float]:
    """The rate of every step, the first of which comes before any call of the scheduler."""
    optimizer, found = adam(lr), []
    made = scheduler(Named(kind, params), optimizer)
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        assert made.get_last_lr() == [found[-1]]
        optimizer.step()
        made.step()
    return found


def warm(iteration: int, steps: int, kind: str) -> float:
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def one_cycle(done: int, low: float, high: float, up: int, down: int) -> float:
    if done <= up:
        return low + (high - low) * done / up
    return low + (high - low) * (up + down - done) / down if done < up + down else low


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 3},
        lambda done: 0.01 * (1 + 3 * done / 5),
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.5,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 6,
        },
        lambda done: one_cycle(done, 0.1, 0.5, 4, 6),
    ),
    "WarmupLR": (
        {"warmup_min_lr": 0.01, "warmup_max_lr": 0.5, "warmup_num_steps": 8},
        lambda done: 0.01 + 0.49 * min(1, warm(max(done - 1, 0), 8, "log")),
    ),
    "WarmupDecayLR": (
        {
            "total_num_steps": 12,
            "warmup_max_lr": 0.5,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        lambda done: 0.5 * (max(done - 1, 0) / 4 if done < 5 else max(0, (13 - done) / 8)),
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 12, "warmup_num_steps": 4, "cos_min_ratio": 0.2},
        lambda done: (
            0.1 * warm(max(done - 1, 0), 4, "log")
            if done < 5
            else 0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * min(1, (done - 4) / 8))) / 2)
        ),
    ),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_rates_are_those_of_the_formula(kind: str) -> None:
    params, formula = FORMULAS[kind]
    assert rates(kind, 20, **params) == pytest.approx([formula(done) for done in range(20)])


def test_all_schedules_are_covered_and_are_schedulers_of_torch() -> None:
    assert FORMULAS.keys() == SCHEDULES.keys()
    assert all(issubclass(each, LRScheduler) for each in SCHEDULES.values())


def test_stairs_hold_the_rate() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    assert rates("OneCycle", 9, **params, cycle_first_stair_count=2) == pytest.approx(
        [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]
    )
    assert rates(
        "LRRangeTest",
        7,
        lr_range_test_min_lr=1.0,
        lr_range_test_step_size=3,
        lr_range_test_staircase=True,
    ) == [1, 1, 1, 2, 2, 2, 3]


def test_the_first_beta_has_a_cycle_of_its_own_and_both_decay() -> None:
    optimizer = adam()
    made = scheduler(
        Named(
            "OneCycle",
            {
                "cycle_min_lr": 0.1,
                "cycle_max_lr": 0.3,
                "cycle_first_step_size": 2,
                "decay_lr_rate": 1.0,
                "decay_mom_rate": 0.01,
                "decay_step_size": 2,
            },
        ),
        optimizer,
    )
    betas, lrs = [], []
    for step in range(7):
        betas_in_use = optimizer.param_groups[0]["betas"]
        assert made.get_mom() == ([betas_in_use] if step else [(0.9, betas_in_use[1])])
        betas.append(optimizer.param_groups[0]["betas"][0])
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert betas == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.005, 0.9 * 1.01])
    assert lrs == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.1 / 2])


def test_warmup_ends_at_the_rate_of_the_optimizer_where_none_is_given() -> None:
    assert rates("WarmupLR", 9, lr=0.25, warmup_num_steps=4)[-1] == 0.25


def test_rates_may_differ_between_groups() -> None:
    optimizer = adam(groups=2)
    scheduler(Named("WarmupLR", {"warmup_min_lr": [0.5, 0.25]}), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    with pytest.raises(ConfigError, match="warmup_min_lr has 1 values, but the optimizer has 2"):
        scheduler(Named("WarmupLR", {"warmup_min_lr": [0.5]}), optimizer)


@given(st.sampled_from(sorted(FORMULAS)), st.integers(0, 15))
def test_going_on_gives_the_rates_of_a_whole_run(kind: str, done: int) -> None:
    params = FORMULAS[kind][0]
    whole = rates(kind, 20, **params)
    optimizer = adam()
    first = scheduler(Named(kind, params), optimizer)
    for _ in range(done):
        optimizer.step()
        first.step()
    assert first.state_dict() == {"last_batch_iteration": done - 1}
    optimizer = adam()
    second = scheduler(Named(kind, params), optimizer)
    second.load_state_dict(first.state_dict())
    optimizer.step()
    second.step()
    assert second.get_last_lr() == [whole[done + 1]]


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_group_that_is_added_keeps_its_rate(kind: str) -> None:
    optimizer, betas = adam(), (0.5, 0.6)
    made = scheduler(Named(kind, FORMULAS[kind][0]), optimizer)
    added = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 7.0, "betas": betas}
    optimizer.add_param_group(added)
    expected = rates(kind, 4, **FORMULAS[kind][0])
    for rate in expected[1:]:
        optimizer.step()
        made.step()
        assert made.get_last_lr() == [rate, 7.0]
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 7.0]
        assert optimizer.param_groups[1]["betas"] == betas


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_the_numbers_of_a_schedule_have_the_names_of_deepspeed(kind: str) -> None:
    made: Any
    optimizer = adam(0.1)
    numbers = {"warmup_num_steps": 10, "total_num_steps": 20, "warmup_type": kind}
    made = scheduler(Named("WarmupCosineLR", {**numbers, "warmup_min_ratio": 0.25}), optimizer)
    assert (made.warmup_num_steps, made.warmup_type, made.get_lr_ratio()) == (10, kind, 0.0)
    for step in range(10):
        optimizer.step()
        made.step(step)
        assert made.get_lr_ratio() == 0.25 + 0.75 * warm(step, 10, kind)
        assert made.get_last_lr() == [0.1 * made.get_lr_ratio()]
    made = scheduler(Named("WarmupDecayLR", numbers), adam())
    assert (made.warmup_num_steps, made.warmup_type) == (10, kind)
    cycle = {"cycle_first_step_size": 3, "cycle_second_step_size": 1}
    made = scheduler(Named("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, **cycle}), adam())
    assert made.step_ratio == 0.75
    with pytest.raises(AttributeError, match="OneCycle of infinity has no 'delta_lrs': get_last"):
        _ = made.delta_lrs


def test_a_schedule_of_torch_is_taken_by_its_name() -> None:
    assert rates("ExponentialLR", 3, gamma=0.5) == [0.1, 0.05, 0.025]
    with pytest.raises(ConfigError, match=r"scheduler ExponentialLR: .*beta"):
        rates("ExponentialLR", 3, beta=0.5)


@pytest.mark.parametrize(
    ("kind", "params", "problem"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps=-1 must be a whole number"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type='cubic' must be"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0 must be"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler OneCycle: .*cycle_max_lr"),
    ],
)
def test_what_no_schedule_can_be_is_refused(
    kind: str, params: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        scheduler(Named(kind, params), adam())
