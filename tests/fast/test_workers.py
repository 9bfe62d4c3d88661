"""Tests that run in forks of the process that has collected them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.workers import LONGEST, by_file

TESTS = Path(__file__).parents[1]
ONE = """
import os, pathlib, pytest
with open("imports", "a") as file: file.write("one")

@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    with open("ended", "a") as file: file.write("ended ")

def test_passes(shared, tmp_path):
    assert shared == os.getpid()
    pathlib.Path("first").write_text(f"{shared} {os.getppid()} {tmp_path}")

def test_fails():
    print("said")
    assert 1 == 2

@pytest.mark.skip(reason="of no use")
def test_is_skipped(): ...

def test_kills(): os.kill(os.getpid(), 9)

def test_comes_after(): ...
"""
OTHER = """
import os, pathlib

def test_leaves(): os._exit(0)

def test_comes_after(tmp_path):
    pathlib.Path("second").write_text(f"{os.getpid()} {os.getppid()} {tmp_path}")
"""


def run(folder: Path, *words: str) -> str:
    """What pytest says of the tests of `folder`, which run in two workers."""
    options = ["-p", "support.workers", "--workers", "2", "-p", "no:cacheprovider", "-ra"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, *options, *words, "."],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    return done.stdout + done.stderr


def test_outcomes_are_those_of_one_process_and_an_end_of_a_process_is_a_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_other.py").write_text(OTHER)
    said = run(tmp_path)
    assert sorted(re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", said, re.MULTILINE)) == [
        "FAILED test_one.py::test_fails - assert 1 == 2",
        "FAILED test_one.py::test_kills - the process of this test ended with -9",
        "FAILED test_other.py::test_leaves - the process of this test ended with 0",
        "SKIPPED [1] test_one.py:18: of no use",
    ]
    assert "3 failed, 3 passed, 1 skipped" in said and "said" in said
    assert (tmp_path / "imports").read_text() == "one"
    first, second = ((tmp_path / name).read_text().split() for name in ("first", "second"))
    assert first[0] != second[0] and first[1] == second[1], "two forks of one process"
    assert Path(first[2]).parent != Path(second[2]).parent
    assert not (tmp_path / "ended").exists(), "a process that is killed ends no fixture"


def test_what_is_shared_ends_once_and_a_limit_of_failures_ends_all(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    said = run(tmp_path, "--deselect", "test_one.py::test_kills")
    assert "1 failed, 2 passed, 1 skipped" in said
    assert (tmp_path / "ended").read_text() == "ended "
    (tmp_path / "test_two.py").write_text(ONE)
    (tmp_path / "test_zero.py").write_text(ONE)
    said = run(tmp_path, "--maxfail", "1", "--verbose")
    assert re.search("stopping after [12] failures", said), said
    assert said.count("test_comes_after") < 3


def test_files_that_take_long_begin_first() -> None:
    paths = [Path("some/test_a.py")] * 2 + [TESTS / LONGEST[1]] + [TESTS / LONGEST[0]] * 2
    assert by_file(paths) == [[3, 4], [2], [0, 1]]
    assert [name for name in LONGEST if not (TESTS / name).exists()] == []
