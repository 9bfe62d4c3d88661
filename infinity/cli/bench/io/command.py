"""`infinity bench io`: the command and its options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer

from infinity.cli.bench.delivery import Delivery, say
from infinity.cli.bench.options import (
    OUTPUT,
    Json,
    JsonCommand,
    ReportFile,
    naming_options,
    parse_count,
)
from infinity.cli.failure import plain_failures, require_extras
from infinity.cli.options import (
    Debug,
    HiddenNvme,
    parse_directory,
    parse_size,
    same_directories,
)
from infinity.cli.output import write_file
from infinity.interrupt import interrupted_by_signals

if TYPE_CHECKING:
    from infinity.bench.io.plan import Mode

_WHERE = "Where"
_WHAT = "What is measured"
_HOW = "How it is run"
_NOT_HERE = {
    "--folder_to_device_mapping": (
        "name each directory: each has a ring of its own, and no GPU belongs to it"
    ),
    "--sweep_config": (
        "the search is not a grid; --engine, --depth, --request-bytes and "
        "--threads fix what you name"
    ),
    "--log_dir": "there is one result: --json FILE, and --report FILE for a page",
    "--verbose": "--json - prints every measurement",
    "--flush_page_cache": "O_DIRECT passes the page cache, so there is nothing to flush",
    "--gpu": "transfers go to host memory, as in training; --load copies to the GPU beside them",
    "--gds": "GPUDirect Storage is not used; --load copies to the GPU beside the transfers",
    "--use_gds": "GPUDirect Storage is not used; --load copies to the GPU beside the transfers",
    "--multi_process": "one process drives every path: name each directory",
    "--single_submit": "requests are submitted together whenever there are several",
    "--sequential_requests": "for one request after the other use --depth 1",
    "--validate": "every request's byte count is always checked, and a short one fails the run",
    "--different_file_each_iteration": "each path has one file, written over its whole length",
    "--warmup_loops": "files are written and memory is touched before anything is timed",
    "--include_warmup_time": "files are written and memory is touched before anything is timed",
    "--fast_io_size": "the memory for transfers is what the engine in training uses at most",
    "--slow_bounce_buffer": "transfers go straight to the memory they are for",
    "--use_accelerator_pin_memory": "memory is on huge pages and touched beforehand",
    "--torch_legacy_save": "tensors are moved as bytes, and not saved by torch",
}
"""Options of DeepSpeed's `ds_io` and `ds_nvme_tune` that have no meaning here, with advice."""


_RENAMED = {
    "--path": "DIR",
    "--nvme_dir": "DIR",
    "--folder": "DIR",
    "--io_size": "--size",
    "--block_size": "--request-bytes",
    "--queue_depth": "--depth",
    "--io_parallel": "--threads",
    "--loops": "--rounds",
    "--read": "--mode read",
    "--no_read": "--no-read",
    "--no_write": "--no-write",
}
"""Options of earlier versions and of DeepSpeed's tools, with their names here."""


class IoCommand(JsonCommand):
    """Refuses an option of DeepSpeed's tools or of an earlier version with a sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            name = argument.partition("=")[0]
            if name in _RENAMED:
                _refuse(f"{name} is called {_RENAMED[name]} here")
            if name in _NOT_HERE:
                _refuse(f"{name} is an option of DeepSpeed that does not apply: {_NOT_HERE[name]}")
        return super().parse_args(ctx, args)


def _refuse(text: str) -> NoReturn:
    typer.echo(f"infinity: {text}", err=True)
    raise typer.Exit(2)


def _size(*names: str, text: str, panel: str, default: str) -> Any:
    return typer.Option(
        *names,
        parser=parse_size,
        metavar="BYTES",
        show_default=default,
        help=text,
        rich_help_panel=panel,
    )


Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        parser=parse_directory,
        metavar="DIR",
        help="A directory on each drive.",
        show_default=False,
    ),
]
Size = Annotated[
    int,
    _size(
        "--size",
        text="The file on each path, larger than a drive's memory.",
        panel=_WHERE,
        default="2GiB",
    ),
]
Reserve = Annotated[
    int, _size("--reserve", text="Space that always stays free.", panel=_WHERE, default="4GiB")
]


class ModeName(str, Enum):
    """`Mode` as an enum, which typer needs for a repeated option."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    MANY_TENSOR = "many-tensor"
    REPLAY = "replay"


Modes = Annotated[
    list[ModeName] | None,
    typer.Option(
        "--mode",
        help=(
            "read, write: sequential. mixed: 70% reads. many-tensor: tensors in no "
            "order. replay: a model's training step."
        ),
        show_default="all of them",
        rich_help_panel=_WHAT,
    ),
]
NoRead = Annotated[
    bool, typer.Option("--no-read", help="Leave out --mode read.", rich_help_panel=_WHAT)
]
NoWrite = Annotated[
    bool, typer.Option("--no-write", help="Leave out --mode write.", rich_help_panel=_WHAT)
]
TensorBytes = Annotated[
    int, _size("--tensor-bytes", text="A tensor of many-tensor.", panel=_WHAT, default="1MiB")
]
Parameters = Annotated[
    int,
    typer.Option(
        "--count",
        parser=parse_count,
        metavar="COUNT",
        show_default="7B",
        help="Parameters of the model of replay: 14 bytes read, 12 written each.",
        rich_help_panel=_WHAT,
    ),
]
WithLoad = Annotated[
    bool,
    typer.Option(
        "--load",
        help="Measure also beside CPU Adam and copies to a GPU, as training does.",
        rich_help_panel=_WHAT,
    ),
]
Sustained = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="Then write for so long, past the drive's caches.",
        rich_help_panel=_WHAT,
    ),
]
WriteSet = Annotated[
    int | None,
    _size(
        "--write-set",
        text="What --sustained writes, over and over.",
        panel=_WHAT,
        default="no block twice, space permitting",
    ),
]
CompareFio = Annotated[
    bool,
    typer.Option(
        "--compare-fio",
        help="Run fio beside, with equal parameters; print ratios.",
        rich_help_panel=_WHAT,
    ),
]

