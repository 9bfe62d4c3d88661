"""`report.html`: one page about a run, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from infinity.cli.figures import loss_figure, tiers_figure, timeline_figure
from infinity.cli.history import (
    History,
    budget_of_a_rank,
    budget_text,
    cached_text,
    format_loss,
    format_seconds,
    labels_of,
)
from infinity.cli.output import write_file
from infinity.cli.page import card, page, section
from infinity.observe import Span
from infinity.quantities import format_bytes
from infinity.tier import GPU


def _cards(summary: dict[str, Any]) -> str:
    loss, nvme = summary["loss"], summary["nvme_bytes_per_parameter_per_step"]
    read, written = nvme["read"], nvme["written"]
    validation = (
        f"after step {loss['validation_step']}" if loss["validation_step"] else "no validation"
    )
    cards = [
        card(
            "Training loss",
            format_loss(loss["last"], ".3f"),
            f"from {format_loss(loss['first'], '.3f')}",
        ),
        card("Validation loss", format_loss(loss["validation"], ".3f"), validation),
        card(
            "Tokens per second",
            f"{summary['tokens_per_second']:,.0f}",
            "of data, without padding; the first step and validations are left out",
        ),
        card(
            "NVMe bytes per parameter and step",
            f"{read['measured']:.1f} + {written['measured']:.1f}",
            f"read + written; planned {read['planned']:.1f} + {written['planned']:.1f}",
        ),
    ]
    peaks, labels = [], labels_of(summary)
    for tier, memory in summary["memory"].items():
        of = ", the highest of a rank" if summary["ranks"] > 1 else ""
        budget = budget_text(summary, tier, "budget ") or "no limit was set"
        peaks.append(card(f"Peak: {labels[tier]}{of}", format_bytes(memory["peak"]), budget))
    if summary["cached"]["of"]:
        peaks.append(
            card(
                "Cached in host memory",
                format_bytes(summary["cached"]["bytes"]),
                f"{cached_text(summary['cached'])}; these bytes are never read",
            )
        )
    if summary["gpu_resident"]:
        kept = format_bytes(summary["gpu_resident"])
        peaks.append(
            card(
                f"{labels[GPU.name]}-resident states",
                kept,
                "all states of the first units: updated there",
            )
        )
    return "".join(f'<div class="cards">{"".join(row)}</div>' for row in (cards, peaks) if row)


def _bars(rows: Iterable[tuple[str, float]]) -> str:
    listed = list(rows)
    longest = max((seconds for _, seconds in listed), default=0.0) or 1.0
    lines = (
        f"<tr><th>{escape(name)}</th>"
        f'<td class="bar"><div style="width:{100 * seconds / longest:.1f}%"></div></td>'
        f'<td class="n">{format_seconds(seconds)}</td></tr>'
        for name, seconds in listed
    )
    return f"<table>{''.join(lines)}</table>"


def render_report(summary: dict[str, Any], history: History, spans: Sequence[Span]) -> str:
    """The page as HTML text. `summary` comes from `infinity.cli.history.summarize`."""
    count = summary["steps"]
    steps = f"{count} step{'' if count == 1 else 's'}"
    ended = (
        '<p class="warn">The run was interrupted; this is its state at the last finished step.</p>'
    )
    ranks = summary["ranks"]
    many = f" on {ranks} ranks; what follows over time is that of rank 0" if ranks > 1 else ""
    budgets = {
        tier: budget for tier in summary["memory"] if (budget := budget_of_a_rank(summary, tier))
    }
    time_table = _bars(summary["seconds"].items())
    waits = (
        _bars((wait["unit"], wait["seconds"]) for wait in summary["worst_waits"])
        if summary["worst_waits"]
        else ""
    )
    parts = [
        f"<header><h1>{escape(summary['model'])}</h1><p>{summary['parameters']:,} parameters, "
        f"{steps} of {history.tokens_per_step:,} "
        f"tokens of data{many}</p>{ended if summary['signal'] is not None else ''}</header>",
        _cards(summary),
        section("Loss and learning rate", "", loss_figure(history)),
        section(
            "Memory by tier",
            (
                "Bytes the engine holds, sampled while the steps ran. A dashed line is the "
                "budget, where it is near."
            ),
            tiers_figure(history, budgets),
        ),
        section(
            "Timeline of the last steps",
            "Reading, writing and the optimizer should run beside compute. In the wait lanes the "
            "model stands still. trace.json beside this page has every recorded span, for "
            "ui.perfetto.dev.",
            timeline_figure(history, spans),
        ),
        '<div class="pair">',
        section(
            "Where the time went",
            "Totals over the run; the optimizer runs beside the others.",
            time_table,
        ),
        section("Units waited for most", "Seconds the model waited for NVMe, by unit.", waits),
        "</div>",
    ]
    return page(f"infinity: {summary['model']}", parts)


def write_report(
    path: Path, summary: dict[str, Any], history: History, spans: Sequence[Span]
) -> None:
    """Write the page to `path`."""
    write_file(path, render_report(summary, history, spans))
