"""Updates that begin in backward, on a guess: they change when bytes move and never what they are
(I8), and can be rolled back."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.optim.kernels import Kernels
from infinity.optim.speculation import Policy
from infinity.placement.spec import Kind
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency
from infinity.tiers.staging import ChunkRequest
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("plain", "exact", "speculative", "auto")
WHERE: dict[str, dict[str, Any]] = {"nvme": {}, "host": {"parameters": "cpu", "optimizer": "cpu"}}
"""Where states have two places each."""
each_place = pytest.mark.parametrize("where", WHERE)
BUDGETS: dict[str, Any] = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "cache": 0, "poison": True}


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []  # an engine does not keep its model alive

    def make(
        update: str, build: Callable[[], nn.Module] = transformer, **options: Any
    ) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        config = config_of(**(BUDGETS | {"nvme": folder, "update": update} | options))
        models.append(infinity.wrap(build(), config))
        return infinity.engine(models[-1])

    yield make
    for model in models:
        infinity.engine(model).close()


def backward(model: nn.Module, number: int) -> None:
    model(**text_batch(number)).loss.backward()


def counts(engine: infinity.Engine) -> tuple[int, int]:
    """Updates that were kept and rolled back."""
    counters = engine.recorder.counters()
    return counters.get("updates kept", 0), counters.get("updates rolled back", 0)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def states(optimizer: infinity.AdamW) -> dict[str, torch.Tensor]:
    found = copy.deepcopy(optimizer.state_dict()["state"])
    return {
        f"{number}.{name}": value
        for number, state in found.items()
        for name, value in state.items()
    }


@each_place
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_steps_of_which_some_are_clipped(
    where: str, precision: str, wrap: Callable[..., infinity.Engine]
) -> None:
    outcomes = []
    for mode in MODES:
        engine = wrap(mode, precision=precision, **WHERE[where])
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-3, max_grad_norm=100)
        norms = []
        for number in range(20):
            (
                engine.model(**text_batch(number)).loss * (1e4 if number % 5 in (1, 3) else 1)
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        clipped = sum(norm > 100 for norm in norms if norm is not None)
        assert clipped == 8
        outcomes.append((norms, engine.state_dict(), states(optimizer)))
        if mode == "speculative":
            units = len(engine.units)
            # The first step has nothing to guess by.
            assert counts(engine) == (11 * units, 8 * units)
        elif mode != "auto":
            assert counts(engine) == (0, 0)
    for norms, weights, optimizer_states in outcomes[1:]:
        assert norms == outcomes[0][0]
        assert equal(weights, outcomes[0][1])
        assert equal(optimizer_states, outcomes[0][2])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("split", [True, False])
def test_only_what_is_not_updated_is_copied_to_the_second_home(
    precision: str,
    split: bool,
    wrap: Callable[..., infinity.Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An update reads one home and writes the other; a parameter that is frozen for a while goes
    along with its unit."""
    copied: list[int] = []
    real = Kernels.copy

    def copy(kernels: Kernels, target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(target.numel())
        real(kernels, target, source)

    monkeypatch.setattr(Kernels, "copy", copy)
    outcomes = []
    for mode in ("exact", "speculative"):
        engine = wrap(mode, precision=precision, split_master=split, **WHERE["host"])
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-3)
        unit = max(engine.units, key=lambda unit: len(unit.parameters))
        frozen = unit.parameters[1]
        for number in range(6):
            frozen.requires_grad_(number < 3)
            backward(engine.model, number)
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
            assert bool(copied) == (mode == "speculative" and number >= 3)
        assert sum(copied) <= 3 * sum(block.nbytes for block in unit.blocks.values())
        outcomes.append(engine.state_dict() | states(optimizer))
    assert equal(*outcomes)


