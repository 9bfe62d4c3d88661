"""Units all of whose states stay on the compute device: which ones, what that saves, and that no
number changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.device import ComputeDevice, Copy, Mark
from infinity.placement.cache import fill
from infinity.placement.spec import Kind
from infinity.quantities import round_up
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.discrete_engines import assert_equal
from support.models import text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
TIERS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "speculative": {"update": "speculative"},
    "gradients on nvme": {"gradients": "nvme"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "parameters on the device": {"parameters": "gpu", "optimizer": "cpu"},
}
DEVICES = {"unified": ComputeDevice, "discrete": DiscreteDevice}
MODELS: list[torch.nn.Module] = []
"""Those of the test that runs: an engine does not keep its model alive."""
each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device = DEVICES[
        request.node.callspec.params.get("device", "unified")
        if hasattr(request.node, "callspec")
        else "unified"
    ]
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", device)
    yield
    MODELS.clear()


def wrap(directory: Path, **options: Any) -> infinity.Engine:
    values = {
        "gpu_memory": "64MiB",
        "cpu_memory": "64MiB",
        "cache": 0,
        "gpu_cache": 0,
        "precision": "bf16",
        "poison": True,
    }
    config = config_of(**(values | {"nvme": directory, "device": "cpu"} | options))
    MODELS.append(infinity.wrap(transformer(), config))
    return infinity.engine(MODELS[-1])


def train(engine: infinity.Engine) -> dict[str, Any]:
    with engine:
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=0.5)
        losses, norms = [], []
        for step in range(STEPS):
            loss = engine.model(**text_batch(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.grad_norm)
        report = engine.report()
        states = optimizer.state_dict()["state"]
        tensors = {
            f"{number}.{name}": value
            for number, state in states.items()
            for name, value in state.items()
        }
        assert all(report.peaks[tier] <= report.budgets[tier] for tier in ("gpu", "cpu"))
        return {
            "report": report,
            "numbers": {"losses": losses, "norms": norms, **engine.state_dict(), **tensors},
        }


def kept(engine: infinity.Engine) -> list[int]:
    """The units that stay; of the others no state but what the configuration says is on the
    device."""
    config = engine.config
    tiers = {Kind.PARAM: config.parameters, Kind.GRAD: config.gradients}
    found = []
    for unit in engine.units:
        if all(block.tier.is_device for block in unit.blocks.values()):
            found.append(unit.facts.index)
        else:
            assert all(
                block.tier.name == tiers.get(kind, config.optimizer)
                for kind, block in unit.blocks.items()
            )
    return found


def nbytes(engine: infinity.Engine, units: list[int]) -> int:
    return sum(
        round_up(block.nbytes, 4096)
        for index in units
        for block in engine.units[index].blocks.values()
    )


@each_device
@pytest.mark.parametrize("tiers", TIERS)
def test_no_number_changes_and_what_stays_does_not_move(
    tiers: str, device: str, tmp_path: Path
) -> None:
    engine = wrap(tmp_path, **TIERS[tiers])
    sizes = [nbytes(engine, [unit.facts.index]) for unit in engine.units]
    without = train(engine)
    before = without["report"]
    for count in (1, len(sizes) - 1, len(sizes)):
        # To the byte what these units take; parameters may be there already.
        on_device = engine.config.parameters == "gpu"
        there = (
            sum(round_up(unit.facts.nbytes, 4096) for unit in engine.units[:count])
            if on_device
            else 0
        )
        with_cache = wrap(tmp_path, **TIERS[tiers], gpu_cache=sum(sizes[:count]) - there)
        assert kept(with_cache) == list(range(count))
        found = train(with_cache)
        assert_equal(found["numbers"], without["numbers"])
        report = found["report"]
        assert (
            report.gpu_resident
            == sum(unit.blocks[k].nbytes for unit in with_cache.units[:count] for k in unit.blocks)
            - there
        )
        moved = report.read_per_parameter, report.written_per_parameter
        if tiers != "speculative":  # which moves more or less, as it comes
            assert moved == (
                report.planned_read_per_parameter,
                report.planned_written_per_parameter,
            )
        if count == len(sizes):
            assert moved == (0, 0)
        elif before.read_per_parameter and tiers != "speculative":
            assert moved[0] < before.read_per_parameter and moved[1] < before.written_per_parameter
        if device == "discrete" and tiers != "speculative":
            assert (report.copied_to_device, report.copied_from_device) < (
                before.copied_to_device,
                before.copied_from_device,
            )


def test_cpu_and_device_update_different_units_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an update on the device before those on the CPU are done."""
    engines: list[infinity.Engine] = []
    waited: list[set[str]] = []

    class Slow(Copy):
        def done(self) -> bool:
            return self in ended

        def wait(self) -> None:
            if self not in ended:
                ended.add(self)
                waited.append(
                    {span.name for span in engines[0].recorder.spans() if span.lane == "adam"}
                )

    class Device(DiscreteDevice):
        def updating(self, after: Mark | None) -> Any:
            class Context:
                def __enter__(self) -> Copy:
                    return Slow()

                def __exit__(self, *error: object) -> None: ...

            return Context()

    ended: set[Copy] = set()
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", Device)
    engines.append(wrap(tmp_path, parameters="cpu", optimizer="cpu", gpu_cache="256KiB"))
    with engines[0] as engine:
        gpu_resident = kept(engine)
        assert 0 < len(gpu_resident) < len(engine.units)
        optimizer = infinity.AdamW(engine.model.parameters())
        engine.model(**text_batch(0)).loss.backward()
        optimizer.step()
        engine.drain()
        assert len(ended) == len(gpu_resident)
        assert waited[0] == {unit.facts.name for unit in engine.units}


