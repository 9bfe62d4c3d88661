"""What `benchmarks/gpu` runs on a GPU: the script goes through on the CPU at tiny sizes, and its
arithmetic of sizes holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.bench.step.train import find_source
from support.children import CHILD
from support.gpu_benchmarks import FOLDER, load

GIB = 1 << 30


sizes = load("sizes")
H100 = sizes.Machine(61 * GIB, 110 * GIB, 57 * GIB)
CONFIGS = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "configs").glob("*.json")}


def test_the_rehearsal_runs_what_is_cheap_and_writes_what_became_of_each_part(
    tmp_path: Path,
) -> None:
    parts = ["kernels", "links", "step-13b"]
    command = [
        sys.executable,
        FOLDER / "run_all",
        "--rehearse",
        "--output",
        tmp_path / "out",
        "--nvme",
        tmp_path,
        "--only",
        *parts,
    ]
    done = subprocess.run(command, capture_output=True, **CHILD)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(written["parts"]) == parts
    assert written["machine"]["versions"]["torch"]
    assert written["parts"]["kernels"]["status"] == "skipped"
    rows = written["parts"]["links"]["result"]["rows"]
    assert [row["name"] for row in rows] == ["host_to_device", "device_to_host", "nvme_to_device"]
    assert all(row["ratio"]["median"] > 0 for row in rows)
    step = written["parts"]["step-13b"]["result"]
    assert step["result"]["parameters_count"] == step["plan"]["parameters_count"]
    for tier, use in step["result"]["tiers"].items():
        assert 0 < use["peak_bytes"] <= step["plan"]["budget_bytes"][tier]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "results.json"]


@pytest.mark.parametrize("carries_liburing", [True, False])
def test_a_machine_without_an_index_builds_with_the_wheels_that_were_carried(
    carries_liburing: bool, tmp_path: Path
) -> None:
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    wheels.mkdir()
    (wheels / "pydantic-2.0-py3-none-any.whl").touch()
    if carries_liburing:
        (wheels / "liburing").mkdir()
    site = environment / "lib" / "python3.12" / "site-packages"
    commands: list[list[str]] = []

    def run(*command: object) -> None:
        commands.append([str(part) for part in command])
        if "venv" in command:
            site.mkdir(parents=True)

    python = load("wheels").install(wheels, environment, run)
    made, carried, built = commands
    assert made == [sys.executable, "-m", "venv", str(environment)]
    assert carried[-1] == str(wheels / "pydantic-2.0-py3-none-any.whl")
    for command in (carried, built):
        assert command[0] == str(python)
        assert {"--no-index", "--no-deps"} <= set(command)
    assert "--no-build-isolation" in built
    assert any("INFINITY_LIBURING_LIBRARY" in part for part in built) is carries_liburing
    # torch is that of the Python that runs this.
    paths = (site / "parent.pth").read_text().split()
    assert str(Path(pytest.__file__).parents[1]) in paths


def test_without_a_gpu_it_says_so() -> None:
    if load("links").torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run(
        [sys.executable, FOLDER / "run_all", "--output", "/tmp"], capture_output=True, **CHILD
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


def test_what_is_planned_for_a_gpu_machine_fits_and_fills_it() -> None:
    held = sizes.in_host_memory(CONFIGS["llama-3-8b"], H100)
    assert held.options["moment-precision"] == "fp32"
    assert 7 * held.parameters <= held.states["cpu"] == 14 * held.parameters - held.states["gpu"]
    assert held.budgets["cpu"] > held.states["cpu"] + 12 * held.states["cpu"] / 14, "shadow copies"
    spread = sizes.over_three_tiers(CONFIGS["llama-2-13b"], H100, "fp32")
    biggest = sizes.largest(CONFIGS["llama-33b"], H100)
    assert biggest.parameters > 25e9
    for plan in (held, spread, biggest):
        assert all(
            plan.budgets[tier] <= getattr(H100, {"cpu": "host"}.get(tier, tier))
            for tier in plan.budgets
        )
    for plan in (spread, biggest):
        assert plan.facts["state_of_budgets_ratio"] > 0.9
        assert all(ratio > 0.9 for ratio in plan.facts["state_of_budget_ratio"].values())
    more = biggest.model | {"num_hidden_layers": biggest.model["num_hidden_layers"] + 1}
    with pytest.raises(ValueError, match="do not fit"):
        sizes.parameters_on_device(more, H100, "int8")


def test_narrower_moments_are_taken_where_memory_is_short() -> None:
    model = CONFIGS["llama-3-8b"]
    assert (
        sizes.in_host_memory(model, H100._replace(host=50 * GIB)).options["moment-precision"]
        == "bf16"
    )
    with pytest.raises(ValueError, match="do not fit into 20 GiB of host memory"):
        sizes.in_host_memory(model, H100._replace(host=20 * GIB))