def evaluate(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    with torch.no_grad():
        engine.model(**text_batch(99))


def change_rate(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def clip_by_hand(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    engine.clip_grad_norm_(0.25)


def one_more_backward(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    backward(engine.model, 5)


def throw_away(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    optimizer.zero_grad()
    backward(engine.model, 6)


def throw_away_by_the_model(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    engine.model.zero_grad()


def read_states(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    optimizer.state_dict()
    engine.state_dict()


def load_states(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    loaded = optimizer.state_dict()
    for state in loaded["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    optimizer.load_state_dict(loaded)


@torch.no_grad()
def write_weights(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    with infinity.gathered(engine.model, write=True):
        for parameter in engine.model.parameters():
            parameter.mul_(0.75)


def backward_inside_of_a_write(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    optimizer.zero_grad()
    with infinity.gathered(engine.model, write=True):
        backward(engine.model, 8)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(0.125)


def nothing(engine: infinity.Engine, optimizer: infinity.AdamW) -> None:
    pass


BETWEEN = (
    nothing,
    evaluate,
    change_rate,
    clip_by_hand,
    one_more_backward,
    throw_away,
    throw_away_by_the_model,
    read_states,
    load_states,
    write_weights,
    backward_inside_of_a_write,
)


def run(
    engine: infinity.Engine,
    schedule: list[tuple[int, Callable[[infinity.Engine, infinity.AdamW], None]]],
    max_grad_norm: float,
) -> list[float | None]:
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=max_grad_norm)
    norms = []
    for number, (accumulation, between) in enumerate(schedule):
        for micro_batch in range(accumulation):
            backward(engine.model, number + micro_batch)
        between(engine, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


@each_place
@pytest.mark.parametrize("between", BETWEEN)
def test_what_comes_between_backward_and_step(
    between: Callable[[infinity.Engine, infinity.AdamW], None],
    where: str,
    wrap: Callable[..., infinity.Engine],
) -> None:
    schedule = [(1, nothing), (1, between), (1, nothing), (1, between), (1, nothing), (1, nothing)]
    engines = [wrap(mode, precision="bf16", **WHERE[where]) for mode in ("plain", "speculative")]
    norms = [run(engine, schedule, max_grad_norm=1e6) for engine in engines]
    assert norms[0] == norms[1]
    assert equal(engines[0].state_dict(), engines[1].state_dict())
    kept, rolled_back = counts(engines[1])
    assert kept > 0
    assert (rolled_back > 0) == (between not in (nothing, evaluate))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schedule=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(BETWEEN)), min_size=3, max_size=8
    ),
    max_grad_norm=st.sampled_from([0.5, 2.0, 1e6]),
    precision=st.sampled_from(["bf16", "fp32"]),
    gradients=st.sampled_from(["cpu", "nvme"]),
    where=st.sampled_from(list(WHERE)),
)
def test_any_schedule(
    schedule: list[tuple[int, Callable[[infinity.Engine, infinity.AdamW], None]]],
    max_grad_norm: float,
    precision: str,
    gradients: str,
    where: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    outcomes = []
    for mode in ("plain", "speculative", "auto"):
        options = {
            "nvme": tmp_path_factory.mktemp("nvme"),
            "precision": precision,
            "gradients": gradients,
            "update": mode,
        }
        model = infinity.wrap(transformer(), config_of(**(BUDGETS | options | WHERE[where])))
        with infinity.engine(model) as engine:
            outcomes.append((run(engine, schedule, max_grad_norm), engine.state_dict()))
    for norms, weights in outcomes[1:]:
        assert norms == outcomes[0][0]
        assert equal(weights, outcomes[0][1])


def until(engine: infinity.Engine, condition: Callable[[], bool]) -> None:
    """Wait for what the updater is about to do."""
    Probe(engine).await_jobs(condition)


@each_place
def test_nothing_is_seen_of_an_update_before_its_step(
    where: str, wrap: Callable[..., infinity.Engine]
) -> None:
    engine = wrap("speculative", precision="bf16", **WHERE[where])
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-1)
    for number in range(2):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    before = engine.state_dict()
    with torch.no_grad():
        loss = engine.model(**text_batch(50)).loss
    backward(engine.model, 2)
    begun = Probe(engine).speculative_jobs
    assert set(begun) == set(engine.units)
    until(engine, lambda: all(job.written for job in begun.values()))
    with torch.no_grad():
        assert torch.equal(engine.model(**text_batch(50)).loss, loss)
    for unit in engine.units:
        # Ties away from zero.
        nearest = (unit.states.read(Kind.MASTER).view(torch.int32) + 0x8000 >> 16).to(torch.int16)
        assert torch.equal(unit.states.read(Kind.PARAM).view(torch.int16), nearest)
    optimizer.step()
    assert counts(engine) == (2 * len(engine.units), 0)
    after = engine.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before if name != "scale")


def test_what_the_next_forward_needs_first_is_updated_first(
    wrap: Callable[..., infinity.Engine],
) -> None:
    """Although its gradients come last. All staging is taken until they are all there."""
    engine = wrap("speculative", lambda: transformer(width=96), precision="fp32", gpu_memory="8MiB")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    taken = []
    block = engine.units[0].blocks[Kind.EXP_AVG]
    while (
        chunk := Probe(engine).store.staging.try_check_out(ChunkRequest([block], 0))
    ) is not None:
        taken += chunk
    seen = len(engine.recorder.spans())
    backward(engine.model, 2)
    for one in taken:
        one.release()
    begun = Probe(engine).speculative_jobs
    until(engine, lambda: all(job.written for job in begun.values()))
    updated = [span.name for span in engine.recorder.spans()[seen:] if span.lane == "adam"]
    assert len(updated) > len(engine.units)  # several chunks each
    first_uses = [engine.units[index].name for index in Probe(engine).trace.first_uses()]
    places = [first_uses.index(name) for name in updated]
    # The pipeline was waiting with one chunk, which it chose before all were there.
    others = (places[:one] + places[one + 1 :] for one in range(len(places)))
    assert any(rest == sorted(rest) for rest in others)


def test_a_unit_whose_states_have_no_second_place_waits_for_its_step(
    wrap: Callable[..., infinity.Engine],
) -> None:
    for options in ({"copy_on_write": False}, {"parameters": "cpu"}, {"optimizer": "cpu"}):
        engine = wrap("speculative", **options)
        optimizer = infinity.AdamW(engine.model.parameters())
        for number in range(3):
            backward(engine.model, number)
            optimizer.step()
            optimizer.zero_grad()
        assert counts(engine) == (0, 0)


def test_second_homes_take_what_host_memory_is_left_for_the_last_units(
    wrap: Callable[..., infinity.Engine],
) -> None:
    def shadowed(engine: infinity.Engine) -> list[int]:
        found = [unit.index for unit in engine.units if unit.states.has_shadow]
        assert engine.memory()["cpu"] <= engine.config.cpu_memory
        optimizer = infinity.AdamW(engine.model.parameters())
        for number in range(3):
            backward(engine.model, number)
            optimizer.step()
            optimizer.zero_grad()
        assert counts(engine) == (2 * len(found), 0)
        return found

    engine = wrap("speculative", **WHERE["host"])
    units, homes = len(engine.units), engine.memory()["cpu"]
    assert shadowed(engine) == list(range(units))
    some = shadowed(wrap("speculative", cpu_memory=homes * 3 // 4, **WHERE["host"]))
    assert units - 1 in some and len(some) < units
    for options in ({"copy_on_write": False}, {"update": "exact"}, {"update": "auto"}):
        assert shadowed(wrap(**({"update": "speculative"} | options | WHERE["host"]))) == []


@pytest.mark.parametrize("fault", [{"fail_write_at": 0}, {"fail_write_at": 7}, {"fail_read_at": 3}])
def test_a_speculative_update_that_fails_leaves_the_last_step_whole(
    fault: dict[str, int], wrap: Callable[..., infinity.Engine]
) -> None:
    engine = wrap("speculative", precision="bf16")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    before = engine.state_dict()
    loss = engine.model(**text_batch(2)).loss
    engine.io.set_faults(**fault)
    with pytest.raises(
        infinity.EngineClosedError, match=r"^an update failed and the engine cannot go on: "
    ) as caught:
        loss.backward()
        until(engine, lambda: Probe(engine).failed)
        optimizer.step()
    assert isinstance(caught.value.__cause__, infinity.NvmeError)
    engine.io.set_faults()
    for unit in engine.units:
        values = unit.states.read(Kind.PARAM)
        for name, place in zip(unit.names, unit.layout.places, strict=True):
            assert torch.equal(values[place.offset : place.end].view(place.shape), before[name])
    assert Probe(engine).staging_left() == 0


def test_kept_updates_write_once_and_read_a_parameter_twice_more_at_most(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap(
        "speculative", lambda: transformer(width=48, depth=5), gpu_memory="300KiB", precision="bf16"
    )
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(8):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
        if number > 3:
            # An update that runs ahead may find no copy of the old parameter, and has no place for
            # the new one.
            plan = engine.plan()
            parameters = sum(unit.blocks[Kind.PARAM].nbytes for unit in engine.units)
            # Of the step before the last, which was not drained.
            read, written = Probe(engine).last_traffic
            assert written == plan.update_written
            assert plan.update_read <= read <= plan.read + 2 * parameters
    assert counts(engine)[0] > 0


def test_rolled_back_updates_are_counted_twice(wrap: Callable[..., infinity.Engine]) -> None:
    engine = wrap("speculative", precision="bf16")
    optimizer = infinity.AdamW(engine.model.parameters(), max_grad_norm=1e-3)
    for number in range(5):
        backward(engine.model, number)
        until(engine, lambda: all(job.written for job in Probe(engine).speculative_jobs.values()))
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    backward(engine.model, 5)
    optimizer.step()
    assert Probe(engine).last_traffic[1] == 2 * engine.plan().update_written
    assert engine.report().seconds["adam"] > 0


def test_what_is_ahead_goes_to_the_copy_that_the_next_forward_uses(
    wrap: Callable[..., infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[set[Block]] = []
    plain, backward_ended = Residency.renew, threading.Event()
    backward_ended.set()

    def renew(store: Residency, block: Block, *rest: Any) -> Any:
        # A unit that backward still uses has no place for what is new.
        assert backward_ended.wait(600)
        placing = plain(store, block, *rest)
        if placing is not None:
            placed[-1].add(block)
        return placing

    monkeypatch.setattr(Residency, "renew", renew)
    engine = wrap("speculative", gpu_memory="64MiB", cpu_memory="64MiB")  # for a copy of every unit
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(4):
        loss = engine.model(**text_batch(number)).loss
        placed.append(set())
        backward_ended.clear()
        loss.backward()
        backward_ended.set()
        until(engine, lambda: all(job.written for job in Probe(engine).speculative_jobs.values()))
        optimizer.step()
        optimizer.zero_grad()
    plan = engine.plan()
    assert plan.fetched == 0
    assert [len(blocks) for blocks in placed[1:]] == [len(engine.units)] * 3
    assert Probe(engine).last_traffic == (plan.read, plan.update_written)
    assert counts(engine) == (3 * len(engine.units), 0)


def test_states_are_read_ahead_for_what_backward_comes_to_first(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap(
        "speculative",
        lambda: transformer(width=96),
        precision="fp32",
        gpu_memory="8MiB",
        cpu_memory="32MiB",
    )
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    loss = engine.model(**text_batch(2)).loss
    expected = Probe(engine).speculative_jobs
    assert list(expected) and set(expected) == set(Probe(engine).speculative_order[:2])
    jobs = dict(expected)
    while not all(job.in_flight > 0 for job in jobs.values()):
        pass
    loss.backward()
    assert all(Probe(engine).speculative_jobs[unit] is job for unit, job in jobs.items())
    optimizer.step()
    assert counts(engine) == (2 * len(engine.units), 0)


@pytest.mark.parametrize("copies", [True, False])
def test_writes_that_the_next_forward_does_not_wait_for_let_reads_go_first(
    copies: bool, wrap: Callable[..., infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[list[bool]] = []
    engine = wrap("speculative", gpu_memory="64MiB" if copies else "200KiB")
    optimizer = infinity.AdamW(engine.model.parameters())
    plain = Probe(engine).nvme.write

    def write(transfer: Any) -> Any:
        priorities[-1].append(transfer.background)
        return plain(transfer)

    monkeypatch.setattr(Probe(engine).nvme, "write", write)
    for number in range(2):
        priorities.append([])
        backward(engine.model, number)
        until(engine, lambda: all(job.written for job in Probe(engine).speculative_jobs.values()))
        optimizer.step()
        optimizer.zero_grad()
        engine.drain()
    # The first step has nothing to guess by: of what it has no copy, the forward waits for the
    # writes, and reads it again.
    assert all(priorities[0]) is copies
    assert all(priorities[1])


def test_the_updater_of_a_collected_optimizer_guesses_nothing(
    wrap: Callable[..., infinity.Engine],
) -> None:
    engine = wrap("speculative")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    backward(engine.model, 2)
    assert not Probe(engine).speculative_jobs


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.booleans(), min_size=1, max_size=400))
def test_a_guess_is_rarely_wrong_for_long(steps: list[bool]) -> None:
    """Whatever is clipped: what is begun in vain stays a small part, unless guesses pay in
    between."""
    policy = Policy("auto")
    right = wrong = 0
    for unclipped in steps:
        if policy.speculates:
            right, wrong = right + unclipped, wrong + (not unclipped)
        policy.learn(update_seconds=2.0, forward_seconds=1.0, held=unclipped)
    assert wrong <= right + len(steps).bit_length() + 1


def test_when_speculative_updates_pay() -> None:
    policy = Policy("auto")
    assert not policy.speculates
    policy.learn(1.0, 2.0, held=True)  # hides behind the forward anyway
    assert not policy.speculates
    policy.learn(2.0, 1.0, held=True)
    assert policy.speculates
    policy.learn(2.0, 1.0, held=False)
    assert not policy.speculates
    policy.learn(2.0, 1.0, held=False)  # an exact step that was clipped
    assert not policy.speculates
    policy.learn(2.0, 1.0, held=True)
    assert policy.speculates
    for mode, early, waits in (
        ("exact", False, False),
        ("speculative", True, False),
        ("plain", False, True),
    ):
        forced = Policy(mode)
        for held in (False, True, False):
            forced.learn(2.0, 1.0, held)
            assert (forced.speculates, forced.waits) == (early, waits)


def test_how_long_updates_took_is_told_as_of_the_step(
    wrap: Callable[..., infinity.Engine], monkeypatch: Any
) -> None:
    """Also where the updater goes on from one step to the next without a pause."""
    engine = wrap("speculative")
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(
        Probe(engine).updater.speculation.policy,
        "learn",
        lambda busy, *_, **__: told.append((busy, time.perf_counter())),
    )
    optimizer = infinity.AdamW(engine.model.parameters())
    begun = time.perf_counter()
    for number in range(8):
        engine.io.set_faults(bytes_per_second=0 if number < 2 else 40e6)
        backward(engine.model, number)
        optimizer.step()
        optimizer.zero_grad()
    assert len(told) == 8
    for number, (busy, at) in enumerate(told):
        assert busy > 0 or number == 0
        assert sum(earlier for earlier, _ in told[: number + 1]) <= at - begun
