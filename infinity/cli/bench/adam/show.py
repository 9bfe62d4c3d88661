"""Shows the result as a table on a terminal, and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console

from infinity.cli.bench.delivery import print_rows
from infinity.cli.drawing import GREY, INK, ORANGE, TEAL, name_rows, new_figure, styled, svg
from infinity.cli.page import card, page, section, table

HEADINGS = ("update", "bytes", "ns", "GB/s", "rounds", "of loop", "rounds")


def cells(row: dict[str, Any]) -> list[str]:
    """The texts of one row under `HEADINGS`. Bytes and nanoseconds are per parameter."""
    return [
        row["name"],
        f"{row['bytes_per_parameter']:.4g}",
        f"{row['nanoseconds_per_parameter']:.3f}",
        f"{row['gb_per_second_median']:.1f}",
        f"{row['gb_per_second_lowest']:.1f}-{row['gb_per_second_highest']:.1f}",
        f"{row['of_in_place_loop_ratio_median']:.2f}",
        f"{row['of_in_place_loop_ratio_lowest']:.2f}-{row['of_in_place_loop_ratio_highest']:.2f}",
    ]


def sentences(result: dict[str, Any]) -> list[str]:
    """Sentences that compare updates to a shadow copy with a loop that does the same, and the fp32
    update with the peers."""
    return [
        f"The update '{row['name']}' reaches {row['of_shadow_loop_ratio_median']:.2f} of the loop "
        f"to one ({row['of_shadow_loop_ratio_lowest']:.2f}-"
        f"{row['of_shadow_loop_ratio_highest']:.2f} by round)."
        for row in result["rows"]
        if "of_shadow_loop_ratio_median" in row
    ] + [
        f"The fp32 update takes {ratios['ratio_median']:.2f} times fewer seconds than {peer} "
        f"({ratios['ratio_lowest']:.2f}-{ratios['ratio_highest']:.2f} by round)."
        for row in result["rows"]
        for peer, ratios in row.get("over_peers", {}).items()
    ]


def title(result: dict[str, Any]) -> str:
    """The measured work, in one line."""
    return (
        f"{result['parameters_count']:,} parameters, {result['threads_count']} threads, "
        f"{result['instruction_set']}, {result['rounds_count']} rounds"
    )


def print_table(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table for each size."""
    for result in results:
        print_rows(console, HEADINGS, map(cells, result["rows"]), title(result))
        for sentence in sentences(result):
            console.print(sentence, markup=False)


def figure(result: dict[str, Any]) -> str:
    """A bar for each row, with the spread of its rounds, and a line at the in-place loop."""
    rows = result["rows"]
    peers = {peer for row in rows for peer in row.get("over_peers", {})}
    with styled("adam"):
        drawing = new_figure(0.4 * len(rows) + 1.0)
        axes = drawing.subplots()
        for at, row in enumerate(rows):
            color = GREY if at == 0 else ORANGE if row["name"] in peers else TEAL
            axes.barh(at, row["gb_per_second_median"], height=0.5, color=color)
            axes.plot(
                [row["gb_per_second_lowest"], row["gb_per_second_highest"]],
                [at, at],
                color=INK,
                linewidth=1,
            )
        axes.axvline(rows[0]["gb_per_second_median"], color=INK, linewidth=1, linestyle=(0, (5, 3)))
        name_rows(axes, [row["name"] for row in rows])
        axes.set_xlabel(
            "GB/s, median of the rounds; the line spans them; dashed: the in-place loop"
        )
        return svg(drawing, "GB/s by format")


def render(results: Sequence[dict[str, Any]]) -> str:
    """The page as HTML text."""
    parts = [
        (
            "<header><h1>infinity bench adam</h1><p>What the optimizer kernels reach of what "
            "memory gives</p></header>"
        )
    ]
    last = results[-1]["rows"]
    cards = [
        card(
            row["name"],
            f"{row['gb_per_second_median']:.1f} GB/s",
            f"{row['of_in_place_loop_ratio_median']:.0%} of the loop",
        )
        for row in last[1:4]
    ]
    parts.append(f'<div class="cards">{"".join(cards)}</div>')
    for result in results:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(result))
        note = (
            "Bytes read plus bytes written for each parameter; ratios are of one round "
            "each. 1 GB is 10^9 bytes."
        )
        shown = table(HEADINGS, map(cells, result["rows"]))
        parts.append(section(title(result), note, figure(result) + shown + words))
    return page("infinity bench adam", parts)
