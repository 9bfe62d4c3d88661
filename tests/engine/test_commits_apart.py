"""`Config(durability=N)`: one of N steps is committed, and a kill costs N steps at most."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.durable.home import SPARE
from infinity.durable.store import DurableStore
from infinity.placement.spec import Kind
from infinity.tiers.manifest import STATES_NAME
from support.configs import config_of
from support.durable import (
    LEAST,
    PLACES,
    STEPS,
    Model,
    folders_in,
    in_a_process,
    logged,
    run_undisturbed,
    same,
    train,
)
from support.models import text_batch
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The log and the result of a run that nobody killed, without durability."""
    return run_undisturbed(tmp_path_factory.mktemp("uninterrupted"))


def start(folders: list[Path], every: int, **options: Any) -> tuple[Model, infinity.Engine, Any]:
    """A resumed run, with its optimizer."""
    model = Model()
    config = config_of(nvme=folders, **LEAST | {"durability": every} | options)
    infinity.wrap(model, config, resume=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=True)
    return model, infinity.engine(model), optimizer


def step(model: Model, optimizer: Any, number: int, factor: float = 1.0) -> None:
    (model(**text_batch(number)).loss * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(engine: infinity.Engine) -> list[torch.Tensor]:
    """Parameters, masters and moments of all units."""
    engine.drain()
    return [
        unit.states.read(kind)
        for unit in engine.units
        for kind in unit.blocks
        if kind is not Kind.GRAD
    ]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.pairs
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_killed_again_and_again_it_ends_with_the_same_bits(
    every: int,
    update: str,
    cache: int | str,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """After 40 writes, a few more every time, each process with another number of steps."""
    reference, expected = uninterrupted
    folders, kill, ends = folders_in(tmp_path), 40, []
    options: dict[str, Any] = {"update": update, "cache": cache}
    turns = itertools.cycle((every, "step", every + 1))
    killed: int | str = every  # how the last process commits that logged a step
    while not ends or ends[-1]:
        before, apart = logged(tmp_path), next(turns)
        ends.append(in_a_process(tmp_path, folders, kill, durability=apart, **options))
        after = logged(tmp_path)[len(before) :]
        if before and after:
            again = before[-1][0] - after[0][0] + 1
            assert again <= (1 if killed == "step" else killed), "more were made again"
        killed = apart if after else killed
        kill += 23
        assert ends[-1] in (0, -signal.SIGKILL)
    assert len(ends) > 1
    assert same(torch.load(tmp_path / "result"), expected)
    steps = {number: rest for number, *rest in logged(reference)}
    assert all(steps[number] == rest for number, *rest in logged(tmp_path))
    assert {number for number, *_ in logged(tmp_path)} == set(range(STEPS))


@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_another_number_of_steps_and_other_budgets_go_on(
    update: str,
    cache: int | str,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Of a run that is closed at steps that no update knew to be committed."""
    folders = folders_in(tmp_path)
    caches = (cache, 0, "auto", "512KiB", cache)
    for until, every, much in zip((1, 3, 4, 6, STEPS), (4, 3, 1, 7, 2), caches, strict=True):
        options = {"durability": every, "update": update, "cache": much}
        found = train(folders, tmp_path / "log", steps=until, **options)
    assert same(found, uninterrupted[1]) and logged(tmp_path) == logged(uninterrupted[0])


@pytest.mark.parametrize(("update", "cache"), PLACES)
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_the_committed_step_is_a_multiple_until_it_is_closed(
    every: int, update: str, cache: int | str, tmp_path: Path
) -> None:
    folders = folders_in(tmp_path)
    model, engine, optimizer = start(folders, every, update=update, cache=cache)
    for number in range(7):
        step(model, optimizer, number)
        Probe(engine).committer.rest()
        # What was sealed is of a forward that began: that of this step.
        assert engine.committed_step == number // every * every
    expected = states_of(engine)
    engine.close()
    model, engine, optimizer = start(folders, every, update=update, cache=cache)
    assert engine.committed_step == 7 and are_equal(states_of(engine), expected)
    engine.close()


BETWEEN: dict[str, Callable[[Any, Any, Any], object]] = {
    "a write": lambda model, engine, optimizer: _fill(model),
    "a step that is left out": lambda model, engine, optimizer: step(
        model, optimizer, 9, float("nan")
    ),
    "a step of other units": lambda model, engine, optimizer: _step_of_some(model, optimizer),
    "a forward": lambda model, engine, optimizer: model(**text_batch(3)),
}


def _fill(model: Model) -> None:
    with infinity.gathered([model.inner.blocks[0].up.weight], write=True), torch.no_grad():
        model.inner.blocks[0].up.weight.fill_(0.25)


def _step_of_some(model: Model, optimizer: Any) -> None:
    """One in which the first block has no gradients."""
    model(**text_batch(8)).loss.backward()
    for parameter in model.inner.blocks[0].parameters():
        parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()


AT = [0, 1, 2, *(pytest.param(at, marks=pytest.mark.long) for at in (3, 4))]
"""One step of three is committed, so the first three places are all that differ."""


@pytest.mark.parametrize("what", list(BETWEEN))
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_what_comes_between_leaves_a_whole_state_to_be_committed(
    what: str, at: int, update: str, cache: int | str, tmp_path: Path
) -> None:
    """After each of five steps, of which one in three is committed; it is closed a step later, or
    after the forward that commits."""
    folders = folders_in(tmp_path)
    model, engine, optimizer = start(folders, 3, update=update, cache=cache)
    for number in range(at):
        step(model, optimizer, number)
    BETWEEN[what](model, engine, optimizer)
    for number in range(at, 5):
        step(model, optimizer, number)
    expected, steps = states_of(engine), engine.report()
    engine.close()
    model, engine, optimizer = start(folders, 3, update=update, cache=cache)
    assert engine.committed_step == steps.steps + steps.skipped_steps
    assert are_equal(states_of(engine), expected)
    engine.close()


@pytest.mark.parametrize(("update", "cache"), PLACES)
def test_a_checkpoint_is_loaded_between_two_commits(
    update: str, cache: int | str, tmp_path: Path
) -> None:
    folders = folders_in(tmp_path)
    model, engine, optimizer = start(folders, 4, update=update, cache=cache)
    step(model, optimizer, 0)
    saved = states_of(engine)
    engine.save_checkpoint(tmp_path / "checkpoint", optimizer)
    for number in range(1, 3):
        step(model, optimizer, number)
    engine.load_checkpoint(tmp_path / "checkpoint", optimizer)
    # It has the number of its step.
    assert engine.committed_step == 1 and are_equal(states_of(engine), saved)
    step(model, optimizer, 3)
    expected = states_of(engine)
    engine.close()
    model, engine, optimizer = start(folders, 4, update=update, cache=cache)
    assert are_equal(states_of(engine), expected)
    engine.close()


def test_a_record_is_of_the_beginning_of_a_forward_that_commits_nothing(tmp_path: Path) -> None:
    """Closed in the middle of a step, a run goes on with the random numbers, the buffers and what
    is tracked as that step began."""
    folders, drawn = folders_in(tmp_path), []
    for resume in (False, True):
        model, engine, optimizer = start(folders, 3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine.track(scheduler=scheduler)
        if not resume:
            step(model, optimizer, 0)
            scheduler.step()
        seen = model.counter.seen.item()
        drawn.append((model(**text_batch(1)).loss.item(), scheduler.last_epoch, seen))
        if not resume:
            scheduler.step()
            model(**text_batch(2))
        engine.close()
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("cache", [0, "256KiB", "auto"])
def test_no_commit_writes_states_where_steps_are_even(
    cache: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their updates have written all that a commit needs: nothing is read and written again."""
    again: list[int] = []
    make_whole = DurableStore.make_whole
    monkeypatch.setattr(
        DurableStore, "make_whole", lambda store: (again.append(1), make_whole(store))
    )
    model, engine, optimizer = start(folders_in(tmp_path), 3, cache=cache)
    for number in range(10):
        step(model, optimizer, number)
        assert not again
    engine.close()
    # Step 10: what is cached was not written, and nothing lies in a spare extent.
    assert bool(again) == (cache != 0)


def test_no_update_waits_for_a_commit_where_steps_are_even(tmp_path: Path) -> None:
    """The update after a commit writes the spare extent."""
    model, engine, optimizer = start(folders_in(tmp_path), 2, cache=0)
    for number in range(4):
        step(model, optimizer, number)
    engine.drain()
    blocks = Probe(engine).store.state_blocks()
    kept = {block.home.version for block in blocks}
    assert kept <= {0, 1} and all(block.home.target(1) == SPARE for block in blocks)
    assert all(block.home.is_free(1) for block in blocks)
    engine.close()


@pytest.mark.parametrize("cache", [0, "256KiB", "auto"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_space_is_what_is_not_cached_once_more(
    every: int, cache: int | str, tmp_path: Path
) -> None:
    """The file has that from the beginning on, and does not grow."""
    (folder,) = folders = folders_in(tmp_path)
    model, engine, optimizer = start(folders, every, cache=cache)
    report, taken = engine.report(), engine.memory()["nvme"]
    spare = (report.on_nvme - report.cached) * (every > 1)
    assert taken == 2 * report.on_nvme + spare
    assert taken == Probe(engine).store.layout.nvme_bytes
    size = (folder / STATES_NAME).stat().st_size
    assert size == -(-taken // (4 << 20)) * (4 << 20)
    for number in range(3):
        step(model, optimizer, number)
    engine.close()
    assert (folder / STATES_NAME).stat().st_size == size


def test_space_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Three times 6 MiB, where twice was enough."""
    (folder,) = folders = folders_in(tmp_path)
    options = {"gpu_memory": "8MiB", "cpu_memory": "32MiB", "cache": 0, "nvme_memory": "16MiB"}
    made = [torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2))) for _ in range(2)]
    with pytest.raises(infinity.BudgetError, match="the smallest nvme_memory that works is 209715"):
        infinity.wrap(made[0], config_of(nvme=folders, durability=2, **options))
    assert not list(folder.iterdir())
    infinity.engine(
        infinity.wrap(made[1], config_of(nvme=folders, durability=1, **options))
    ).close()


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", "steps", None])
def test_what_is_no_number_of_steps_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="neither 'off' nor 'step' nor a number of"):
        config_of(nvme=folders_in(tmp_path), **LEAST | {"durability": value})


def test_every_step_is_a_number_too(tmp_path: Path) -> None:
    config = config_of(nvme=folders_in(tmp_path), **LEAST | {"durability": 1})
    assert config.durability == "step" and config.steps_per_commit == 1


def test_a_state_is_serialized_once_per_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tracked may be large: it is saved once, to be checked and to be recorded."""
    saved: list[Any] = []
    save = torch.save
    model, engine, optimizer = start(folders_in(tmp_path), 1)
    tracked = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine.track(scheduler=tracked)
    monkeypatch.setattr(
        torch, "save", lambda value, *rest: (saved.append(value), save(value, *rest))
    )
    model(**text_batch(0))
    assert sum(value == tracked.state_dict() for value in saved) == 1 and len(saved) == 2
    engine.close()
