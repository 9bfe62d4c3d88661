"""Terminal output of a run: a progress bar on stderr, and a table on stdout at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from infinity.cli.display import Display
from infinity.cli.history import (
    History,
    budget_text,
    cached_text,
    format_loss,
    format_seconds,
    labels_of,
)
from infinity.quantities import format_bytes
from infinity.tier import GPU, TIERS

if TYPE_CHECKING:
    from infinity.engine import Engine

_pinning = logging.getLogger("infinity.pinning")
"""Log messages about pinning much memory. The bar stands still meanwhile."""
LINES = 20
"""If stderr is no terminal, about this many plain lines replace the bar."""


class _Stderr(Console):
    def on_broken_pipe(self) -> None:
        """Write no more, and continue. `rich` would end the process."""
        self.quiet = True


class _Notes(logging.Handler):
    """Shows log messages as notes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


class Progress(Display):
    """A progress bar with loss, speed and the three tiers of this rank. If stderr is no terminal,
    it writes plain lines."""

    def __init__(self, whose: str = "") -> None:
        self._console, self._whose = _Stderr(stderr=True), whose
        self._steps = 0
        self._engine: Engine | None = None
        self._budgets: dict[str, int] = {}
        self._bar = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(bar_width=20),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[facts]}"),
            bars.TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, facts="")
        self._moving = self._bar.add_task("", total=100, facts="", visible=False)
        self._notes = _Notes(self.note)

    def __enter__(self) -> Progress:
        self._bar.start()
        _pinning.addHandler(self._notes)
        _pinning.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        _pinning.removeHandler(self._notes)
        _pinning.setLevel(logging.NOTSET)
        self._bar.stop()

    def phase(self, text: str) -> None:
        """The part `text` of the run begins."""
        self._bar.update(self._task, description=text)

    def attach(self, engine: Engine, steps: int) -> None:
        """Show the tiers of `engine`, and count to `steps`."""
        self._engine, self._steps = engine, steps
        self._bar.update(self._task, total=steps)
        self._budgets = engine.report().limits  # read once, because a report waits for updates

    def stepped(self, history: History) -> None:
        """Advance the bar by one step."""
        step = history.steps[-1]
        facts = f"loss {step.loss:.4f}  {history.tokens_per_second():,.0f} tokens/s"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step.number, facts=f"{facts}  {self._tiers()}")
        elif step.number in (1, self._steps) or step.number % -(-self._steps // LINES) == 0:
            self.note(f"step {step.number}/{self._steps}  {facts}  {self._tiers()}")

    def validated(self, history: History) -> None:
        """Write the validation loss above the bar."""
        step, loss = history.validations[-1]
        self.note(f"step {step}/{self._steps}  validation loss {loss:.4f}")

    def moved(self, doing: str, done: int, total: int) -> None:
        """Show a separate bar, in percent, until all bytes are done."""
        if done == 0:
            self._bar.reset(self._moving)
        self._bar.update(
            self._moving,
            description=doing,
            completed=100 * done // max(total, 1),
            facts=f"% of {format_bytes(total)}",
            visible=done < total,
        )

    def note(self, text: str) -> None:
        """Write a line above the bar. Training continues if stderr is closed."""
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tiers(self) -> str:
        engine, budgets = self._engine, self._budgets
        if engine is None:
            return ""
        used = engine.memory()
        return self._whose + "  ".join(
            f"{tier.label_on(engine.compute_device.unified_memory)} {format_bytes(used[name])}"
            + (f"/{format_bytes(budgets[name])}" if budgets.get(name) else "")
            for name, tier in TIERS.items()
            if name in used
        )


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (name, value) texts, for the table."""
    rows = [
        *_run_rows(summary),
        *_update_rows(summary),
        *((f"time: {cause}", format_seconds(spent)) for cause, spent in summary["seconds"].items()),
        *(
            (f"waited for {wait['unit']}", format_seconds(wait["seconds"]))
            for wait in summary["worst_waits"]
        ),
        *_memory_rows(summary),
        *((name, summary[name]) for name in ("output", "report", "trace") if summary.get(name)),
    ]
    if not summary["output"]:
        rows.append(
            ("output", "none: the trained weights are gone; give --output DIR to keep them")
        )
    return rows


_Rows = Iterator[tuple[str, str]]


def _run_rows(summary: dict[str, Any]) -> _Rows:
    """The model, the steps, the loss and the traffic."""
    loss, ranks = summary["loss"], summary["ranks"]
    yield "model", f"{summary['model']}, {summary['parameters']:,} parameters"
    if ranks > 1:
        yield (
            "ranks",
            f"{ranks}; bytes moved are those of all, peaks those of one rank, times those of "
            "rank 0",
        )
    interrupted = " (interrupted)" if summary["signal"] is not None else ""
    yield "steps", f"{summary['steps']}{interrupted}"
    yield "loss, first to last", f"{format_loss(loss['first'])} to {format_loss(loss['last'])}"
    yield "validation loss", format_loss(loss["validation"])
    yield "tokens per second", f"{summary['tokens_per_second']:,.0f}"
    for way in ("read", "written"):
        moved = summary["nvme_bytes_per_parameter_per_step"][way]
        yield (
            f"NVMe {way}",
            f"{moved['measured']:.2f} B per parameter and step, planned {moved['planned']:.2f}",
        )


def _update_rows(summary: dict[str, Any]) -> _Rows:
    """Updates that began early, and steps that were left out."""
    speculative = summary["speculative_updates"]
    if any(speculative.values()):
        yield (
            "speculative updates",
            f"{speculative['kept']:,} kept, {speculative['rolled_back']:,} rolled back",
        )
    scale = summary["loss_scale"]
    if scale is not None or summary["steps_skipped"]:
        shown = "" if scale is None else f"; loss scale {scale:,.0f} at the end"
        yield (
            "steps skipped",
            f"{summary['steps_skipped']}, because gradients were not finite{shown}",
        )


def _memory_rows(summary: dict[str, Any]) -> _Rows:
    """Peaks and budgets of the tiers, and the bytes that stayed in memory."""
    labels = labels_of(summary)
    for tier, memory in summary["memory"].items():
        budget = budget_text(summary, tier, " of ")
        yield f"peak {labels[tier]}", format_bytes(memory["peak"]) + budget
    for tier, source in summary["budget_sources"].items():
        if source != "given":
            yield f"budget {labels[tier]}", source
    if summary["cached"]["of"]:
        yield "cached in host memory", cached_text(summary["cached"])
    if summary["gpu_resident"]:
        yield f"{labels[GPU.name]}-resident", format_bytes(summary["gpu_resident"])
    saved = summary["activations"]
    stayed = saved["not_offloaded"]
    if saved["offloaded"] or stayed:
        yield (
            "activations offloaded",
            f"{format_bytes(saved['offloaded'])} in the last step, "
            f"{format_bytes(saved['written_to_nvme'])} of it to NVMe; "
            f"peak {format_bytes(saved['peak'])}"
            + (f"; {format_bytes(stayed)} had no room" if stayed else ""),
        )


def print_summary(summary: dict[str, Any]) -> None:
    """Print the table of the run to stdout."""
    table = Table(title="infinity finetune", show_header=False, title_justify="left")
    table.add_column(style="bold", max_width=36, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    Console(file=sys.stdout).print(table, markup=False)
