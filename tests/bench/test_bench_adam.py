"""`infinity bench adam`: what it counts, what it refuses, and what it writes for others to read."""

from __future__ import annotations

import json
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.bench.adam import CASES, NORMS, SHADOW_LOOP, SUMS, Bench, Subject, rows
from infinity.cli.main import app
from infinity.errors import ConfigError
from infinity.measure.rates import Formats


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["bench", "adam", *map(str, arguments)])


def test_bytes_are_those_that_an_update_must_move() -> None:
    """gradient read; parameter read and written, or written only beside an fp32 master; master and
    moments read and written."""
    assert [case.bytes_per_parameter for case in CASES] == [
        28,
        2 + 2 + 8 + 16,
        2 + 4 + 4 + 16,
        2 + 4 + 4 + 8,
        2 + 4 + 4 + 4 * 1.125,
        2 + 4 + 4 + 16,
    ]
    assert Formats("", "fp32", "fp16", "fp32", "fp32").bytes_per_parameter == 4 + 2 + 8 + 16


def test_ratios_are_of_one_round_each() -> None:
    def subject(name: str, nbytes: float, *seconds: float) -> Subject:
        return Subject(name, nbytes, lambda: None, lambda: None, list(seconds))

    ours = [subject(case.name, 28, 2.0, 4.0, 9.0) for case in CASES]
    loop, *updates, peer = rows(
        [subject("loop", 20, 1.0, 2.0, 3.0), *ours, subject("peer", 28, 3.0, 4.0, 27.0)], 10
    )
    assert loop["gb_per_second_median"] == pytest.approx(20 * 10 / 2.0 / 1e9)
    assert updates[0]["of_in_place_loop_ratio_median"] == pytest.approx(1.4 * 0.5)
    assert updates[0]["of_in_place_loop_ratio_lowest"] == pytest.approx(1.4 / 3)
    assert updates[0]["nanoseconds_per_parameter"] == pytest.approx(4e8)
    assert updates[0]["over_peers"] == {
        "peer": {"ratio_median": 1.5, "ratio_lowest": 1.0, "ratio_highest": 3.0}
    }
    assert all("over_peers" not in row for row in (loop, *updates[1:], peer))


def test_an_update_to_a_shadow_copy_is_judged_by_the_loop_to_one_too() -> None:
    def subject(name: str, nbytes: float, *seconds: float) -> Subject:
        return Subject(name, nbytes, lambda: None, lambda: None, list(seconds))

    ours = [subject(case.name, 26, 2.0, 4.0, 9.0) for case in CASES]
    loops = subject("loop", 20, 1.0, 2.0, 3.0), subject(SHADOW_LOOP, 20, 2.0, 2.0, 6.0)
    measured = rows([loops[0], *ours, loops[1]], 10)
    judged = [row for row in measured if "of_shadow_loop_ratio_median" in row]
    assert [row["name"] for row in judged] == [case.name for case in CASES if case.shadow]
    assert judged[0]["of_shadow_loop_ratio_median"] == pytest.approx(1.3 * 6 / 9)
    assert judged[0]["of_shadow_loop_ratio_highest"] == pytest.approx(1.3)
    assert all("over_peers" not in row or SHADOW_LOOP not in row["over_peers"] for row in measured)


def test_everyone_steps_in_every_round_and_the_order_turns() -> None:
    bench = Bench(1 << 16, 2, peers=True)
    order: list[str] = []
    try:
        for subject in bench.subjects:
            step = subject.step
            subject.fill = partial(order.append, subject.name)
            subject.step = lambda step=step: (order.append("step"), step())  # type: ignore[misc]
        names = [subject.name for subject in bench.subjects]
        bench.run(3, lambda text: None)
        assert all(len(subject.seconds) == 3 for subject in bench.subjects)
    finally:
        bench.close()
    ours = ["in-place loop", *(case.name for case in CASES), SHADOW_LOOP, *NORMS, *SUMS]
    assert names[: len(ours)] == ours
    assert "torch fused AdamW" in names[len(ours) :]
    turns = [names[number:] + names[:number] for number in range(3)]
    assert order == [text for turn in turns for name in turn for text in (name, "step", "step")]


def test_the_command_prints_a_table_and_writes_json_and_a_page(tmp_path: Path) -> None:
    result = run(
        "--count",
        "100K",
        "--count",
        "70K",
        "--rounds",
        2,
        "--json",
        tmp_path / "r.json",
        "--report",
        tmp_path / "r.html",
    )
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits on a terminal
    written = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [size["parameters_count"] for size in written] == [100_000, 70_000]
    for size in written:
        assert size["rows"][0]["of_in_place_loop_ratio_median"] == 1
        assert set(size["rows"][1]["over_peers"]) >= {"torch fused AdamW"}
    page = (tmp_path / "r.html").read_text()
    HTMLParser().feed(page)
    assert page.count("<svg") == 2
    names = [*(case.name for case in CASES), SHADOW_LOOP, *NORMS, *SUMS]
    assert all(name in page and name in result.stdout for name in names)
    assert written[0]["rows"][1]["over_peers"].keys().isdisjoint(names)


def test_without_peers_and_as_json_only() -> None:
    result = run("--count", "100K", "--rounds", 1, "--no-peers", "--json", "-")
    (size,) = json.loads(result.stdout)["results"]
    assert [row["name"] for row in size["rows"]] == [
        "in-place loop",
        *(case.name for case in CASES),
        SHADOW_LOOP,
        *NORMS,
        *SUMS,
    ]
    widths = {row["name"]: row["bytes_per_parameter"] for row in size["rows"]}
    assert [widths[name] for name in (*NORMS, *SUMS)] == [4, 2, 12, 6, 6]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--count", "1000"], "1000 parameters stay in the caches; measure at least 65536"),
        (["--count", "100T"], "are free; measure fewer"),
        (["--json", "/nowhere/r.json"], "--json /nowhere/r.json cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    arguments: list[str], sentence: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(ConfigError):
        Bench(10, 1, peers=False)
