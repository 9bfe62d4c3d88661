"""`infinity-run.json` in an output directory: the run that writes there, and whether it has ended.

It is written without a summary before the first file of the output gets its name. It gets its
summary after the last file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from infinity.cli.output import RUN_NAME, write_file
from infinity.directories.directory import Directory
from infinity.errors import naming
from infinity.models.reading import open_regular


class RunFile(BaseModel):
    """The content of the file: the `options` that identify the run, and the run id of its committed
    `states` ("" for none). A complete output also has its `files` with their bytes, and the
    `summary` of the run."""

    options: dict[str, Any]
    states: str
    files: dict[str, int] = {}
    summary: dict[str, Any] | None = None

    @classmethod
    def of(cls, directory: Path, options: Mapping[str, Any]) -> RunFile | None:
        """The run file in `directory` if it has these `options`; otherwise None. Raises
        `OSError`."""
        path = directory / RUN_NAME
        if not path.is_file():
            return None
        with naming(path), open_regular(path) as file:
            try:
                found = cls.model_validate_json(file.read())
            except ValidationError:
                return None
        return found if found.options == options else None

    def is_whole(self, directory: Path) -> bool:
        """Whether the run has ended, and all its files have their length."""
        with Directory(directory, "--output") as place:
            sizes = {name: place.status(name) for name in self.files}
        return self.summary is not None and all(
            status is not None and status.st_size == self.files[name]
            for name, status in sizes.items()
        )

    def begin(self, directory: Path) -> None:
        """Write the file before the output."""
        write_file(directory / RUN_NAME, self.model_dump_json(indent=1))

    def end(self, directory: Path, summary: Mapping[str, Any]) -> None:
        """Write the file again after the output, with `summary` and the lengths of all files."""
        sizes = {
            path.name: path.stat().st_size
            for path in directory.iterdir()
            if path.is_file() and path.name != RUN_NAME
        }
        self.model_copy(update={"files": sizes, "summary": dict(summary)}).begin(directory)
