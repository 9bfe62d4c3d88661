"""Where the result of a benchmark goes: to stdout as a table or as JSON, and to files, which are
refused before a long run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from infinity.cli.output import write_file


class Delivery:
    """The options `--json` (a file, or - for stdout) and `--report`; `others` are further files, by
    their options.

    Raises `ValueError` naming the option when one of them cannot be written.
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

    def deliver(
        self, result: Any, page: Callable[[], str], table: Callable[[Console], None]
    ) -> None:
        """Write `result` as JSON and `page`, where they were asked for; print the JSON or else the
        table."""
        text = json.dumps(result, indent=1, allow_nan=False)
        if self._json is not None:
            write_file(self._json, text + "\n")
        if self._report is not None:
            write_file(self._report, page())
        if self._to_stdout:
            typer.echo(text)
        else:
            table(Console(file=sys.stdout))


def say(text: str) -> None:
    """Tell the user how far a benchmark is, on stderr."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True, style="dim")
