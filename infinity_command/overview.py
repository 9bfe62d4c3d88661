"""The commands in one line each: all that `infinity --help` and `--version` need.

This package imports no part of `infinity`, because that imports torch first, which takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

COMMANDS = {
    "finetune": "Fine-tune a causal language model with its states on NVMe, CPU or GPU.",
    "generate": "Continue prompts with a model that is larger than the compute device.",
    "inspect": "Show what a checkpoint holds, and whether it is damaged.",
    "export": "Write a checkpoint as files that transformers and PEFT load.",
    "doctor": "Show what this machine offers, and which sizes of models it takes.",
    "gc": "Remove what a dead run left in NVMe and checkpoint directories.",
    "plan": "Say what fits a machine, how long a step takes, and what to change.",
    "run": "Run a script that was written for DeepSpeed.",
    "bench": "Measure what this machine's devices give.",
    "config": "Read configurations of other tools.",
}
"""What `infinity --help` says of each command, in its order."""


def new_app() -> typer.Typer:
    """The command without its subcommands."""
    app = typer.Typer(
        name="infinity",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(main)
    return app


def suffices(arguments: Sequence[str]) -> bool:
    """Whether `overview` answers these arguments."""
    return list(arguments) in ([], ["-h"], ["--help"], ["--version"])


def overview() -> typer.Typer:
    """The command with names in place of its subcommands."""
    app = new_app()
    for name, text in COMMANDS.items():
        app.command(name, short_help=text)(_stand_in)
    return app


def _stand_in() -> None:
    """Never called: it is in the place of a command in a list."""


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("zero-infinity")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"infinity {version}")
        raise typer.Exit


def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Fine-tune PyTorch models larger than GPU memory, and larger than RAM, with their states on
    NVMe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths that are not UTF-8 are printed as they are.
        sys.stdout.reconfigure(errors="surrogateescape")
