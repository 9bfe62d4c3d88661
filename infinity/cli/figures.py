"""The figures of the report, drawn with matplotlib as SVG text for HTML."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.cli.drawing import (
    BLUE,
    BROWN,
    FAINT,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    name_rows,
    new_figure,
    styled,
    svg,
)
from infinity.cli.history import History
from infinity.cli.perfetto import lane_order
from infinity.observe import Span
from infinity.quantities import format_bytes, parse_bytes
from infinity.tier import TIERS

TIMELINE_STEPS = 3
_FINEST = 2500
"""Spans of a lane are joined if their gap is below this fraction of the timeline. Such a gap is
invisible."""
_LABEL_SHARE = 0.05
"""A bar has a label if it is longer than this share of the timeline."""
_BUDGET_SHARE = 0.2
"""A budget is drawn if more than this share of it is in use. Otherwise it would flatten the
curve."""
_LANE_COLORS = {
    "compute": BLUE,
    "wait nvme": RED,
    "wait adam": BROWN,
    "wait collective": GREY,
    "nvme read": TEAL,
    "nvme write": ORANGE,
    "adam": PURPLE,
    "collective": INK,
}
_TIER_COLORS = {"gpu": BLUE, "cpu": PURPLE, "nvme": TEAL}


def loss_figure(history: History) -> str:
    """Over steps: the training and validation loss above, the learning rate below."""
    numbers = [step.number for step in history.steps]
    with styled("loss"):
        figure = new_figure(4.6)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        marker = "o" if len(numbers) < 3 else None
        losses = [step.loss for step in history.steps]
        above.plot(numbers, losses, color=BLUE, linewidth=1.5, marker=marker, label="training")
        if history.validations:
            points = [(point.step, point.loss) for point in history.validations]
            style = {"color": ORANGE, "marker": "o", "markersize": 5, "linewidth": 1}
            above.plot(*zip(*points, strict=True), label="validation", **style)
        above.set_title("Loss (mean cross-entropy per token, nats)")
        above.legend(loc="upper right")
        rates = [step.learning_rate for step in history.steps]
        below.plot(numbers, rates, color=FAINT, linewidth=1.5, marker=marker)
        below.set_title("Learning rate")
        below.set_ylim(bottom=0)
        below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=False)
        below.set_xlabel("step")
        below.xaxis.get_major_locator().set_params(integer=True)
        return svg(figure, "loss and learning rate over steps")


def tiers_figure(history: History, budgets: dict[str, int]) -> str:
    """Bytes in use per tier over time. The budget is drawn if it is near enough for a common
    scale."""
    tiers = [tier for tier in TIERS if any(tier in sample.used for sample in history.samples)]
    if not tiers:
        return ""
    origin = history.samples[0].time
    times = [sample.time - origin for sample in history.samples]
    with styled("tiers"):
        figure = new_figure(1.5 * len(tiers) + 0.5)
        panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
        for tier, panel in zip(tiers, panels, strict=True):
            used = [sample.used.get(tier, 0) for sample in history.samples]
            budget, highest, color = budgets.get(tier, 0), max(used), _TIER_COLORS[tier]
            last = len(used) - 1
            changes = [i for i in range(len(used)) if i in (0, last) or used[i] != used[i - 1]]
            shown = budget if highest > _BUDGET_SHARE * budget else 0
            prefix, factor = _scale(max(highest, shown))
            at, values = [times[i] for i in changes], [used[i] / factor for i in changes]
            panel.fill_between(at, values, step="post", color=color, alpha=0.25, linewidth=0)
            panel.step(at, values, where="post", color=color, linewidth=1.2)
            label = TIERS[tier].label_on(history.unified_memory)
            title = f"{label}: up to {format_bytes(highest)}"
            if shown:
                panel.axhline(shown / factor, color=RED, linewidth=1.2, linestyle=(0, (5, 3)))
            if budget:
                title += f" of {format_bytes(budget)}" + (
                    f" ({highest / budget:.0%})" if highest > budget / 100 else ""
                )
            panel.set_title(title)
            panel.set_ylim(0, 1.12 * max(highest, shown, 1) / factor)
            panel.set_ylabel(prefix)
            panel.yaxis.get_major_locator().set_params(nbins=3)
        panels[-1].set_xlim(0, max(times[-1], 1e-9))
        panels[-1].set_xlabel("seconds since the first sample")
        return svg(figure, "bytes in use per tier over time")


def _scale(count: int) -> tuple[str, int]:
    """The binary prefix for `count` bytes, and its factor."""
    prefix = format_bytes(count).split()[1]
    return prefix, parse_bytes(f"1{prefix}")


def _joined(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """The spans of one lane inside [begin, end]. Spans with an invisible gap are joined. They keep
    their name if it is the same."""
    nearest = (end - begin) / _FINEST
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, stop = max(span.start, begin), min(span.end, end)
        if stop < start:
            continue
        if joined and start - joined[-1].end < nearest:
            before = joined[-1]
            name = before.name if before.name == span.name else ""
            joined[-1] = Span(before.lane, name, before.start, max(before.end, stop))
        else:
            joined.append(Span(span.lane, span.name, start, stop))
    return joined


def timeline_figure(history: History, spans: Sequence[Span]) -> str:
    """The busy times of each lane in the last few steps."""
    steps = history.steps[-TIMELINE_STEPS:]
    lanes = lane_order(spans)
    if not steps or not lanes:
        return ""
    begin, end = steps[0].start, steps[-1].end
    unit, factor = ("ms", 1e3) if end - begin < 10 else ("s", 1.0)
    with styled("timeline"):
        figure = new_figure(0.42 * len(lanes) + 0.9)
        axes = figure.subplots()
        for row, lane in enumerate(lanes):
            color = _LANE_COLORS.get(lane, GREY)
            drawn = _joined([span for span in spans if span.lane == lane], begin, end)
            bars = [
                ((s.start - begin) * factor, max(s.end - s.start, (end - begin) / _FINEST) * factor)
                for s in drawn
            ]
            axes.broken_barh(bars, (row - 0.34, 0.68), color=color, linewidth=0)
            for span in drawn:
                if span.name and span.end - span.start > _LABEL_SHARE * (end - begin):
                    x = ((span.start + span.end) / 2 - begin) * factor
                    axes.text(
                        x,
                        row,
                        span.name[-24:],
                        ha="center",
                        va="center",
                        color="white",
                        size=7,
                        clip_on=True,
                    )
        for step in steps:
            axes.axvline((step.start - begin) * factor, color=INK, linewidth=0.8, alpha=0.6)
            label = {
                "xy": ((step.start - begin) * factor, 1),
                "xytext": (3, 2),
                "xycoords": ("data", "axes fraction"),
            }
            axes.annotate(
                f"step {step.number}", textcoords="offset points", color=FAINT, size=8.5, **label
            )
        name_rows(axes, lanes)
        axes.set_xlim(0, (end - begin) * factor)
        axes.set_xlabel(f"{unit} since step {steps[0].number} began")
        return svg(figure, "timeline of the last steps by lane")
