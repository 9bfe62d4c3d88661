"""The command `infinity`: which subcommands exist. Each one lives in the file of its name."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from infinity.cli.bench.adam.command import adam
from infinity.cli.bench.io.command import IoCommand
from infinity.cli.bench.io.command import io as bench_io
from infinity.cli.bench.step.command import step
from infinity.cli.config import config
from infinity.cli.doctor import doctor, installed_version
from infinity.cli.export import export
from infinity.cli.finetune import finetune
from infinity.cli.gc import gc
from infinity.cli.inspect import inspect
from infinity.cli.plan import plan

app = typer.Typer(
    name="infinity",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(finetune)
app.command()(inspect)
app.command()(export)
app.command()(doctor)
app.command()(gc)
app.command()(plan)
bench = typer.Typer(
    name="bench", no_args_is_help=True, help="Measure what this machine's devices give."
)
bench.command("io", cls=IoCommand)(bench_io)
bench.command()(adam)
bench.command()(step)
app.add_typer(bench)
app.add_typer(config, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"infinity {installed_version('zero-infinity') or '(not installed)'}")
        raise typer.Exit


@app.callback()
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
