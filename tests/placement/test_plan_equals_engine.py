"""What `infinity plan` states is what an engine takes: bytes of every tier, the order of uses, and
the bytes that a step moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.free_memory import Memory
from infinity.modules import division
from infinity.plan.forecast import plan
from infinity.plan.hardware import DriveSpec, Hardware
from infinity.plan.lanes import simulate
from infinity.plan.memory import Training
from infinity.plan.model import of_module
from infinity.plan.pace import steps_of
from infinity.plan.steps import READ, WRITE
from infinity.sharding.tiles import Tile
from support.configs import config_of
from support.models import FAMILIES, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

DRIVE = DriveSpec(2e9, 1e9, 1 << 40)
THIS = Hardware("this machine", 1 << 40, 1e11, drives=(DRIVE,))
VALUES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
SMALL = {"gpu_memory": "1MiB", "cpu_memory": "4MiB"}


def build(name: str) -> nn.Module:
    return FAMILIES[name].build() if name in FAMILIES else transformer(depth=3, tied=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"precision": "bf16", **SMALL}),
        ("llama", {"precision": "bf16", "gpu_memory": "128KiB", "cpu_memory": "3MiB", "cache": 0}),
        ("gpt2", {"precision": "fp32", **SMALL, "cache": 1 << 17}),
        ("gpt2", {"precision": "fp32", **SMALL, "cache": 1 << 17, "durability": "step"}),
        ("gpt2", {"precision": "fp32", **SMALL, "cache": 0, "durability": 3}),
        ("llama", {"precision": "bf16", **SMALL, "cache": 1 << 17, "durability": 2}),
        ("hand", {"precision": "bf16", **SMALL, "durability": 4}),
        ("hand", {"precision": "fp32", **SMALL, "copy_on_write": False}),
        ("hand", {"precision": "bf16", **SMALL, "gradients": "nvme", "moment_precision": "bf16"}),
        ("hand", {"precision": "bf16", **SMALL, "parameters": "cpu", "optimizer": "cpu"}),
        ("gpt2", {"precision": "bf16", **SMALL, "parameters": "gpu", "activations": "nvme"}),
        ("hand", {"precision": "fp32", **SMALL, "update": "delayed", "algorithm": "lion"}),
        ("hand", {"precision": "fp32", **SMALL, "recompute": "auto"}),
        ("llama", {"precision": "bf16", **SMALL, "recompute": "auto", "activations": "nvme"}),
    ],
)
def test_bytes_of_every_tier(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(nvme=[tmp_path], **options, device="cpu")
    model = build(name)
    forecast = plan(of_module(model, config, name, VALUES), THIS, Training(8, 2), config)
    assert forecast.problems == ()
    assert forecast.memory is not None
    planned, taken = forecast.memory, infinity.wrap(model, config)
    with infinity.engine(taken) as engine:
        probe = Probe(engine)
        assert planned.layout.rooms == probe.store.layout.rooms
        assert [
            (b.spec.name, b.spec.tier, b.spec.nbytes, b.copies, b.cached_elements)
            for b in planned.layout.blocks
        ] == [
            (b.spec.name, b.spec.tier, b.spec.nbytes, b.copies, b.cached_elements)
            for b in probe.store.layout.blocks
        ]
        arenas = {tier: probe.memory(tier).numel() for tier in ("gpu", "cpu", "staging")}
        saved = planned.layout.rooms.saved
        allocated = planned.allocated
        assert allocated["gpu"] == arenas["gpu"]
        assert allocated["cpu"] == arenas["cpu"] + arenas["staging"] + saved
        files = tmp_path.glob("infinity-states.bin")
        on_drive = sum(file.stat().st_size for file in files)
        grows = 4096 * (config.activations == "nvme")
        assert engine.memory()["nvme"] == planned.layout.nvme_bytes + grows
        assert on_drive == allocated["nvme"] or (grows and not allocated["nvme"])
        states = planned.states
        in_memory = sum(tiers["cpu"] for tiers in states.values())
        assert in_memory <= arenas["cpu"] == engine.memory()["cpu"]


@pytest.mark.parametrize("memory", [400 << 10, 480 << 10, 4 << 20])
def test_parameters_leave_half_to_what_blocks_save(memory: int, tmp_path: Path) -> None:
    """With a stated `gpu_memory`: of what is more than the units in use and the next ones need. The
    engine takes the room that the plan states."""
    layouts, model = {}, transformer(depth=12, tied=False)
    for recompute in ("off", "all", "auto"):
        config = config_of(nvme=[tmp_path], **SMALL | {"gpu_memory": memory}, recompute=recompute)
        found = plan(of_module(model, config, "", VALUES), THIS, Training(8, 2), config)
        assert found.memory is not None
        layouts[recompute] = found.memory.layout
    off, auto = layouts["off"], layouts["auto"]
    assert layouts["all"].rooms == off.rooms
    if memory == 4 << 20:  # all parameters fit beside
        assert auto.rooms.device == off.rooms.device
    else:
        assert auto.left_bytes > off.left_bytes == 0
        assert auto.rooms.device >= auto.left_bytes
    planned = plan(of_module(model, config, "", VALUES), THIS, Training(8, 2), config).memory
    assert planned is not None and planned.auto is not None
    least, most, room = planned.auto
    assert least < most and room == auto.left_bytes
    taken = infinity.wrap(model, config_of(**config.model_dump(exclude={"tuning"}), device="cpu"))
    with infinity.engine(taken) as engine:
        assert engine.report().activation_room == room


def test_budgets_that_nobody_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory that a plan describes, `wrap` chooses the budgets of the plan."""
    free, total = 6 << 30, 8 << 30
    monkeypatch.setattr("infinity.build.read_host", lambda: Memory(total, free, "this machine"))
    config = config_of(nvme=[tmp_path], precision="bf16", device="cpu")
    hardware = THIS.replace(host_memory=free, host_total=total)
    model = build("gpt2")
    memory = plan(of_module(model, config, "", VALUES), hardware, Training(8, 2), config).memory
    assert memory is not None
    with infinity.engine(infinity.wrap(model, config)) as engine:
        budgets = engine.report().budgets
        assert (budgets["gpu"], budgets["cpu"]) == memory.choice.budgets
        assert memory.layout.rooms == Probe(engine).store.layout.rooms


