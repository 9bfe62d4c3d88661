"""`infinity finetune`: continues the training of a causal language model with its states on
NVMe."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import typer

from infinity.cli import options as o
from infinity.cli.display import Display
from infinity.cli.failure import require_extras, say
from infinity.cli.knobs import mirrors
from infinity.cli.option_file import Config, ShowConfig, as_yaml
from infinity.cli.progress import Progress, print_summary
from infinity.cli.ranks import joined

LEFT_OUT = (
    "algorithm",  # it trains with AdamW
    "stage",
    "durability",  # this command adds the value auto
    "inference",
    *("split_master", "copy_on_write", "collective_timeout", "poison"),
    *("device", "instruction_set", "threads"),
    "partition_activations",  # there are no tensor parallel ranks
)


@mirrors(before="steps", leave_out=LEFT_OUT, options=o.FinetuneOptions)
def finetune(
    config: Config = None,
    show_config: ShowConfig = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
    **values: Any,
) -> None:
    """Fine-tune a causal language model with parameters and optimizer states on NVMe, CPU or GPU.

    On many ranks: torchrun --nproc-per-node N -m infinity finetune ... shards the model over them.
    The batch size is that of all ranks together. Host memory and NVMe are budgets of a node. Each
    rank has its own directory below every --nvme.
    """
    if show_config:
        typer.echo(as_yaml(values), nl=False)
        return
    options = {each.name: values.pop(each.name) for each in fields(o.FinetuneOptions)}
    with joined(debug) as world:
        drawing = ["matplotlib"] if options["output"] and options["report"] else []
        adapting = ["peft"] if options["lora"] else []
        require_extras("transformers", "accelerate", *drawing, *adapting)
        if options["base"]:
            require_extras("bitsandbytes", what="--base 4bit", package="bitsandbytes")
        if (logger := options["report_to"]) is not None:
            require_extras(logger, what=f"--report-to {logger}", package=logger)
        from infinity.cli.job import FinetuneJob

        job = FinetuneJob(**options, knobs=values)
        with (
            Progress("" if world.size == 1 else "rank 0: ")
            if world.is_first
            else nullcontext(Display()) as progress
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
        if world.is_first and options["push_to_hub"] is not None:
            from infinity.cli.hub import upload

            say(f"the output is at {upload(options['output'], options['push_to_hub'])}")
