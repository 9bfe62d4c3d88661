"""What `benchmarks/gpu` runs on a GPU: the script goes through on the CPU at tiny sizes, and its
arithmetic of sizes holds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.bench.step.train import find_source
from support.children import CHILD
from support.gpu_benchmarks import FOLDER, load

GIB = 1 << 30


sizes = load("sizes")
H100 = sizes.Machine(61 * GIB, 110 * GIB, 57 * GIB)
CONFIGS = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "configs").glob("*.json")}


def rehearse(output: Path, nvme: Path, *more: object) -> tuple[str, dict[str, Any]]:
    """What `run_all` prints, and the parts that its results have then."""
    command = [FOLDER / "run_all", "--rehearse", "--output", output, "--nvme", nvme, *more]
    done = subprocess.run([sys.executable, *command], capture_output=True, **CHILD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((output / "results.json").read_text())


def test_the_rehearsal_runs_what_is_cheap_and_writes_what_became_of_each_part(
    tmp_path: Path,
) -> None:
    parts = ["memory", "drive", "kernels", "links", "step-13b"]
    output, copy = tmp_path / "out", tmp_path / "copy"
    _, written = rehearse(output, tmp_path, "--only", *parts, "--copy-to", copy)
    assert list(written["parts"]) == parts
    assert written["machine"]["versions"]["torch"]
    assert written["parts"]["kernels"]["status"] == "skipped"
    results = {name: part.get("result") for name, part in written["parts"].items()}
    assert [each["bytes"] for each in results["memory"]["slices"]] == [16 << 20] * 4
    assert results["drive"]["read_bytes_per_second"] > 0
    rows = results["links"]["rows"]
    assert [row["name"] for row in rows] == ["host_to_device", "device_to_host", "nvme_to_device"]
    assert all(row["ratio"]["median"] > 0 for row in rows)
    step = results["step-13b"]
    assert step["result"]["parameters_count"] == step["plan"]["parameters_count"]
    for tier, use in step["result"]["tiers"].items():
        assert 0 < use["peak_bytes"] <= step["plan"]["budget_bytes"][tier]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out"]
    files = ["llama-2-13b.trace.json", "log.txt", "results.json"]
    for folder in (output, copy):
        assert sorted(path.name for path in folder.iterdir()) == files


def test_each_command_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """What was cut off comes last; what has ended is not run again."""
    ended = {"status": "ok", "result": {}}
    names = list(load("run_all").PARTS)
    done = dict.fromkeys(names, ended) | {"drive": {"status": "begun"}}
    del done["kernels"]
    (tmp_path / "results.json").write_text(json.dumps({"machine": {}, "parts": done}))
    printed, written = rehearse(tmp_path, tmp_path)
    said = [line.split(":")[0] for line in printed.splitlines()]
    assert said == ["kernels", "drive", f"all is in {tmp_path}"]
    assert written["parts"]["memory"] == ended


def test_a_command_begins_no_part_that_it_has_no_time_for(tmp_path: Path) -> None:
    printed, written = rehearse(tmp_path, tmp_path, "--most-seconds", "15")
    assert (written["parts"], printed.split(":")[0]) == ({}, "left for the next command")


def test_the_parts_of_three_commands_end_in_time() -> None:
    """Each of at most 580 seconds, of which the first has to build the package."""
    parts, commands = load("run_all").PARTS, [150]
    for part in parts.values():
        if commands[-1] + part.limit > 565:
            commands.append(0)
        commands[-1] += part.limit
    assert len(commands) == 4, commands  # what is of least worth is left to a fourth
    assert list(parts)[-1] == "step-8b" and commands[-1] == parts["step-8b"].limit


@pytest.mark.parametrize("carries_libraries", [True, False])
def test_a_machine_without_an_index_builds_with_the_wheels_that_were_carried(
    carries_libraries: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a folder that is kept, without a virtual environment; the wheels once, the package at
    every command, for it may have changed."""
    wheels, kept = tmp_path / "wheels", tmp_path / "kept"
    wheels.mkdir()
    (wheels / "pydantic-2.0-py3-none-any.whl").touch()
    for name in ("liburing", "libaio") if carries_libraries else ():
        (wheels / name).mkdir()
    commands: list[list[str]] = []

    def run(*command: object) -> None:
        commands.append([str(part) for part in command])
        (kept / "site").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "before"})
    environment = load("wheels").install(wheels, kept, run, "90")
    assert environment["PYTHONPATH"] == f"{kept / 'site'}:before"
    assert (f"-L{wheels / 'libaio'}" in environment.values()) is carries_libraries
    carried, built = commands
    assert carried[-1] == str(wheels / "pydantic-2.0-py3-none-any.whl")
    for command in (carried, built):
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert {"--no-index", "--no-deps", "--target", str(kept / "site")} <= set(command)
    assert "--no-build-isolation" in built and environment["CUDAARCHS"] == "90"
    assert any("INFINITY_LIBURING_LIBRARY" in part for part in built) is carries_libraries
    load("wheels").install(wheels, kept, run)
    assert commands[2][-1] == built[-1] and len(commands) == 3


