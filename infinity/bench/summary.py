"""The result of one benchmark question: the one schema of all files in `benchmarks/results/`.

A summary has the facts that a reader needs to judge a figure: its spread over rounds, its commit
and machine, and its ratio to a limit. Raw runs are not kept.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from infinity.bench.machine import lines

DIGITS = 6
"""Significant digits of a figure. A spread makes fewer meaningful."""
Finite = Annotated[
    float, Field(allow_inf_nan=False), AfterValidator(lambda value: float(f"{value:.{DIGITS}g}"))
]
Scalar = str | bool | int | Finite | None
PACKAGES = ("zero-infinity", "torch", "transformers", "safetensors", "deepspeed", "torchao")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Strict):
    """Median, lowest and highest of one quantity over all rounds."""

    median: Finite
    lowest: Finite
    highest: Finite

    @model_validator(mode="after")
    def _check_order(self) -> Spread:
        if not self.lowest <= self.median <= self.highest:
            raise ValueError(
                f"the median {self.median} is not between {self.lowest} and {self.highest}"
            )
        return self

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values))

    def text(self) -> str:
        """ "1.05 (0.98 to 1.2)"."""
        return f"{self.median:.4g} ({self.lowest:.4g} to {self.highest:.4g})"


class Row(_Strict):
    """One measured case or setting.

    `value` is the quantity in `unit`. `ratio` is its share of the summary's limit, taken within
    each round. `others` are further quantities with a spread, `facts` are counts and single
    figures. Names end with their unit.
    """

    name: str
    unit: str = ""
    rounds: int | None = Field(default=None, ge=1)
    value: Spread | None = None
    ratio: Spread | None = None
    others: dict[str, Spread] = {}
    facts: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _check_content(self) -> Row:
        if self.value is None and self.ratio is None and not self.facts:
            raise ValueError(f"row {self.name!r} has no figure")
        if (self.value is None) != (self.unit == ""):
            raise ValueError(f"row {self.name!r} needs a value and its unit, or neither")
        return self


class MachineInfo(_Strict):
    """The machine of the measurement. None: not recorded. `versions` has the installed packages."""

    device: str
    cpu: str | None = None
    cpus_count: int | None = None
    memory_bytes: int | None = None
    kernel: str | None = None
    versions: dict[str, str] = {}

    @classmethod
    def here(cls, device: str = "cpu") -> MachineInfo:
        """This machine, with the compute device of the benchmark."""
        models = [
            line.split(":", 1)[1].strip()
            for line in lines("/proc/cpuinfo")
            if line.startswith("model name")
        ]
        return cls(
            device=device,
            cpu=models[0] if models else platform.processor() or None,
            cpus_count=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            versions=dict(_versions()) | {"python": platform.python_version()},
        )


class Summary(_Strict):
    """One question and its answer.

    `limit` is the meaning of the ratio 1. `commit` is that of the measured code, and `changed`
    whether files differed from it. None for a result from before this schema: its `commit` is the
    one that recorded the figures.
    """

    question: str
    script: str
    limit: str
    seeds: list[int]
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None
    changed: bool | None
    machine: MachineInfo
    settings: dict[str, Scalar]
    rows: Annotated[list[Row], Field(min_length=1)]

    @classmethod
    def of(
        cls,
        script: str | Path,
        question: str,
        limit: str,
        rows: Sequence[Row],
        *,
        seeds: Sequence[int] = (),
        settings: Mapping[str, object] | None = None,
        device: str = "cpu",
    ) -> Summary:
        """A summary of a measurement of `script` on this machine.

        Paths in `settings` are left out, because they mean nothing elsewhere. Values that are no
        scalars become text.
        """
        path = Path(script).resolve()
        commit = _git(path.parent, "rev-parse", "HEAD")
        return cls(
            question=question,
            script=path.name,
            limit=limit,
            seeds=list(seeds),
            commit=commit,
            changed=None if commit is None else bool(_git(path.parent, "status", "--porcelain")),
            machine=MachineInfo.here(device),
            settings={
                name: _scalar(value)
                for name, value in (settings or {}).items()
                if not isinstance(value, Path)
            },
            rows=list(rows),
        )

    @classmethod
    def read(cls, path: Path) -> Summary:
        """The summary in a file. Raises `ValueError` with the key if it does not have the
        schema."""
        return cls.model_validate_json(path.read_bytes())

    def text(self) -> str:
        """The summary as JSON. Empty and unknown fields of rows are left out."""
        return self.model_dump_json(indent=1, exclude_defaults=True) + "\n"

    def write(self, path: Path | None) -> None:
        """Write the JSON to `path`; None: nowhere."""
        if path is not None:
            path.write_text(self.text())

    def table(self) -> Iterator[str]:
        """Lines for a terminal: the value and ratio of a row, and below it the rest."""
        yield f"{self.question} A ratio of 1: {self.limit}."
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            values = [f"{row.value.text()} {row.unit}"] if row.value else []
            if row.ratio:
                values.append(f"ratio {row.ratio.text()}" if values else row.ratio.text())
            yield f"{row.name:{width}}  {', '.join(values)}"
            more = [f"{name} {other.text()}" for name, other in row.others.items()]
            more += [
                f"{name} {fact:.4g}" if isinstance(fact, float) else f"{name} {fact}"
                for name, fact in row.facts.items()
            ]
            if more:
                yield f"{'':{width}}  {'; '.join(more)}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest, JSON-ready."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git in `folder`. None outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
