"""Placement never changes numerics (I8): losses, gradient norms, weights and states are bitwise
equal wherever they live.

Every run clips, accumulates two micro-batches, has two parameter groups, and poisons freed slots,
so that a value read from the wrong place or at the wrong time is NaN. The reference keeps
everything in memory and updates with one scalar thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from support import elsewhere
from support.budgets import ROOMY
from support.configs import config_of
from support.machine import IO_ENGINES, ISAS, PAGE, TIERS
from support.models import Transformer, text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ACCUMULATION, MAX_GRAD_NORM = 3, 2, 0.5
PRECISIONS = ("bf16", "fp32")
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Outcome(NamedTuple):
    """All numbers of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def build() -> Transformer:
    # A block has two chunks of the optimizer, the second one in part.
    return transformer(width=48, depth=3)


def train(
    after_step: Callable[[Transformer], object] = lambda model: None,
    build: Callable[[], Transformer] = build,
    **config: Any,
) -> Outcome:
    model = infinity.wrap(build(), config_of(**({"poison": True} | ROOMY | config)))
    with infinity.engine(model) as engine:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 5e-3},
        ]
        optimizer = infinity.AdamW(groups, lr=1e-2, max_grad_norm=MAX_GRAD_NORM)
        losses, norms = [], []
        for step in range(STEPS):
            for micro_batch in range(ACCUMULATION):
                loss = model(**text_batch(step * ACCUMULATION + micro_batch)).loss / ACCUMULATION
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
            after_step(model)
        states = optimizer.state_dict()["state"]
        peaks, budgets = engine.report().peaks, engine.report().budgets
        assert all(peaks[tier] <= budgets[tier] for tier in ("gpu", "cpu"))
        flat = {
            f"{number}.{name}": value
            for number, state in states.items()
            for name, value in state.items()
        }
        return Outcome(losses, norms, engine.state_dict(), flat)


@cache
def reference(precision: str) -> Outcome:
    outcome = train(
        precision=precision,
        parameters="gpu",
        gradients="gpu",
        optimizer="cpu",
        instruction_set="scalar",
        threads=1,
    )
    assert len(set(outcome.losses)) == STEPS * ACCUMULATION
    assert max(outcome.norms) > MAX_GRAD_NORM  # clipping had work to do
    plain = build().state_dict()
    changed = [
        name
        for name, value in outcome.weights.items()
        if not torch.equal(value.float(), plain[name].float())
    ]
    assert set(changed) == set(plain) - {"scale"}
    names = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if precision == "bf16" else set())
    assert {key.partition(".")[2] for key in outcome.states} == names
    return outcome


def check(outcome: Outcome, precision: str) -> None:
    check_equal(outcome, reference(precision))


