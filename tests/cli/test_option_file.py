"""`infinity finetune --config FILE`: options in YAML, as `--show-config` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from infinity.cli.main import app


def shown(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments), "--show-config"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    return found


def test_what_is_shown_can_be_read_and_shows_the_same(tmp_path: Path) -> None:
    options = ["--nvme", "a", "--nvme", "b", "--gpu-memory", "64MiB", "--cpu-memory", "80%"]
    options += ["--columns", "prompt=question,completion=answer", "--durability", 3, "--no-report"]
    options += ["--lr", "1e-3", "--chunked-loss", "1MiB", "--epochs", 2, "--nvme-shares", "1,2"]
    found = shown(*options)
    assert (found["nvme"], found["gpu_memory"], found["epochs"]) == (["a", "b"], 64 << 20, 2.0)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(found))
    assert shown("--config", file) == found


def test_the_command_line_goes_before_the_file_and_dashes_are_names_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nsequence-length: 64\nresume: true\nbatch_size: 2\n")
    found = shown("--config", file, "--steps", 3)
    assert [found[name] for name in ("steps", "sequence_length", "resume", "batch_size")] == [
        3,
        64,
        True,
        2,
    ]


def test_values_are_as_on_the_command_line(tmp_path: Path) -> None:
    """YAML reads `off` as a truth value, and lists and tables may be written out."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "durability: off\nchunked_loss: off\nnvme: one\noutput: 5\nlora_target: [a, b]\n"
        "columns: {prompt: question}\ngpu_direct: off\n"
    )
    found = shown("--config", file)
    names = ("durability", "chunked_loss", "nvme", "output", "lora_target", "columns")
    assert [found[name] for name in names] == [
        *("off", None, ["one"], "5", "a,b"),
        "prompt=question",
    ]
    assert found["gpu_direct"] == "off"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("steeps: 3", "has the key 'steeps', which is no option; did you mean 'steps'?"),
        ("- steps", "holds no options; write lines such as steps: 100"),
        ("steps: [", "cannot be read: "),
        ("steps: many", "Invalid value for '--steps'"),
        ("lora: true", "Invalid value for '--lora'"),
        ("show_config: true", "has the key 'show_config', which is no option"),
    ],
)
def test_what_is_no_option_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["finetune", "--config", str(file)])
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert reason in said


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["finetune", "--config", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "cannot be read" in " ".join(result.stderr.split())
