"""The part of the states on NVMe that stays in host memory: it changes no number (I8), moves no
byte, and is in the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.observe import Recorder
from infinity.placement.budget import CHUNK_ELEMENTS, STAGED_SETS
from infinity.placement.spec import BF16, BlockSpec, Kind
from infinity.tier import NVME
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
PRECISIONS = ("bf16", "fp32")
MODES = ("plain", "exact", "speculative", "auto")
SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)  # of what is on NVMe
STEADY = 3  # steps until what is resident repeats itself
LIMIT = 100.0  # of the norm; every fourth step is over it


def build(depth: int = 4) -> nn.Module:
    # A block has four chunks of the optimizer, the last one in part.
    return transformer(width=72, depth=depth)


Wrap = Callable[..., infinity.Engine]


@pytest.fixture
def wrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wrap]:
    made: list[tuple[nn.Module, infinity.Engine]] = []  # an engine does not keep its model alive

    def make(cache: Any = "auto", depth: int = 4, **options: Any) -> infinity.Engine:
        known = {
            "gpu_memory": "4MiB",
            "cpu_memory": "64MiB",
            "poison": True,
            "nvme": tmp_path_factory.mktemp("nvme"),
        }
        model = infinity.wrap(build(depth), config_of(**(known | {"cache": cache} | options)))
        made.append((model, infinity.engine(model)))
        return made[-1][1]

    yield make
    for _, engine in made:
        engine.close()


def step(
    engine: infinity.Engine, optimizer: infinity.AdamW, number: int, accumulation: int = 1
) -> None:
    for micro_batch in range(accumulation):
        loss = engine.model(**text_batch(number * accumulation + micro_batch)).loss
        (loss * (1e4 if number % 4 == 3 else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(engine: infinity.Engine, optimizer: infinity.AdamW) -> dict[str, torch.Tensor]:
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return engine.state_dict() | {
        f"{n}.{name}": value for n, state in states.items() for name, value in state.items()
    }


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def on_nvme(engine: infinity.Engine) -> int:
    """Bytes of what lives on NVMe, each once."""
    return sum(b.nbytes for unit in engine.units for b in unit.blocks.values() if b.tier.is_drive)


# Bytes


@pytest.mark.pairs
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_moves_is_what_the_planner_states_and_less_with_every_byte_kept(
    precision: str, gradients: str, accumulation: int, wrap: Wrap
) -> None:
    moved, kept = [], []
    options = {
        "update": "exact",
        "precision": precision,
        "gradients": gradients,
        "gpu_memory": "1MiB",
    }
    whole = on_nvme(wrap(0, **options))
    for share in SHARES:
        cache = int(share * whole)
        engine = wrap(cache, **options)
        optimizer = infinity.AdamW(engine.model.parameters(), max_grad_norm=LIMIT)
        for number in range(STEADY):
            step(engine, optimizer, number, accumulation)
        Probe(engine).come_to_rest()
        before = engine.recorder.counters()
        step(engine, optimizer, STEADY, accumulation)
        Probe(engine).come_to_rest()
        after, plan = engine.recorder.counters(), engine.plan()
        read, written = (
            after.get(f"nvme bytes {w}", 0) - before.get(f"nvme bytes {w}", 0)
            for w in ("read", "written")
        )
        assert (read, written) == (plan.read, plan.update_written)
        report = engine.report()
        assert round(report.read_per_parameter * report.parameters) == plan.read
        assert round(report.written_per_parameter * report.parameters) == plan.update_written
        assert cache - 12 * CHUNK_ELEMENTS * 2 < report.cached <= cache
        assert report.on_nvme == on_nvme(engine)
        copies = sum(
            len(b.home.extents) * b.moved_bytes
            for unit in engine.units
            for b in unit.blocks.values()
        )
        assert engine.memory()["nvme"] == copies <= 2 * (report.on_nvme - report.cached)
        moved.append(read + written)
        kept.append(report.cached)
    assert kept == sorted(set(kept))
    assert moved == sorted(set(moved), reverse=True)
    assert (moved[-1], kept[-1], engine.io) == (0, on_nvme(engine), None)


def test_parameters_are_kept_first_unless_that_would_let_no_update_be_speculative(
    wrap: Wrap,
) -> None:
    moved = {}
    for update in ("exact", "speculative"):
        engine = wrap(
            100 * CHUNK_ELEMENTS * 2, depth=16, update=update, precision="bf16", gpu_memory="400KiB"
        )
        optimizer = infinity.AdamW(engine.model.parameters())
        for number in range(2):
            step(engine, optimizer, number)
        plan, report = engine.plan(), engine.report()
        moved[update] = plan.read + plan.update_written
        assert report.cached > 90 * CHUNK_ELEMENTS * 2
        for unit in engine.units:
            parameter, *states = (
                block for kind, block in unit.blocks.items() if kind is not Kind.GRAD
            )
            assert len({block.cached_elements for block in states}) == 1
            assert parameter.cached_elements == (
                parameter.elements if update == "exact" else states[0].cached_elements
            )
    assert moved["exact"] < moved["speculative"]


# Values


def trained(engine: infinity.Engine) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """The norms of nine steps, two of which are clipped, and all values after them."""
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=LIMIT)
    norms = []
    for number in range(9):
        step(engine, optimizer, number)
        norms.append(optimizer.grad_norm)
    assert sum(norm > LIMIT for norm in norms if norm is not None) == 2
    return norms, everything(engine, optimizer)


@cache
def trained_in_host_memory(
    precision: str,
) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    options: dict[str, Any] = {"gpu_memory": "4MiB", "cpu_memory": "64MiB", "update": "plain"}
    config = config_of(parameters="cpu", optimizer="cpu", precision=precision, **options)
    model = infinity.wrap(build(), config)
    with infinity.engine(model) as engine:
        return trained(engine)


@pytest.mark.pairs
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", SHARES)
def test_numbers_are_the_same_whatever_is_kept_with_some_steps_clipped(
    precision: str, mode: str, share: float, wrap: Wrap
) -> None:
    options = {"precision": precision, "update": mode}
    engine = wrap(int(share * on_nvme(wrap(0, **options))), **options)
    norms, values = trained(engine)
    counters = engine.recorder.counters()
    if mode == "speculative" and share < 1.0:
        assert counters["updates kept"] > 0 and counters["updates rolled back"] > 0
    expected = trained_in_host_memory(precision)
    assert norms == expected[0]
    assert_equal(values, expected[1])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cpu_memory=st.integers(1 << 20, 8 << 20),
    cache=st.one_of(st.just("auto"), st.integers(0, 8 << 20)),
    gpu_memory=st.integers(300 << 10, 2 << 20),
    how=st.fixed_dictionaries(
        {
            "precision": st.sampled_from(PRECISIONS),
            "update": st.sampled_from(MODES),
            "copy_on_write": st.booleans(),
            "gradients": st.sampled_from(["cpu", "nvme"]),
            "parameters": st.sampled_from(["gpu", "cpu", "nvme", "nvme"]),
            "optimizer": st.sampled_from(["cpu", "nvme", "nvme"]),
        }
    ),
)
def test_any_budget_and_placement(
    cpu_memory: int, cache: Any, gpu_memory: int, how: dict[str, Any], wrap: Wrap
) -> None:
    budgets = {"cpu_memory": cpu_memory + (6 << 20), "gpu_memory": gpu_memory + (1 << 20)}
    engine = wrap(cache, **budgets, **how)
    reference = wrap(
        0, precision=how["precision"], update="plain", parameters="cpu", optimizer="cpu"
    )
    found = []
    for one in (engine, reference):
        optimizer = infinity.AdamW(one.model.parameters(), lr=1e-2, max_grad_norm=LIMIT)
        for number in range(5):
            step(one, optimizer, number)
        found.append(everything(one, optimizer))
    assert_equal(*found)
    report = engine.report()
    assert all(report.peaks[tier] <= report.budgets[tier] for tier in ("gpu", "cpu"))
    assert report.cached <= min(report.on_nvme, report.on_nvme if cache == "auto" else cache)
    for one in (engine, reference):
        one.close()


def partly(wrap: Wrap, **options: Any) -> infinity.Engine:
    """An engine of which half of every kind of state is kept, and at least one unit in part."""
    engine = wrap(int(0.42 * on_nvme(wrap(0, **options))), **options)
    shares = {
        b.cached_elements / b.elements
        for unit in engine.units
        for b in unit.blocks.values()
        if b.tier.is_drive
    }
    assert {0.0, 1.0} < shares
    return engine


@pytest.mark.parametrize("mode", ["exact", "speculative"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_and_weights_are_read_and_written_across_the_border(
    precision: str, mode: str, wrap: Wrap
) -> None:
    engines = [
        partly(wrap, precision=precision, update=mode),
        wrap(0, precision=precision, update="plain", parameters="cpu"),
    ]
    outcomes = []
    for engine in engines:
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2)
        for number in range(3):
            step(engine, optimizer, number)
        saved = copy.deepcopy(optimizer.state_dict())
        step(engine, optimizer, 3)
        optimizer.load_state_dict(saved)
        step(engine, optimizer, 4)
        engine.model(**text_batch(5)).loss.backward()
        with infinity.gathered(engine.model, write=True), torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(0.75)
        optimizer.step()
        optimizer.zero_grad()
        written = everything(engine, optimizer)
        for state in saved["state"].values():
            del state["exp_avg"]
        optimizer.load_state_dict(saved)  # what it has not begins anew
        step(engine, optimizer, 6)
        outcomes.append((written, everything(engine, optimizer)))
    for mine, theirs in zip(*outcomes, strict=True):
        assert_equal(mine, theirs)


def test_what_was_forgotten_is_zero_in_memory_and_on_the_drive_without_io(wrap: Wrap) -> None:
    engine = partly(wrap, precision="bf16", update="speculative")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        step(engine, optimizer, number)
    engine.drain()
    unit = next(
        u
        for u in engine.units
        if 0 < u.blocks[Kind.EXP_AVG].cached_elements < u.facts.layout.shard_numel
    )
    block, border = unit.blocks[Kind.EXP_AVG], unit.blocks[Kind.EXP_AVG].cached_elements
    values = unit.states.read(Kind.EXP_AVG)
    assert border % CHUNK_ELEMENTS == 0 and values[:border].any() and values[border:].any()
    before = engine.io.counters()["bytes_read"]
    unit.store.forget(block)
    assert not unit.states.read(Kind.EXP_AVG).any()
    assert engine.io.counters()["bytes_read"] == before
    unit.states.write(Kind.EXP_AVG, values)
    assert torch.equal(unit.states.read(Kind.EXP_AVG), values)
    assert engine.io.counters()["bytes_read"] == before + values[border:].nbytes


# Speculative updates


def test_a_rolled_back_update_leaves_what_is_kept_untouched(wrap: Wrap) -> None:
    engine = partly(wrap, precision="bf16", update="speculative")
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-1)
    for number in range(2):
        step(engine, optimizer, number)
    before = everything(engine, optimizer)
    started = Probe(engine).speculative_jobs
    engine.model(**text_batch(2)).loss.backward()

    def waiting() -> bool:
        """Whether all that may be written ahead is written."""
        return all(not job.chunks and job.in_flight == 0 for job in started.values())

    begun = {unit.facts.name for unit in engine.units if unit.update_blocks.has_shadow}
    assert {job.unit.facts.name for job in started.values() if job.update is not None} == begun
    assert 0 < len(begun) < len(engine.units)
    Probe(engine).await_jobs(waiting)
    assert any(job.in_memory for job in started.values()) and any(
        job.meter.written for job in started.values()
    )
    optimizer.zero_grad()  # rolls them back
    assert_equal(everything(engine, optimizer), before)


def test_once_confirmed_what_is_kept_costs_no_io(wrap: Wrap) -> None:
    """A step whose backward has written all that may be written ahead has only memory left to
    update."""
    engine = partly(wrap, precision="bf16", update="speculative")
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-1)
    for number in range(2):
        step(engine, optimizer, number)
    engine.drain()
    started = Probe(engine).speculative_jobs
    engine.model(**text_batch(2)).loss.backward()
    Probe(engine).await_jobs(
        lambda: all(not job.chunks and job.in_flight == 0 for job in started.values())
    )
    kept_whole = [u for u in engine.units if not u.update_blocks.has_shadow]
    before = everything_kept(engine)
    written = engine.recorder.counters()["nvme bytes written"]
    optimizer.step()
    engine.drain()
    assert engine.recorder.counters()["nvme bytes written"] == written
    after = everything_kept(engine)
    assert kept_whole and all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def everything_kept(engine: infinity.Engine) -> list[torch.Tensor]:
    kinds = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    blocks = [unit.blocks[kind] for unit in engine.units for kind in kinds]
    return [block.home.cached.clone() for block in blocks if block.home.cached is not None]


# Failures, memory, ranks


@pytest.mark.parametrize("fault", [{"fail_write_at": 0}, {"fail_write_at": 5}, {"fail_read_at": 2}])
def test_a_speculative_update_that_fails_leaves_the_last_step_whole_in_both_places(
    fault: dict[str, int], wrap: Wrap
) -> None:
    engine = partly(wrap, precision="bf16", update="speculative")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        step(engine, optimizer, number)
    before = engine.state_dict()
    loss = engine.model(**text_batch(2)).loss
    engine.io.set_faults(**fault)
    with pytest.raises(
        infinity.EngineClosedError, match=r"^an update failed and the engine cannot go on: "
    ) as caught:
        loss.backward()
        Probe(engine).await_failure()
        optimizer.step()
    assert isinstance(caught.value.__cause__, infinity.NvmeError)
    engine.io.set_faults()
    for unit in engine.units:
        values = unit.states.read(Kind.PARAM)
        for name, place in zip(unit.facts.names, unit.facts.layout.places, strict=True):
            assert torch.equal(values[place.offset : place.end].view(place.shape), before[name])
    assert Probe(engine).staging_left() == 0


@pytest.mark.parametrize("where", ["fail_read_at", "fail_write_at"])
def test_a_drive_that_fails_in_the_rest_of_a_kept_block_ends_the_engine(
    where: str, wrap: Wrap
) -> None:
    engine = partly(wrap, precision="fp32", update="exact")
    optimizer = infinity.AdamW(engine.model.parameters())
    for number in range(2):
        step(engine, optimizer, number)
    engine.model(**text_batch(2)).loss.backward()
    engine.drain()
    engine.io.set_faults(**{where: 0})
    optimizer.step()
    with pytest.raises(
        infinity.EngineClosedError, match=r"^an update failed and the engine cannot go on: "
    ):
        engine.drain()
    engine.io.set_faults()
    assert Probe(engine).staging_left() == 0
    with pytest.raises(infinity.EngineClosedError):
        engine.state_dict()


def test_a_fetch_that_fails_in_the_rest_of_a_kept_parameter_is_an_error_and_the_next_one_works(
    wrap: Wrap,
) -> None:
    engine = partly(wrap, precision="bf16", update="speculative")
    unit = next(
        u
        for u in engine.units
        if 0 < u.blocks[Kind.PARAM].cached_elements < u.facts.layout.shard_numel
    )
    with infinity.gathered(unit.facts.parameters):
        expected = unit.on_device.wait().clone()
    unit.store.resident.begin_update(unit.blocks[Kind.PARAM])  # drops the copy
    unit.store.resident.end_update([])
    unit.blocks[Kind.PARAM].copy.to_absent()
    engine.io.set_faults(fail_read_at=0)
    unit.on_device.start()
    with pytest.raises(infinity.NvmeError):
        unit.on_device.wait()
        unit.on_device.wait()  # where the mover met the error first, this one tries again
        pytest.skip("the mover met the only error")
    unit.on_device.release()
    engine.io.set_faults()
    with infinity.gathered(unit.facts.parameters):
        assert torch.equal(unit.on_device.wait(), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 5, 8, 16])
def test_the_cache_takes_what_is_left_and_no_more(
    precision: str, room: int, smallest: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"nvme": tmp_path, "precision": precision}
    budgets = smallest(build(), **options)
    budgets["cpu_memory"] += room * MIB
    model = infinity.wrap(build(), config_of(**options, **budgets))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(3):
            step(engine, optimizer, number)
        report = engine.report()
        assert report.peaks["cpu"] <= budgets["cpu_memory"]
        assert Probe(engine).used("cpu") + Probe(engine).staging_bytes <= budgets["cpu_memory"]
        least = smallest(build(), **options)["cpu_memory"]
        assert least == budgets["cpu_memory"] - room * MIB, (
            "the smallest budget is what it was without a cache"
        )
        if report.cached < report.on_nvme:
            assert Probe(engine).staged_sets >= min(STAGED_SETS, room)
            unused = budgets["cpu_memory"] - Probe(engine).used("cpu") - Probe(engine).staging_bytes
            assert unused < CHUNK_ELEMENTS * 16 or room == 0
        else:
            assert engine.io is None and Probe(engine).staging_bytes == 0


def test_staging_grows_with_what_is_left_for_it(wrap: Wrap) -> None:
    engine = wrap(0, cpu_memory="16MiB")
    assert (Probe(engine).staged_sets, engine.report().cached) == (24, 0)
    limited = wrap(3 * MIB, cpu_memory="16MiB", precision="fp32")
    assert 2 * MIB < limited.report().cached <= 3 * MIB and Probe(limited).staged_sets > STAGED_SETS


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_device_that_the_drive_cannot_reach_gets_both_parts(kept: int, tmp_path: Path) -> None:
    elements = 2 * CHUNK_ELEMENTS + 2048
    cache = 1 << 30 if kept == 3 else kept * CHUNK_ELEMENTS * 2
    config = infinity.Config(
        nvme=tmp_path,
        gpu_memory=MIB,
        cpu_memory=2 * MIB,
        tuning=infinity.Tuning(cache=cache, poison=True),
    )
    device = DiscreteDevice()
    store = Store(config, device, Recorder())
    block = store.add(BlockSpec(0, Kind.PARAM, elements, BF16, NVME, 2 * elements, 0, "param"))
    store.open(store.placement.layout(block.spec.span))
    try:
        assert block.cached_elements == min(kept * CHUNK_ELEMENTS, elements)
        values = torch.arange(elements, dtype=torch.int16).view(torch.uint8)
        store.resident.begin_update(block)
        for begin in store.staging.chunks(block):
            (chunk,) = store.staging.check_out(ChunkRequest([block], begin))
            chunk.tensor.copy_(values[2 * begin : 2 * begin + chunk.tensor.numel()])
            chunk.commit()
            chunk.release()
        store.resident.end_update([block])
        read: list[int] = []
        device.on_upload = lambda target, after: read.append(store.meter.read)
        store.resident.start(block)
        assert torch.equal(store.resident.wait(block), values)
        store.resident.release(block)
        assert store.meter.read == block.moved_bytes == 2 * (elements - block.cached_elements)
        if kept == 0:
            assert read[0] == block.moved_bytes, (
                "the next chunks are read while the first is copied"
            )
        assert store._arenas.staging.used == 0
    finally:
        store.close()
