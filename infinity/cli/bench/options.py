"""Options that the commands of `infinity bench` share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

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


Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON; -: to stdout.",
        rich_help_panel=OUTPUT,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML page.", rich_help_panel=OUTPUT),
]