@each_device
def test_auto_takes_what_is_left_on_a_device_with_memory_of_its_own(
    device: str, tmp_path: Path
) -> None:
    with wrap(tmp_path, gpu_cache="auto") as engine:
        assert kept(engine) == ([] if device == "unified" else list(range(len(engine.units))))
        everything = nbytes(engine, [unit.facts.index for unit in engine.units])
        largest = max(unit.facts.nbytes for unit in engine.units)
    for memory in (6 * largest, 9 * largest, everything):
        with wrap(tmp_path, gpu_cache="auto", gpu_memory=memory) as engine:
            homes = nbytes(engine, kept(engine))
            if device == "unified":
                assert homes == 0
            else:
                assert homes <= memory - 2 * largest, "the others pass"
                assert memory < everything or homes > memory // 2
    with wrap(tmp_path, gpu_cache="auto", update="delayed") as engine:
        assert kept(engine) == []


def test_what_leaves_the_others_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        infinity.BudgetError,
        match=(
            r"the smallest gpu_memory that works is (\d+) \(.*\), or set a smaller "
            r"gpu_cache$"
        ),
    ) as refusal:
        wrap(tmp_path, gpu_memory="256KiB", gpu_cache="256KiB")
    found = re.search(r"that works is (\d+)", str(refusal.value))
    assert found is not None
    with wrap(tmp_path, gpu_memory=int(found[1]), gpu_cache="256KiB") as engine:
        assert kept(engine)
    with pytest.raises(infinity.BudgetError):
        wrap(tmp_path, gpu_memory=int(found[1]) - 4096, gpu_cache="256KiB")


def test_another_optimizer_and_a_checkpoint_of_another_placement(tmp_path: Path) -> None:
    numbers = []
    for size in (0, "1MiB"):
        with wrap(tmp_path, gpu_cache=size, algorithm="other") as engine:
            optimizer: Any = infinity.adapt(torch.optim.RMSprop, engine.model.parameters(), lr=1e-3)
            for step in range(2):
                engine.model(**text_batch(step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            numbers.append(engine.state_dict())
    assert_equal(numbers[0], numbers[1])
    with wrap(tmp_path, gpu_cache="1MiB") as engine:
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2)
        engine.model(**text_batch(0)).loss.backward()
        optimizer.step()
        engine.save_checkpoint(tmp_path / "saved", optimizer)
        expected = engine.state_dict()
    with wrap(tmp_path) as engine:
        engine.load_checkpoint(
            tmp_path / "saved", infinity.AdamW(engine.model.parameters(), lr=1e-2)
        )
        assert_equal(engine.state_dict(), expected)


@given(st.integers(0, 100), st.lists(st.integers(1, 40), max_size=8))
def test_the_first_that_fit_are_taken(budget: int, sizes: list[int]) -> None:
    taken = fill(budget, sizes)
    left = budget
    for number, size in enumerate(sizes):
        assert (number in taken) == (size <= left)
        left -= size * (number in taken)
    assert left >= 0 and taken == sorted(taken)
