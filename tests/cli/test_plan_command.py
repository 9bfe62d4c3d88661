"""`infinity plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from infinity.cli.main import app

DECODER = ("--layers", 4, "--hidden", 256)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_plan_on_a_terminal() -> None:
    result = run(*DECODER, "--machine", "rtx4090")
    assert result.exit_code == 0
    assert "parameters on rtx4090, one rank" in result.stdout
    assert 'infinity.Config(nvme="/mnt/nvme0", precision="bf16")' in result.stdout
    assert "tokens per second" in result.stdout


def test_a_plan_as_json() -> None:
    found = planned(*DECODER, "--machine", "rtx4090", "--nodes", 2, "--batch-size", 3)
    assert found["ranks_count"] == 2
    assert found["tokens_per_step_count"] == 2 * 3 * 2048
    assert found["fits"] and found["step"]["seconds"] > 0
    assert set(found["memory"]["states_bytes"]) == {
        "param", "grad", "master", "exp_avg", "exp_avg_sq",
    }  # fmt: skip


def test_options_of_config_count() -> None:
    described = ("--machine", "rtx4090", *DECODER)
    on_nvme = planned(*described, "--cache", 0, "--gpu-cache", 0)["memory"]["per_rank_bytes"]
    in_memory = planned(*described, "--parameters", "cpu", "--optimizer", "cpu", "--gpu-cache", 0)
    assert on_nvme["nvme"] > 0
    assert in_memory["memory"]["per_rank_bytes"]["nvme"] == 0


def test_a_trace_and_a_chart(tmp_path: Path) -> None:
    trace, chart = tmp_path / "trace.json", tmp_path / "chart.png"
    machine = ("--machine", "rtx4090", "--cache", 0, "--gpu-cache", 0)
    result = run(*DECODER, *machine, "--timeline", trace, "--chart", chart)
    assert result.exit_code == 0, result.output
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "adam", "nvme read", "nvme write", "host to device"} <= lanes
    assert any(event["name"].startswith("update ") for event in events)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_refused_with_advice() -> None:
    result = run("--layers", 32, "--hidden", 4096, "--machine", "rtx4090", "--optimizer", "cpu")
    assert result.exit_code == 1
    assert "It does not fit: cpu_memory=" in result.stdout
    assert 'Smallest change: set optimizer="nvme".' in result.stdout


def test_a_preset_model_and_a_directory(tmp_path: Path) -> None:
    description = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(description))
    assert planned("--model", tmp_path, "--machine", "h200")["parameters_count"] > 0
    assert planned("--model", "llama-tiny", "--machine", "h200")["model"] == "llama-tiny"


def test_wrong_options() -> None:
    for arguments, message in (
        ((), "give --model, or --layers and --hidden"),
        (("--layers", 3), "give --model, or --layers and --hidden"),
        ((*DECODER, "--machine", "dgx"), "did you mean 'dgx2'"),
        (("--layers", 3, "--hidden", 100, "--heads", 3), "cannot be divided among 3 heads"),
        (("--model", "llama-7b", "--heads", 7), "--model says its own --heads"),
        (("--model", "llama-7b", "--vocabulary", 7), "--model says its own --vocabulary"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr


def test_the_published_tables() -> None:
    result = run("--tables")
    assert result.exit_code == 0
    assert "1910.02054" in result.stdout and "2104.07857" in result.stdout
    assert "1845.70" in result.stdout


def test_steps_that_are_committed_now_and_then_are_planned() -> None:
    """Three extents instead of two, where nothing is cached."""
    described = (*DECODER, "--machine", "rtx4090", "--cache", 0, "--gpu-cache", 0)
    states = [
        planned(*described, "--durability", each)["memory"]["states_total_bytes"]["nvme"]
        for each in ("off", "step", 1, 5)
    ]
    assert states[0] == states[1] == states[2] and 2 * states[3] == 3 * states[0]
