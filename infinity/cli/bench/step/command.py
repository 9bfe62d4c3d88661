"""`infinity bench step`: the command and its options; those of `infinity finetune` are the same ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from infinity.cli import options as o
from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import Json, ReportFile
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.interrupt import interrupted_by_signals

_TIMING = "Timing"

Model = Annotated[
    str,
    typer.Option(help="A Hugging Face directory, a config.json (random weights), or a preset (llama-tiny, llama-100m, ...)."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs; auto: a GPU if there is one.")]
CopyOnWrite = Annotated[
    bool, typer.Option(help="Write an updated state on nvme beside its old value, which takes twice the space.")
]
Steps = Annotated[int, typer.Option(min=1, help="Steps that are timed.", rich_help_panel=_TIMING)]
Discard = Annotated[int, typer.Option(min=1, help="Steps before them that are not.", rich_help_panel=_TIMING)]
MostSeconds = Annotated[
    float, typer.Option(min=0, help="Begin no further step after so many seconds of them.", rich_help_panel=_TIMING)
]
ProbeBytes = Annotated[
    int,
    typer.Option(
        parser=o.parse_size, metavar="BYTES", show_default="256MiB", help="What a link is measured with.", rich_help_panel=_TIMING
    ),
]


def step(
    model: Model = "llama-tiny",
    device: Device = "auto",
    checkpoint_activations: o.CheckpointActivations = True,
    sequence_length: o.SequenceLength = 256,
    batch_size: o.BatchSize = 4,
    accumulate: o.Accumulate = 1,
    accumulation_order: o.AccumulationOrder = "horizontal",
    lr: o.LearningRate = 1e-4,
    seed: o.Seed = 0,
    nvme: o.Nvme = None,
    gpu_memory: o.GpuMemory = 1 << 30,
    cpu_memory: o.CpuMemory = 2 << 30,
    nvme_memory: o.NvmeMemory = None,
    nvme_shares: o.NvmeShares = "measured",
    cache: o.Cache = "auto",
    gpu_cache: o.GpuCache = "auto",
    parameters: o.Parameters = "nvme",
    optimizer: o.Optimizer = "nvme",
    gradients: o.Gradients = "cpu",
    activations: o.Activations = "gpu",
    activation_memory: o.ActivationMemory = "auto",
    precision: o.Precision = "bf16",
    gradient_precision: o.GradientPrecision = "auto",
    moment_precision: o.MomentPrecision = "fp32",
    copy_on_write: CopyOnWrite = True,
    update: o.Update = "auto",
    delayed_after: o.DelayedAfter = 0,
    io_engine: o.IoEngine = "auto",
    gpu_direct: o.GpuDirect = "auto",
    steps: Steps = 5,
    discard: Discard = 2,
    most_seconds: MostSeconds = 1e9,
    probe_bytes: ProbeBytes = 256 << 20,
    as_json: Json = None,
    report: ReportFile = None,
    debug: o.Debug = False,
) -> None:
    """Train for a few steps on synthetic tokens and say how near a step comes to the roofline: what its devices give alone.

    Compute (models of one and two blocks, extrapolated in depth), NVMe, the link to the device and the update are measured in the
    same run; the longest of them is the bound. One process, one device.
    """
    with plain_failures(debug):
        require_extras("transformers", *(["matplotlib"] if report else []), what="`infinity bench step`")
        from infinity.bench.step.measure import measure
        from infinity.bench.step.train import Workload, find_source
        from infinity.cli.bench.step.show import print_table, render
        from infinity.config import Config, Tuning

        delivery = Delivery(as_json, report)
        tiers: dict[str, Any] = {
            "parameters": parameters,
            "optimizer": optimizer,
            "gradients": gradients,
            "activations": activations,
        }
        o.refuse_missing_directory(nvme, **tiers)
        config = Config(
            nvme=tuple(nvme or ()),
            gpu_memory=gpu_memory,
            cpu_memory=cpu_memory,
            **tiers,
            precision=precision,
            moment_precision=moment_precision,
            tuning=Tuning(
                nvme_memory=nvme_memory,
                nvme_shares=nvme_shares,
                cache=cache,
                gpu_cache=gpu_cache,
                activation_memory=activation_memory,
                gradient_precision=gradient_precision,
                copy_on_write=copy_on_write,
                update=update,
                delayed_after=delayed_after,
                device=device,
                io_engine=io_engine,
                gpu_direct=gpu_direct,
            ),
        )
        source = find_source(model, precision)
        source.check_length(sequence_length)
        work = Workload(
            source, config, sequence_length, batch_size, accumulate, accumulation_order == "vertical", checkpoint_activations,
            steps, discard, most_seconds, lr, seed,
        )  # fmt: skip
        with interrupted_by_signals():
            summary = measure(work, probe_bytes, say)
        delivery.deliver(summary, lambda: render(summary), lambda console: print_table(summary, console))
