"""`infinity plan`: the command and its options."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from infinity.cli import options as o
from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import OUTPUT, Json
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.knobs import configured, mirrors
from infinity.config import Config
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.planned import PlanCase
    from infinity.models.source import ModelSource
    from infinity.plan.hardware import Hardware
    from infinity.plan.memory import Training
    from infinity.plan.model import Dimensions, PlannedModel

_MODEL, _MACHINE = "Model", "Machine"
_RUN = o.FinetuneOptions
"""Where no option says so, a plan is of the run that `infinity finetune` makes then."""

Model = Annotated[
    str | None,
    typer.Option(
        help=(
            "A Hugging Face directory, a config.json, the id of a model of the hub, a part of a "
            "known id (llama-3.1-8b, qwen3-32b, gpt-oss-120b, ...), or a preset (llama-tiny, ...)."
        ),
        show_default=_RUN.model,
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
Lora = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="RANK",
        help="Train adapters of this rank on each linear layer, beside a frozen model.",
        show_default="train all parameters",
        rich_help_panel=_MODEL,
    ),
]
Base = Annotated[
    Literal["4bit"] | None,
    typer.Option(
        help="With --lora: linear layers in nf4 with nested statistics, as in QLoRA.",
        show_default="in --precision",
        rich_help_panel=_MODEL,
    ),
]
OnMachine = Annotated[
    str,
    typer.Option(
        "--machine",
        help=(
            "this (measured in under a minute), a JSON or TOML file that describes it, or a name: "
            "rtx4090, rtx5090, gb10, h100, aws-p5, ... (docs/plan.md)."
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
Endurance = Annotated[
    Any,
    typer.Option(
        parser=o.parse_size,
        metavar="BYTES",
        help="What may be written to each drive (TBW).",
        show_default="that of --machine, else 600TB",
        rich_help_panel=_MACHINE,
    ),
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
    "durability",  # this command adds the value auto
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


@dataclass(frozen=True)
class AskedModel:
    """The model in the options: the `name` of one, or the dimensions of a decoder, and its adapters
    of rank `lora`."""

    name: str | None
    layers: int | None
    hidden: int | None
    heads: int | None
    vocabulary: int
    lora: int | None
    base: str | None

    def check(self, said: Collection[str]) -> None:
        """Raise `ValueError` for options that do not go together, of which these were `said`."""
        idle = [each for each in ("heads", "vocabulary") if each in said]
        if self.name is not None and idle:
            raise ValueError(f"--model says its own --{idle[0]}; that goes with --layers, --hidden")
        has_layers, has_hidden = self.layers is not None, self.hidden is not None
        if has_layers != has_hidden or (has_layers and self.name is not None):
            raise ValueError("give --model, or --layers and --hidden")
        if self.base is not None and self.lora is None:
            raise ValueError("a base in 4 bits is not trained; add --lora RANK for its adapters")
        if self.lora is not None and has_layers:
            raise ValueError("--lora goes with --model")

    def source(self, precision: str) -> ModelSource | Dimensions:
        """The sizes of the model. Raises `ValueError` and `ConfigError`."""
        from infinity.plan.model import Dimensions, find_source

        if self.layers is not None:
            hidden = self.hidden or 0
            heads = self.heads or max(1, hidden // 128)
            return Dimensions(self.layers, hidden, heads, self.vocabulary)
        require_extras("transformers", what="--model")
        return find_source(self.name or _RUN.model, precision)

    def can_run(self, source: ModelSource) -> bool:
        """Whether `infinity finetune` takes the model: from a directory or by its name, and without
        adapters of a preset, whose weights are random."""
        from infinity.models.source import PRESETS

        is_taken = not Path(source.name).is_file()
        return is_taken and (self.lora is None or source.name not in PRESETS)

    def planned(self, source: ModelSource | Dimensions, config: Config) -> PlannedModel:
        """The model of `source` in the units of `config`."""
        from infinity.plan.adapters import LinearAdapters
        from infinity.plan.model import Dimensions, of_dimensions, of_source
        from infinity.weights.four_bit import is_four_bit

        if isinstance(source, Dimensions):
            return of_dimensions(source, config)
        in_four_bits = is_four_bit(getattr(source.config, "quantization_config", None))
        if in_four_bits and (self.base is not None or self.lora is None):
            raise ValueError(
                f"{source.name} is in 4 bits already; "
                + ("leave out --base" if self.base else "add --lora RANK for its adapters")
            )
        if self.lora is None:
            return of_source(source, config)
        require_extras("peft", what="--lora", package="peft")
        four_bits = self.base is not None or in_four_bits
        return of_source(source, config, LinearAdapters(self.lora, four_bits))


@dataclass(frozen=True)
class AskedRun:
    """A step in the options: `batch_size` windows of all ranks together, and `length` tokens."""

    length: int | None
    batch_size: int
    accumulate: int
    checkpoint_activations: bool
    durability: int | str

    @staticmethod
    def usual_length(source: ModelSource | Dimensions) -> int:
        """The tokens of a window where no option says so."""
        from infinity.models.description import USUAL_LENGTH, planned_length
        from infinity.plan.model import Dimensions

        return USUAL_LENGTH if isinstance(source, Dimensions) else planned_length(source.config)

    def training(
        self, source: ModelSource | Dimensions, config: Config, ranks: int, said: Collection[str]
    ) -> Training:
        """The step of one rank. Raises `ValueError` for a length or a batch that cannot be."""
        from infinity.cli.ranks import World
        from infinity.models.source import ModelSource
        from infinity.plan.memory import Training

        length = self.length or self.usual_length(source)
        if isinstance(source, ModelSource):
            source.check_length(length)
        batch = self.batch_size
        if "batch_size" not in said:  # of the fewest windows from the default on, one for each rank
            batch = -(-batch // ranks) * ranks
        World(size=ranks).check_batch(batch)
        recomputes = self.checkpoint_activations or config.recompute != "off"
        return Training(length, batch // ranks, self.accumulate, recomputes)


@mirrors(before="as_json", leave_out=LEFT_OUT)
def plan(
    context: typer.Context,
    model: Model = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    vocabulary: Vocabulary = 50_304,
    lora: Lora = None,
    base: Base = None,
    machine: OnMachine = "this",
    nodes: Nodes = None,
    gpus: Gpus = None,
    endurance: Endurance = None,
    sequence_length: o.SequenceLength[int | None] = None,
    batch_size: o.BatchSize = _RUN.batch_size,
    accumulate: o.Accumulate = _RUN.accumulate,
    checkpoint_activations: o.CheckpointActivations = _RUN.checkpoint_activations,
    durability: o.Durability = _RUN.durability,
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
    simulated. Without options, it describes the run of infinity finetune without options. The exit
    status is 1 if the model does not fit.
    """
    with plain_failures(debug):
        from infinity.cli.plan_table import print_tables
        from infinity.cli.planned import answer

        if tables:
            print_tables()
            return
        if chart is not None:
            require_extras("matplotlib", what="--chart")
        said = [name for name in context.params if _is_said(context, name)]
        asked = AskedModel(model, layers, hidden, heads, vocabulary, lora, base)
        asked.check(said)
        run = AskedRun(sequence_length, batch_size, accumulate, checkpoint_activations, durability)
        delivery = Delivery(as_json, None, timeline=timeline, chart=chart)
        changes = {"nodes": nodes, "gpus": gpus}
        given = {name: number for name, number in changes.items() if number is not None}
        case = _case(asked, run, machine, given, knobs, said)
        if endurance is not None:
            case = case.with_endurance(endurance)
        fits = answer(case, delivery, timeline, chart)
    if not fits:
        raise typer.Exit(1)


