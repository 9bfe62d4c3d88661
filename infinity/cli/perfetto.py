"""Writes the recorded spans as a Chrome/Perfetto trace (open it at ui.perfetto.dev or
chrome://tracing)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infinity.cli.history import History
from infinity.directories.directory import Directory
from infinity.directories.drafts import drafting
from infinity.errors import naming
from infinity.observe import LANES, Span
from infinity.tier import TIERS

_PROCESS = 1
_ROWS_PER_LANE = 1000
"""Track ids are lane * this + row. A lane has several rows if its spans overlap without nesting."""


def lane_order(spans: Iterable[Span]) -> list[str]:
    """Lanes that have spans: known lanes in their order, then other lanes by name."""
    present = {span.lane for span in spans}
    return [lane for lane in LANES if lane in present] + sorted(present.difference(LANES))


def rows(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span of one lane with its row. Two spans in a row are either disjoint or nested."""
    open_ends: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for row, ends in enumerate(open_ends):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                yield row, span
                break
        else:
            open_ends.append([span.end])
            yield len(open_ends) - 1, span


def trace_events(spans: Sequence[Span], history: History) -> Iterator[dict[str, Any]]:
    """Trace events: one track per lane (more if spans overlap), the steps, and counters for loss
    and tiers.

    Times are microseconds since the first event.
    """
    starts = (
        [span.start for span in spans]
        + [step.start for step in history.steps]
        + [s.time for s in history.samples]
    )
    origin = min(starts, default=0.0)

    def microseconds(time: float) -> float:
        return round((time - origin) * 1e6, 3)

    def complete(track: int, name: str, category: str, start: float, end: float) -> dict[str, Any]:
        length = max(0.0, round(microseconds(end) - microseconds(start), 3))
        head = {"name": name, "cat": category, "ph": "X", "pid": _PROCESS, "tid": track}
        return {**head, "ts": microseconds(start), "dur": length}

    def metadata(kind: str, track: int, **arguments: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": arguments}

    yield metadata("process_name", 0, name="infinity")
    yield metadata("thread_name", 0, name="steps")
    yield metadata("thread_sort_index", 0, sort_index=0)
    for step in history.steps:
        yield complete(0, f"step {step.number}", "step", step.start, step.end)
        yield {
            "name": "loss",
            "ph": "C",
            "pid": _PROCESS,
            "ts": microseconds(step.end),
            "args": {"loss": step.loss},
        }
    for number, lane in enumerate(lane_order(spans), start=1):
        named: set[int] = set()
        for row, span in rows([span for span in spans if span.lane == lane]):
            track = number * _ROWS_PER_LANE + row
            if row not in named:
                named.add(row)
                yield metadata(
                    "thread_name", track, name=lane if row == 0 else f"{lane} ({row + 1})"
                )
                yield metadata("thread_sort_index", track, sort_index=track)
            yield complete(track, span.name, lane, span.start, span.end)
    for sample in history.samples:
        for tier, used in sample.used.items():
            counter = {
                "name": f"{TIERS[tier].label_on(history.unified_memory)} bytes",
                "ph": "C",
                "pid": _PROCESS,
                "ts": microseconds(sample.time),
            }
            yield {**counter, "args": {"bytes": used}}


def write_trace(path: Path, spans: Sequence[Span], history: History) -> None:
    """Write the trace events to `path`, one per line, atomically."""
    with Directory(path.parent) as place, drafting(place) as drafts:
        created = drafts.folder.create(path.name, 0o666)
        with naming(path), os.fdopen(created, "w", encoding="utf-8") as handle:
            handle.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(trace_events(spans, history)):
                handle.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
            handle.write("\n]}\n")
        drafts.publish(path.name)
