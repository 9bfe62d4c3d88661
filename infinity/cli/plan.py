"""`infinity plan`: the command and its options."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli import options as o
from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import OUTPUT, Json
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.knobs import configured, mirrors
from infinity.config import Config

if TYPE_CHECKING:
    from infinity.plan.pace import Pace

_MODEL, _MACHINE = "Model", "Machine"

Model = Annotated[
    str | None,
    typer.Option(
        help=(
            "A Hugging Face directory, a config.json, the id of a model in the cache of the hub, "
            "or a preset (llama-tiny, llama-7b, ...)."
        ),
        rich_help_panel=_MODEL,
    ),
]
Layers = Annotated[
    int | None, typer.Option(help="Blocks, instead of --model.", rich_help_panel=_MODEL)
]
Hidden = Annotated[int | None, typer.Option(help="The hidden size.", rich_help_panel=_MODEL)]
Heads = Annotated[
    int | None,
    typer.Option(
        help="Attention heads.", show_default="one for 128 of --hidden", rich_help_panel=_MODEL
    ),
]
Vocabulary = Annotated[int, typer.Option(help="Words.", rich_help_panel=_MODEL)]
OnMachine = Annotated[
    str,
    typer.Option(
        "--machine",
        help=(
            "this (measured in under a minute), a JSON or TOML file that describes it, or one of "
            "dgx2, h200, dgx-h200, rtx4090."
        ),
        rich_help_panel=_MACHINE,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Nodes, instead of those of --machine.", rich_help_panel=_MACHINE),
]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a node, likewise.", rich_help_panel=_MACHINE)
]
Tables = Annotated[
    bool,
    typer.Option("--tables", help="Print the published tables that the formulas reproduce."),
]
Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write one simulated step as a Perfetto trace.",
        rich_help_panel=OUTPUT,
    ),
]
Chart = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw a PNG.", rich_help_panel=OUTPUT)
]

LEFT_OUT = (
    "deterministic",
    "inference",
    "nvme_shares",
    "io_engine",
    "gpu_direct",
    "collective_timeout",
    "verify",
    "poison",
    "instruction_set",
    "delayed_after",
    "partition_activations",
)


@mirrors(before="as_json", leave_out=LEFT_OUT)
def plan(
    context: typer.Context,
    model: Model = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    vocabulary: Vocabulary = 50_304,
    machine: OnMachine = "this",
    nodes: Nodes = None,
    gpus: Gpus = None,
    sequence_length: o.SequenceLength = 2048,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Windows per forward pass, of one rank.")
    ] = 1,
    accumulate: o.Accumulate = 1,
    checkpoint_activations: o.CheckpointActivations = True,
    tables: Tables = False,
    as_json: Json = None,
    timeline: Timeline = None,
    chart: Chart = None,
    debug: o.Debug = False,
    **knobs: Any,
) -> None:
    """Predict the memory and the step time of a model on a machine, and the smallest change if it
    does not fit.

    Nothing is allocated: the code that places states at run time decides, and its scheduler is
    simulated. The exit status is 1 if the model does not fit.
    """
    with plain_failures(debug):
        from infinity.cli.planned import print_plan, print_tables, write_chart
        from infinity.plan.advice import advise
        from infinity.plan.forecast import plan as forecast_of
        from infinity.plan.forecast import summary
        from infinity.plan.memory import Training

        if tables:
            print_tables()
            return
        if chart is not None:
            require_extras("matplotlib", what="--chart")
        idle = [name for name in ("heads", "vocabulary") if _is_said(context, name)]
        if model is not None and idle:
            raise ValueError(f"--model says its own --{idle[0]}; that goes with --layers, --hidden")
        delivery = Delivery(as_json, None, timeline=timeline, chart=chart)
        recomputes = checkpoint_activations or knobs.get("recompute") != "off"
        training = Training(sequence_length, batch_size, accumulate, recomputes)
        dimensions = (layers, hidden, heads, vocabulary)
        changes = {"nodes": nodes, "gpus": gpus}
        said = [name for name in knobs if _is_said(context, name)]
        given = {name: number for name, number in changes.items() if number is not None}
        config, planned, hardware = _asked(model, dimensions, machine, training, given, knobs, said)
        forecast = forecast_of(planned, hardware, training, config)
        advice = advise(forecast)
        better = None
        if advice is not None:
            case = advice.case
            better = forecast_of(planned, case.hardware, case.training, case.config)
        if timeline is not None:
            _write_timeline(timeline, forecast.pace)
        if chart is not None:
            write_chart(chart, forecast)
        result = summary(forecast, None if advice is None else advice.words)
        delivery.deliver(result, str, lambda console: print_plan(console, forecast, advice, better))
    if not forecast.fits:
        raise typer.Exit(1)


def _write_timeline(path: Path, pace: Pace | None) -> None:
    from infinity.cli.history import History
    from infinity.cli.perfetto import write_trace

    if pace is None:
        say(f"{path} is not written: the plan does not fit")
    else:
        write_trace(path, pace.spans, History(pace.tokens))


def _asked(
    model: str | None,
    dimensions: tuple[int | None, int | None, int | None, int],
    machine: str,
    training: Any,
    changes: dict[str, int],
    knobs: dict[str, Any],
    said: Collection[str],
) -> tuple[Config, Any, Any]:
    """The configuration, the model and the machine in the options."""
    from infinity.plan.hardware import find_hardware
    from infinity.plan.measure import measured
    from infinity.plan.model import Dimensions, find_source, of_dimensions, of_source

    layers, hidden, heads, vocabulary = dimensions
    if (model is None) == (layers is None) or (layers is None) != (hidden is None):
        raise ValueError("give --model, or --layers and --hidden")
    described = None if machine == "this" else find_hardware(machine)
    if described is not None:
        described = described.replace(**changes)
    drives, ranks = (0, 1) if described is None else (len(described.drives), described.gpus)
    config = _config(knobs, said, drives, ranks)
    if model is not None:
        require_extras("transformers", what="--model")
        source: Any = find_source(model, config.precision)
        source.check_length(training.length)
        planned = of_source(source, config)
    else:
        width = hidden or 0
        source = Dimensions(layers or 0, width, heads or max(1, width // 128), vocabulary)
        planned = of_dimensions(source, config)
    if described is not None:
        return config, planned, described
    require_extras("transformers", what="measuring this machine")
    found = measured(planned, source, training, config, config.nvme, say)
    return config, planned, found.replace(**changes)


def _is_said(context: typer.Context, name: str) -> bool:
    """Whether the command line has the option of `name`."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _config(knobs: dict[str, Any], said: Collection[str], drives: int, ranks: int) -> Config:
    """The configuration. Options in `said` stay as they are. A described machine has a directory
    for each drive. Without drives, states are in host memory. With stages 1 and 2, parameters are
    on the device."""
    if not knobs["nvme"] and drives:
        knobs["nvme"] = [Path(f"/mnt/nvme{number}") for number in range(drives)]
    for state in ("parameters", "optimizer"):
        if not knobs["nvme"] and state not in said:
            knobs[state] = "cpu"
    if knobs["stage"] in (1, 2) and "parameters" not in said:
        knobs["parameters"] = "gpu"
    return configured(knobs, lambda nbytes: nbytes // ranks)
