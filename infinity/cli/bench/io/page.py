"""Shows the result as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from infinity.cli.bench.io.table import HEADINGS, cells, facts, row_name, setting_words
from infinity.cli.drawing import (
    BLUE,
    FAINT,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    TEAL,
    name_rows,
    new_figure,
    styled,
    svg,
)
from infinity.cli.page import card, page, section, table
from infinity.quantities import format_bytes


def modes_figure(rows: Sequence[dict[str, Any]], paths: int) -> str:
    """A bar per mode with the spread of its rounds. If fio ran, its bar is beside it."""
    with styled("modes"):
        figure = new_figure(0.45 * len(rows) + 1.0)
        axes = figure.subplots()
        for at, row in enumerate(rows):
            color = (
                ORANGE
                if "write" in row["mode"]
                else PURPLE
                if row["mode"] in ("mixed", "replay")
                else TEAL
            )
            _bar(axes, at - (0.18 if "fio_median_ratio" in row else 0), row, "", color)
            if "fio_median_ratio" in row:
                _bar(axes, at + 0.18, row, "fio_", GREY)
        name_rows(axes, [row_name(row, paths) for row in rows])
        axes.set_xlabel(
            "GB/s, median of the rounds; the line spans them"
            + (" (grey: fio)" if _compared(rows) else "")
        )
        return svg(figure, "GB/s by mode")


def _bar(axes: Any, at: float, row: dict[str, Any], whose: str, color: str) -> None:
    median, low, high = (
        row[f"{whose}{name}_gb_per_second"] for name in ("median", "lowest", "highest")
    )
    axes.barh(at, median, height=0.34, color=color)
    axes.plot([low, high], [at, at], color=INK, linewidth=1)


def _compared(rows: Sequence[dict[str, Any]]) -> bool:
    return any("fio_median_ratio" in row for row in rows)


def search_figure(trials: Sequence[dict[str, Any]]) -> str:
    """Every measurement of the search: read and write speed over bytes in flight."""
    with styled("search"):
        figure = new_figure(3.2)
        axes = figure.subplots()
        for way, color in (("read", TEAL), ("write", ORANGE)):
            for engine, marker in (("io_uring", "o"), ("posix", "x")):
                points = [
                    (
                        trial["depth_requests"] * trial["request_bytes"] / (1 << 20),
                        trial[f"{way}_gb_per_second"],
                    )
                    for trial in trials
                    if trial["engine"] == engine and f"{way}_gb_per_second" in trial
                ]
                if points:
                    axes.scatter(
                        *zip(*points, strict=True),
                        color=color,
                        marker=marker,
                        s=22,
                        label=f"{way}, {engine}",
                    )
        axes.set_xscale("log", base=2)
        ticks = sorted(
            {trial["depth_requests"] * trial["request_bytes"] / (1 << 20) for trial in trials}
        )
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("MiB in flight")
        axes.set_ylabel("GB/s")
        axes.legend(loc="lower right")
        return svg(figure, "speed of each setting that was tried")


def sustained_figure(sustained: dict[str, Any]) -> str:
    """Write speed over time."""
    with styled("sustained"):
        figure = new_figure(2.6)
        axes = figure.subplots()
        timeline = sustained["timeline"]
        axes.plot(
            [s["at_seconds"] for s in timeline],
            [s["gb_per_second"] for s in timeline],
            color=BLUE,
            linewidth=1.3,
        )
        axes.axhline(
            sustained["last_half_gb_per_second"], color=FAINT, linewidth=1, linestyle=(0, (5, 3))
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds")
        axes.set_ylabel("GB/s written")
        return svg(figure, "write speed over time")


def render(summary: dict[str, Any]) -> str:
    """The page as HTML text, from the summary of `Benchmark.run`."""
    rows, paths = summary["rows"], len(summary["paths"])
    names = ", ".join(place["path"] for place in summary["paths"])
    whole = [row for row in rows if len(row["paths"]) == paths and row["load"] is None]
    cards = [
        card(
            row["mode"],
            f"{row['median_gb_per_second']:.2f} GB/s",
            f"{row['fio_median_ratio']:.0%} of fio" if "fio_median_ratio" in row else "",
        )
        for row in whole[:4]
    ]
    sustained, config = summary["sustained"], json.dumps(summary["config"], indent=2)
    around = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts(summary)
    )
    modes = table(HEADINGS, [cells(row, paths) for row in rows])
    note = "Medians of interleaved rounds; 1 GB is 10^9 bytes, latencies are in milliseconds."
    tried = search_figure(summary["search"]["trials"])
    parts = [
        (
            f"<header><h1>infinity bench io</h1><p>{escape(names)}: "
            f"{escape(setting_words(summary['best']))}</p></header>"
        ),
        f'<div class="cards">{"".join(cards)}</div>',
        section("Modes", note, modes_figure(rows, paths) + modes),
        section(
            "The search", "Each point is one measurement; the best few were measured again.", tried
        ),
    ]
    if sustained:
        note = (
            f"Over {format_bytes(sustained['write_set_bytes'])}; the dashed line is the "
            "median of the last half."
        )
        parts.append(section("Sustained writing", note, sustained_figure(sustained)))
    parts += [
        section("Around it", "", f"<table>{around}</table>"),
        section(
            "Configuration",
            "For infinity.Config (add budgets) and a DeepSpeed file.",
            f"<pre>{escape(config)}</pre>",
        ),
    ]
    return page(f"infinity bench io: {names}", parts)
