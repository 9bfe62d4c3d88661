"""Options that the commands of `infinity bench` share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from infinity.errors import InfinityError

OUTPUT = "Output"
"""The help panel of output options."""
_MOST_PARAMETERS = 1e18


def parse_count(value: Any) -> int:
    """Parse a number of parameters. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\d+)?)([KMBT]?)", str(value).strip())
    if match is None or not 1 <= float(match[1]) <= _MOST_PARAMETERS:
        raise typer.BadParameter(
            f"{value!r} is not a number of parameters; write for example 100M, 7B or 7000000000"
        )
    return int(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]])


@contextmanager
def naming_options(**options: str) -> Iterator[None]:
    """Replace arguments in backticks by options, in errors of `infinity.bench` that leave the
    block. `options` maps an argument to its option if the names differ."""

    def option(match: re.Match[str]) -> str:
        return "--" + options.get(match[1], match[1]).replace("_", "-")

    try:
        yield
    except (InfinityError, ValueError) as error:
        text = re.sub(r"`(\w+)`", option, str(error))
        if text == str(error):
            raise
        raise InfinityError(text) from None


class JsonCommand(TyperCommand):
    """A command whose `--json` needs no file: alone it means stdout, as in all commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word, following in zip(args, [*args, "--"][1:], strict=True):
            words.append(word)
            is_file = following == "-" or not (
                following.startswith("-") or _is_directory(following)
            )
            if word == "--json" and not is_file:
                words.append("-")
        return super().parse_args(ctx, words)


def _is_directory(name: str) -> bool:
    """Whether `name` is a directory, which is no place for JSON but may be an argument."""
    return Path(name).is_dir()


Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Print the result as one JSON object, or write it to a file.",
        rich_help_panel=OUTPUT,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML page.", rich_help_panel=OUTPUT),
]
