"""`infinity finetune`: continues the training of a causal language model with its states on
NVMe."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import typer

from infinity.cli import options as o
from infinity.cli.failure import require_extras
from infinity.cli.knobs import mirrors
from infinity.cli.progress import Progress, Silence, print_summary
from infinity.cli.ranks import joined

LEFT_OUT = (
    "algorithm",  # it trains with AdamW
    "stage",
    "durability",  # this command adds the value auto
    "inference",
    *("split_master", "copy_on_write", "collective_timeout", "poison"),
    *("device", "instruction_set", "threads"),
    "read_in_place",  # it freezes nothing
    "partition_activations",  # there are no tensor parallel ranks
)


@mirrors(before="steps", leave_out=LEFT_OUT)
def finetune(
    model: o.Model = "llama-tiny",
    checkpoint_activations: o.CheckpointActivations = True,
    data: o.Data = None,
    data_format: o.DataFormat = "auto",
    byte_tokenizer: o.AsBytes = False,
    sequence_length: o.SequenceLength = 256,
    seed: o.Seed = 0,
    steps: o.Steps = 100,
    batch_size: o.BatchSize = 4,
    accumulate: o.Accumulate = 1,
    accumulation_order: o.AccumulationOrder = "horizontal",
    chunked_loss: o.ChunkedLoss = "off",
    lr: o.LearningRate = 3e-4,
    weight_decay: o.WeightDecay = 0.1,
    warmup: o.Warmup = None,
    max_grad_norm: o.MaxGradNorm = 1.0,
    clip: o.Clip = "global",
    skip_nonfinite: o.SkipNonfinite = False,
    eval_every: o.EvalEvery = 0,
    eval_batches: o.EvalBatches = 8,
    durability: o.Durability = "auto",
    checkpoint: o.Checkpoint = None,
    checkpoint_every: o.CheckpointEvery = 100,
    keep_checkpoints: o.KeepCheckpoints = 2,
    resume: o.Resume = False,
    output: o.Output = None,
    overwrite: o.Overwrite = False,
    report: o.WriteReport = True,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
    **knobs: Any,
) -> None:
    """Fine-tune a causal language model with parameters and optimizer states on NVMe, CPU or GPU.

    On many ranks: torchrun --nproc-per-node N -m infinity finetune ... shards the model over them.
    The batch size is that of all ranks together. Host memory and NVMe are budgets of a node. Each
    rank has its own directory below every --nvme.
    """
    values: dict[str, Any] = {**locals()}
    for name in ("as_json", "debug"):
        del values[name]
    values["warmup"] = steps // 10 if warmup is None else warmup
    with joined(debug) as world:
        require_extras("transformers", *(["matplotlib"] if output and report else []))
        from infinity.cli.job import FinetuneJob

        job = FinetuneJob(**values)
        with (
            Progress(steps, "" if world.size == 1 else "rank 0: ")
            if world.is_first
            else nullcontext(Silence()) as progress
        ):
            summary = job.run(progress, world)
        if world.is_first and as_json:
            typer.echo(json.dumps(summary, allow_nan=False))
        elif world.is_first:
            print_summary(summary)
        # torchrun ends the other ranks after a nonzero exit status. The first rank may still write
        # then.
        world.wait()
        if summary["signal"] is not None:
            raise typer.Exit(128 + summary["signal"])
