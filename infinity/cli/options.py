"""The options of `infinity finetune`, without those that `infinity.cli.knobs` generates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from infinity.models.description import MOST_TOKENS
from infinity.quantities import parse_bytes

T = TypeVar("T")
"""The type of an option that some commands may leave out."""


def parse_size(value: Any) -> int:
    """Parse bytes. Raises `typer.BadParameter`."""
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_directory(value: Any) -> Path:
    """Parse a directory. An empty text is refused, because `Path` would make it the current
    directory."""
    if not str(value):
        raise typer.BadParameter("it is empty; name a directory ('.' is the current one)")
    return Path(value)


def same_directories(*given: list[Path] | None) -> list[Path]:
    """The directories of an argument, and those of its hidden option --nvme."""
    return [path for each in given for path in each or ()]


HiddenNvme = Annotated[
    list[Path] | None, typer.Option("--nvme", hidden=True, parser=parse_directory)
]
"""For commands that take directories as arguments: other commands call them so."""


def _parse_chunks(value: Any) -> int | None:
    return None if value is None or value == "off" else parse_size(value)


def parse_durability(value: Any) -> int | str:
    """Parse "off", "step", or a number of steps between commits. Raises `typer.BadParameter`."""
    text = str(value)
    if text in ("off", "step"):
        return text
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise typer.BadParameter(f"{value!r} is not off, step, or a number of steps from 1 on")
    return int(text)


def finite(value: float | None) -> float | None:
    """Refuse infinite numbers and NaN with `typer.BadParameter`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def _above_zero(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number above 0")
    return value


def _parse_columns(value: Any) -> dict[str, str] | None:
    """Parse "prompt=question,completion=answer". Raises `typer.BadParameter`."""
    if value is None or isinstance(value, dict):
        return value
    pairs = [pair.partition("=") for pair in str(value).split(",")]
    if not all(key and name for key, _, name in pairs):
        raise typer.BadParameter(
            f"{value!r} is not KEY=NAME with commas between, such as "
            "prompt=question,completion=answer"
        )
    return {key: name for key, _, name in pairs}


MOST = (1 << 63) - 1
_MOST_WINDOWS = 1 << 20
PANEL = "Where states live"
_MODEL, _DATA, _TRAINING, _OUTPUT = "Model", "Data", "Training", "Output"
_LORA = "LoRA"
_CHECKPOINTS = "Checkpoints"

Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face directory, a downloaded id of the hub, or a preset (llama-tiny, ...).",
        rich_help_panel=_MODEL,
    ),
]
CheckpointActivations = Annotated[
    bool,
    typer.Option(
        help="Recompute activations in backward instead of keeping them; --recompute auto chooses "
        "by itself.",
        rich_help_panel=_MODEL,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Text, or records in JSON lines, JSON, CSV or parquet: a file or a folder.",
        show_default="the Python standard library",
        rich_help_panel=_DATA,
    ),
]
DataFormat = Annotated[
    Literal["auto", "text"],
    typer.Option(
        help="text: train on the characters of every file, also of records.", rich_help_panel=_DATA
    ),
]
AsBytes = Annotated[
    bool,
    typer.Option(
        "--byte-tokenizer",
        help="Where the model has no tokenizer: one token per byte.",
        rich_help_panel=_DATA,
    ),
]
Columns = Annotated[
    Any,
    typer.Option(
        parser=_parse_columns,
        metavar="KEY=NAME,...",
        help="The columns of records for the keys that are read, such as "
        "prompt=question,completion=answer.",
        rich_help_panel=_DATA,
    ),
]
SequenceLength = Annotated[
    T,
    typer.Option(
        min=2,
        max=MOST_TOKENS,
        help="Tokens per window. `infinity finetune` takes as many as the longest sample has, and "
        "for texts 1024; at most the positions of the model.",
        rich_help_panel=_DATA,
    ),
]
Packing = Annotated[
    bool,
    typer.Option(
        "--packing",
        help="Put as many samples as fit into each window. Each is alone there.",
        rich_help_panel=_DATA,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST,
        help="Seed of new weights and of the order of windows.",
        rich_help_panel=_DATA,
    ),
]

Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST,
        help="Optimizer steps.",
        show_default="100, or those of --epochs",
        rich_help_panel=_TRAINING,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        callback=_above_zero,
        help="Passes through the data, instead of --steps.",
        show_default="none",
        rich_help_panel=_TRAINING,
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1 << 16,
        metavar="RANK",
        help="Train LoRA adapters of this rank, and nothing else. The output has these alone.",
        show_default="none: all parameters",
        rich_help_panel=_LORA,
    ),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        callback=_above_zero,
        help="The scale of the adapters, divided by their rank.",
        show_default="twice the rank",
        rich_help_panel=_LORA,
    ),
]
LoraTarget = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="The layers that get adapters.",
        show_default="all linear layers but the head",
        rich_help_panel=_LORA,
    ),
]
Base = Annotated[
    Literal["4bit"] | None,
    typer.Option(
        help="Train beside a model whose linear layers are in 4 bits (nf4 with nested scales), as "
        "in QLoRA. It is made once, below the first --nvme.",
        show_default="in --precision",
        rich_help_panel=_LORA,
    ),
]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        help="Write the whole model with the adapters in it, not the adapters alone.",
        rich_help_panel=_LORA,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=_MOST_WINDOWS,
        help="Windows per forward pass, of all ranks together.",
        rich_help_panel=_TRAINING,
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        min=1,
        max=_MOST_WINDOWS,
        help="Forward passes per optimizer step.",
        rich_help_panel=_TRAINING,
    ),
]
AccumulationOrder = Annotated[
    Literal["horizontal", "vertical"],
    typer.Option(
        help="vertical: all forward passes of a step go through one unit before the next unit. "
        "Parameters then move once per step, and the activations of all passes are alive at once.",
        rich_help_panel=_TRAINING,
    ),
]
ChunkedLoss = Annotated[
    Any,
    typer.Option(
        parser=_parse_chunks,
        metavar="off|BYTES",
        help="Compute the loss from chunks of tokens whose logits take at most so much at once.",
        rich_help_panel=_TRAINING,
    ),
]
LearningRate = Annotated[
    T,
    typer.Option(
        "--lr",
        min=0.0,
        callback=finite,
        help="Highest learning rate. `infinity finetune` takes 3e-4; for a model with weights and "
        "300M parameters 1e-4, and 1B 2e-5; with --lora 2e-4.",
        rich_help_panel=_TRAINING,
    ),
]
WeightDecay = Annotated[
    float,
    typer.Option(
        min=0.0, callback=finite, help="Decoupled weight decay.", rich_help_panel=_TRAINING
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST,
        show_default="a tenth of the steps",
        help="Steps of linear warm-up.",
        rich_help_panel=_TRAINING,
    ),
]
MaxGradNorm = Annotated[
    float,
    typer.Option(
        min=0.0,
        callback=finite,
        help="Clip the global gradient norm to this; 0: never.",
        rich_help_panel=_TRAINING,
    ),
]
Clip = Annotated[
    Literal["global", "previous", "unit"],
    typer.Option(
        help="What clips: the norm of the step, of the step before, or of each unit alone, which "
        "is another operation. With previous and unit, updates of clipped steps begin in backward.",
        rich_help_panel=_TRAINING,
    ),
]
SkipNonfinite = Annotated[
    bool,
    typer.Option(
        help="Leave out steps with an infinite or NaN gradient, as fp16 always does.",
        rich_help_panel=_TRAINING,
    ),
]
EvalEvery = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST,
        help="Validate every so many steps; 0: only at the end.",
        rich_help_panel=_TRAINING,
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(
        metavar="PROMPT",
        help="Show with each validation how the model answers this.",
        show_default="none",
        rich_help_panel=_TRAINING,
    ),
]
EvalBatches = Annotated[
    int, typer.Option(min=1, max=MOST, help="Batches per validation.", rich_help_panel=_TRAINING)
]

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Directory for checkpoints, one folder per step; one is also made at the end "
            "and on Ctrl-C."
        ),
        show_default="none",
        rich_help_panel=_CHECKPOINTS,
    ),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        min=1, max=MOST, help="Steps from one checkpoint to the next.", rich_help_panel=_CHECKPOINTS
    ),
]
KeepCheckpoints = Annotated[
    int,
    typer.Option(
        min=1, max=MOST, help="How many checkpoints to keep.", rich_help_panel=_CHECKPOINTS
    ),
]
Durability = Annotated[
    Any,
    typer.Option(
        parser=lambda value: value if value == "auto" else parse_durability(value),
        metavar="auto|off|step|N",
        help="step: every step is committed in --nvme, where it stays; N: every N-th step. auto: "
        "as step where parameters and optimizer states are on nvme, until the run has ended.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the last committed step, else from the last checkpoint, or from the "
        "beginning if there is none.",
        rich_help_panel=_CHECKPOINTS,
    ),
]

