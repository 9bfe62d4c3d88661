"""Updates that are seen one step late: against plain PyTorch, bitwise over placements (I8), and
exact for whoever looks."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.optim.pipeline import Pipeline
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MAX_NORM, ADAM = 8, 0.5, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
SMALL: dict[str, Any] = {
    "gpu_memory": "192KiB",
    "cpu_memory": "8MiB",
    "cache": 0,
    "poison": True,
    "precision": "fp32",
}
Wrap = Callable[..., infinity.Engine]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    models: list[nn.Module] = []  # an engine does not keep its model alive

    def make(update: str = "delayed", after: int = 0, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        config = config_of(
            **(SMALL | {"nvme": folder, "update": update, "delayed_after": after} | options)
        )
        models.append(infinity.wrap(transformer(), config))
        return infinity.engine(models[-1])

    yield make
    for model in models:
        infinity.engine(model).close()


def take_step(engine: infinity.Engine, optimizer: infinity.AdamW, number: int) -> float:
    loss = engine.model(**text_batch(number)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adam(engine: infinity.Engine) -> infinity.AdamW:
    return infinity.AdamW(engine.model.parameters(), max_grad_norm=MAX_NORM, **ADAM)


def train(engine: infinity.Engine, steps: int = STEPS) -> dict[str, Any]:
    """Losses, norms, weights and states."""
    optimizer, losses, norms = adam(engine), [], []
    for number in range(steps):
        losses.append(take_step(engine, optimizer, number))
        norms.append(optimizer.grad_norm)
    assert any(norm > MAX_NORM for norm in norms if norm is not None), "some step is to be clipped"
    return {
        "losses": losses,
        "norms": norms,
        "weights": engine.state_dict(),
        "states": copy.deepcopy(optimizer.state_dict()["state"]),
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same(value, second[key]) for key, value in first.items()
        )
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def delayed_by_hand(after: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What plain PyTorch computes when, from step number `after` on, a forward uses the parameters
    of before the last step."""
    used, newest = transformer(), transformer()
    optimizer = torch.optim.AdamW(newest.parameters(), **ADAM)
    losses = []
    for number in range(STEPS):
        used.zero_grad()
        loss = used(**text_batch(number)).loss
        loss.backward()
        losses.append(loss.item())
        if number > after:
            used.load_state_dict(newest.state_dict())
        for theirs, ours in zip(newest.parameters(), used.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        torch.nn.utils.clip_grad_norm_(newest.parameters(), MAX_NORM)
        optimizer.step()
        if number < after:
            used.load_state_dict(newest.state_dict())
    return losses, newest.state_dict()


@pytest.mark.parametrize("after", [0, 3])
def test_like_plain_pytorch_with_a_forward_that_is_one_step_behind(after: int, wrap: Wrap) -> None:
    losses, weights = delayed_by_hand(after)
    found = train(wrap(after=after))
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)
    exact = train(wrap("exact"))
    assert exact["losses"][: after + 1] == found["losses"][: after + 1]
    assert all(
        a != b
        for a, b in zip(exact["losses"][after + 1 :], found["losses"][after + 1 :], strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "split_master": False, "moment_precision": "int8"},
    ],
)
def test_placement_does_not_change_a_number(options: dict[str, Any], wrap: Wrap) -> None:
    places = [
        {"gpu_memory": "4MiB"},
        {"cache": "auto", "cpu_memory": "16MiB"},
        {"cache": "64KiB"},
        {"parameters": "cpu"},
        {"optimizer": "cpu"},
        {"parameters": "cpu", "optimizer": "cpu", "gpu_memory": "4MiB"},
        {"parameters": "cpu", "optimizer": "gpu", "gpu_memory": "8MiB"},
        {"gradients": "nvme", "gpu_memory": "4MiB"},
    ]
    expected = train(wrap(**options))
    for place in places:
        assert same(train(wrap(**options, **place)), expected), place


def evaluate(engine: infinity.Engine) -> None:
    with torch.no_grad():
        engine.model(**text_batch(99))


@torch.no_grad()
def write(engine: infinity.Engine) -> None:
    for parameter in engine.model.parameters():
        with infinity.gathered(parameter, write=True):
            parameter.mul_(0.75)


