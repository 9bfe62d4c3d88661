"""One meaning for a name in all commands, and errors of the engine in the words of the command
line."""

from __future__ import annotations

from collections.abc import Iterator
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


def options_of_commands() -> Iterator[tuple[Any, Any]]:
    """Each command with each of its options and arguments."""
    pending: list[Any] = [typer.main.get_command(app)]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        yield from ((command, each) for each in command.params)


def test_json_is_printed_without_a_file() -> None:
    """In every command that has the option."""
    found = [(command, each) for command, each in options_of_commands() if "--json" in each.opts]
    assert len(found) >= 8
    for command, each in found:
        assert each.is_flag or isinstance(command, JsonCommand), command.name


SEVERAL_KINDS = {
    "--json",  # beside charts and traces, also to a file
    "--report",  # a file of its own, or one of --output
    "--durability",  # commands that plan or run a training add auto
    "--verify",  # a flag of a reader, a moment of a run
    "--model",  # a directory with the description, or a name
    "--nvme",  # hidden where directories are arguments
}


def test_options_of_one_name_take_values_of_one_kind() -> None:
    kinds: dict[str, set[str | None]] = {}
    for _, each in options_of_commands():
        for name in (name for name in each.opts if name.startswith("--")):
            kinds.setdefault(name, set()).add("flag" if each.is_flag else each.metavar)
    assert {name for name, found in kinds.items() if len(found) > 1} == SEVERAL_KINDS


def test_an_option_of_one_name_reads_or_writes() -> None:
    """In all commands alike."""
    writes: dict[str, set[bool]] = {}
    for _, each in options_of_commands():
        if each.metavar in ("FILE", "[FILE]"):
            is_written = each.help.startswith(("Write", "Print", "Draw"))
            writes.setdefault(each.opts[0], set()).add(is_written)
    assert writes["--config"] == {False}
    assert all(len(found) == 1 for found in writes.values())
