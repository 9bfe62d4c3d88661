"""`infinity doctor`: the capabilities of this machine, and what limits its speed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.bench.capacity import capacity, drive_speed, step_seconds
from infinity.bench.io.preflight import copying
from infinity.bench.machine import (
    direct_io_problem,
    gpu_direct_problem,
    huge_pages,
    io_engine_problem,
    lines,
    memlock_limit,
)
from infinity.cli.failure import plain_failures
from infinity.cli.options import AsJson, Debug, HiddenNvme, parse_directory, same_directories
from infinity.errors import ConfigError
from infinity.free_memory import Available, Budgets, Memory, choose, read_host
from infinity.quantities import format_bytes

_PACKAGES = ("zero-infinity", "torch", "numpy", "safetensors", "transformers", "matplotlib")
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")
_NATIVE = ("_aio", "_cpu_adam", "_cuda")


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _others_of_this_name() -> list[str]:
    """Other distributions that install a package `infinity`, such as MegaTrain. The files of both
    then lie in one folder."""
    found = importlib.metadata.packages_distributions().get("infinity", [])
    return sorted({*found} - {_PACKAGES[0]})


def _isa() -> list[str]:
    flags = next(
        (line.split() for line in lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))),
        [],
    )
    return [flag for flag in _ISA_FLAGS if flag in flags]


def _native() -> dict[str, str | None]:
    """For each compiled module None, or the reason why it does not load."""
    state: dict[str, str | None] = {}
    for name in _NATIVE:
        try:
            importlib.import_module(f"infinity.{name}")
            state[name] = None
        except ImportError as error:
            missing = importlib.util.find_spec(f"infinity.{name}") is None
            state[name] = "not built" if missing else str(error)
    return state


def _path(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        missing = dict.fromkeys(("free", "speed", "copy_on_write"))
        return {"path": str(directory), "problem": "not a directory", **missing}
    speed = drive_speed(directory)
    problem = direct_io_problem(directory)
    return {
        "path": str(directory),
        "problem": speed if isinstance(speed, str) and problem is None else problem,
        "free": shutil.disk_usage(directory).free,
        "speed": None if isinstance(speed, str) else speed,
        "device": directory.stat().st_dev,
        "copy_on_write": copying(directory),
    }


def _verdict(facts: dict[str, Any]) -> dict[str, Any] | None:
    """The sizes of models that fit. None if the memory is unknown."""
    if isinstance(facts["budgets"], str):
        return None
    drives = {p["device"]: p for p in facts["nvme"] if p["speed"] is not None}.values()
    free, speed = (sum(p[key] for p in drives) for key in ("free", "speed"))
    found = capacity(facts["budgets"]["cpu_memory"]["nbytes"], free)
    seconds = step_seconds(found.on_nvme, speed) if drives else None
    return {**found._asdict(), "step_seconds_on_nvme": seconds, "speed": speed}


def _verdict_lines(facts: dict[str, Any]) -> list[str]:
    """The last lines of the table: the sizes of models that train here."""
    verdict, host = facts["verdict"], facts["host_memory"]
    if verdict is None:
        return ["The memory of this machine is not known, so the size of models is not, either."]
    total = "" if host is None else f" of {format_bytes(host)} of host memory"
    budget = format_bytes(facts["budgets"]["cpu_memory"]["nbytes"])
    lines = [
        f"States may take {budget}{total}. With bf16 and Adam, all in memory: up to "
        f"{_count(verdict['in_memory'])} parameters."
    ]
    if not facts["nvme"]:
        return [
            *lines,
            "With --nvme DIR: also what the space and the speed of a drive are enough for.",
        ]
    if verdict["step_seconds_on_nvme"] is None:
        return [*lines, "No NVMe directory can be used."]
    seconds, size = verdict["step_seconds_on_nvme"], _count(verdict["on_nvme"])
    return [
        *lines,
        f"With states on NVMe: up to {size} parameters, and {_count(verdict['largest'])} with "
        "gradients there and copy_on_write=False.",
        f"The drives give {verdict['speed'] / 1e9:.2g} GB/s together: a step of {size} parameters "
        f"has about {seconds:.3g} s of I/O.",
    ]


def _count(parameters: int) -> str:
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {name}"
    return str(parameters)


def _budgets(gpu: Memory | None) -> dict[str, dict[str, Any]] | str:
    """The "auto" budgets of one rank now, before states ask for more; or the reason why there are
    none."""
    try:
        choice = choose("auto", "auto", Available(read_host(), gpu), Budgets(0, 0))
    except ConfigError as error:
        return str(error)
    return {"gpu_memory": choice.gpu._asdict(), "cpu_memory": choice.cpu._asdict()}


def _expandable_segments() -> bool:
    """Whether torch's GPU allocator uses expandable segments. The older variable counts if the
    newer is not set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return "expandable_segments:true" in said.replace(" ", "").lower()