@pytest.mark.parametrize("look", [evaluate, write, infinity.Engine.state_dict])
@pytest.mark.parametrize("placement", [{}, {"parameters": "cpu", "optimizer": "cpu"}])
def test_whoever_looks_sees_the_last_step(
    look: Callable[[infinity.Engine], Any], placement: dict[str, Any], wrap: Wrap
) -> None:
    """And training goes on from what was seen: with a look after each step nothing is late."""
    results = []
    for update in ("exact", "delayed"):
        engine = wrap(update, **placement)
        optimizer, seen = adam(engine), []
        for number in range(4):
            seen.append(take_step(engine, optimizer, number))
            look(engine)
        with torch.no_grad():
            seen.append(engine.model(**text_batch(99)).loss.item())
        results.append((seen, engine.state_dict(), optimizer.state_dict()["state"]))
    assert same(dict(enumerate(results[0])), dict(enumerate(results[1])))


def test_a_backward_waits_for_the_update_that_reads_its_gradients(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update goes on before the backward asks for it: so the forward does not wait, and no
    gradient is lost."""
    expected = train(wrap())
    go_on, waited = threading.Event(), []
    update, await_readers = Pipeline._update, Updater.await_readers
    monkeypatch.setattr(Pipeline, "_update", lambda *args: (go_on.wait(60), update(*args)))

    def watched(updater: Any, facts: Any) -> None:
        for unit, job in updater._delayed.items():
            if unit.facts is facts:
                waited.append(job.written)
                go_on.set()
        await_readers(updater, facts)

    monkeypatch.setattr(Updater, "await_readers", watched)
    engine = wrap()
    step = infinity.AdamW.step

    def gated(optimizer: infinity.AdamW) -> Any:
        result = step(optimizer)
        go_on.clear()
        return result

    monkeypatch.setattr(infinity.AdamW, "step", gated)
    monkeypatch.setattr(
        infinity.Engine,
        "state_dict",
        lambda engine, read=infinity.Engine.state_dict: (go_on.set(), read(engine))[1],
    )
    assert same(train(engine), expected)
    assert waited.count(False) >= STEPS - 1


ACTIONS: dict[str, Callable[[infinity.Engine, infinity.AdamW], Any]] = {
    "nothing": lambda engine, optimizer: None,
    "more gradients": lambda engine, optimizer: engine.model(**text_batch(50)).loss.backward(),
    "other gradients": lambda engine, optimizer: (
        optimizer.zero_grad(),
        engine.model(**text_batch(51)).loss.backward(),
    ),
    "clip": lambda engine, optimizer: engine.clip_grad_norm_(0.1),
    "rate": lambda engine, optimizer: optimizer.param_groups[0].update(
        lr=optimizer.param_groups[0]["lr"] * 0.5
    ),
    "evaluate": lambda engine, optimizer: evaluate(engine),
    "write": lambda engine, optimizer: write(engine),
    "states": lambda engine, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "freeze": lambda engine, optimizer: next(iter(engine.model.parameters())).requires_grad_(False),
    "thaw": lambda engine, optimizer: next(iter(engine.model.parameters())).requires_grad_(True),
}


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schedule=st.lists(
        st.tuples(st.sampled_from(sorted(ACTIONS)), st.sampled_from(sorted(ACTIONS))),
        min_size=3,
        max_size=6,
    ),
    after=st.integers(0, 3),
)
def test_whatever_happens_between_steps(
    schedule: list[tuple[str, str]], after: int, wrap: Wrap
) -> None:
    """Something between backward and step, something after it: the same numbers wherever the states
    are."""
    results = []
    for place in (
        {"gpu_memory": "4MiB"},
        {"parameters": "cpu", "cache": "auto", "cpu_memory": "16MiB"},
    ):
        engine = wrap(after=after, **place)
        optimizer, losses = adam(engine), []
        for number, (between, afterwards) in enumerate(schedule):
            loss = engine.model(**text_batch(number)).loss
            loss.backward()
            ACTIONS[between](engine, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if "gradients" not in afterwards and afterwards != "clip":
                ACTIONS[afterwards](engine, optimizer)
        results.append(
            {
                "losses": losses,
                "weights": engine.state_dict(),
                "states": copy.deepcopy(optimizer.state_dict()["state"]),
            }
        )
    assert same(*results)


def test_who_looks_inside_of_a_forward_sees_what_it_uses(wrap: Wrap) -> None:
    """And between a forward and its backward, too; it does not disturb the updates that are there
    already."""
    expected = train(wrap(), steps=4)
    for place in ({}, {"parameters": "cpu"}):
        engine, seen = wrap(**place), []
        optimizer = adam(engine)

        def look(
            module: nn.Module, args: Any, engine: infinity.Engine = engine, seen: list[Any] = seen
        ) -> None:
            Probe(engine).come_to_rest()
            used = module.up.weight.detach().clone()
            seen.append(torch.equal(engine.state_dict()["blocks.1.up.weight"], used))

        engine.model.blocks[1].register_forward_pre_hook(look)
        for number in range(4):
            loss = engine.model(**text_batch(number)).loss
            evaluate(engine)
            engine.report()
            with infinity.gathered(engine.model.head):
                loss.backward()
            engine.drain()
            optimizer.step()
            optimizer.zero_grad()
            engine.report()
        assert seen == [True] * 8
        assert same(engine.state_dict(), expected["weights"])
        assert same(optimizer.state_dict()["state"], expected["states"])


def test_updates_come_in_the_order_of_the_backward(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    update = Pipeline._update

    def noted(pipeline: Pipeline, chunk: Any, phase: Any) -> None:
        order.append(chunk.job.unit.facts.index)
        update(pipeline, chunk, phase)

    monkeypatch.setattr(Pipeline, "_update", noted)
    engine = wrap()
    optimizer = adam(engine)
    for number in range(3):
        order.clear()
        take_step(engine, optimizer, number)
        Probe(engine).come_to_rest()
        assert list(dict.fromkeys(order)) == Probe(engine).trace.first_uses()[::-1]


def test_bytes_that_move(wrap: Wrap) -> None:
    for placement in ({}, {"parameters": "cpu"}, {"optimizer": "cpu"}):
        engine = wrap(precision="bf16", **placement)
        optimizer = adam(engine)
        for number in range(5):
            take_step(engine, optimizer, number)
        report = engine.report()
        assert report.written_per_parameter == report.planned_written_per_parameter
        padded = sum(unit.facts.layout.numel for unit in engine.units) / report.parameters
        parameter = 2 * padded * ("parameters" not in placement)
        states = 10 * padded * ("optimizer" not in placement)
        # Read for forward, for backward, and by the update where no copy is left.
        most = report.planned_read_per_parameter
        assert most - parameter <= report.read_per_parameter <= most <= 3 * parameter + states
        assert report.written_per_parameter == pytest.approx(parameter + states)


def test_old_parameters_in_memory_take_part_in_the_budget(
    tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    config = {"nvme": tmp_path, "parameters": "cpu", "precision": "bf16"}
    least = {
        update: smallest(transformer(), update=update, **config)["cpu_memory"]
        for update in ("exact", "delayed")
    }
    with infinity.engine(
        infinity.wrap(transformer(), config_of(gpu_memory="4MiB", cpu_memory="8MiB", **config))
    ) as engine:
        homes = sum(-(-unit.blocks[Kind.PARAM].nbytes // 4096) * 4096 for unit in engine.units)
    assert least["delayed"] - least["exact"] == homes


def test_a_failed_update_is_told_by_the_next_step_and_nothing_hangs(wrap: Wrap) -> None:
    engine = wrap()
    optimizer = adam(engine)
    take_step(engine, optimizer, 0)
    engine.drain()
    engine.io.set_faults(fail_write_at=3)
    with pytest.raises(infinity.EngineClosedError, match="an update failed") as caught:
        for number in range(1, 3):
            take_step(engine, optimizer, number)
    assert isinstance(caught.value.__cause__, infinity.NvmeError)


@pytest.mark.parametrize("wrong", [{"parameters": "gpu"}, {"copy_on_write": False}])
def test_where_the_old_parameters_cannot_be_kept(wrong: dict[str, Any], tmp_path: Path) -> None:
    name = "parameters on gpu" if "parameters" in wrong else "copy_on_write=False"
    with pytest.raises(
        infinity.ConfigError,
        match=rf"update='delayed' keeps the old parameters .* with {name}; put the parameters",
    ):
        config_of(update="delayed", nvme=tmp_path, gpu_memory="1GiB", cpu_memory="1GiB", **wrong)


def test_a_step_that_is_skipped_is_late_for_nobody(wrap: Wrap) -> None:
    """What was delayed is seen after the next call of step, whether that one counts or not."""
    results = []
    for update in ("exact", "delayed"):
        engine = wrap(update)
        optimizer = infinity.AdamW(engine.model.parameters(), skip_nonfinite=True, **ADAM)
        take_step(engine, optimizer, 0)
        (engine.model(**text_batch(1)).loss * math.inf).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
        results.append(engine.model(**text_batch(2)).loss.item())
    assert results[0] == results[1]