Engine = Annotated[
    Literal["auto", "io_uring", "posix"],
    typer.Option(help="How files are read and written; auto: try both.", rich_help_panel=_HOW),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        min=1,
        max=4096,
        show_default="searched",
        help="Requests in flight per path (io_uring).",
        rich_help_panel=_HOW,
    ),
]
RequestBytes = Annotated[
    int | None,
    _size(
        "--request-bytes",
        text="One request to the device.",
        panel=_HOW,
        default="searched",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=256,
        show_default="searched",
        help="Threads per path (posix).",
        rich_help_panel=_HOW,
    ),
]
SearchSeconds = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=600,
        metavar="SECONDS",
        help="The search ends after this.",
        rich_help_panel=_HOW,
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        min=1,
        help="Interleaved rounds; medians count.",
        rich_help_panel=_HOW,
    ),
]
RoundSeconds = Annotated[
    float,
    typer.Option(
        min=0.01, metavar="SECONDS", help="One measurement of one round.", rich_help_panel=_HOW
    ),
]

BlockFile = Annotated[
    Path | None,
    typer.Option(
        "--block",
        metavar="FILE",
        help="Write the block for infinity.Config and DeepSpeed.",
        rich_help_panel=OUTPUT,
    ),
]
Endurance = Annotated[
    int | None,
    _size(
        "--endurance",
        text="What the maker warrants per drive, e.g. 600TB.",
        panel=OUTPUT,
        default="unknown",
    ),
]
Runs = Annotated[
    int,
    typer.Option(
        min=1, help="How often this benchmark will run, for the wear.", rich_help_panel=OUTPUT
    ),
]


def io(
    directories: Paths = None,
    nvme: HiddenNvme = None,
    size: Size = 2 << 30,
    reserve: Reserve = 4 << 30,
    mode: Modes = None,
    no_read: NoRead = False,
    no_write: NoWrite = False,
    tensor_bytes: TensorBytes = 1 << 20,
    parameters: Parameters = 7_000_000_000,
    load: WithLoad = False,
    sustained: Sustained = None,
    write_set: WriteSet = None,
    compare_fio: CompareFio = False,
    engine: Engine = "auto",
    depth: Depth = None,
    request_bytes: RequestBytes = None,
    threads: Threads = None,
    search_seconds: SearchSeconds = 30.0,
    rounds: Rounds = 3,
    round_seconds: RoundSeconds = 1.0,
    as_json: Json = None,
    report: ReportFile = None,
    block: BlockFile = None,
    endurance: Endurance = None,
    runs: Runs = 1,
    debug: Debug = False,
) -> None:
    """Measure NVMe directories with infinity's own I/O engine. Find its best setting and the limit
    of its speed.

    Writes one file per directory, in a folder of its own, and always removes it. An option of
    DeepSpeed's ds_io or ds_nvme_tune is answered with its name here.
    """
    with plain_failures(debug):
        from infinity.bench.io.benchmark import Benchmark
        from infinity.bench.io.plan import Plan

        if report is not None:
            require_extras("matplotlib", what="--report")
        delivery = Delivery(as_json, report, block=block)
        plan = Plan(
            paths=_places(same_directories(directories, nvme)),
            size=size,
            reserve=reserve,
            engine=engine,
            depth=depth,
            request_bytes=request_bytes,
            threads=threads,
            search_seconds=search_seconds,
            modes=_modes(mode or (), no_read, no_write),
            rounds=rounds,
            round_seconds=round_seconds,
            tensor_bytes=tensor_bytes,
            model_parameters=parameters,
            load=load,
            compare_fio=compare_fio,
            sustained=sustained,
            write_set=write_set,
            endurance=endurance,
            runs=runs,
        )
        with naming_options(modes="mode"), interrupted_by_signals():
            summary = Benchmark(plan, say).run()
        _deliver(summary, delivery, block)


def _deliver(summary: dict[str, Any], delivery: Delivery, block: Path | None) -> None:
    from infinity.cli.bench.io.table import print_table

    if block is not None:
        write_file(block, json.dumps(summary["config"], indent=2) + "\n")
    delivery.deliver(summary, lambda: _page(summary), lambda console: print_table(summary, console))


def _places(directories: list[Path]) -> tuple[Path, ...]:
    if not directories:
        raise ValueError("no directory is given: infinity bench io DIR, on the drive to measure")
    return tuple(directories)


def _modes(named: Sequence[ModeName], no_read: bool, no_write: bool) -> tuple[Mode, ...]:
    """The modes in the options, each once."""
    from infinity.bench.io.plan import MODES

    asked = cast("tuple[Mode, ...]", tuple(dict.fromkeys(name.value for name in named))) or MODES
    left_out = {name for name, out in (("read", no_read), ("write", no_write)) if out}
    return tuple(name for name in asked if name not in left_out)


def _page(summary: dict[str, Any]) -> str:
    from infinity.cli.bench.io.page import render  # needs matplotlib

    return render(summary)
