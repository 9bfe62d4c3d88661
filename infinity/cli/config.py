"""`infinity config explain`: how each key of a DeepSpeed configuration is treated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.cli.failure import plain_failures, say
from infinity.cli.options import AsJson, Debug
from infinity.config import Config

if TYPE_CHECKING:
    from infinity.deepspeed.rows import KeyRow
    from infinity.deepspeed.settings import Explained, Settings

config = typer.Typer(no_args_is_help=True, help="Read configurations of other tools.")
_STYLES = {"exact": "green", "mapped": "cyan", "ignored": "yellow", "refused": "red", "auto": "dim"}
_PLAIN_WIDTH = 200
"""Columns if the output is no terminal."""


@config.callback()
def _group() -> None:
    """Keeps `explain` a subcommand, although it is the only one."""


@config.command()
def explain(
    file: Annotated[
        str, typer.Argument(help="JSON or HJSON, or base64 text of one.", metavar="FILE")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that train together.")] = 1,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help='Of the model; some "auto" values depend on it.')
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show how each key of a DeepSpeed configuration is treated. The exit status is 1 if the
    configuration is refused."""
    from infinity.deepspeed import settings

    with plain_failures(debug):
        explained = settings.explain(file, ranks, hidden_size)
        if as_json:
            typer.echo(json.dumps(_facts(explained), default=str))
        else:
            _show(explained)
        if explained.problems:
            raise typer.Exit(1)


def _facts(explained: Explained) -> dict[str, Any]:
    return {
        "keys": [
            {
                "key": row.path,
                "value": row.value,
                "treatment": _treatment(row),
                "becomes": row.becomes,
                "reason": row.reason,
            }
            for row in explained.rows
        ],
        "problems": explained.problems,
        "config": _config(explained.settings.config) if explained.settings else None,
    }


def _treatment(row: KeyRow) -> str:
    return "auto" if row.is_auto else row.treatment.value


def _show(explained: Explained) -> None:
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=40)
    table.add_column("treatment", no_wrap=True)
    table.add_column("what it becomes, or why not", overflow="fold")
    for row in explained.rows:
        treatment = _treatment(row)
        table.add_row(
            row.path,
            escape(_text(row.value)),
            treatment,
            escape(row.becomes or row.reason),
            style=_STYLES[treatment],
        )
    console.print(table)
    if explained.settings is not None:
        for line in _summary(explained.settings):
            console.print(line, markup=False, highlight=False)
    for problem in explained.problems:
        say(f"refused: {problem}")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _summary(settings: Settings) -> list[str]:
    """The settings of the whole configuration, in words."""
    batches = settings.batches
    clipping = settings.gradient_clipping
    chosen = ", ".join(f"{name}={value!r}" for name, value in _config(settings.config).items())
    lines = [
        "",
        f"infinity.Config({chosen})",
        f"batch: {batches.train} samples a step, {batches.micro} in a forward of a rank, "
        f"{batches.accumulation} forwards a step"
        if settings.has_batches
        else "batch: no size is given",
        f"gradients: the global norm is clipped at {clipping:g}"
        if clipping
        else "gradients: no clipping",
    ]
    if any(row.is_auto for row in settings.rows):
        lines.append('keys with "auto": a Trainer or accelerate replaces them')
    return lines


def _config(config: Config) -> dict[str, Any]:
    """The fields that differ from their defaults, ready for JSON."""
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name == "nvme" and value:
            found[name] = [str(path) for path in value]
        elif name == "tuning":
            tuning = value.model_dump(exclude_defaults=True)
            found |= {"tuning": tuning} if tuning else {}
        elif value != type(config).model_fields[name].default:
            found[name] = value
    return found