def _case(
    asked: AskedModel,
    run: AskedRun,
    machine: str,
    changes: dict[str, int],
    knobs: dict[str, Any],
    said: Collection[str],
) -> PlanCase:
    """The model, the machine, the step and the configuration in the options."""
    from infinity.cli.planned import PlanCase, SameRun, working
    from infinity.models.source import ModelSource
    from infinity.plan.machines import find_hardware

    described: Hardware | None = None
    if machine != "this":
        described = find_hardware(machine).replace(**changes)
    drives, ranks = (0, 1) if described is None else (len(described.drives), described.gpus)
    of_all = changes.get("nodes", 1) * changes.get("gpus", 1)
    if described is not None:
        of_all = described.ranks
    config, others = _configs(knobs, said, drives, ranks, run.durability)
    with working("the model"):
        source = asked.source(config.precision)
        training = run.training(source, config, of_all, said)
        planned = asked.planned(source, config)
    if described is None:
        from infinity.plan.measure import measured

        require_extras("transformers", what="measuring this machine")
        found = measured(planned, source, training, config, config.nvme, say)
        described = found.replace(**changes)
    same = None
    has_place = asked.base is None or config.nvme  # for the base
    if isinstance(source, ModelSource) and asked.can_run(source) and has_place:
        usual = _RUN.sequence_length or AskedRun.usual_length(source)
        same = SameRun(source.name, run.durability, usual, asked.lora, asked.base)
    return PlanCase(planned, described, training, config, others, same)


def _is_said(context: typer.Context, name: str) -> bool:
    """Whether the command line has the option of `name`."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _configs(
    knobs: dict[str, Any], said: Collection[str], drives: int, ranks: int, durability: int | str
) -> tuple[Config, Config | None]:
    """The configuration, and another one where it does not fit. With `durability` auto, the first
    one commits each step if it can, and the other one commits none, as `infinity finetune` does on
    one rank.

    Options in `said` stay as they are. A described machine has a directory for each drive. Without
    drives, states are in host memory. With stages 1 and 2, parameters are on the device.
    """
    if not knobs["nvme"] and drives:
        knobs["nvme"] = [Path(f"/mnt/nvme{number}") for number in range(drives)]
    for state in ("parameters", "optimizer"):
        if not knobs["nvme"] and state not in said:
            knobs[state] = "cpu"
    if knobs["stage"] in (1, 2) and "parameters" not in said:
        knobs["parameters"] = "gpu"

    def made(durability: int | str) -> Config:
        return configured({**knobs, "durability": durability}, lambda nbytes: nbytes // ranks)

    if durability != "auto":
        return made(durability), None
    without = made("off")
    try:
        return made("step"), without if ranks == 1 else None
    except ConfigError:
        return without, None
