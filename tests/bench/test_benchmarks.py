"""Results of `benchmarks/`: one schema, one script per question, and an index that names all of
them."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.bench.summary import MachineInfo, Row, Spread, Summary

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted((FOLDER / "results").iterdir())
TABLES = FOLDER / "tables.py"
SCRIPTS = sorted(set(FOLDER.glob("*.py")) - {TABLES})
VALUE = {"median": 1.0, "lowest": 0.5, "highest": 2.0}


def summary_of(**changes: Any) -> dict[str, Any]:
    """A summary as JSON has it."""
    row = {"name": "ours", "unit": "s", "value": VALUE, "ratio": VALUE}
    return {
        "question": "How long?",
        "script": "step.py",
        "limit": "plain",
        "seeds": [0],
        "commit": "0" * 40,
        "changed": False,
        "machine": {"device": "cpu"},
        "settings": {"steps": 3},
        "rows": [row],
    } | changes


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_the_schema_and_names_its_script(path: Path) -> None:
    summary = Summary.read(path)
    assert summary.text() == path.read_text()
    assert FOLDER / summary.script in SCRIPTS
    assert summary.commit is not None
    assert len({row.name for row in summary.rows}) == len(summary.rows)


def question_of(script: Path) -> str:
    (value,) = [
        node.value
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QUESTION"
    ]
    return str(ast.literal_eval(value))


def test_the_index_names_every_script_and_every_result() -> None:
    rows = re.findall(
        r"^\| (.+?) \| `(\w+\.py)(?: [^`]*)?` \| (.+?) \|$",
        (FOLDER / "README.md").read_text(),
        re.MULTILINE,
    )
    assert {script for _, script, _ in rows} == {path.name for path in SCRIPTS}
    for path in SCRIPTS:
        assert (question_of(path), path.name) in {(asked, script) for asked, script, _ in rows}
    linked = [name for _, _, result in rows for name in re.findall(r"\]\(results/(.+?)\)", result)]
    assert sorted(linked) == [path.name for path in RESULTS]
    by_script = [
        (script, name)
        for _, script, result in rows
        for name in re.findall(r"\]\(results/(.+?)\)", result)
    ]
    assert by_script == [
        (Summary.read(FOLDER / "results" / name).script, name) for _, name in by_script
    ]


def test_pages_have_the_tables_of_the_results() -> None:
    tables = runpy.run_path(str(TABLES))
    named = []
    for page in tables["PAGES"]:
        text = page.read_text()
        assert tables["rewritten"](text) == text, f"{page.name} differs: run benchmarks/tables.py"
        named += re.findall(r"<!-- table: ([\w-]+) -->", text)
    assert sorted(named) == sorted(tables["TABLES"])


@pytest.mark.parametrize("name", ["step", "comparison"])
def test_a_table_is_rewritten_where_it_stands(name: str) -> None:
    tables = runpy.run_path(str(TABLES))
    page = (
        f"before\n<!-- table: {name} -->\n| 0.12 | a figure that nobody measured "
        "|\n<!-- end of table -->\nafter\n"
    )
    marks = f"<!-- table: {name} -->\n", "<!-- end of table -->"
    assert (
        tables["rewritten"](page) == f"before\n{marks[0]}{tables['table'](name)}{marks[1]}\nafter\n"
    )


def test_a_table_that_nothing_writes_is_an_error() -> None:
    with pytest.raises(KeyError, match="speed"):
        runpy.run_path(str(TABLES))["rewritten"]("<!-- table: speed -->\n<!-- end of table -->\n")


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"runs": []}, "runs"),
        ({"commit": "main"}, "commit"),
        ({"rows": []}, "rows"),
        ({"rows": [{"name": "a", "unit": "s"}]}, "'a' has no figure"),
        ({"rows": [{"name": "a", "value": VALUE}]}, "'a' needs a value and its unit"),
        (
            {"rows": [{"name": "a", "ratio": VALUE | {"median": 3.0}}]},
            "3.0 is not between 0.5 and 2.0",
        ),
        ({"rows": [{"name": "a", "facts": {"bytes": float("nan")}}]}, "bytes"),
        ({"machine": {}}, "machine.device"),
    ],
)
def test_what_the_schema_does_not_have_is_refused_by_name(
    wrong: dict[str, Any], where: str, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(summary_of()))
    Summary.read(file)
    file.write_text(json.dumps(summary_of(**wrong)))
    with pytest.raises(ValueError, match=re.escape(where)):
        Summary.read(file)


def test_a_summary_knows_where_it_was_measured(tmp_path: Path) -> None:
    rows = [Row(name="ours", unit="s", value=Spread.of([3.0, 1.0, 2.0]))]
    summary = Summary.of(
        tmp_path / "step.py", "How long?", "plain", rows, seeds=[7], settings={"shares": [0.5, 1.0]}
    )
    assert rows[0].value == Spread(median=2.0, lowest=1.0, highest=3.0)
    assert (summary.script, summary.seeds, summary.settings) == (
        "step.py",
        [7],
        {"shares": "0.5 1.0"},
    )
    assert (summary.commit, summary.changed) == (None, None), "not a checkout"
    assert summary.machine == MachineInfo.here()
    assert summary.machine.versions["torch"]
    summary.write(tmp_path / "step.json")
    assert Summary.read(tmp_path / "step.json") == summary


def test_measuring_writes_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "adam.json"
    command = [
        "adam.py",
        "--parameters",
        "65536",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--no-peers",
        "--json",
        str(written),
    ]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(FOLDER / "adam.py"), run_name="__main__")
    summary = Summary.read(written)
    assert summary.script == "adam.py"
    assert summary.settings["rounds"] == 2
    (loop, *ours) = summary.rows
    assert loop.name == "65536, in-place loop"
    assert loop.ratio == Spread(median=1.0, lowest=1.0, highest=1.0)
    assert all(row.unit == "GB/s" and row.ratio is not None and row.rounds == 2 for row in ours)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_what_there_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are not run by tests; names that moved must not break them unseen."""
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(path), run_name="imported")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "infinity":
            assert not (node.module or "").startswith("infinity.cli"), (
                "benchmarks stand on the library"
            )
            module = __import__(node.module or "", fromlist=["*"])
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