Output = Annotated[
    Path | None,
    typer.Option(
        help="Directory for the trained model and the report.",
        show_default="none",
        rich_help_panel=_OUTPUT,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Write into an output that is not empty, and begin anew where an earlier run left "
        "committed steps.",
        rich_help_panel=_OUTPUT,
    ),
]
ReportTo = Annotated[
    Literal["tensorboard", "wandb", "trackio"] | None,
    typer.Option(
        help="Also log each step there. metrics.jsonl in --output has them in any case.",
        show_default="none",
        rich_help_panel=_OUTPUT,
    ),
]
PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/NAME",
        help="Upload the complete output to this model repository of the hub. A new one is "
        "private.",
        show_default="none",
        rich_help_panel=_OUTPUT,
    ),
]
WriteReport = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Write report.html and trace.json.", rich_help_panel=_OUTPUT
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON object.", rich_help_panel=_OUTPUT),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of a failure.", rich_help_panel=_OUTPUT)
]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The options of `infinity finetune` that concern the run, in the order of --help. Sizes are in
    bytes."""

    model: Model = "llama-tiny"
    checkpoint_activations: CheckpointActivations = True
    data: Data = None
    data_format: DataFormat = "auto"
    byte_tokenizer: AsBytes = False
    columns: Columns = None
    sequence_length: SequenceLength[int | None] = None
    packing: Packing = False
    seed: Seed = 0
    lora: Lora = None
    lora_alpha: LoraAlpha = None
    lora_target: LoraTarget = None
    base: Base = None
    merge: Merge = False
    steps: Steps = None
    epochs: Epochs = None
    batch_size: BatchSize = 4
    accumulate: Accumulate = 1
    accumulation_order: AccumulationOrder = "horizontal"
    chunked_loss: ChunkedLoss = "off"
    lr: LearningRate[float | None] = None
    weight_decay: WeightDecay = 0.1
    warmup: Warmup = None
    max_grad_norm: MaxGradNorm = 1.0
    clip: Clip = "global"
    skip_nonfinite: SkipNonfinite = False
    eval_every: EvalEvery = 0
    eval_batches: EvalBatches = 8
    sample: Sample = None
    durability: Durability = "auto"
    checkpoint: Checkpoint = None
    checkpoint_every: CheckpointEvery = 100
    keep_checkpoints: KeepCheckpoints = 2
    resume: Resume = False
    output: Output = None
    overwrite: Overwrite = False
    push_to_hub: PushToHub = None
    report: WriteReport = True
    report_to: ReportTo = None
