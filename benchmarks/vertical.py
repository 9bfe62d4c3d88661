#!/usr/bin/env python3
"""What accumulation in vertical order moves and how long a step takes, beside the horizontal order,
by number of micro-batches.

`--tier nvme`: parameters and optimizer states on NVMe, `--rate` slows the drive to a known one.
`--tier cpu`: all states in host memory, so that what moves is copied to the compute device. The
compute device has room for a few units only. Every block is checkpointed. Bytes are counted over a
step in the steady state: those of parameters on the way to the compute device (on NVMe what the
updates read of them included). Times are of whole steps in interleaved rounds; the ratio is taken
within each round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from overlap import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.placement.spec import Kind
from infinity.quantities import parse_bytes, round_up

QUESTION = "What does accumulation in vertical order save, and what does it cost?"
LIMIT = "a step in horizontal order, in the same round"
ORDERS = ("horizontal", "vertical")


class Stack(nn.Module):
    """A small layer, and blocks of which each is checkpointed."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Run:
    """A wrapped model that is trained in one order, and what it copied to the compute device."""

    def __init__(self, options: argparse.Namespace, folder: Path, order: str) -> None:
        folder.mkdir()
        torch.manual_seed(0)
        model = Stack(options.width, options.depth)
        self.parameters = sum(p.numel() for p in model.parameters())
        unit = 4 * round_up(sum(p.numel() for p in model.blocks[0].parameters()), 4096)
        tiers = dict.fromkeys(("parameters", "optimizer"), options.tier)
        config = infinity.Config(
            nvme=folder,
            precision="fp32",
            gradients="cpu",
            gpu_memory=options.units * unit,
            cpu_memory=16 * self.parameters + (192 << 20),
            tuning=infinity.Tuning(threads=options.threads, update="exact", cache=0),
            **tiers,
        )
        self.model, self.order = infinity.wrap(model, config), order
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(options.batch, options.width)
        self.uploaded, upload = 0, self.engine._device.upload

        def counted(target: torch.Tensor, source: torch.Tensor) -> None:
            self.uploaded += target.nbytes
            upload(target, source)

        vars(self.engine._device)["upload"] = counted
        if options.rate and self.engine.io is not None:
            self.engine.io.set_faults(bytes_per_second=options.rate)

    def steps(self, count: int, micro_batches: int) -> float:
        """Seconds per step."""
        start = time.perf_counter()
        for _ in range(count):
            infinity.accumulate(
                self.model,
                [self.batch] * micro_batches,
                lambda y, _: y.square().mean(),
                order=self.order,
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / count

    def moved(self, micro_batches: int, tier: str) -> tuple[float, float | None]:
        """Bytes of parameters, per parameter and step, that went to the compute device, and what
        the planner states of them."""
        self.steps(5, micro_batches)  # until what is resident repeats itself
        if tier == "cpu":
            self.engine.drain()
            before = self.uploaded
            self.steps(2, micro_batches)
            self.engine.drain()
            return (self.uploaded - before) / 2 / self.parameters, None
        report = self.engine.report()
        kinds = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        states = (
            sum(
                u.blocks[kind].moved_bytes
                for u in self.engine.units
                for kind in kinds
                if kind in u.blocks
            )
            / self.parameters
        )
        return report.read_per_parameter - states, report.planned_read_per_parameter - states


def row_of(
    options: argparse.Namespace,
    count: int,
    times: list[list[float]],
    moved: list[tuple[float, float | None]],
) -> Row:
    """One number of micro-batches; `times` and `moved` by order."""
    horizontal, vertical = times
    facts = {
        f"{order}_bytes_per_parameter": nbytes
        for order, (nbytes, _) in zip(ORDERS, moved, strict=True)
    }
    facts |= {
        f"{order}_planned_bytes_per_parameter": planned
        for order, (_, planned) in zip(ORDERS, moved, strict=True)
    }
    slowed = f" at {options.rate / 1e6:.0f} MB/s" if options.rate else ""
    return Row(
        name=f"{options.tier}{slowed}, {count} micro-batches",
        unit="s",
        rounds=options.rounds,
        value=Spread.of(vertical),
        ratio=Spread.of([ours / other for ours, other in zip(vertical, horizontal, strict=True)]),
        others={"horizontal_step_seconds": Spread.of(horizontal)},
        facts=facts | {"bytes_ratio": moved[1][0] / moved[0][0]},
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nvme",
        type=Path,
        default=None,
        help="directory for the states (default: a temporary one)",
    )
    parser.add_argument(
        "--tier",
        choices=["nvme", "cpu"],
        default="nvme",
        help="home of parameters and optimizer states",
    )
    parser.add_argument(
        "--rate",
        type=parse_bytes,
        default=0,
        help="bytes per second that the drive is slowed to (default: not)",
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256, help="rows of a micro-batch")
    parser.add_argument(
        "--units", type=int, default=2, help="blocks that the compute device has room for"
    )
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--threads", type=int, default=2, help="threads of the optimizer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        runs = {order: Run(options, Path(folder, order), order) for order in ORDERS}
        moved = {
            (order, count): runs[order].moved(count, options.tier)
            for count in options.micro_batches
            for order in ORDERS
        }
        times: dict[tuple[str, int], list[float]] = {key: [] for key in moved}
        for _ in range(options.rounds):
            for count in options.micro_batches:
                for order, run in runs.items():
                    if len(options.micro_batches) > 1:
                        run.steps(1, count)  # ends the updates of other steps
                    times[order, count].append(run.steps(options.steps, count))
        for count in options.micro_batches:
            rows.append(
                row_of(
                    options,
                    count,
                    [times[order, count] for order in ORDERS],
                    [moved[order, count] for order in ORDERS],
                )
            )
        settings = vars(options) | {"parameters": runs["vertical"].parameters}
        for run in runs.values():
            run.engine.close()
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