def test_libraries_that_are_to_be_carried_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is downloaded: a machine without them would measure no DeepSpeed on NVMe."""
    wheels = load("wheels")
    monkeypatch.setattr(wheels, "LIBRARIES", {"absent": "absent.a", "missing": "missing.so"})
    monkeypatch.setattr(sys, "argv", ["wheels.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"absent and missing must .* absent-dev missing-dev"):
        wheels.main()


@pytest.mark.parametrize("way", ["build-nvme", "build-cpu"])
def test_a_peer_that_cannot_be_compiled_leaves_the_other_ways(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = load("../step")
    ran: list[str] = []

    def child(options: object, turn: object, name: str, *_: object) -> dict[str, Any]:
        ran.append(name)
        if name == way:
            return {"skipped": "it failed: no compiler"}
        return {"parameters": 1, "step_s": [1.0], "peak_MiB": 1.0}

    monkeypatch.setattr(step, "child", child)
    monkeypatch.setattr(step, "rows_of", lambda model, runs, drive: sorted(runs))
    monkeypatch.setattr(step, "surroundings", lambda *_: {})
    options = argparse.Namespace(
        ways=["infinity-cpu", "deepspeed-cpu", "deepspeed-nvme"],
        lock=None,
        nvme=tmp_path,
        skipped={},
        rounds=2,
        end=None,
    )
    rows, settings = step.measure(options, "98M")
    peer = way.replace("build", "deepspeed")
    assert rows == sorted({*options.ways} - {peer}) and peer not in ran
    assert settings == {
        f"98M, {peer} is left out": "it failed: no compiler",
        "98M_parameters": 1,
    }
    assert ran.count("infinity-cpu") == 2 and ran.count(way) == 1


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if load("links").torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for program in (sys.executable, "bash"):
        done = subprocess.run(
            [program, FOLDER / "run_all", "--output", tmp_path], capture_output=True, **CHILD
        )
        assert done.returncode == 2
        assert "torch sees no CUDA device" in done.stderr


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_are_counted_as_the_model_has_them(name: str) -> None:
    source = find_source(str(FOLDER / "configs" / f"{name}.json"), "bf16")
    source.config.num_hidden_layers = 2
    with infinity.init(exact=False):
        built = source.build()
    expected = sum(p.numel() for p in built.parameters())
    assert sizes.count(CONFIGS[name] | {"num_hidden_layers": 2}) == expected


def beside_staging(plan: Any, given: Any) -> dict[str, int]:
    """The budgets, less what passes through host memory."""
    return plan.budgets | {"cpu": plan.budgets["cpu"] - sizes.staging(given)}


def test_what_is_planned_for_a_gpu_machine_fits_and_fills_it() -> None:
    held = sizes.in_host_memory(CONFIGS["llama-3-8b"], H100)
    assert held.options["moment-precision"] == "fp32"
    assert 7 * held.parameters <= held.states["cpu"] == 14 * held.parameters - held.states["gpu"]
    assert held.budgets["cpu"] > held.states["cpu"] + 12 * held.states["cpu"] / 14, "shadow copies"
    spread = sizes.over_three_tiers(CONFIGS["llama-2-13b"], H100, "fp32")
    assert spread.options["moment-precision"] == "fp32" and "copy-on-write" in spread.options
    biggest = sizes.largest(CONFIGS["llama-33b"], H100)
    assert biggest.parameters > 25e9
    for plan in (held, spread, biggest):
        for tier, nbytes in beside_staging(plan, H100).items():
            assert plan.states[tier] <= nbytes <= getattr(H100, {"cpu": "host"}.get(tier, tier))
    for plan in (spread, biggest):
        assert plan.facts["state_of_budgets_ratio"] > 0.9
        assert all(ratio > 0.9 for ratio in plan.facts["state_of_budget_ratio"].values())
    more = biggest.model | {"num_hidden_layers": biggest.model["num_hidden_layers"] + 1}
    with pytest.raises(ValueError, match="do not fit"):
        sizes.parameters_on_device(more, H100, "int8")


@pytest.mark.parametrize("host", [0, 4, 20, 43])
def test_less_host_memory_takes_more_of_the_drive_and_narrower_moments(host: int) -> None:
    given = H100._replace(host=host * GIB)
    for model in (CONFIGS["llama-3-8b"], CONFIGS["llama-2-13b"]):
        plan = sizes.over_three_tiers(model, given, "fp32")
        for tier, nbytes in beside_staging(plan, given).items():
            assert plan.states[tier] <= nbytes <= getattr(given, {"cpu": "host"}.get(tier, tier))
        assert sum(plan.states.values()) >= plan.parameters * sum(
            sizes.per_parameter(plan.options["moment-precision"])
        )
    on_drive = sizes.in_host_memory(CONFIGS["llama-3-8b"], given).states["nvme"]
    assert (on_drive > 0) is (host < 43)


def test_narrower_moments_are_taken_where_memory_is_short() -> None:
    model, given = CONFIGS["llama-3-8b"], H100._replace(host=50 * GIB)
    assert sizes.in_host_memory(model, given).options["moment-precision"] == "bf16"
    with pytest.raises(
        ValueError, match=r"^8,030,261,248 parameters do not fit into 61 GiB of gpu, 0 GiB of host"
    ):
        sizes.in_host_memory(model, sizes.Machine(61 * GIB, 0, GIB))
    plan = sizes.states_on_drive(CONFIGS["llama-3.2-3b"], H100)
    assert plan.options["moment-precision"] == "fp32" and plan.options["gpu-cache"] == 0
    assert plan.states["nvme"] == 10 * plan.parameters
