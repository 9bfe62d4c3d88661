"""The options of `infinity finetune`, each written once: name, limits, help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from infinity.units import parse_bytes


def parse_size(value: Any) -> int:
    """The parser of options that take bytes."""
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_cache(value: Any) -> int | str:
    """The parser of --cache, --gpu-cache and --activation-memory: bytes, or "auto"."""
    return "auto" if value == "auto" else parse_size(value)


def parse_shares(value: Any) -> Any:
    """The parser of --nvme-shares: "measured", "equal", or numbers with commas between."""
    if not isinstance(value, str) or value in ("measured", "equal"):
        return value
    try:
        return tuple(float(number) for number in value.split(","))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not measured, equal, or a number for each --nvme with commas between") from None


_MOST = (1 << 63) - 1
_MOST_WINDOWS = 1 << 20
_MOST_TOKENS = 1 << 24
_MODEL, _DATA, _TIERS, _TRAINING, _OUTPUT = "Model", "Data", "Where states live", "Training", "Output"
_CHECKPOINTS = "Checkpoints"

TierName = Literal["gpu", "cpu", "nvme"]

Model = Annotated[
    str, typer.Option(help="A Hugging Face directory, or a preset (llama-tiny, llama-100m, ...).", rich_help_panel=_MODEL)
]
CheckpointActivations = Annotated[
    bool, typer.Option(help="Recompute activations in backward instead of keeping them.", rich_help_panel=_MODEL)
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A text file, a JSONL file (key text) or a folder of them.",
        show_default="the Python standard library",
        rich_help_panel=_DATA,
    ),
]
SequenceLength = Annotated[int, typer.Option(min=2, max=_MOST_TOKENS, help="Tokens per window.", rich_help_panel=_DATA)]
Seed = Annotated[
    int, typer.Option(min=0, max=_MOST, help="Seed of new weights and of the order of windows.", rich_help_panel=_DATA)
]

Nvme = Annotated[
    list[Path] | None,
    typer.Option(help="A directory on NVMe; give it several times to stripe over drives.", rich_help_panel=_TIERS),
]
GpuMemory = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="BYTES",
        show_default="1GiB",
        help="Budget on the compute device of each rank (RAM where there is no GPU).",
        rich_help_panel=_TIERS,
    ),
]
CpuMemory = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="BYTES",
        show_default="2GiB",
        help="Budget in host memory, of all ranks of a node together.",
        rich_help_panel=_TIERS,
    ),
]
NvmeMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="BYTES",
        show_default="what is free",
        help="Budget on NVMe, over all --nvme, of all ranks of a node together.",
        rich_help_panel=_TIERS,
    ),
]
NvmeShares = Annotated[
    Any,
    typer.Option(
        parser=parse_shares,
        metavar="measured|equal|N,N,...",
        help="What part of the states each --nvme holds; measured: by its speed.",
        rich_help_panel=_TIERS,
    ),
]
Cache = Annotated[
    Any,
    typer.Option(
        parser=parse_cache,
        metavar="auto|BYTES",
        help="How much of --cpu-memory may keep a part of what is on NVMe; auto: what is left.",
        rich_help_panel=_TIERS,
    ),
]
GpuCache = Annotated[
    Any,
    typer.Option(
        parser=parse_cache,
        metavar="auto|BYTES",
        help="How much of --gpu-memory keeps all states of the first units; auto: on a GPU what is left.",
        rich_help_panel=_TIERS,
    ),
]
Parameters = Annotated[TierName, typer.Option(help="Home of the parameters.", rich_help_panel=_TIERS)]
Optimizer = Annotated[TierName, typer.Option(help="Home of the optimizer states.", rich_help_panel=_TIERS)]
Gradients = Annotated[TierName, typer.Option(help="Home of the gradients.", rich_help_panel=_TIERS)]
Activations = Annotated[
    TierName,
    typer.Option(
        help="Where what a forward saves waits for its backward; cpu: on the device where host memory is full, nvme: on from "
        "there to the drives.",
        rich_help_panel=_TIERS,
    ),
]
ActivationMemory = Annotated[
    Any,
    typer.Option(
        parser=parse_cache,
        metavar="auto|BYTES",
        help="How much of --cpu-memory is for activations, of all ranks of a node together; auto: half of what is left.",
        rich_help_panel=_TIERS,
    ),
]
Precision = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    typer.Option(help="dtype of parameters and compute; auto: the model's own.", rich_help_panel=_TIERS),
]
GradientPrecision = Annotated[
    Literal["auto", "fp32"],
    typer.Option(help="dtype that gradients are accumulated in; auto: that of the parameters.", rich_help_panel=_TIERS),
]
MomentPrecision = Annotated[
    Literal["fp32", "bf16", "int8"],
    typer.Option(help="How the optimizer's moments are kept: 8, 4 or 2.25 bytes per parameter.", rich_help_panel=_TIERS),
]
Update = Annotated[
    Literal["auto", "speculative", "exact", "plain", "delayed"],
    typer.Option(
        help="When updates run: beside the next forward (exact), from backward on (speculative), or before the step returns "
        "(plain); the numbers are the same. Delayed: each forward uses the parameters of before the last step.",
        rich_help_panel=_TIERS,
    ),
]
DelayedAfter = Annotated[
    int,
    typer.Option(
        min=0, max=_MOST, help="With --update delayed: the steps that come before the first late one.", rich_help_panel=_TIERS
    ),
]
IoEngine = Annotated[
    Literal["auto", "io_uring", "posix"], typer.Option(help="How NVMe is read and written.", rich_help_panel=_TIERS)
]
GpuDirect = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(help="Whether drives write parameters straight to the GPU; auto: where they can.", rich_help_panel=_TIERS),
]

Steps = Annotated[int, typer.Option(min=1, max=_MOST, help="Optimizer steps.", rich_help_panel=_TRAINING)]
BatchSize = Annotated[
    int,
    typer.Option(min=1, max=_MOST_WINDOWS, help="Windows per forward pass, of all ranks together.", rich_help_panel=_TRAINING),
]
Accumulate = Annotated[
    int, typer.Option(min=1, max=_MOST_WINDOWS, help="Forward passes per optimizer step.", rich_help_panel=_TRAINING)
]
AccumulationOrder = Annotated[
    Literal["horizontal", "vertical"],
    typer.Option(
        help="vertical: all forward passes of a step go through a unit before the next one, so that parameters move once per "
        "step, and activations of all of them are kept at once.",
        rich_help_panel=_TRAINING,
    ),
]
LearningRate = Annotated[float, typer.Option("--lr", min=0.0, help="Highest learning rate.", rich_help_panel=_TRAINING)]
WeightDecay = Annotated[float, typer.Option(min=0.0, help="Decoupled weight decay.", rich_help_panel=_TRAINING)]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0, max=_MOST, show_default="a tenth of the steps", help="Steps of linear warm-up.", rich_help_panel=_TRAINING
    ),
]
MaxGradNorm = Annotated[
    float, typer.Option(min=0.0, help="Clip the global gradient norm to this; 0: never.", rich_help_panel=_TRAINING)
]
SkipNonfinite = Annotated[
    bool, typer.Option(help="Leave out steps with an infinite or NaN gradient, as fp16 always does.", rich_help_panel=_TRAINING)
]
EvalEvery = Annotated[
    int, typer.Option(min=0, max=_MOST, help="Validate every so many steps; 0: only at the end.", rich_help_panel=_TRAINING)
]
EvalBatches = Annotated[int, typer.Option(min=1, max=_MOST, help="Batches per validation.", rich_help_panel=_TRAINING)]

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Directory for checkpoints, one folder per step; one is also made at the end and on Ctrl-C.",
        show_default="none",
        rich_help_panel=_CHECKPOINTS,
    ),
]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, max=_MOST, help="Steps from one checkpoint to the next.", rich_help_panel=_CHECKPOINTS)
]
KeepCheckpoints = Annotated[
    int, typer.Option(min=1, max=_MOST, help="How many checkpoints to keep.", rich_help_panel=_CHECKPOINTS)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the last checkpoint, or from the beginning if there is none.", rich_help_panel=_CHECKPOINTS
    ),
]

Output = Annotated[
    Path | None,
    typer.Option(help="Directory for the trained model and the report.", show_default="none", rich_help_panel=_OUTPUT),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into an output that is not empty.", rich_help_panel=_OUTPUT)]
WriteReport = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html and trace.json.", rich_help_panel=_OUTPUT)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.", rich_help_panel=_OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.", rich_help_panel=_OUTPUT)]


def refuse_missing_directory(nvme: Sequence[Path] | None, **tiers: str) -> None:
    """Raise `ValueError` where one of the states, whose `tiers` these are, is on nvme and no directory is given."""
    on_nvme = [state for state, tier in tiers.items() if tier == "nvme"]
    if on_nvme and not nvme:
        raise ValueError(
            f"{' and '.join(on_nvme)} on nvme, but no directory is given: add --nvme DIR, "
            f"or keep them in memory with {' '.join(f'--{state} cpu' for state in on_nvme)}"
        )
