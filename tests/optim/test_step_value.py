"""A step is a value: what the optimizer asks for is fixed when it asks, and the updater reports
what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.job import JobState
from infinity.optim.step import Step, StepRun
from infinity.optim.updater import Updater
from support.configs import config_of
from support.probe import Probe

WIDTH, DEPTH, LR = 64, 3, 0.5

Start = Callable[..., tuple[infinity.Engine, infinity.SGD, list[Step]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A wrapped model, its optimizer, and the steps that the updater gets."""
    engines: list[infinity.Engine] = []
    models: list[nn.Module] = []  # an engine does not keep its model alive

    def make(
        update: str = "exact", **options: Any
    ) -> tuple[infinity.Engine, infinity.SGD, list[Step]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        models.append(model)
        budgets = {"gpu_memory": "1MiB", "cpu_memory": "64MiB", "cache": 0}
        config = config_of(
            nvme=[tmp_path],
            algorithm="sgd",
            device="cpu",
            threads=1,
            update=update,
            delayed_after=0,
            **budgets,
        )
        engines.append(infinity.engine(infinity.wrap(model, config, units=[nn.Linear])))
        optimizer = infinity.SGD(model.parameters(), lr=LR, **options)
        steps: list[Step] = []
        post = Updater.post

        def note(updater: Updater, step: Step) -> None:
            steps.append(step)
            post(updater, step)

        monkeypatch.setattr(Updater, "post", note)
        return engines[-1], optimizer, steps

    yield make
    for engine in engines:
        engine.close()


def train(engine: infinity.Engine, optimizer: infinity.SGD) -> None:
    engine.model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_says_all_that_is_done(start: Start) -> None:
    engine, optimizer, steps = start(max_grad_norm=1e-3)
    train(engine, optimizer)
    train(engine, optimizer)
    assert [step.number for step in steps] == [1, 2]
    for count, step in enumerate(steps, start=1):
        assert [share.unit for share in step.shares] == list(engine.units)
        assert set(step.counts) == {id(p) for p in engine.model.parameters()}
        assert set(step.counts.values()) == {count}
        assert step.loss_scale == 1.0
        (factor,) = set(step.factors.values())
        assert 0 < factor < 1 and set(step.factors) == set(step.shares)
        for update in step.updates:
            assert {segment.factor for segment in update.segments} == {factor}
            assert {segment.hyper.values["lr"] for segment in update.segments} == {LR}
    with pytest.raises(dataclasses.FrozenInstanceError):
        steps[0].number = 2  # type: ignore[misc]


def test_a_step_that_is_left_out_has_a_number_and_no_value(start: Start) -> None:
    engine, optimizer, steps = start(skip_nonfinite=True)
    train(engine, optimizer)
    (engine.model(torch.ones(2, WIDTH)).mean() * torch.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(engine, optimizer)
    assert [step.number for step in steps] == [1, 3]


def has_ended(run: StepRun) -> bool:
    """Whether every update has ended, well or not."""
    return all(job.state is JobState.ENDED for job in run.jobs)


def test_a_step_is_reported_finished_when_all_of_it_is_written(start: Start) -> None:
    engine, optimizer, _ = start()
    train(engine, optimizer)
    run = Probe(engine).last_step
    assert {job.unit for job in run.jobs} == set(engine.units)
    engine.drain()
    assert has_ended(run)
    assert all(job.written for job in run.jobs)


def test_a_delayed_step_is_not_finished_before_it_is_seen(start: Start) -> None:
    engine, optimizer, _ = start("delayed")
    train(engine, optimizer)
    run = Probe(engine).last_step
    engine.drain()  # all is written
    assert not has_ended(run)
    engine.state_dict()
    assert has_ended(run)


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
def test_what_a_clipped_step_asks_for_is_not_what_was_begun(
    max_grad_norm: float | None, start: Start
) -> None:
    engine, optimizer, _ = start("speculative", max_grad_norm=max_grad_norm)
    for _ in range(3):
        train(engine, optimizer)
    run = Probe(engine).last_step
    kept, rollbacks = (DEPTH, 0) if max_grad_norm is None else (0, DEPTH)
    assert (run.kept, run.rollbacks) == (kept, rollbacks)
