"""One meaning for a name in all commands, and errors of the engine in the words of the command
line."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from infinity.cli.bench.options import JsonCommand
from infinity.cli.knobs import as_options, configured, options_of
from infinity.cli.main import app
from infinity.config import Config, Tuning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu_memory=4 GiB is too small", "--cpu-memory 4 GiB is too small"),
        ('use gradients="nvme", raise cpu_memory', "use --gradients nvme, raise --cpu-memory"),
        ("set Tuning(copy_on_write=False), after which", "set --no-copy-on-write, after which"),
        ("Config(tuning=Tuning(collective_timeout=9))", "--collective-timeout 9"),
        (" take 1 GiB (infinity.tile(model, max_bytes=...) before wrap makes units smaller); ",
         " take 1 GiB; "),
        ("set nvme=[...]", "set --nvme DIR"),
        ("Config(recompute='off')", "--recompute off"),
        ("/gpu_memory/x.gpu_memory: no optimizer", "/gpu_memory/x.gpu_memory: no optimizer"),
    ],
)  # fmt: skip
def test_fields_become_options(text: str, expected: str) -> None:
    assert as_options(text) == expected


def test_the_options_of_a_configuration_make_it() -> None:
    config = Config(
        nvme=["/a", "/b"],
        precision="bf16",
        gradients="nvme",
        gpu_memory=1 << 30,
        cpu_memory=3 << 30,
        tuning=Tuning(copy_on_write=False, nvme_shares=(1.0, 2.5), cache=0),
    )
    words = options_of(config, lambda nbytes: nbytes * 4)
    assert words.count("--nvme") == 2 and words[words.index("--cpu-memory") + 1] == str(12 << 30)
    command: Any = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known | {"--nvme-shares"}
    assert options_of(configured({"nvme": None, "precision": "bf16"} | _usual())) == [
        "--parameters", "cpu", "--optimizer", "cpu",
    ]  # fmt: skip


def _usual() -> dict[str, Any]:
    return {"parameters": "cpu", "optimizer": "cpu"}


def test_json_is_printed_without_a_file() -> None:
    """In every command that has the option."""
    found = 0
    pending: list[Any] = [typer.main.get_command(app)]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        for each in command.params:
            if "--json" in each.opts:
                found += 1
                assert each.is_flag or isinstance(command, JsonCommand), command.name
    assert found >= 8
