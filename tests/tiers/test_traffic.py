"""The bytes that cross to NVMe and the bytes of memory are what the planner and the budgets say, by
three counts.

Ours (`engine.report()`), the planner's (`engine.plan()`), and the kernel's (`/proc/self/io`, which
O_DIRECT makes exact, and `VmHWM`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.placement.budget import STAGED_SETS
from infinity.placement.spec import MOMENTS, Kind
from support.budgets import ROOMY
from support.children import CHILD
from support.configs import config_of
from support.machine import PAGE
from support.models import text_batch, transformer
from support.probe import Probe
from support.traffic import STEADY, check_traffic, counted, is_what_the_kernel_counts

MIB = 1 << 20
PRECISIONS = ("bf16", "fp32")

pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> nn.Module:
    return transformer(width=48, depth=5)


def step(model: nn.Module, optimizer: infinity.AdamW, number: int, accumulation: int = 1) -> None:
    for micro_batch in range(accumulation):
        model(**text_batch(number * accumulation + micro_batch)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_states_that_are_read_ahead_wait_for_the_copy_of_their_parameter(
    tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    """The first unit is so large that its copy comes last in backward: read ahead of it, its
    parameter would be read twice."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(128, 4096), nn.Linear(4096, 128), *(nn.Linear(128, 128) for _ in range(6))
        )

    config: dict[str, Any] = {"nvme": tmp_path, "precision": "fp32", "update": "exact"}
    budgets = smallest(build(), **config) | {"cpu_memory": 256 * MIB, "cache": 0}
    model = infinity.wrap(build(), config_of(**config, **budgets))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        assert Probe(engine).staged_sets > STAGED_SETS
        for number in range(STEADY + 1):
            model(
                torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        check_traffic(model)


@pytest.mark.pairs
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("extra", [0, 4, 16, 100])
@pytest.mark.parametrize("update", ["exact", "plain"])
def test_traffic_is_what_the_planner_states(
    update: str,
    precision: str,
    accumulation: int,
    extra: int,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
) -> None:
    config: dict[str, Any] = {"nvme": [tmp_path], "precision": precision, "update": update}
    config |= smallest(build(), **config)
    config["gpu_memory"] += extra * PAGE
    model = infinity.wrap(build(), config_of(**config))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(STEADY + 3):
            step(model, optimizer, number, accumulation)
        check_traffic(model, accumulation)
        assert extra == 100 or engine.plan().fetched > 0


@pytest.mark.parametrize("extra", [0, 4, 16, 100])
def test_who_waits_for_updates_has_parameters_read_again(
    extra: int, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    """An update that has no place yet is written, and the next forward reads what it wrote."""
    config: dict[str, Any] = {"nvme": [tmp_path], "precision": "bf16", "update": "exact"}
    config |= smallest(build(), **config)
    config["gpu_memory"] += extra * PAGE
    model = infinity.wrap(build(), config_of(**config))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        found = []
        for number in range(2 * STEADY + 2):
            step(model, optimizer, number)
            if number < STEADY + 1:
                engine.drain()
            if number in (STEADY + 1, 2 * STEADY + 1):
                found.append(engine.report())
        waited, alone = found
        assert (
            round(
                (waited.read_per_parameter - waited.planned_read_per_parameter) * waited.parameters
            )
            == waited.read_again
        )
        assert (waited.read_again > 0) is (extra < 100)
        assert alone.read_per_parameter == alone.planned_read_per_parameter
        assert alone.read_again == 0


@pytest.mark.pairs
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(
    "where",
    [
        {"gradients": "nvme"},
        {"parameters": "cpu"},
        {"parameters": "gpu", "optimizer": "cpu", "gradients": "nvme"},
    ],
)
def test_traffic_of_other_placements(
    where: dict[str, str], max_grad_norm: float | None, accumulation: int, tmp_path: Path
) -> None:
    # Nothing is done twice.
    config = config_of(nvme=[tmp_path], precision="bf16", update="exact", **ROOMY, **where)
    model = infinity.wrap(build(), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), max_grad_norm=max_grad_norm)
        for number in range(STEADY + 2):
            step(model, optimizer, number, accumulation)
        check_traffic(model)
        assert engine.plan().read > 0


@pytest.mark.parametrize("update", ["exact", "plain"])
@pytest.mark.parametrize("cache", [0, "200KiB", "auto"])
def test_what_commits_need_is_written_wherever_it_is_cached(
    cache: int | str, update: str, tmp_path: Path
) -> None:
    """14 bytes: a bf16 parameter, the other half of its master, two moments. Reads get fewer."""
    options: dict[str, Any] = {"precision": "bf16", "update": update, "cache": cache}
    config = config_of(nvme=[tmp_path], durability="step", **ROOMY | options)
    model = infinity.wrap(build(), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(STEADY + 2):
            step(model, optimizer, number)
        check_traffic(model)
        numel = sum(unit.layout.numel for unit in engine.units)
        assert engine.plan().update_written == (2 + 2 + 4 + 4) * numel
        report = engine.report()
        assert report.written_through == report.cached
        assert (report.cached == 0) == (cache == 0) and (engine.plan().read == 0) == (
            cache == "auto"
        )


@pytest.mark.parametrize("update", ["exact", "speculative", "plain"])
@pytest.mark.parametrize("cache", [0, "200KiB", "auto"])
def test_what_is_cached_is_written_by_steps_that_are_committed_alone(
    cache: int | str, update: str, tmp_path: Path
) -> None:
    """12 bytes: a bf16 parameter, the other half of its master, two moments. What is not cached is
    written by every step, by none twice."""
    every = 3
    options: dict[str, Any] = {"precision": "bf16", "update": update, "cache": cache}
    config = config_of(nvme=[tmp_path], durability=every, **ROOMY | options)
    model = infinity.wrap(build(), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        numel = sum(unit.layout.numel for unit in engine.units)
        written = {}
        for number in range(3 * every):
            step(model, optimizer, number)
            report, plan = engine.report(), engine.plan()
            # What the step before this one has moved, to its end.
            written[number] = round(report.written_per_parameter * report.parameters)
            stated = round(report.planned_written_per_parameter * report.parameters)
            if number >= STEADY:
                assert written[number] == stated
        cached = report.cached
        assert (cached == 0) == (cache == 0) and report.written_through == cached
        assert (plan.update_written, plan.commit_written) == (12 * numel - cached, cached)
        for number in range(STEADY, 3 * every):
            is_committed = number % every == 0
            assert written[number] == 12 * numel - cached * (not is_committed)
        assert plan.mean_written(every) == 12 * numel - cached + cached / every


def test_nothing_on_nvme_moves_nothing(tmp_path: Path) -> None:
    model = infinity.wrap(build(), config_of(**ROOMY, parameters="cpu", optimizer="cpu"))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(STEADY):
            step(model, optimizer, number)
        check_traffic(model)
        assert (engine.plan().read, engine.plan().update_written, engine.io) == (0, 0, None)
        assert engine.report().read_per_parameter == 0


# Bytes per parameter at rest in states, by what is kept: the master (or its low half), and two
# moments.
LEDGER = [({"split_master": False}, 4 + 8), ({}, 2 + 8), ({"moment_precision": "bf16"}, 2 + 4)]


@pytest.mark.parametrize("extra_blocks", [0, 2])
@pytest.mark.parametrize(("formats", "states"), LEDGER, ids=["fp32", "split", "bf16"])
def test_bytes_per_parameter_by_our_count_and_by_the_kernels(
    formats: dict[str, Any],
    states: int,
    extra_blocks: int,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
) -> None:
    """Everything but gradients on NVMe, bf16. States are read and written, parameters written; a
    parameter is read for backward and, as the high half of a split master, for its update, unless
    it is there still. For forward it always is."""
    width, depth = 256, 4
    config: dict[str, Any] = {
        "nvme": [tmp_path],
        "precision": "bf16",
        "update": "exact",
        "cache": 0,
        **formats,
    }
    config |= smallest(transformer(width=width, depth=depth), **config)
    config["cpu_memory"] += 8 * MIB
    config["gpu_memory"] += extra_blocks * 12 * width * width * 2
    model = infinity.wrap(transformer(width=width, depth=depth), config_of(**config))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(STEADY):
            step(model, optimizer, number)
        Probe(engine).come_to_rest()
        ours, kernels = engine.recorder.counters(), counted(("read_bytes", "write_bytes"))
        native = engine.io.counters()
        for number in range(STEADY, STEADY + 2):
            step(model, optimizer, number)
        Probe(engine).come_to_rest()
        kernel_read, kernel_written = (
            after - before
            for before, after in zip(kernels, counted(("read_bytes", "write_bytes")), strict=True)
        )
        plan, after = engine.plan(), engine.recorder.counters()
        read, written = (
            after[key] - ours[key] for key in ("nvme bytes read", "nvme bytes written")
        )
        assert (read, written) == (2 * plan.read, 2 * plan.update_written)
        moved = engine.io.counters()
        assert moved["bytes_read"] - native["bytes_read"] == read
        assert moved["bytes_written"] - native["bytes_written"] == written
        assert moved["bounced_bytes"] == 0
        check_traffic(model)
        parameters = engine.report().parameters
        assert parameters > 3_000_000
        padded = sum(unit.layout.numel for unit in engine.units)
        assert padded < 1.01 * parameters
        assert plan.update_written == (states + 2) * padded
        assert plan.fetched <= 2 * padded
        high_halves = 0 if formats.get("split_master") is False else 2 * padded
        assert states * padded <= plan.update_read <= states * padded + high_halves
        assert plan.read + plan.update_written <= (2 * states + 6) * padded
        assert extra_blocks == 0 or plan.fetched < 2 * padded
        if os.major(tmp_path.stat().st_dev) == 0:
            pytest.skip(
                "this file system is not on a block device, so the kernel counts none of its bytes"
            )
        assert is_what_the_kernel_counts((read, written), (kernel_read, kernel_written))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "where",
    [{}, {"gradients": "nvme"}, {"parameters": "cpu"}, {"parameters": "gpu", "optimizer": "cpu"}],
)
def test_the_smallest_budget_works_and_a_byte_less_is_refused(
    precision: str, where: dict[str, str], tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    config: dict[str, Any] = {"nvme": [tmp_path], "precision": precision} | where
    budgets = smallest(build(), **config)
    for key, value in budgets.items():
        with pytest.raises(
            infinity.BudgetError, match=rf"the smallest {key} that works is {value} \("
        ):
            infinity.wrap(build(), config_of(**(config | budgets | {key: value - 1})))
    assert list(tmp_path.iterdir()) == []
    model = infinity.wrap(build(), config_of(**config, **budgets))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(STEADY):
            step(model, optimizer, number, accumulation=2)
        report = engine.report()
        for tier in ("gpu", "cpu"):
            assert 0 < report.peaks[tier] <= report.budgets[tier] == budgets[f"{tier}_memory"]
            assert 0 <= engine.memory()[tier] <= report.peaks[tier]


def test_the_smallest_nvme_memory_works_and_a_byte_less_is_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {"nvme": [tmp_path], "precision": "bf16"} | ROOMY
    with pytest.raises(
        infinity.BudgetError, match=r"the smallest nvme_memory that works is \d+"
    ) as refusal:
        infinity.wrap(build(), config_of(**config, nvme_memory=0))
    least = int(str(refusal.value).split("that works is ")[1].split()[0])
    with pytest.raises(
        infinity.BudgetError, match=f"the smallest nvme_memory that works is {least}"
    ):
        infinity.wrap(build(), config_of(**config, nvme_memory=least - 1))
    assert list(tmp_path.iterdir()) == []
    model = infinity.wrap(build(), config_of(**config, nvme_memory=least))
    with infinity.engine(model) as engine:
        (states,) = [path for path in tmp_path.iterdir() if path.suffix == ".bin"]
        assert states.stat().st_size == least
        # Preallocated: a later write cannot meet a full file system.
        assert states.stat().st_blocks * 512 >= least
        assert engine.memory()["nvme"] <= least
        assert (states.stat().st_mode & 0o777) == 0o600


WIDTH, DEPTH, BATCH, LENGTH = 640, 6, 4, 32  # 29.6 million parameters in 6 blocks and 2 small units


class Perceptrons(nn.Module):
    """A stack of wide perceptrons whose parameters all come from modules that can initialise
    themselves."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 6 * width),
                nn.GELU(),
                nn.Linear(6 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def resident(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


def train_fresh(
    directory: str, gpu_memory: int, cpu_memory: int, width: int, depth: int
) -> dict[str, int]:
    """Build a model inside `infinity.init()`, train it for three steps, and say how the resident
    memory grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = resident("VmRSS")
    with infinity.init():
        model = Perceptrons(width, depth)
    config = infinity.Config(
        nvme=[directory], precision="bf16", gpu_memory=gpu_memory, cpu_memory=cpu_memory
    )
    model = infinity.wrap(model, config, seed=0)
    optimizer = infinity.AdamW(model.parameters())
    with infinity.engine(model) as engine:
        for number in range(3):
            model(
                torch.randint(
                    0, 256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
                )
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        found = {
            "grown": resident("VmRSS") - before,
            "peak": resident("VmHWM") - before,
            "parameters": engine.report().parameters,
            "largest": max(unit.facts.nbytes for unit in engine.units),
        }
    found["closed"] = resident("VmRSS") - before
    assert engine is not None and optimizer.param_groups
    return found


def test_resident_memory_stays_under_the_budgets(tmp_path: Path) -> None:
    """The allowance is the gradients of the largest unit, the activations, and 32 MiB for what
    torch keeps.

    A small model is trained first, so that what is loaded and started only once does not count.
    malloc gives back what is freed: with thresholds that adapt it keeps 0 to 60 MiB more, from run
    to run.
    """
    gpu_memory, cpu_memory = 32 * MIB, 96 * MIB
    gives_back = {
        "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
        "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    }
    child = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(tmp_path), str(gpu_memory), str(cpu_memory)],
        capture_output=True,
        check=False,
        text=True,
        env=CHILD["env"] | gives_back,
    )
    assert child.returncode == 0, child.stderr
    measured = json.loads(child.stdout)
    assert measured["parameters"] > 29_000_000
    activations = 2 * BATCH * LENGTH * (DEPTH * (2 + 6 + 6 + 1) * WIDTH + 256 * 4)
    allowance = measured["largest"] + activations + 32 * MIB
    assert measured["grown"] <= measured["peak"] <= gpu_memory + cpu_memory + allowance
    # A plain model with masters, moments and gradients holds that much.
    assert measured["peak"] < 16 * measured["parameters"]
    assert measured["closed"] <= allowance  # although the engine and the optimizer are still there
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("formats", "states"), LEDGER, ids=["fp32", "split", "bf16"])
def test_states_on_nvme_take_what_the_ledger_says(
    formats: dict[str, Any], states: int, tmp_path: Path
) -> None:
    config = config_of(nvme=[tmp_path], precision="bf16", copy_on_write=False, **formats, **ROOMY)
    model = infinity.wrap(build(), config)
    with infinity.engine(model) as engine:
        padded = sum(unit.layout.numel for unit in engine.units)
        assert engine.memory()["nvme"] == (2 + states) * padded
        assert {kind.value: block.tier for kind, block in engine.units[0].blocks.items()} == {
            kind.value: "cpu" if kind is Kind.GRAD else "nvme"
            for kind in (Kind.PARAM, Kind.GRAD, Kind.MASTER, *MOMENTS["adam"])
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    budgets = int(sys.argv[2]), int(sys.argv[3])
    train_fresh(sys.argv[1], *budgets, width=16, depth=2)
    print(json.dumps(train_fresh(sys.argv[1], *budgets, width=WIDTH, depth=DEPTH)))
