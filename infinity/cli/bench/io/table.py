"""Shows the result as tables on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.cli.bench.delivery import print_rows
from infinity.quantities import format_bytes


def row_name(row: dict[str, Any], paths: int) -> str:
    """ "read", "read, /mnt/a alone", "read beside CPU Adam"."""
    name = str(row["mode"])
    if len(row["paths"]) < paths:
        name += f", {row['paths'][0]} alone"
    return name + (f" beside {row['load']}" if row["load"] else "")


HEADINGS = ("mode", "GB/s", "rounds", "p50", "p99", "p99.9", "CPU s/GB", "of fio", "of quiet")
"""The percentiles are in milliseconds."""


def cells(row: dict[str, Any], paths: int) -> list[str]:
    """The texts of one row under `HEADINGS`. Values that were not measured are empty."""

    def number(key: str, form: str, factor: float = 1.0) -> str:
        return "" if row.get(key) is None else format(row[key] * factor, form)

    return [
        row_name(row, paths),
        number("median_gb_per_second", ".2f"),
        f"{row['lowest_gb_per_second']:.2f}-{row['highest_gb_per_second']:.2f}",
        *(number(f"latency_{name}_seconds", ".3g", 1e3) for name in ("p50", "p99", "p99_9")),
        number("cpu_seconds_per_gb", ".3f"),
        number("fio_median_ratio", ".2f"),
        number("of_quiet_ratio", ".2f"),
    ]


def setting_words(setting: dict[str, Any]) -> str:
    """A setting in words."""
    threads = f", {setting['threads_count']} threads" if setting["engine"] == "posix" else ""
    size = format_bytes(setting["request_bytes"])
    return f"{setting['engine']}, {setting['depth_requests']} requests of {size} in flight{threads}"


def facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Facts around the table of modes, as (name, text)."""
    search = summary["search"]
    rows = [
        *((place["path"], _place_words(place)) for place in summary["paths"]),
        ("machine", _machine_words(summary["machine"])),
        ("notes", " ".join(summary["notes"])),
        ("best setting", setting_words(summary["best"])),
        (
            "search",
            f"{search['trials_count']} measurements of {search['settings_count']} "
            f"settings in {search['seconds']:.1f} s",
        ),
        *(("limit", sentence) for sentence in summary["limits"]),
        ("of fio by round", "; ".join(_ratios(summary))),
        *(
            ("training step", _step_words(row))
            for row in summary["rows"]
            if row["mode"] == "replay"
        ),
        *_load_rows(summary),
        ("wear", wear_words(summary["wear"])),
    ]
    return [(name, text) for name, text in rows if text]


def _place_words(place: dict[str, Any]) -> str:
    known = [
        place["file_system"],
        place["device"],
        place["model"],
        place["pcie_link"] and f"PCIe {place['pcie_link']}",
        place["numa_node"] and f"NUMA node {place['numa_node']}",
        place["direct_io_problem"] or "O_DIRECT",
        f"{format_bytes(place['free_bytes'])} free",
    ]
    return ", ".join(str(part) for part in known if part)


def _machine_words(machine: dict[str, Any]) -> str:
    locked = machine["memlock_bytes"]
    return (
        f"Linux {machine['kernel']}, {machine['cpus_count']} CPUs, "
        f"io_uring {'refused' if machine['io_uring_problem'] else 'works'}, "
        f"memlock {'no limit' if locked is None else format_bytes(locked)}, "
        f"huge pages {machine['transparent_huge_pages'] or 'none'}"
    )


def _ratios(summary: dict[str, Any]) -> list[str]:
    return [
        f"{row_name(row, len(summary['paths']))} "
        f"{row['fio_lowest_ratio']:.2f}-{row['fio_highest_ratio']:.2f}"
        for row in summary["rows"]
        if "fio_median_ratio" in row
    ]


def _step_words(row: dict[str, Any]) -> str:
    beside = f" beside {row['load']}" if row["load"] else ""
    return (
        f"{row['io_per_training_step_seconds']:.3g} s of I/O{beside} for "
        f"{row['model_parameters_count']:,} parameters, from "
        f"{row['replayed_parameters_count']:,} replayed"
    )


def _load_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    load, sustained = summary["load"], summary["sustained"]
    if load:
        speed = load["adam_gigaparameters_per_second"]
        yield "load", f"Adam updated {speed:.2f} billion parameters per second"
    if sustained:
        yield (
            "sustained",
            f"{sustained['last_half_gb_per_second']:.2f} GB/s in the last half of "
            f"{sustained['seconds']:.0f} s, {sustained['first_tenth_gb_per_second']:.2f} at "
            f"first, {format_bytes(sustained['written_bytes'])} written over "
            f"{format_bytes(sustained['write_set_bytes'])}",
        )


def wear_words(wear: dict[str, Any]) -> str:
    """The bytes written, and their share of the drive's life."""
    text = f"{format_bytes(wear['written_bytes'])} written"
    if wear["endurance_used_percent"] is not None:
        times = f", {wear['runs_count']} times," if wear["runs_count"] > 1 else ""
        endurance = format_bytes(wear["endurance_bytes"])
        steps = wear["training_steps_per_endurance_count"]
        text += (
            f"{times} of the {endurance} that each drive endures: "
            f"{wear['endurance_used_percent']:.2g} %"
        )
        text += (
            f"; {steps:,} steps of {wear['model_parameters_count']:,} parameters would "
            "take all of it"
        )
    for drive in wear["drives"]:
        text += f"; {drive['device']} says that {drive['life_used_percent']} % of its life is used"
    return text


def print_table(summary: dict[str, Any], console: Console) -> None:
    """Print everything. The configuration comes last, ready to be copied."""
    for load in dict.fromkeys(row["load"] for row in summary["rows"]):
        rows = [row for row in summary["rows"] if row["load"] == load]
        shown = [cells(row | {"load": None}, len(summary["paths"])) for row in rows]
        used = [number for number in range(len(HEADINGS)) if any(line[number] for line in shown)]
        title = f"infinity bench io{f', beside {load}' if load else ''} (p50, p99, p99.9 in ms)"
        headings, *lines = ([line[number] for number in used] for line in (HEADINGS, *shown))
        print_rows(console, headings, lines, title)
    around = Table(show_header=False, box=None)
    around.add_column(style="bold", no_wrap=True)
    around.add_column(overflow="fold")
    for name, text in facts(summary):
        around.add_row(name, text)
    console.print(around, markup=False)
    console.print("\nfor infinity.Config (add budgets) and a DeepSpeed file:", markup=False)
    console.print(
        json.dumps(summary["config"], indent=2), markup=False, highlight=False, soft_wrap=True
    )