@pytest.mark.parametrize("name", ["llama", "gpt2", "hand"])
@pytest.mark.parametrize("gpu_memory", ["512KiB", "4MiB"])
def test_the_order_of_uses_and_the_traffic(name: str, gpu_memory: str, tmp_path: Path) -> None:
    config = config_of(
        nvme=[tmp_path], precision="fp32", gpu_memory=gpu_memory, cpu_memory="3MiB", cache=0,
        update="exact", device="cpu",
    )  # fmt: skip
    model = build(name)
    forecast = plan(of_module(model, config, name, VALUES), THIS, Training(8, 2), config)
    assert forecast.problems == () and forecast.pace is not None
    family = FAMILIES["llama"]
    with infinity.engine(infinity.wrap(model, config)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for number in range(4):
            model(**family.batch(number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        uses = [use.unit for use in (*forecast.model.forward, *forecast.model.backward)]
        once = [unit for at, unit in enumerate(uses) if uses[at - 1 : at] != [unit]]
        assert tuple(once) == Probe(engine).trace.last_cycle("train").order
        assert forecast.pace.traffic == engine.plan()


@pytest.mark.parametrize("mode", ["exact", "speculative"])
def test_the_simulated_steps_move_the_planned_bytes(mode: Any, tmp_path: Path) -> None:
    """Of a model whose units are fetched, evicted, and updated when they have a place. A
    speculative update reads no parameter that backward has left; the fetch reads it instead."""
    config = config_of(
        nvme=[tmp_path], precision="bf16", gpu_memory="512KiB", cpu_memory="3MiB", cache=0
    )
    training = Training(8, 2)
    model = of_module(transformer(width=64, depth=6), config, "hand", VALUES)
    memory = plan(model, THIS, training, config).memory
    assert memory is not None
    steps = steps_of(model, training, memory, THIS, mode)
    for _ in range(3):
        steps.step()
    before = dict(steps.moved)
    steps.step()
    moved = [steps.moved[lane] - before[lane] for lane in (READ, WRITE)]
    stated = plan(model, THIS, training, config).pace
    assert stated is not None
    assert moved == pytest.approx([stated.traffic.read, stated.traffic.update_written])
    simulate(steps.tasks, {})
    assert all(task.end >= need.end for task in steps.tasks for need in task.needs)


@pytest.mark.parametrize(
    ("name", "precision", "gpu_memory", "in_tiles"),
    [
        ("hand", "fp32", 4 << 20, False),
        ("hand", "fp32", 64 << 10, False),
        ("hand", "fp32", 48 << 10, True),
        ("hand", "bf16", 28 << 10, False),
        ("llama", "bf16", 20 << 10, False),
        ("gpt2", "fp32", 64 << 10, True),
    ],
)
def test_units_that_wrap_makes_smaller(
    name: str,
    precision: Any,
    gpu_memory: int,
    in_tiles: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units, bytes, the order of uses and the traffic of a model whose blocks do not fit.

    A plan takes modules to run as they are defined. Blocks of Llama define their norms last, so
    these are read in another order than planned.
    """
    monkeypatch.setattr(division, "LEAST_SPLIT", 4 << 10)
    config = config_of(
        nvme=[tmp_path], precision=precision, gpu_memory=gpu_memory, cpu_memory="3MiB", cache=0,
        update="exact", device="cpu",
    )  # fmt: skip
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    planned = of_module(model, config, name, VALUES)
    forecast = plan(planned, THIS, Training(8, 2), config)
    assert [type(module) for module in model.modules()] == kinds, "a plan changes nothing"
    assert forecast.model == plan(planned, THIS, Training(8, 2), config).model
    assert forecast.problems == () and forecast.pace is not None and forecast.memory is not None
    family = FAMILIES["llama"]
    with infinity.engine(infinity.wrap(model, config)) as engine:
        assert any(isinstance(module, Tile) for module in model.modules()) == in_tiles
        assert [unit.name for unit in forecast.model.units] == [unit.name for unit in engine.units]
        assert forecast.memory.layout.rooms == Probe(engine).store.layout.rooms
        assert forecast.memory.allocated["gpu"] == Probe(engine).memory("gpu").numel()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for number in range(4):
            model(**family.batch(number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        uses = [use.unit for use in (*forecast.model.forward, *forecast.model.backward)]
        once = [unit for at, unit in enumerate(uses) if uses[at - 1 : at] != [unit]]
        traffic, taken = forecast.pace.traffic, engine.plan()
        assert traffic.update_written == taken.update_written
        if name == "llama":
            return
        assert tuple(once) == Probe(engine).trace.last_cycle("train").order
        assert traffic.read == pytest.approx(taken.read, abs=8 << 10), "but for one small unit"


def test_a_plan_refuses_what_wrap_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one text, after both have tried tiles."""
    monkeypatch.setattr(division, "LEAST_SPLIT", 4 << 10)
    config = config_of(nvme=[tmp_path], gpu_memory="4KiB", cpu_memory="3MiB", device="cpu")
    model = build("hand")
    (problem,) = plan(of_module(model, config, "", VALUES), THIS, Training(8, 2), config).problems
    with pytest.raises(infinity.BudgetError) as refusal:
        infinity.wrap(model, config)
    assert str(refusal.value) == problem
