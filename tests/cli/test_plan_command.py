"""`infinity plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.cli.options import FinetuneOptions
from infinity.models.description import planned_length
from infinity.models.source import find_model

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
    config = 'infinity.Config(nvme="/mnt/nvme0", precision="bf16", durability="step")'
    assert config in result.stdout
    assert "infinity finetune" not in result.stdout  # it takes no such model
    assert "tokens per second" in result.stdout


def test_a_plan_as_json() -> None:
    found = planned(*DECODER, "--machine", "rtx4090", "--nodes", 2, "--batch-size", 6)
    assert found["ranks_count"] == 2
    assert found["tokens_per_step_count"] == 6 * 1024
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
    assert "It does not fit: --cpu-memory " in result.stdout
    assert "Smallest change: set --optimizer nvme." in result.stdout


def test_a_mixture_of_experts_says_what_counts(tmp_path: Path) -> None:
    description = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(description))
    said = "Every expert counts as computed, so a real step computes less."
    assert said in run("--model", tmp_path, "--machine", "h100").stdout
    assert said not in run("--machine", "h100").stdout


def test_a_preset_model_and_a_directory(tmp_path: Path) -> None:
    description = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(description))
    found = [
        planned("--model", where, "--machine", "h200", "--lora", 4)
        for where in (tmp_path, tmp_path / "config.json")
    ]
    assert found[0] == found[1] and found[0]["model"] == str(tmp_path)
    words = found[0]["command"].split()[1:]
    shown = CliRunner().invoke(app, [*words, "--show-config"])
    assert {"lora: 4", f"model: {tmp_path}"} <= set(shown.stdout.splitlines())
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert planned("--model", tmp_path / "other.json", "--machine", "h200")["command"] is None
    assert planned("--model", "llama-tiny", "--machine", "h200")["model"] == "llama-tiny"


def test_wrong_options() -> None:
    for arguments, message in (
        (("--model", "llama-7b", "--layers", 3, "--hidden", 9), "give --model, or --layers and"),
        (("--layers", 3), "give --model, or --layers and --hidden"),
        ((*DECODER, "--machine", "dgx"), "did you mean 'dgx2'"),
        (("--layers", 3, "--hidden", 100, "--heads", 3), "cannot be divided among 3 heads"),
        (("--model", "llama-7b", "--heads", 7), "--model says its own --heads"),
        (("--model", "llama-7b", "--vocabulary", 7), "--model says its own --vocabulary"),
        (("--base", "4bit"), "a base in 4 bits is not trained; add --lora RANK for its adapters"),
        ((*DECODER, "--lora", 3), "--lora goes with --model"),
        (("--machine", "dgx2", "--batch-size", 17), "cannot be divided among 16; take 16 or 32"),
        (("--machine", "MacBook"), "MacBook has no CUDA, and the engine runs on Linux; plan for"),
        (("--model", "qwen3-8", "--machine", "h100"), "did you mean 'Qwen/Qwen3-8B'? A model is"),
        (
            ("--model", "some/model", "--machine", "h100"),
            "download the one file that a plan needs: hf download some/model config.json; else",
        ),
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


def test_a_plan_without_options_is_of_the_run_without_options() -> None:
    """Of every parameter and step, it writes a bf16 parameter with its rest, and two fp32 moments,
    because every step is committed."""
    found = planned("--machine", "rtx4090")
    usual, model = FinetuneOptions(), find_model(FinetuneOptions.model, "bf16")
    assert (found["model"], found["ranks_count"]) == (usual.model, 1)
    tokens = usual.batch_size * usual.accumulate * planned_length(model.config)
    assert found["tokens_per_step_count"] == tokens
    written, count = found["step"]["nvme_written_bytes"], found["parameters_count"]
    assert 12 * count <= written <= 12.2 * count
    assert found["config"].endswith('durability="step")')
    assert found["command"].startswith("infinity finetune ")
    assert found["command"].endswith("--nvme /mnt/nvme0")


def test_the_command_of_a_plan_makes_its_configuration() -> None:
    options = ("--model", "llama-1b", "--batch-size", 16, "--accumulate", 3, "--gradients", "nvme")
    more = ("--cpu-memory", "64GB", "--no-copy-on-write", "--durability", "off")
    words = planned("--machine", "aws-p5", *options, *more[:2])["command"].split()
    assert words[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "infinity", "finetune"]
    for option, value in (
        ("--batch-size", "16"),
        ("--accumulate", "3"),
        ("--cpu-memory", str(64 * 10**9)),
    ):
        assert words[words.index(option) + 1] == value
    assert words.count("--nvme") == 8 and "--durability" not in words
    again = planned("--machine", "rtx4090", "--durability", "off")["command"]
    assert "--durability off" in again
    assert planned("--machine", "aws-p5", *options, *more)["command"] is None  # no such option


def test_steps_are_committed_where_that_fits(tmp_path: Path) -> None:
    """As `infinity finetune` does on one rank. Without commits, what is cached takes no space."""
    machine = {"host_memory": "64GB", "flops": 1e14, "gpu_memory": "24GB",
               "drives": [{"read": 6e9, "write": 3e9, "capacity": "10MB"}]}  # fmt: skip
    path = tmp_path / "box.json"
    path.write_text(json.dumps(machine))
    assert "durability" not in planned("--machine", path)["config"]
    result = run("--machine", path, "--durability", "step")
    assert result.exit_code == 1 and "the states on nvme need" in result.stdout


def test_what_makes_a_plan_faster() -> None:
    found = planned("--model", "llama-1b", "--machine", "rtx4090", "--cache", 0, "--gpu-cache", 0)
    before, gains = found["step"]["tokens_per_second"], found["gains"]
    accumulated, drive = gains[0]["change"], gains[1]["change"]
    assert drive == "add a drive to each node"
    assert all(each["tokens_per_second"] > before for each in gains)
    number = accumulated.split()[1]
    assert accumulated == f"accumulate {number} micro-batches, which hides the drives"
    again = planned(
        "--model", "llama-1b", "--machine", "rtx4090", "--cache", 0, "--gpu-cache", 0,
        "--accumulate", number,
    )  # fmt: skip
    assert again["step"]["tokens_per_second"] == gains[0]["tokens_per_second"]


def test_the_endurance_of_drives(tmp_path: Path) -> None:
    machine = {"host_memory": "64GB", "flops": 1e14, "gpu_memory": "24GB",
               "drives": [{"read": 6e9, "write": 3e9, "capacity": "2TB"}] * 2}  # fmt: skip
    path = tmp_path / "box.json"
    path.write_text(json.dumps(machine))
    result = run("--machine", path)
    assert "endurance of 1,200 TB, assumed, lasts" in result.stdout
    said = run("--machine", path, "--endurance", "1PB")
    assert "endurance of 2,000 TB, lasts" in said.stdout
    step = planned("--machine", path, "--endurance", "1PB")["step"]
    assert step["drives_last_days"] * step["written_per_day_bytes"] == pytest.approx(2e15)


def test_adapters_and_a_quantized_base() -> None:
    pytest.importorskip("peft")
    common = ("--machine", "rtx4090")
    whole, lora = planned(*common), planned(*common, "--lora", 8)
    quantized = planned(*common, "--lora", 8, "--base", "4bit")
    # Each adapter of q, k, v, o, gate, up and down in 4 blocks has rank x (inputs + outputs).
    count = 8 * 4 * (4 * (128 + 128) + 3 * (128 + 352))
    assert lora["trainable_count"] == quantized["trainable_count"] == count
    assert whole["trainable_count"] == whole["parameters_count"]
    states = lora["memory"]["states_total_bytes"]
    assert states["nvme"] < whole["memory"]["states_total_bytes"]["nvme"] / 5
    moments = lora["memory"]["states_bytes"]["exp_avg"]["nvme"]
    assert 2 * 4 * count <= moments < 2.1 * 4 * count  # two extents, because steps are committed
    assert quantized["memory"]["activations"]["quantization_bytes"] == sum(
        4 * (number // 64 + 4 * -(-number // 64 // 256) + 4 * (16 + 256 + 1))
        for number in [128 * 128] * 4 + [128 * 352] * 3
    )
    # The weights of a preset are random.
    assert lora["command"] is None and quantized["command"] is None
    known = ("--model", "qwen3-8b", *common, "--lora", 8)
    line = "infinity finetune --model Qwen/Qwen3-8B --lora 8"
    assert planned(*known)["command"].startswith(f"{line} ")
    assert planned(*known, "--base", "4bit")["command"].startswith(f"{line} --base 4bit ")