def examine(nvme: list[Path]) -> dict[str, Any]:
    """All facts of `infinity doctor`, ready for JSON. Sizes are in bytes. None means no limit or no
    problem."""
    import torch

    from infinity.device import ComputeDevice

    computing = ComputeDevice("auto")
    device = str(computing.torch)
    host = read_host()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "others_of_this_name": _others_of_this_name(),
        "device": device,
        "cpus": len(os.sched_getaffinity(0)),
        "isa": _isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "native": _native(),
        "io_uring_problem": io_engine_problem(),
        "gpu_direct_problem": gpu_direct_problem(device, nvme),
        "nondeterminism": computing.nondeterminism(),
        "expandable_segments": _expandable_segments(),
        "budgets": _budgets(computing.memory()),
        "memlock": memlock_limit(),
        "huge_pages": huge_pages(),
        "host_memory": None if host is None else host.total,
        "nvme": [_path(directory) for directory in nvme],
    }
    return facts | {"verdict": _verdict(facts)}


_Rows = Iterator[tuple[bool, str, str]]


def rows_of(facts: dict[str, Any]) -> list[tuple[bool, str, str]]:
    """The rows of the table: (fine?, name, value)."""
    return [
        (True, "Python", f"{facts['python']}, Linux {facts['kernel']}, {facts['machine']}"),
        *_package_rows(facts),
        (True, "compute device", facts["device"]),
        (
            "avx2" in facts["isa"],
            "CPU",
            f"{facts['cpus']} usable, {' '.join(facts['isa']) or 'no known vector extension'}",
        ),
        *_native_rows(facts),
        *_gpu_rows(facts),
        *_budget_rows(facts["budgets"]),
        *_limit_rows(facts),
        *_drive_rows(facts["nvme"]),
    ]


def _package_rows(facts: dict[str, Any]) -> _Rows:
    for name, version in facts["versions"].items():
        yield version is not None, name, version or "not installed"
    for name in facts["others_of_this_name"]:
        yield False, name, "installs a package infinity, too: uninstall it, install this one again"


def _native_rows(facts: dict[str, Any]) -> _Rows:
    """The native modules, and how they do I/O."""
    for name, problem in facts["native"].items():
        if name == "_cuda" and problem == "not built":
            is_fine = facts["device"] == "cpu"
            yield is_fine, f"infinity.{name}", "not built (needed for a GPU only)"
        else:
            yield problem is None, f"infinity.{name}", problem or "loads"
    problem = facts["io_uring_problem"]
    text = "available" if problem is None else f"{problem}; POSIX threads are used"
    yield problem is None, "io_uring", text
    problem = facts["gpu_direct_problem"]
    text = f"{problem}; parameters on nvme pass host memory" if problem else "available"
    yield True, "GPUDirect Storage", text


def _gpu_rows(facts: dict[str, Any]) -> _Rows:
    if facts["device"] == "cpu":
        return
    problem, field = facts["nondeterminism"], "Config(deterministic=True)"
    text = f"{field} is refused: {problem}" if problem else f"with {field}"
    yield not problem, "same bits at every run", text
    has_segments, variable = facts["expandable_segments"], "PYTORCH_ALLOC_CONF"
    text = "on" if has_segments else f"off; {variable}=expandable_segments:True wastes less memory"
    yield has_segments, "expandable segments", text


def _limit_rows(facts: dict[str, Any]) -> _Rows:
    memlock, pages = facts["memlock"], facts["huge_pages"]
    yield True, "memlock limit", "none" if memlock is None else format_bytes(memlock)
    yield (
        pages["transparent"] in ("always", "madvise"),
        "huge pages",
        f"transparent: {pages['transparent'] or 'no'}, reserved: {pages['reserved']}",
    )


def _drive_rows(directories: list[dict[str, Any]]) -> _Rows:
    for path in directories:
        free = "" if path["free"] is None else f", {format_bytes(path['free'])} free"
        speed = "" if path["speed"] is None else f", {path['speed'] / 1e9:.2g} GB/s"
        text = (path["problem"] or "O_DIRECT works") + free + speed
        yield path["problem"] is None, path["path"], text
        if path["copy_on_write"] is not None:
            spared, sentence = path["copy_on_write"]
            yield spared, path["path"], sentence


def _budget_rows(budgets: dict[str, Any] | str) -> list[tuple[bool, str, str]]:
    if isinstance(budgets, str):
        return [(False, "budgets", budgets)]
    return [
        (True, key, f"{format_bytes(budget['nbytes'])} ({budget['source']})")
        for key, budget in budgets.items()
    ]


def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=parse_directory,
            help="NVMe directories to examine.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    nvme: HiddenNvme = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the capabilities of this machine and the sizes of models that fit: versions, instruction
    sets, io_uring, memory, NVMe directories. Writes 64 MiB to each directory to measure its
    speed."""
    with plain_failures(debug):
        facts = examine(same_directories(directories, nvme))
        if as_json:
            typer.echo(json.dumps(facts))
            return
        table = Table(show_header=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for fine, name, value in rows_of(facts):
            table.add_row("ok" if fine else "!", name, value)
        console = Console(file=sys.stdout)
        console.print(table, markup=False)
        for line in ("", *_verdict_lines(facts)):
            console.print(line, markup=False)
