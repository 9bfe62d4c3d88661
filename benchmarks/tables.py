#!/usr/bin/env python3
"""Writes the tables of pages from the summaries in `benchmarks/results`.

    python benchmarks/tables.py            # rewrites what lies between the markers of each page
    python benchmarks/tables.py --check    # writes nothing; exit status 1 if a page differs

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`, where NAME is a key of
`TABLES`. A figure is the median of its rounds, with the lowest and the highest in parentheses.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from infinity.bench.summary import Row, Spread, Summary

TOP = Path(__file__).resolve().parents[1]
RESULTS = TOP / "benchmarks" / "results"
PAGES = (
    TOP / "README.md",
    *(TOP / "docs" / f"{name}.md" for name in ("benchmarks", "durability", "training")),
)
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Lines = Iterator[str]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a page differs"
    )
    check = parser.parse_args().check
    differs = False
    for page in PAGES:
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            differs = True
            if not check:
                page.write_text(after)
            print(f"{page.relative_to(TOP)} {'differs' if check else 'rewritten'}")
    return int(check and differs)


def rewritten(page: str) -> str:
    """The text of a page with each of its tables as the results have it. Raises `KeyError` for an
    unknown table."""
    return TABLE.sub(lambda found: f"{found[1]}{table(found['name'])}{found[3]}", page)


def table(name: str) -> str:
    """A Markdown table, with a newline at its end."""
    return "".join(f"{line}\n" for line in TABLES[name]())


# Cells


def row_line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """A Markdown table with these column heads."""
    yield row_line(head)
    yield f"|{'---|' * len(head)}"
    yield from map(row_line, rows)


def rows_of(name: str) -> dict[str, Row]:
    """The rows of `benchmarks/results/NAME.json`, by name."""
    return {row.name: row for row in Summary.read(RESULTS / f"{name}.json").rows}


def spread(value: Spread | None) -> str:
    """ "1.05 (0.98 to 1.20)"; a median without a spread stands alone, and None is a dash."""
    if value is None:
        return "-"
    if value.lowest == value.highest:
        return f"{value.median:.2f}"
    return f"{value.median:.2f} ({value.lowest:.2f} to {value.highest:.2f})"


def median(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.2f}"


def fact(row: Row, name: str, form: str = ".1f", scale: float = 1.0) -> str:
    """A figure of `row.facts`; raises `KeyError` if the result lacks it."""
    return format(float(row.facts[name] or 0) * scale, form)


# Tables, in the order of docs/benchmarks.md

INFINITY = {
    "infinity-memory": "infinity in memory",
    "infinity-cpu": "infinity, states in host memory",
    "infinity-nvme": "infinity, everything on NVMe",
}
MIB_TO_GIB = 1 / 1024


def comparison() -> Lines:
    """The table of README: medians only."""
    step, ranks = rows_of("step"), rows_of("ranks")

    def ratios(name: str, rows: dict[str, Row], ways: Sequence[str]) -> list[str]:
        return [name, "1.00", *(median(rows[way].ratio) for way in ways)]

    def gib(way: str) -> str:
        return f"{fact(step[f'98M, {way}'], 'peak_mib', '.2f', MIB_TO_GIB)} GiB"

    offloaded = ("infinity-cpu", "deepspeed-cpu", "fsdp2-offload")
    in_memory = ("98M, infinity-cpu", "98M, deepspeed-cpu")
    on_nvme = ("98M, infinity-nvme", "98M, deepspeed-nvme")
    sent = (fact(ranks[way], "sent_over_ddp_ratio", ".2f") for way in offloaded)
    yield from lines(
        ["", "PyTorch", "infinity", "DeepSpeed 0.19.8", "FSDP2"],
        [
            [*ratios("Step, states in host memory", step, in_memory), "not measured"],
            [*ratios("Step, states on NVMe", step, on_nvme), "no NVMe"],
            [
                "Peak memory, states on NVMe",
                gib("plain"),
                gib("infinity-nvme"),
                gib("deepspeed-nvme"),
                "no NVMe",
            ],
            ratios("Two ranks: step, states in host memory", ranks, offloaded),
            ["Two ranks: bytes sent by each", "1.00", *sent],
        ],
    )


STEP_HEAD = ["", "step", "step over DeepSpeed's on NVMe", "peak memory (GiB)", "read", "written"]
DEEPSPEED_NVME = {"deepspeed-nvme": "DeepSpeed 0.19.8 ZeRO-3, NVMe offload"}
PLAIN = {"plain": "plain PyTorch"}


def step_cells(label: str, row: Row) -> list[str]:
    return [
        label,
        spread(row.ratio),
        median(row.others["step_over_deepspeed-nvme_ratio"]),
        fact(row, "peak_mib", ".2f", MIB_TO_GIB),
        fact(row, "read_bytes_per_parameter"),
        fact(row, "written_bytes_per_parameter"),
    ]


def step() -> Lines:
    rows = rows_of("step")
    deepspeed = {"deepspeed-cpu": "DeepSpeed 0.19.8 ZeRO-3, CPU offload"} | DEEPSPEED_NVME
    ways = PLAIN | INFINITY | deepspeed
    yield from lines(
        STEP_HEAD, (step_cells(label, rows[f"98M, {way}"]) for way, label in ways.items())
    )


def step_nvme() -> Lines:
    rows = rows_of("step-nvme")
    ways = {
        "infinity-nvme": "infinity, everything on NVMe",
        "infinity-nvme-unit": 'the same, `clip="unit"`',
    }
    yield from lines(
        STEP_HEAD,
        (
            step_cells(f"{size}: {label}", rows[f"{size}, {way}"])
            for size in ("98M", "316M")
            for way, label in (PLAIN | ways | DEEPSPEED_NVME).items()
        ),
    )


def ranks() -> Lines:
    rows = rows_of("ranks")
    ways = {
        "ddp": "data parallel (DDP)",
        "infinity-memory": "infinity in memory",
        "infinity-cpu": "infinity from host memory, through 32 MiB",
        "infinity-nvme": "infinity from NVMe, through 32 MiB",
        "deepspeed-cpu": "DeepSpeed ZeRO-3, CPU offload",
        "fsdp2": "FSDP2",
        "fsdp2-offload": "FSDP2, offloaded",
        "alone": "each rank alone",
    }
    yield from lines(
        ["", "bytes sent", "step", "memory (MiB)", "loss differs by"],
        (
            [
                label,
                fact(row, "sent_over_ddp_ratio", ".2f"),
                spread(row.ratio),
                fact(row, "over_imports_mib", ".0f"),
                fact(row, "loss_differs_from_ddp_ratio", ".0e"),
            ]
            for way, label in ways.items()
            for row in [rows[way]]
        ),
    )


def overlap() -> Lines:
    speculative, exact = rows_of("overlap"), rows_of("overlap-exact")
    yield from lines(
        [
            "I/O over compute",
            "speculative step",
            "without overlap",
            'clipped step (`update="exact"`)',
        ],
        (
            [
                name.removeprefix("I/O = ").removesuffix(" x compute"),
                spread(row.ratio),
                fact(row, "one_after_the_other_ratio", ".2f"),
                spread(exact[name].ratio),
            ]
            for name, row in speculative.items()
        ),
    )


ADAM_SIZES = (100_000_000, 300_000_000)
"""Parameters, as the rows of adam.json begin with."""


def adam() -> Lines:
    rows = rows_of("adam")
    formats = {
        "fp32": "fp32",
        "bf16, fp32 master": "bf16, fp32 masters",
        "bf16, split master": "bf16, split masters",
        "split, to a shadow copy": "split masters, update into a shadow copy",
        "loop to a shadow copy": "plain loop into a shadow copy",
        "split, bf16 moments": "split masters, bf16 moments",
        "split, int8 moments": "split masters, int8 moments",
        "torch fused AdamW": "torch fused AdamW, fp32",
        "DeepSpeed CPUAdam": "DeepSpeed CPUAdam, fp32",
    }
    yield from lines(
        ["format", "bytes per parameter", "100 million parameters", "300 million parameters"],
        (
            [
                label,
                fact(rows[f"{ADAM_SIZES[0]}, {name}"], "bytes_per_parameter"),
                *(spread(rows[f"{size}, {name}"].ratio) for size in ADAM_SIZES),
            ]
            for name, label in formats.items()
        ),
    )


def adam_peers() -> Lines:
    rows = rows_of("adam")
    yield from lines(
        ["fp32 steps per second, over", "100 million parameters", "300 million parameters"],
        (
            [
                peer,
                *(
                    spread(rows[f"{size}, fp32"].others[f"steps_per_second_over_{peer}_ratio"])
                    for size in ADAM_SIZES
                ),
            ]
            for peer in ("torch fused AdamW", "DeepSpeed CPUAdam")
        ),
    )


def activations() -> Lines:
    rows = rows_of("activations")
    yield from lines(
        ["", "saved on the device, before (MiB)", "after (MiB)", "step"],
        (
            [
                label,
                fact(rows[f"{way}, gpu"], "held_mib", ".0f"),
                fact(rows[f"{way}, {tier}"], "held_mib", ".0f"),
                spread(rows[f"{way}, {tier}"].ratio),
            ]
            for way, tier, label in (
                ("plain", "nvme", "no checkpointing, activations on NVMe"),
                ("checkpointed", "nvme", "checkpointing, activations on NVMe"),
                (
                    "checkpointed",
                    "cpu",
                    "checkpointing, the CPU as device and as tier: nothing moves",
                ),
            )
        ),
    )


def chunked_loss() -> Lines:
    yield from lines(
        ["", "step", "peak beside the weights (MiB)", "gradients differ by"],
        (
            [
                name.replace(", width 64", ""),
                spread(row.ratio),
                fact(row, "peak_mib", ".0f"),
                fact(row, "gradients_differ_ratio", ".0e"),
            ]
            for name, row in rows_of("chunked-loss").items()
        ),
    )


def formats() -> Lines:
    rows = rows_of("formats")
    labels = {
        "fp32": "fp32 masters and moments",
        "split": "split masters, fp32 moments",
        "bf16": "split masters, bf16 moments",
        "int8": "split masters, int8 moments",
        "nudged": "fp32, learning rate larger by a millionth",
    }
    yield from lines(
        [
            "states",
            "bytes per parameter",
            "mean loss",
            "loss of the seeds",
            "minus fp32, same seed",
        ],
        (
            [
                label,
                fact(row, "bytes_per_parameter"),
                fact(row, "mean_nats", ".3f"),
                f"{row.value.lowest:.3f} to {row.value.highest:.3f}" if row.value else "-",
                f"{minus.lowest:+.3f} to {minus.highest:+.3f}",
            ]
            for name, label in labels.items()
            for row in [rows[name]]
            for minus in [row.others["minus_fp32_nats"]]
        ),
    )


def vertical() -> Lines:
    labels = {
        "nvme, 8 micro-batches": "NVMe, as it is",
        "nvme at 600 MB/s, 8 micro-batches": "NVMe, slowed to 600 MB/s",
        "cpu, 8 micro-batches": "host memory",
    }
    rows = rows_of("vertical")
    yield from lines(
        ["states", "bytes per parameter, horizontal", "vertical", "step, vertical over horizontal"],
        (
            [
                label,
                fact(rows[name], "horizontal_bytes_per_parameter"),
                fact(rows[name], "vertical_bytes_per_parameter"),
                spread(rows[name].ratio),
            ]
            for name, label in labels.items()
        ),
    )


def aio() -> Lines:
    rows = rows_of("aio")
    engines = {
        "io_uring": "io_uring",
        "io_uring, registered": "io_uring, registered memory",
        "posix": "POSIX threads",
    }
    yield from lines(
        ["", "read", "write", "70/30 mix"],
        (
            [
                label,
                *(spread(rows[f"{mode}, {engine}"].ratio) for mode in ("read", "write", "mixed")),
            ]
            for engine, label in engines.items()
        ),
    )


def aio_random() -> Lines:
    rows = rows_of("aio")
    yield from lines(
        ["random reads of", "64 in flight", "128 in flight"],
        (
            [label, *(spread(rows[f"{size}, io_uring x {depth}"].ratio) for depth in (64, 128))]
            for size, label in (("random_4k", "4 KiB"), ("random_64k", "64 KiB"))
        ),
    )


def drive() -> Lines:
    rows = rows_of("drive")
    beside = "beside the load, {} beside CPU Adam"
    labels = {
        "read": "read",
        "write": "write",
        "mixed": "70/30 mix",
        "replay": "I/O of a training step",
    }
    yield from lines(
        ["", "over fio, equal parameters", "speed kept beside CPU Adam"],
        (
            [
                label,
                spread(rows[f"searched, {mode}"].ratio),
                fact(rows[beside.format(mode)], "of_quiet_ratio", ".2f"),
            ]
            for mode, label in labels.items()
        ),
    )


SIZES = {"large": "one large", "mid": "two hundred of 16 MiB", "small": "a thousand of 1 MiB"}


def tensors() -> Lines:
    rows = rows_of("tensors")

    def cells(memory: str, size: str) -> Iterator[str]:
        for way in ("write", "read"):
            mine = rows[f"{memory}-{size}, {way}, infinity io_uring"]
            prefix = f"{memory}-{size}, {way}, deepspeed"
            theirs = min(_cpu(row) for name, row in rows.items() if name.startswith(prefix))
            yield spread(mine.ratio)
            yield f"{_cpu(mine) / theirs:.2f}"

    yield from lines(
        ["tensors", "memory", "write", "CPU time", "read", "CPU time"],
        (
            [label, name, *cells(memory, size)]
            for memory, name in (("locked", "I/O memory"), ("ordinary", "ordinary memory"))
            for size, label in SIZES.items()
        ),
    )


def _cpu(row: Row) -> float:
    return row.others["cpu_seconds_per_gb"].median


def tensor_files() -> Lines:
    rows = rows_of("tensors")
    labels = {"large": "one large", "mid": "of 16 MiB", "small": "of 1 MiB"}

    def cells(size: str) -> Iterator[str]:
        for way in ("write", "read"):
            row = rows[f"files-{size}, {way}, infinity"]
            yield spread(row.ratio)
            yield median(row.others["over_torch_ratio"])

    found = (size for size in labels if f"files-{size}, write, infinity" in rows)
    yield from lines(
        [
            "tensors in one file",
            "write over safetensors",
            "over `torch.save`",
            "read over safetensors",
            "over `torch.load`",
        ],
        ([labels[size], *cells(size)] for size in found),
    )


def checkpoints() -> Lines:
    rows = rows_of("checkpoints")
    of_mixed = "over_mixed_ratio"
    yield from lines(
        ["", "over half reads, half writes", "over the 70/30 mix of `infinity bench io`"],
        (
            [name, spread(rows[name].ratio), spread(rows[name].others[of_mixed])]
            for name in ("save", "save over another", "load")
        ),
    )


def durable() -> Lines:
    yield from lines(
        [
            "states, commits",
            'step, over `durability="off"` with the same `cpu_memory`',
            "bytes written per parameter",
            "without commits",
        ],
        (
            [
                name,
                spread(row.ratio),
                fact(row, "step_written_bytes_per_parameter"),
                fact(row, "off_written_bytes_per_parameter"),
            ]
            for name, row in rows_of("durable").items()
        ),
    )


def generation() -> Lines:
    yield from lines(
        ["weights", "tokens per second over the limit", "bytes read per token"],
        (
            [name, spread(row.ratio), fact(row, "read_bytes_per_token", ".3g")]
            for name, row in rows_of("generate").items()
        ),
    )


def many_units() -> Lines:
    rows = rows_of("many-units")
    yield from lines(
        [
            "",
            "step over plain PyTorch's",
            "engine's Python, of the step",
            "hooks",
            "schedule and residency",
            "`wrap` (s)",
            "plan (ms)",
        ],
        (
            [
                name,
                spread(row.ratio),
                spread(row.others["engine_share_ratio"]),
                fact(row, "hooks_share_ratio", ".2f"),
                f"{_share(row, 'schedule') + _share(row, 'residency'):.2f}",
                fact(row, "wrap_seconds"),
                fact(row, "plan_seconds", ".0f", 1e3),
            ]
            for name, row in rows.items()
            if not name.startswith("growth")
        ),
    )


def _share(row: Row, component: str) -> float:
    return float(row.facts[f"{component}_share_ratio"] or 0)


def overhead() -> Lines:
    yield from lines(
        [
            "parameters",
            "step over the longer of compute and I/O",
            "I/O over compute",
            "over compute and then the clipped update",
            "read per parameter",
            "written",
        ],
        (
            [
                name,
                spread(row.ratio),
                f"{_seconds(row, 'io') / _seconds(row, 'compute'):.2f}",
                f"{row.value.median / _seconds(row, 'clipped'):.2f}" if row.value else "-",
                *(
                    f"{float(row.facts[f'nvme_{way}_bytes'] or 0) / count:.1f}"
                    for count in [float(row.facts["parameters_count"] or 0)]
                    for way in ("read", "write")
                ),
            ]
            for name, row in rows_of("overhead").items()
        ),
    )


def _seconds(row: Row, name: str) -> float:
    return float(row.facts[f"{name}_seconds"] or 0)


def look_ahead() -> Lines:
    def range_of(row: Row, what: str) -> str:
        mean, least, most = (
            fact(row, f"{what}_{end}_ratio", ".3f") for end in ("mean", "least", "largest")
        )
        return f"{mean} ({least} to {most})"

    yield from lines(
        ["model", "over the best distance", "one unit ahead, over infinity"],
        (
            [name, range_of(row, "over_the_best"), range_of(row, "one_ahead_over_ours")]
            for name, row in rows_of("look-ahead").items()
        ),
    )


def plan() -> Lines:
    yield from lines(
        ["model and states", "updates", "bottleneck", "predicted step over measured one"],
        (
            [name, str(row.facts["updates"]), str(row.facts["bottleneck"]), spread(row.ratio)]
            for name, row in rows_of("plan").items()
        ),
    )


TABLES: dict[str, Callable[[], Lines]] = {
    "comparison": comparison,
    "step": step,
    "step-nvme": step_nvme,
    "ranks": ranks,
    "overlap": overlap,
    "adam": adam,
    "adam-peers": adam_peers,
    "activations": activations,
    "chunked-loss": chunked_loss,
    "formats": formats,
    "vertical": vertical,
    "aio": aio,
    "aio-random": aio_random,
    "drive": drive,
    "tensors": tensors,
    "tensor-files": tensor_files,
    "checkpoints": checkpoints,
    "durable": durable,
    "generate": generation,
    "many-units": many_units,
    "overhead": overhead,
    "look-ahead": look_ahead,
    "plan": plan,
}
"""What pages may name, and what writes it."""


if __name__ == "__main__":
    sys.exit(main())