def check_equal(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.losses == expected.losses
    assert outcome.norms == expected.norms
    for mine, theirs in ((outcome.weights, expected.weights), (outcome.states, expected.states)):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.pairs
@each_precision
@pytest.mark.parametrize(
    ("parameters", "gradients", "optimizer"), list(itertools.product(TIERS, repeat=3))
)
def test_every_tier_of_every_state_with_the_smallest_budgets(
    precision: str,
    parameters: str,
    gradients: str,
    optimizer: str,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
) -> None:
    where = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    where |= {"nvme": [tmp_path] if "nvme" in where.values() else []}
    budgets = smallest(build(), precision=precision, **where)
    check(train(precision=precision, **where, **budgets), precision)


@pytest.mark.pairs
@each_precision
@pytest.mark.parametrize("extra_gpu", [0, 1, 4, 9, 17, 40])
@pytest.mark.parametrize("extra_cpu", [0, 500])
def test_budgets_from_the_smallest_up(
    precision: str,
    extra_gpu: int,
    extra_cpu: int,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
) -> None:
    budgets = smallest(build(), precision=precision, nvme=[tmp_path])
    budgets["gpu_memory"] += extra_gpu * PAGE
    budgets["cpu_memory"] += extra_cpu * PAGE
    check(train(precision=precision, nvme=[tmp_path], **budgets), precision)


@pytest.mark.pairs
@each_precision
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("gpu_cache", ["300KiB", "700KiB", "auto"])
def test_units_that_stay_on_the_device(
    gpu_cache: str, gradients: str, precision: str, tmp_path: Path
) -> None:
    check(
        train(precision=precision, nvme=[tmp_path], gradients=gradients, gpu_cache=gpu_cache),
        precision,
    )


@each_precision
def test_pieces_of_any_length(
    precision: str, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    """More cpu_memory means longer pieces in the optimizer: here of one to six blocks of the
    gradient norm, in units of six."""

    def wide() -> Transformer:
        return transformer(width=88, depth=4)

    least = smallest(wide(), precision=precision, nvme=[tmp_path])["cpu_memory"]
    staging = len(["param", "grad", "exp_avg", "exp_avg_sq", "master"]) * 6 * 64 << 10
    config = {"build": wide, "precision": precision, "nvme": [tmp_path], "gradients": "nvme"}
    first, *others = [
        train(**config, cpu_memory=least + blocks * staging) for blocks in (1, 2, 4, 6)
    ]
    for other in others:
        check_equal(other, first)


@pytest.mark.pairs
@each_precision
@pytest.mark.parametrize("io_engine", IO_ENGINES)
@pytest.mark.parametrize("copy_on_write", [True, False])
@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (2, 7, 1)])
def test_io_engine_copy_on_write_and_stripes(
    precision: str,
    io_engine: str,
    copy_on_write: bool,
    shares: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that blocks this small cross stripes.
    monkeypatch.setattr("infinity.tiers.drives.STRIPE_BYTES", 5 * PAGE)
    paths = [tmp_path / str(number) for number in range(len(shares))]
    for path in paths:
        path.mkdir()
    config = {
        "precision": precision,
        "nvme": paths,
        "io_engine": io_engine,
        "copy_on_write": copy_on_write,
    }
    check(train(**config, nvme_shares=shares, gradients="nvme"), precision)
    assert [list(path.iterdir()) for path in paths] == [[]] * len(shares)


@pytest.mark.pairs
@each_precision
@pytest.mark.parametrize("instruction_set", [*ISAS, "auto"])
@pytest.mark.parametrize("threads", [1, 3])
def test_instruction_sets_and_threads(
    precision: str, instruction_set: str, threads: int, tmp_path: Path
) -> None:
    check(
        train(
            precision=precision, nvme=[tmp_path], instruction_set=instruction_set, threads=threads
        ),
        precision,
    )


EXAMPLES = 8 if elsewhere.KIND == "queued" else 25


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    precision=st.sampled_from(PRECISIONS),
    where=st.fixed_dictionaries(
        {key: st.sampled_from(TIERS) for key in ("parameters", "gradients", "optimizer")}
    ),
    extra_gpu=st.integers(0, 80),
    extra_cpu=st.integers(0, 400),
    how=st.fixed_dictionaries(
        {
            "io_engine": st.sampled_from(IO_ENGINES),
            "instruction_set": st.sampled_from(ISAS),
            "threads": st.integers(1, 4),
            "copy_on_write": st.booleans(),
            "update": st.sampled_from(["auto", "speculative", "exact", "plain"]),
            "cache": st.one_of(st.just("auto"), st.integers(0, 1 << 20)),
        }
    ),
    directories=st.integers(1, 2),
)
def test_any_combination(
    precision: str,
    where: dict[str, str],
    extra_gpu: int,
    extra_cpu: int,
    how: dict[str, Any],
    directories: int,
    tmp_path_factory: pytest.TempPathFactory,
    smallest: Callable[..., dict[str, int]],
) -> None:
    paths = [tmp_path_factory.mktemp("nvme") for _ in range(directories)]
    config = {"precision": precision, "nvme": paths} | where | how
    budgets = smallest(build(), **config)
    budgets["gpu_memory"] += extra_gpu * PAGE
    budgets["cpu_memory"] += extra_cpu * PAGE
    check(train(**config, **budgets), precision)


@torch.no_grad()
def evaluate(model: Transformer) -> None:
    model(**text_batch(99))


@pytest.mark.parametrize("parameters", TIERS)
def test_what_is_predicted_changes_nothing(
    parameters: str,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an evaluation between steps the prediction is wrong at first; without look-ahead every
    unit is fetched on use."""
    config = {"nvme": [tmp_path], "precision": "fp32", "parameters": parameters}
    config |= smallest(build(), **config)
    check(train(evaluate, **config), "fp32")
    monkeypatch.setattr("infinity.schedule.runtime.look_ahead", lambda *_: None)
    check(train(**config), "fp32")
