"""Writes the result of a benchmark: to stdout as a table or as JSON, and to files. It checks the
files before a long run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from infinity.cli.output import write_file


class Delivery:
    """The targets of a result: `--json` (a file, or - for stdout), `--report`, and `others`, which
    are further files by option.

    Raises `ValueError` that names the option if a file cannot be written.
    """

    def __init__(self, as_json: str | None, report: Path | None, **others: Path | None) -> None:
        self._to_stdout, self._report = as_json == "-", report
        self._json = None if as_json in (None, "-") else Path(str(as_json))
        for name, file in {"json": self._json, "report": report, **others}.items():
            if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
                raise ValueError(
                    f"--{name} {file} cannot be written; give a file in a directory that "
                    "exists and is yours"
                )

    @property
    def console(self) -> Console | None:
        """Where tables are printed. None if JSON goes to stdout."""
        return None if self._to_stdout else Console(file=sys.stdout)

    def deliver(
        self, result: Any, page: Callable[[], str], table: Callable[[Console], None]
    ) -> None:
        """Write `result` as JSON and `page` to their files. Print the JSON if it goes to stdout,
        else the table."""
        text = json.dumps(result, indent=1, allow_nan=False)
        if self._json is not None:
            write_file(self._json, text + "\n")
        if self._report is not None:
            write_file(self._report, page())
        console = self.console
        if console is None:
            typer.echo(text)
        else:
            table(console)


def print_rows(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
) -> None:
    """Print a table with a column of names, and columns of numbers at its right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


def say(text: str) -> None:
    """Print the progress of a benchmark on stderr."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True, style="dim")
