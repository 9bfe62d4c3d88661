"""A simulated step is never faster than its devices allow, and its lanes do the work that the
planner states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infinity.config import Config, Tuning
from infinity.plan.forecast import plan
from infinity.plan.hardware import DriveSpec, Hardware
from infinity.plan.memory import Training
from infinity.plan.model import Dimensions, of_dimensions
from infinity.plan.pace import Pace
from support.configs import default_config

GB = 10**9
READ, WRITE = 6e9, 3e9
BOX = Hardware(
    "box", 64 * GB, 1e14, gpu_memory=24 * GB, drives=(DriveSpec(READ, WRITE, 2000 * GB),)
)
MODEL = Dimensions(4, 1024, 8)


def paced(hardware: Hardware = BOX, accumulate: int = 1, **options: Any) -> Pace:
    update = options.pop("update", "auto")
    tuning = Tuning(cache=0, gpu_cache=0, update=update)
    config = default_config(hardware, **{"precision": "bf16", **options}, tuning=tuning)
    training = Training(1024, 1, accumulate)
    pace = plan(of_dimensions(MODEL, config), hardware, training, config).pace
    assert pace is not None
    return pace


@pytest.mark.parametrize("accumulate", [1, 2, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "exact"},
        {"update": "plain"},
        {"update": "delayed"},
        {"gradients": "nvme"},
        {"parameters": "gpu"},
        {"activations": "nvme"},
        {"moment_precision": "int8"},
        {"gpu_memory": "600MB"},
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_lanes_do_the_stated_work(gpus: int, options: dict[str, Any], accumulate: int) -> None:
    pace = paced(BOX.replace(gpus=gpus), accumulate, **options)
    assert pace.seconds * 1.001 >= max(pace.busy.values())
    written, read = (pace.busy[lane] for lane in ("nvme write", "nvme read"))
    assert pace.seconds * 1.02 >= written + read  # they take turns
    assert written * WRITE / gpus == pytest.approx(pace.traffic.update_written, rel=0.02)
    if options != {"gpu_memory": "600MB"}:  # a speculative update leaves a parameter to its fetch
        assert read * READ / gpus == pytest.approx(pace.traffic.read, rel=0.02)


def test_whole_gradients_are_reduced_once_in_a_step() -> None:
    """Stage 1: from host memory they pass the device then, and a part of them returns."""
    model = of_dimensions(MODEL, Config(precision="bf16"))
    whole = sum(unit.sharded(0, 2).nbytes for unit in model.units)
    ranks, on_gpu = BOX.replace(gpus=2), {"parameters": "gpu", "optimizer": "cpu"}

    def busy(accumulate: int, **options: Any) -> Callable[[str], float]:
        found = paced(ranks, accumulate, update="plain", **on_gpu, **options).busy
        return lambda lane: found.get(lane, 0.0)

    one, four = (busy(number, stage=1, gradients="cpu") for number in (1, 4))
    on_device = busy(4, stage=1, gradients="gpu")
    each_time = busy(4, stage=2, gradients="cpu")
    once = busy(1, stage=2, gradients="cpu")
    gradients = each_time("collective") - once("collective")
    assert gradients > 0
    for lane in (one, four, on_device):
        assert lane("collective") == pytest.approx(once("collective"))
    up = four("host to device") - on_device("host to device")
    assert up == pytest.approx(whole / ranks.link)
    back = four("device to host") - on_device("device to host")
    assert back == pytest.approx((4 * whole + whole / 2) / ranks.link)


def test_a_step_in_memory_is_its_compute_and_its_update() -> None:
    cpu = Hardware("cpu", 64 * GB, 1e11)
    pace = paced(cpu, parameters="gpu", gradients="gpu", optimizer="gpu")
    assert pace.mode == "plain"
    assert pace.seconds == pytest.approx(pace.busy["compute"] + pace.busy["adam"])
    assert pace.hiding_tokens is None and pace.written_per_day == 0


def test_faster_parts_never_make_a_slower_step() -> None:
    slow = paced()
    drive = DriveSpec(2 * READ, 2 * WRITE, 2000 * GB)
    for faster in ({"drives": (drive,)}, {"link": 40e9}, {"memory_bandwidth": 80e9}):
        assert paced(BOX.replace(**faster)).seconds <= slow.seconds * 1.001


def test_a_cpu_that_computes_shares_its_time_with_the_drives_and_the_updates() -> None:
    cpu = Hardware("cpu", 64 * GB, 1e12, drives=BOX.drives)
    apart, together = (paced(cpu.replace(together=share)).seconds for share in (1.0, 0.5))
    assert together > 1.05 * apart
    assert paced(BOX.replace(together=0.5)).seconds == paced().seconds  # a GPU computes


def test_chunks_of_an_update_take_time_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    before = paced(update="exact").busy["adam"]
    monkeypatch.setattr("infinity.plan.pace.CHUNK_SECONDS", 0.0)
    assert paced(update="exact").busy["adam"] < before
    in_memory = {"parameters": "gpu", "gradients": "gpu", "optimizer": "cpu"}
    free = paced(**in_memory).busy["adam"]
    monkeypatch.undo()
    assert paced(**in_memory).busy["adam"] == free
