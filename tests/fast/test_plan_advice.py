"""Ten machines and models by hand: which plans fit, what the others are told, and that the advice
is enough."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from infinity.cli.plan_table import print_head
from infinity.plan.advice import advise
from infinity.plan.forecast import Forecast, config_text, plan, summary
from infinity.plan.hardware import DriveSpec, Hardware
from infinity.plan.memory import Training
from infinity.plan.model import Dimensions, of_dimensions
from support.configs import default_config

GB = 10**9
DRIVE = DriveSpec(6e9, 3e9, 2000 * GB)
BOX = Hardware("box", 64 * GB, 1e14, gpu_memory=24 * GB, drives=(DRIVE,))
SMALL = Dimensions(12, 768, 12)  # 0.12 billion parameters
SEVEN = Dimensions(32, 4096, 32)  # 6.6 billion
LARGE = Dimensions(80, 8192, 64)  # 65 billion
WIDE = Dimensions(16, 25600, 256)  # blocks of 8 billion
WINDOW = Training()
TRILLION = Dimensions(128, 25600, 256)


def planned(
    model: Dimensions, hardware: Hardware, training: Training = WINDOW, **options: Any
) -> Forecast:
    config = default_config(hardware, precision="bf16", **options)
    return plan(of_dimensions(model, config), hardware, training, config)


@pytest.mark.parametrize(
    ("model", "hardware", "training", "options", "advice"),
    [
        pytest.param(SMALL, BOX, Training(), {}, None, id="a small model"),
        pytest.param(SEVEN, BOX, Training(), {}, None, id="7B on one drive"),
        pytest.param(
            SEVEN, BOX, Training(), {"parameters": "cpu", "optimizer": "cpu"},
            'set optimizer="nvme"', id="states do not fit host memory",
        ),
        pytest.param(
            SEVEN, BOX, Training(), {"gpu_memory": "500MB"}, None, id="a budget for tiles alone",
        ),
        pytest.param(
            SEVEN, BOX, Training(), {"gpu_memory": "20MB"},
            "leave gpu_memory out", id="a budget is too small",
        ),
        pytest.param(
            SMALL, BOX, Training(1024, 32, 1, recomputes=False), {},
            "recompute activations (activation checkpointing)", id="activations",
        ),
        pytest.param(
            SMALL, BOX, Training(2048, 32), {},
            "use 2 micro-batches of 16 windows", id="logits",
        ),
        pytest.param(
            LARGE, BOX, Training(), {},
            'set gradients="nvme"', id="gradients do not fit host memory",
        ),
        pytest.param(
            SEVEN, BOX.replace(drives=(DriveSpec(6e9, 3e9, 50 * GB),), host_memory=40 * GB),
            Training(), {}, "set Tuning(copy_on_write=False), after which a failed step loses the "
            "states", id="the drive is small",
        ),
        pytest.param(
            SEVEN, BOX.replace(drives=()), Training(), {"parameters": "cpu", "optimizer": "cpu"},
            'set moment_precision="int8"', id="no drives and little memory",
        ),
        pytest.param(
            WIDE, BOX, Training(), {},
            'set gradients="nvme", set activations="nvme", and add 1.16 TiB of drives to each node',
            id="blocks that are too large for the GPU but for tiles",
        ),
    ],
)  # fmt: skip
def test_what_fits_and_what_to_change(
    model: Dimensions,
    hardware: Hardware,
    training: Training,
    options: dict[str, Any],
    advice: str | None,
) -> None:
    forecast = planned(model, hardware, training, **options)
    found = advise(forecast)
    assert forecast.fits == (advice is None)
    assert (found and found.words) == advice
    if found is not None:
        case = found.case
        changed = plan(forecast.model, case.hardware, case.training, case.config)
        assert changed.fits and changed.pace is not None


def test_a_plan_names_each_weight_that_wrap_would_cut() -> None:
    whole, tight = (planned(SEVEN, BOX, **more) for more in ({}, {"gpu_memory": "500MB"}))
    assert whole.model.tiled == () and summary(whole, None)["tiled"] == []
    assert "embedding.weight" in tight.model.tiled
    assert summary(tight, None)["tiled"] == list(tight.model.tiled)
    printed = Console(record=True, width=200, file=io.StringIO())
    print_head(printed, tight)
    assert "wrap cuts these weights into tiles" in (text := printed.export_text())
    assert all(name in text for name in tight.model.tiled)


def test_a_trillion_parameters_on_one_gpu() -> None:
    drives = (DriveSpec(6.5e9, 4e9, 7_680 * GB, 14e15),) * 4
    hardware = Hardware(
        "big",
        2000 * GB,
        4e14,
        gpu_memory=141 * GB,
        drives=drives,
        link=50e9,
        memory_bandwidth=300e9,
    )
    forecast = planned(TRILLION, hardware, gradients="nvme")
    assert forecast.fits and forecast.pace is not None and forecast.memory is not None
    assert forecast.model.parameters > 1.0e12
    traffic = forecast.pace.traffic
    # Some of it is cached in host memory.
    assert 20 < (traffic.read + traffic.update_written) / forecast.model.parameters < 32
    drives_need = traffic.read / 26e9 + traffic.update_written / 16e9
    assert drives_need < forecast.pace.seconds < 1.2 * drives_need
    assert forecast.wear is not None and not forecast.wear.is_assumed
    # 8 operations per token and parameter with recomputation, beside attention
    tokens = 4e14 * drives_need / (8 * forecast.model.parameters)
    assert forecast.pace.hiding_tokens == pytest.approx(tokens, rel=0.05)


def test_a_machine_without_drives_is_told_so() -> None:
    options = {"nvme": ["/mnt/nvme0"], "parameters": "nvme"}
    forecast = planned(SMALL, BOX.replace(drives=()), **options)
    assert forecast.problems == ("parameters and optimizer on nvme, but the machine has no drives",)


def test_a_config_to_paste() -> None:
    config = default_config(BOX, precision="bf16", gpu_memory="8GiB", tuning={"cache": 0})
    text = config_text(config)
    import infinity

    assert eval(text, {"infinity": infinity}) == config
