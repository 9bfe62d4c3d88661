"""Any value of any option of any command: done or refused in a sentence, with a status that is
documented, and never a traceback.

Options are taken from the commands themselves. What takes long (training, measuring) is put out of
the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from infinity.bench import adam
from infinity.bench.io.benchmark import Benchmark
from infinity.bench.step import measure as step
from infinity.cli import job
from infinity.cli.main import app
from infinity.errors import InfinityError

DONE, FAILED, MISUSED = 0, 1, 2
HOSTILE = [
    *(
        "",
        " ",
        "0",
        "-1",
        "-0.0",
        "1",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "9" * 30,
        "9" * 5000,
        "0x10",
        "1_000",
        "٣",
    ),
    *(
        "-",
        "--",
        "auto",
        "true",
        "[bold]",
        "[/]",
        "{}",
        "%s",
        "\\",
        "\n",
        "\x1b[31m",
        "\x00",
        "\udcff",
        "a" * 5000,
        "1,2",
        ",",
    ),
    *(
        "1,nan",
        "1GiB",
        "-1GiB",
        "9" * 40 + "TiB",
        "7B",
        "1e400B",
        "gpu",
        "nvme ",
        "fp32",
        "llama-tiny",
        "gpt2-tiny",
        "LLAMA",
    ),
    *("..", "/dev/null", "/dev/zero", "/proc/nothing/there", "nvme", "file", "loop"),
]
VALUES = (
    st.sampled_from(HOSTILE)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.text(max_size=6).filter(lambda t: "/" not in t)
)
COMMANDS = {
    ("finetune",): ("--nvme", "nvme", "--data", "file", "--sequence-length", "16"),
    ("doctor",): (),
    ("gc",): ("nvme",),
    ("inspect",): ("nvme",),
    ("export",): ("nvme", "out"),
    ("bench", "io"): ("--nvme", "nvme"),
    ("bench", "adam"): (),
    ("bench", "step"): ("--nvme", "nvme", "--sequence-length", "16"),
}


def options(path: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The options of a command by their first name, and whether each takes a value."""
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    named = [each for each in command.params if each.param_type_name == "option"]
    return [(each.opts[0], not each.is_flag) for each in named if each.opts[0] != "--debug"]


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; nothing trains or measures."""

    def stop(*_: Any, **__: Any) -> Any:
        raise InfinityError("far enough")

    monkeypatch.setattr(job, "assemble", stop)
    monkeypatch.setattr(Benchmark, "run", stop)
    monkeypatch.setattr(adam, "measure", stop)
    monkeypatch.setattr(step, "measure", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "file").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def check(arguments: list[str]) -> int:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        arguments,
        result.exception,
    )
    assert result.exit_code in (DONE, FAILED, MISUSED), arguments
    assert "Traceback" not in result.stderr
    assert "infinity: unexpected" not in result.stderr, (arguments, result.stderr)
    if result.exit_code == FAILED:
        assert result.stderr.splitlines()[-1].startswith("infinity: "), arguments
    return result.exit_code


def every_command(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = getattr(command, "commands", {})
    found = [each for name in inner for each in every_command(inner[name], (*path, name))]
    return found or [path]


def test_no_option_has_an_underscore_and_directories_have_one_name() -> None:
    commands = every_command(typer.main.get_command(app))
    assert set(commands) >= set(COMMANDS)
    names = {name for path in commands for name, _ in options(path)}
    assert [name for name in names if not name.startswith("--") or "_" in name] == []
    assert names & {"--nvme", "--path", "--dir", "--directory", "--folder"} == {"--nvme"}


ALL = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])


@ALL
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_any_value_of_any_option(path: tuple[str, ...], every: bool, where: Path) -> None:
    fixed, known = list(COMMANDS[path]), options(path)
    assert known

    @settings(
        max_examples=(15 + len(known)) * (2 if every else 1) // 2,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
    @given(st.lists(st.tuples(st.sampled_from(known), VALUES), min_size=1, max_size=2))
    def fuzz(chosen: list[tuple[tuple[str, bool], str]]) -> None:
        given_options = [
            word
            for (name, takes), value in chosen
            for word in ([f"{name}={value}"] if takes else [name])
        ]
        check([*path, *fixed, *given_options])

    fuzz()
    assert list((where / "nvme").iterdir()) == []


@ALL
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_with_what_a_random_choice_may_miss(
    path: tuple[str, ...], every: bool, where: Path
) -> None:
    """Each value with every option, or NaN with every one and another value with every third."""
    for number, (name, takes) in enumerate(options(path)):
        some = ("9" * 30, "1e400B", "\udcff")
        for value in ("nan", *(some if every else some[number % 3 :: 3])) if takes else ():
            check([*path, *COMMANDS[path], f"{name}={value}"])


def test_what_no_option_takes(where: Path) -> None:
    for arguments in (
        ["nothing"],
        ["finetune", "more"],
        ["gc"],
        ["bench"],
        ["bench", "nothing"],
        ["finetune", "--nothing=1"],
    ):
        assert check(arguments) == MISUSED
    for arguments in (
        ["gc", "file"],
        ["gc", "loop"],
        ["gc", "gone"],
        ["bench", "io", "--nvme", "loop"],
    ):
        assert check(arguments) == FAILED


def test_one_that_is_no_terminal_cannot_be_asked(where: Path) -> None:
    """A model that brings code is refused, and nobody is asked whether to run it."""
    (where / "model").mkdir()
    (where / "model" / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}'
    )
    (where / "model" / "model.safetensors").touch()
    assert check(["finetune", "--model", "model", "--nvme", "nvme", "--data", "file"]) == FAILED
