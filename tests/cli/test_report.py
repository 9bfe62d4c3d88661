"""The report page and the Perfetto trace of `infinity finetune`, from made-up runs."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.history import History, Sample, StepRecord, Validation, summarize
from infinity.cli.perfetto import lane_order, rows, trace_events, write_trace
from infinity.cli.progress import Progress, print_summary, summary_rows
from infinity.cli.report import render_report, write_report
from infinity.observe import Span
from infinity.report import Report


def made_up_run(steps: int = 12) -> tuple[History, list[Span], Report]:
    history = History(tokens_per_step=1024)
    spans: list[Span] = []
    for number in range(1, steps + 1):
        start = 100.0 + 0.5 * number
        history.steps.append(
            StepRecord(number, 5.0 / number, 1e-3 * number / steps, 1.5, start, start + 0.45)
        )
        for unit in range(6):
            at = start + 0.06 * unit
            spans.append(Span("compute", f"model.layers.{unit}", at, at + 0.05))
            spans.append(Span("wait nvme", f"model.layers.{unit}", at - 0.01, at))
            # Overlaps its neighbours.
            spans.append(Span("nvme read", f"model.layers.{unit}", at - 0.03, at + 0.04))
            spans.append(Span("nvme write", f"model.layers.{unit}", at + 0.3, at + 0.33))
            spans.append(Span("adam", f"model.layers.{unit}", at + 0.3, at + 0.35))
            history.samples.append(
                Sample(at, {"gpu": unit << 20, "cpu": 40 << 20, "nvme": 100 << 20})
            )
    history.validations = [Validation(steps // 2, 2.5), Validation(steps, 1.5)]
    report = Report(
        parameters=99_590_400,
        steps=steps,
        read_per_parameter=14.01,
        written_per_parameter=12.0,
        planned_read_per_parameter=14.0,
        planned_written_per_parameter=12.0,
        seconds={"compute": 3.5, "wait nvme": 1.25, "wait adam": 0.2, "adam": 2.0},
        updates_kept=1200,
        updates_rolled_back=34,
        waits={f"model.layers.{unit}": 0.1 * unit for unit in range(7)},
        peaks={"gpu": 5 << 20, "cpu": 40 << 20, "nvme": 100 << 20},
        budgets={"gpu": 8 << 20, "cpu": 64 << 20, "nvme": 1 << 40},
        cached=24 << 20,
        on_nvme=1394 << 20,
    )
    return history, spans, report


def summary_of(history: History, report: Report, **changes: Any) -> dict[str, Any]:
    return {**summarize("llama-100m", history, report, None, {}), **changes}


class Page(HTMLParser):
    """Collects what a browser would fetch, and checks that elements are closed in order."""

    VOID = frozenset(("meta", "br", "img", "link", "hr", "input"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "data")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


# Page


def test_the_page_is_self_contained_and_well_formed() -> None:
    history, spans, report = made_up_run()
    text = render_report(summary_of(history, report), history, spans)
    page = Page(text)
    assert not page.open
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    assert text.count("<svg") == text.count("</svg>") == 3
    assert len(text) < 400_000


def test_the_figures_are_valid_xml_and_their_local_references_resolve() -> None:
    history, spans, report = made_up_run()
    text = render_report(summary_of(history, report), history, spans)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg.replace("<svg", '<svg xmlns:xlink="x"', 1))
        for target in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg):
            assert f'id="{"".join(target)}"' in svg


def test_the_page_shows_the_numbers_of_the_run() -> None:
    history, spans, report = made_up_run()
    page = Page(render_report(summary_of(history, report), history, spans))
    for shown in (
        "llama-100m",
        "99,590,400 parameters",
        "14.0 + 12.0",
        "1.500",
        "64 MiB",
        "step 12",
        "model.layers.6",
    ):
        assert shown in page.text


def test_cards_have_a_figure_in_large_type_and_words_in_small() -> None:
    history, spans, report = made_up_run()
    report = replace(report, gpu_resident=1 << 20, written_through=1 << 20)
    text = render_report(summary_of(history, report), history, spans)
    cards = re.findall(r'<div class="card"><span>(.*?)</span><b>(.*?)</b><small>', text)
    assert len(cards) == 4 + 3 + 2
    figure = r"[\d.,]+( \+ [\d.]+)?( [KMGT]?i?B)?"
    assert [name for name, value in cards if not re.fullmatch(figure, value)] == []
    assert ("Cached in host memory", "24 MiB") in cards
    assert "24 MiB of 1.36 GiB; each step writes 1 MiB of it; these bytes are never read" in text


def test_names_are_escaped() -> None:
    history, spans, report = made_up_run(2)
    spans = [Span(span.lane, "<script>x</script>&", span.start, span.end) for span in spans]
    text = render_report(summary_of(history, report, model="<script>&"), history, spans)
    assert "<script" not in text
    assert "&lt;script&gt;&amp;" in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs_without_spans_or_samples_have_a_page_too(steps: int) -> None:
    history, _, report = made_up_run(steps)
    history.samples.clear()
    history.validations.clear()
    text = render_report(summary_of(history, report, signal=2), history, [])
    assert "The run was interrupted" in text
    assert not Page(text).open


def test_many_spans_do_not_make_a_large_page() -> None:
    history, _, report = made_up_run(3)
    spans = [
        Span("copy", f"unit {i % 7}", 100.5 + i * 1.6e-5, 100.5 + i * 1.6e-5 + 1e-5)
        for i in range(100_000)
    ]
    assert len(render_report(summary_of(history, report), history, spans)) < 600_000


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    history, spans, report = made_up_run()
    write_report(tmp_path / "report.html", summary_of(history, report), history, spans)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")


# Summary


def test_the_summary_is_valid_json_and_names_the_worst_five_waits() -> None:
    history, _, report = made_up_run()
    summary = json.loads(json.dumps(summary_of(history, report), allow_nan=False))
    assert [wait["unit"] for wait in summary["worst_waits"]] == [
        f"model.layers.{unit}" for unit in (6, 5, 4, 3, 2)
    ]
    assert summary["loss"] == {
        "first": 5.0,
        "last": 5.0 / 12,
        "validation": 1.5,
        "validation_step": 12,
    }
    assert summary["speculative_updates"] == {"kept": 1200, "rolled_back": 34}
    assert ("speculative updates", "1,200 kept, 34 rolled back") in summary_rows(summary)
    assert summary["nvme_bytes_per_parameter_per_step"]["read"] == {
        "measured": 14.01,
        "planned": 14.0,
    }
    assert summary["memory"]["gpu"] == {"peak": 5 << 20, "budget": 8 << 20}
    assert summary["tokens_per_second"] == pytest.approx(1024 / 0.45)


def test_the_table_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    history, _, report = made_up_run()
    summary = summary_of(history, report)
    print_summary(summary)
    shown = capsys.readouterr().out
    named = dict(summary_rows(summary))
    assert named["NVMe read"] == "14.01 B per parameter and step, planned 14.00"
    assert named["peak GPU"] == "5 MiB of 8 MiB"
    assert named["loss, first to last"] == "5.0000 to 0.4167"
    assert all(name in shown for name in named)


def test_without_a_gpu_the_memory_of_the_compute_device_is_called_compute() -> None:
    for unified, label in ((True, "compute"), (False, "GPU")):
        history, spans, report = made_up_run()
        history.unified_memory, report = unified, replace(report, gpu_resident=1 << 20)
        summary = summary_of(history, report)
        page = Page(render_report(summary, history, spans))
        rows, events = dict(summary_rows(summary)), trace_events(spans, history)
        counters = {event["name"] for event in events if event["ph"] == "C"}
        assert {f"peak {label}", "peak host memory", f"{label}-resident"} <= rows.keys()
        assert f"Peak: {label}" in page.text and f"{label}: up to" in page.text
        assert f"{label} bytes" in counters
        assert unified == ("GPU" not in page.text + "".join(rows) + "".join(counters))


def test_speed_leaves_out_the_first_step_unless_it_is_alone() -> None:
    history = History(tokens_per_step=100)
    assert history.tokens_per_second() == 0
    history.steps.append(StepRecord(1, 1.0, 1.0, None, 0.0, 10.0))
    assert history.tokens_per_second() == 10
    history.steps += [
        StepRecord(2, 1.0, 1.0, None, 20.0, 21.0),
        StepRecord(3, 1.0, 1.0, None, 30.0, 31.0),
    ]
    assert history.tokens_per_second() == 100


# Trace


def test_the_trace_is_valid_with_one_lane_each(tmp_path: Path) -> None:
    history, spans, _ = made_up_run()
    path = tmp_path / "trace.json"
    write_trace(path, spans, history)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    lanes = {name for name in names.values() if not name.endswith(")")}
    assert lanes == {"steps", "compute", "wait nvme", "nvme read", "nvme write", "adam"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(spans) + len(history.steps)
    assert all(
        event["ts"] >= 0 and event["dur"] >= 0 and event["tid"] in names for event in complete
    )
    assert min(event["ts"] for event in complete) == 0
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"loss", "GPU bytes", "host memory bytes", "NVMe bytes"}


def test_an_empty_run_has_a_valid_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [], History(tokens_per_step=1))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


span_times = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(
    lambda pair: Span("compute", "u", *map(float, sorted(pair)))
)


@given(st.lists(span_times, max_size=30))
def test_in_one_row_spans_are_apart_or_nested(spans: list[Span]) -> None:
    placed: defaultdict[int, list[Span]] = defaultdict(list)
    for row, span in rows(spans):
        placed[row].append(span)
    assert sorted(span for row in placed.values() for span in row) == sorted(spans)
    assert set(placed) == set(range(len(placed)))
    for row in placed.values():
        for i, a in enumerate(row):
            for b in row[i + 1 :]:
                apart = a.end <= b.start or b.end <= a.start
                nested = (a.start <= b.start and b.end <= a.end) or (
                    b.start <= a.start and a.end <= b.end
                )
                assert apart or nested


def test_lanes_come_in_the_recorders_order_and_unknown_ones_last() -> None:
    spans = [Span(lane, "", 0.0, 1.0) for lane in ("zebra", "adam", "compute", "apple", "adam")]
    assert lane_order(spans) == ["compute", "adam", "apple", "zebra"]
    assert [event["name"] for event in trace_events(spans, History(1)) if event["ph"] == "X"] == [
        ""
    ] * 5


def test_what_is_said_while_memory_is_pinned_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """For the bar stands still; and only while it is shown."""
    said = logging.getLogger("infinity.pinning")
    for shown in (False, True, False):
        with Progress(1) if shown else contextlib.nullcontext():
            said.info("pinning [much] ...")
        assert ("pinning [much] ..." in capsys.readouterr().err) is shown


def test_a_checkpoint_on_its_way_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    for done, shown in ((1 << 29, True), (1 << 30, False)):
        with Progress(3) as progress:
            progress.moved("saving", 0, 1 << 30)
            progress.moved("saving", done, 1 << 30)
        last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).split("\n")[-2:]
        assert any("saving" in line and " 50/100" in line for line in last) == shown
        assert any("of 1 GiB" in line for line in last) == shown
