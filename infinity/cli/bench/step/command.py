"""`infinity bench step`: the command and its options. It shares options with `infinity
finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli import options as o
from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import OUTPUT, Json, ReportFile
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.knobs import configured, mirrors
from infinity.interrupt import interrupted_by_signals
from infinity.observe import Span

_TIMING = "Timing"

Model = Annotated[
    str,
    typer.Option(
        help=(
            "A Hugging Face directory, a config.json (random weights), or a preset "
            "(llama-tiny, llama-100m, ...)."
        )
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Steps that are timed.", rich_help_panel=_TIMING)]
Discard = Annotated[
    int, typer.Option(min=1, help="Steps before them that are not.", rich_help_panel=_TIMING)
]
MostSeconds = Annotated[
    float,
    typer.Option(
        min=0, help="Begin no further step after so many seconds of them.", rich_help_panel=_TIMING
    ),
]
ProbeBytes = Annotated[
    int,
    typer.Option(
        parser=o.parse_size,
        metavar="BYTES",
        show_default="256MiB",
        help="What a link is measured with.",
        rich_help_panel=_TIMING,
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the steps as a Perfetto trace.", rich_help_panel=OUTPUT
    ),
]


LEFT_OUT = (
    "algorithm",
    "stage",
    "deterministic",
    "inference",
    "split_master",
    "collective_timeout",
    "verify",
    "poison",
    "read_in_place",
    "instruction_set",
    "threads",
    "partition_activations",
)


@mirrors(
    before="steps", leave_out=LEFT_OUT, delayed_after=0, gpu_memory=1 << 30, cpu_memory=2 << 30
)
def step(
    model: Model = "llama-tiny",
    checkpoint_activations: o.CheckpointActivations = True,
    sequence_length: o.SequenceLength[int] = 256,
    batch_size: o.BatchSize = 4,
    accumulate: o.Accumulate = 1,
    accumulation_order: o.AccumulationOrder = "horizontal",
    lr: o.LearningRate[float] = 1e-4,
    clip: o.Clip = "global",
    seed: o.Seed = 0,
    steps: Steps = 5,
    discard: Discard = 2,
    most_seconds: MostSeconds = 1e9,
    probe_bytes: ProbeBytes = 256 << 20,
    as_json: Json = None,
    report: ReportFile = None,
    timeline: Timeline = None,
    debug: o.Debug = False,
    **knobs: Any,
) -> None:
    """Train for a few steps on synthetic tokens, and compare a step with the roofline: the speed of
    each device alone.

    Compute (models of one and two blocks, extrapolated in depth), NVMe, the link to the device and
    the update are measured in the same run. The longest of them is the bound. The step is also
    compared with the plan for such a machine. One process, one device. The output is ready to be
    pasted into an issue.
    """
    with plain_failures(debug):
        require_extras(
            "transformers", *(["matplotlib"] if report else []), what="`infinity bench step`"
        )
        from infinity.bench.step.measure import measure
        from infinity.bench.step.train import Workload, find_source
        from infinity.cli.bench.step.show import print_table, render
        from infinity.cli.history import History
        from infinity.cli.perfetto import write_trace
        from infinity.plan.prediction import prediction

        def write(spans: Sequence[Span]) -> None:
            if timeline is not None:
                write_trace(timeline, spans, History(work.tokens))

        delivery = Delivery(as_json, report, timeline=timeline)
        config = configured(knobs)
        source = find_source(model, config.precision)
        source.check_length(sequence_length)
        work = Workload(
            source,
            config,
            sequence_length,
            batch_size,
            accumulate,
            accumulation_order == "vertical",
            checkpoint_activations and config.recompute != "auto",
            steps,
            discard,
            most_seconds,
            lr,
            seed,
            clip,
        )
        with interrupted_by_signals():
            summary = measure(work, probe_bytes, say, write)
            summary["plan"] = prediction(work, summary)
        delivery.deliver(
            summary, lambda: render(summary), lambda console: print_table(summary, console)
        )
