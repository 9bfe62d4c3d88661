"""What happens to the command `infinity` before it has begun."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity_command.importing import LINE
from support.children import CHILD

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv = ['infinity', *sys.argv[1:]]; from infinity_command import main; main()",
]


def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = CHILD["env"] | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), CHILD["env"]["PYTHONPATH"]])
    }
    found = subprocess.run(
        [*COMMAND, "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "infinity: interrupted\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_says_that_torch_is_imported(tmp_path: Path, is_terminal: bool) -> None:
    """While it is imported. The torch of this test waits until the line was read."""
    (tmp_path / "torch.py").write_text("input()\nraise SystemExit(7)\n")
    environment = CHILD["env"] | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), CHILD["env"]["PYTHONPATH"]])
    }
    read, write = pty.openpty() if is_terminal else os.pipe()
    with subprocess.Popen(
        [*COMMAND, "plan"], env=environment, stdin=subprocess.PIPE, stderr=write, text=True
    ) as process:
        os.close(write)
        with os.fdopen(read) as lines:
            assert lines.readline() == LINE
            process.communicate("\n", timeout=100)
            assert process.returncode == 7


def test_the_command_starts_so(pytestconfig: pytest.Config) -> None:
    found = subprocess.run(
        [*COMMAND, "--version"], **CHILD, capture_output=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("infinity ")
    project = (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert 'infinity = "infinity_command:main"' in project


def test_the_list_of_commands_imports_no_torch(tmp_path: Path) -> None:
    """Which takes longer than all the rest. It is the list that the whole command gives."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    environment = CHILD["env"] | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), CHILD["env"]["PYTHONPATH"]]),
        "COLUMNS": "80",
    }
    found = subprocess.run(
        [*COMMAND, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    whole = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"], prog_name="infinity")
    assert found.stdout == whole.stdout
