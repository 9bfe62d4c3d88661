"""Shows a plan: as tables on a terminal, and as a drawing."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.cli.drawing import BLUE, BROWN, FAINT, GREY, INK, ORANGE, PURPLE, RED, TEAL, styled
from infinity.cli.knobs import as_options
from infinity.config import Config
from infinity.directories.directory import Directory
from infinity.directories.drafts import drafting
from infinity.plan.advice import Advice, Gain
from infinity.plan.forecast import Forecast, config_text
from infinity.plan.memory import MemoryPlan
from infinity.plan.published import tables
from infinity.quantities import format_bytes
from infinity.tier import TIERS

_WIDTH = 48
_PARTS = {
    "param": (BLUE, "parameters"),
    "grad": (ORANGE, "gradients"),
    "master": (TEAL, "masters"),
    "exp_avg": (PURPLE, "first moments"),
    "exp_avg_slow": (INK, "slow first moments"),
    "exp_avg_sq": (RED, "second moments"),
    "engine": (GREY, "copies and staging"),
    "statistics": (FAINT, "statistics of 4 bits"),
    "activations": (BROWN, "activations"),
}
"""The parts of a tier, with their colors and names. "engine" is memory beside the homes of
blocks."""


def parts_of(forecast: Forecast, memory: MemoryPlan) -> dict[str, dict[str, float]]:
    """Bytes of one rank, by tier and part."""
    allocated, states = memory.allocated, memory.states
    found: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        own: dict[str, float] = {kind: tiers[tier] for kind, tiers in states.items() if tiers[tier]}
        beside = allocated[tier] - sum(own.values())
        if beside > 0:
            own["engine"] = beside
        found[tier] = own
    spilled = memory.offloaded[1]
    device = "cpu" if forecast.hardware.unified else "gpu"
    if memory.statistics:
        found[device]["statistics"] = memory.statistics
    outside = memory.on_device - memory.statistics
    if outside:
        found[device]["activations"] = found[device].get("activations", 0) + outside
    if spilled:
        found["nvme"]["activations"] = spilled
    return found


def capacities(forecast: Forecast) -> dict[str, float]:
    """Bytes of each tier for one rank."""
    hardware = forecast.hardware
    host = hardware.host_memory / hardware.gpus
    gpu = host if hardware.gpu_memory is None else hardware.gpu_memory
    return {"gpu": gpu, "cpu": host, "nvme": hardware.capacity / hardware.gpus}


def print_head(console: Console, forecast: Forecast) -> None:
    """Print the model, the machine and the bytes."""
    model, hardware, training = forecast.model, forecast.hardware, forecast.training
    ranks = f"{hardware.ranks} ranks" if hardware.ranks > 1 else "one rank"
    console.print(
        f"{model.name}: {model.parameters / 1e9:,.4g} billion parameters on {hardware.name}, "
        f"{ranks}",
        markup=False,
        style="bold",
    )
    if model.trainable != model.parameters:
        console.print(f"{model.trainable:,} parameters are trained, and all others are frozen.")
    console.print(
        f"A step of a rank: {training.accumulate} x {training.batch} windows of "
        f"{training.length:,} tokens, and {_committed(forecast.config)}.",
        markup=False,
        highlight=False,
    )
    if forecast.memory is not None:
        _print_memory(console, forecast, forecast.memory)
    if model.tiled:
        console.print(
            "--gpu-memory holds no larger units, so wrap cuts these weights into tiles, and "
            f"gradients of their inputs round otherwise: {', '.join(model.tiled)}.",
            markup=False,
            soft_wrap=True,
        )


def _committed(config: Config) -> str:
    every = config.steps_per_commit
    return {0: "no step is committed", 1: "every step is committed"}.get(
        every, f"every {every} steps are committed"
    )


def print_answer(
    console: Console, forecast: Forecast, advice: Advice | None, better: Forecast | None
) -> None:
    """Print the step or the problems, and `advice` with the `better` plan that follows it."""
    if forecast.pace is not None:
        _print_pace(console, forecast)
        if forecast.model.has_experts:
            console.print("Every expert counts as computed, so a real step computes less.")
    for problem in forecast.problems:
        text = f"It does not fit: {as_options(problem)}."
        console.print(text, markup=False, style="red", soft_wrap=True)
    if advice is not None:
        text = f"Smallest change: {as_options(advice.words)}."
        console.print(text, markup=False, soft_wrap=True)
    elif not forecast.fits:
        console.print("No single change helps; plan for a smaller model.", markup=False)
    if better is not None and better.pace is not None:
        rate = f"{better.pace.seconds:,.3g} s, {better.pace.tokens_per_second:,.4g} tokens/s"
        console.print(f"With it, a step takes {rate}.", markup=False)


def print_gains(console: Console, forecast: Forecast, found: Sequence[Gain]) -> None:
    """Print what makes a plan faster that fits."""
    if forecast.pace is None or not found:
        return
    before = f"{forecast.pace.tokens_per_second:,.4g}"
    for each in found:
        console.print(
            f"Faster: {each.words}: {each.tokens_per_second:,.4g} tokens/s instead of {before}.",
            markup=False,
            soft_wrap=True,
        )


def print_command(console: Console, forecast: Forecast, command: str | None) -> None:
    """Print what runs the plan."""
    if not forecast.fits:
        return
    console.print(config_text(forecast.config), markup=False, soft_wrap=True, style="green")
    if command is not None:
        console.print(command, markup=False, highlight=False, soft_wrap=True, style="green")


def _print_memory(console: Console, forecast: Forecast, memory: MemoryPlan) -> None:
    parts, have = parts_of(forecast, memory), capacities(forecast)
    unified = forecast.hardware.unified
    kinds = [kind for kind in _PARTS if any(kind in tier for tier in parts.values())]
    table = Table(box=None, title="One rank", title_justify="left")
    table.add_column("")
    for tier in TIERS.values():
        table.add_column(tier.label_on(unified), justify="right")
    for kind in kinds:
        cells = [format_bytes(parts[tier].get(kind, 0)) for tier in TIERS]
        table.add_row(_PARTS[kind][1], *cells, style=_PARTS[kind][0])
    table.add_row("together", *(format_bytes(sum(parts[tier].values())) for tier in TIERS))
    table.add_row("of", *(format_bytes(have[tier]) for tier in TIERS))
    console.print(table)
    if memory.auto is not None:
        least, most, room = map(format_bytes, memory.auto)
        console.print(
            f'recompute="auto": blocks save between {least} (all recomputed, as above) and {most} '
            f"(none), in a room of {room}; a run decides by what it measures",
            markup=False,
            soft_wrap=True,
        )
    for name, tier in TIERS.items():
        console.print(_bar(tier.label_on(unified), parts[name], have[name]))


def _bar(name: str, parts: dict[str, float], have: float) -> Text:
    """A line of blocks in a color for each part, as long as the tier."""
    scale = _WIDTH / max(have, sum(parts.values()), 1)
    line = Text(f"{name:>12} ")
    used = 0
    for kind, nbytes in parts.items():
        blocks = round(nbytes * scale)
        line.append("█" * blocks, style=_PARTS[kind][0])
        used += blocks
    line.append("░" * max(0, round(have * scale) - used))
    return line


def _print_pace(console: Console, forecast: Forecast) -> None:
    pace = forecast.pace
    if pace is None:
        return
    table = Table(box=None, show_header=False, title="One step", title_justify="left")
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_row("seconds", f"{pace.seconds:,.3g}")
    table.add_row("tokens", f"{pace.tokens:,}")
    table.add_row("tokens per second", f"{pace.tokens_per_second:,.4g}")
    table.add_row("bottleneck", pace.bottleneck)
    table.add_row("updates", pace.mode)
    read, written = pace.traffic.read + pace.spilled, round(pace.written)
    if read + written:
        table.add_row("NVMe read, written", f"{format_bytes(read)}, {format_bytes(written)}")
    if pace.hiding_tokens is not None:
        table.add_row("tokens that hide the NVMe", f"{pace.hiding_tokens:,.0f}")
    wear = forecast.wear
    if wear is not None:
        table.add_row("written in a day, per node", f"{wear.bytes_per_day / 1e12:,.3g} TB")
        source = ", assumed" if wear.is_assumed else ""
        total = f"endurance of {wear.endurance / 1e12:,.0f} TB{source}"
        table.add_row(f"{total}, lasts", f"{wear.days:,.0f} days")
    console.print(table)
    for lane, seconds in sorted(pace.busy.items(), key=lambda item: -item[1]):
        share = min(seconds / pace.seconds, 1.0)
        line = Text(f"{lane:>15} ")
        line.append("█" * round(share * _WIDTH), style=BLUE)
        line.append("░" * (_WIDTH - round(share * _WIDTH)))
        line.append(f" {seconds:,.3g} s")
        console.print(line)


def print_tables() -> None:
    """Print the published tables, as the formulas reproduce them."""
    console = Console(file=sys.stdout)
    for table in tables():
        shown = Table(title=table.title, title_justify="left", box=None)
        for column in table.columns:
            shown.add_column(column, justify="right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def write_chart(path: Path, forecast: Forecast) -> None:
    """Draw the tiers and the lanes to `path` as a PNG, atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with styled("plan"), Directory(path.parent) as place, drafting(place) as drafts:
        figure = Figure(figsize=(10, 5.2))
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        if forecast.memory is not None:
            _draw_memory(left, forecast, forecast.memory)
        if forecast.pace is not None:
            lanes = sorted(forecast.pace.busy.items(), key=lambda item: item[1])
            right.barh([lane for lane, _ in lanes], [s for _, s in lanes], color=BLUE)
            right.axvline(forecast.pace.seconds, color=RED, linestyle=(0, (5, 3)))
            right.set_title(
                f"a step: {forecast.pace.seconds:.3g} s (dashed), and who works how long"
            )
            right.set_xlabel("seconds")
        figure.suptitle(
            f"{forecast.model.name}, {forecast.model.parameters / 1e9:,.4g} billion parameters, "
            f"on {forecast.hardware.name}"
        )
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150)
        drafts.write(path.name, image.getvalue())
        drafts.publish(path.name)


def _draw_memory(axes: Any, forecast: Forecast, memory: MemoryPlan) -> None:
    parts, have = parts_of(forecast, memory), capacities(forecast)
    unified = forecast.hardware.unified
    bottom = dict.fromkeys(TIERS, 0.0)
    for kind, (color, name) in _PARTS.items():
        heights = [parts[tier].get(kind, 0) / max(have[tier], 1) for tier in TIERS]
        if any(heights):
            labels = [tier.label_on(unified) for tier in TIERS.values()]
            bottoms = list(bottom.values())
            axes.bar(labels, heights, bottom=bottoms, color=color, label=name)
            bottom = {
                tier: bottom[tier] + height for tier, height in zip(TIERS, heights, strict=True)
            }
    axes.axhline(1.0, color=RED, linestyle=(0, (5, 3)))
    axes.set_title("share of each memory of one rank")
    axes.legend(loc="upper right", fontsize=8)
