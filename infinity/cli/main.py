"""The command `infinity` and its subcommands. Each lives in the file of its name.
`infinity_command.overview` describes each in one line."""

from __future__ import annotations

import typer

from infinity.cli.bench.adam.command import adam
from infinity.cli.bench.io.command import IoCommand
from infinity.cli.bench.io.command import io as bench_io
from infinity.cli.bench.options import JsonCommand
from infinity.cli.bench.step.command import step
from infinity.cli.config import config
from infinity.cli.doctor import doctor
from infinity.cli.export import export
from infinity.cli.finetune import finetune
from infinity.cli.gc import gc
from infinity.cli.generate import generate
from infinity.cli.inspect import inspect
from infinity.cli.plan import plan
from infinity.cli.run import run
from infinity_command.overview import COMMANDS, new_app

OF_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = new_app()
for command in (finetune, generate, inspect, export, doctor, gc):
    app.command(short_help=COMMANDS[command.__name__])(command)
app.command(short_help=COMMANDS["plan"], cls=JsonCommand)(plan)
app.command(short_help=COMMANDS["run"], context_settings=OF_A_SCRIPT)(run)
bench = typer.Typer(
    name="bench", no_args_is_help=True, help="Measure what this machine's devices give."
)
bench.command("io", cls=IoCommand)(bench_io)
bench.command(cls=JsonCommand)(adam)
bench.command(cls=JsonCommand)(step)
app.add_typer(bench, short_help=COMMANDS["bench"])
app.add_typer(config, name="config", short_help=COMMANDS["config"])
