#!/usr/bin/env python3
"""How much of the I/O hides behind compute: one training step with the I/O engine slowed to a known
rate.

For each share the rate is set so that the step's NVMe traffic takes that share of the step's
compute time (the same step with every state in memory, measured in the same round). With `--caches`
the same rate is used for engines that keep shares of the states in host memory. Printed per share:
step time over max(compute, I/O), and what running one after the other would give. Rounds are
interleaved; medians and the spread over rounds are reported.

With `--update exact` nothing is updated before the last gradient is there, so updates overlap with
the next forward and not with the backward: around share 1 the whole step cannot reach 1. The lower
bound of this order is printed beside each figure:
max(forward, update traffic and forward's fetches) + max(backward, backward's fetches). Updates that
begin in backward, on the guess that nothing is clipped (the norm is computed and compared, and
stays under the limit here), go below it. With `--clip` every step is clipped, by the norm that it
names.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.quantities import parse_bytes

QUESTION = "How much of a step's NVMe traffic hides behind compute?"
LIMIT = "the longer of compute and I/O, in the same round"
UNREACHED, EXCEEDED = 1e6, 1e-9  # gradient norms: no step is clipped, or every one


class Block(nn.Module):
    """A residual MLP: compute proportional to the batch, parameters to the width squared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Run:
    """A wrapped model, and the times of its steps."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        cache: float = 0.0,
        **placement: str,
    ) -> None:
        folder.mkdir()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
        states = sum(p.numel() for p in model.parameters()) * 20
        budgets: dict[str, int | str] = {"gpu_memory": states, "cpu_memory": states + (64 << 20)}
        tuning: dict[str, int | str] = {"threads": options.threads}
        if not placement:
            kept = int(cache * sum(p.numel() for p in model.parameters()) * 12)
            budgets = {
                "gpu_memory": options.gpu_memory,
                "cpu_memory": parse_bytes(options.cpu_memory) + kept,
            }
            tuning |= {"update": options.update, "cache": kept}
        config = infinity.Config(
            nvme=folder, precision="fp32", tuning=tuning, **budgets, **placement
        )
        self.model = infinity.wrap(model, config)
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(
            self.model.parameters(),
            lr=1e-4,
            max_grad_norm=EXCEEDED if options.clip else UNREACHED,
            clip=options.clip or "global",
        )
        self.batch = torch.randn(options.batch, options.width)

    def steps(self, count: int) -> tuple[float, float, float]:
        """Seconds per step, and of its forward and backward."""
        forward = backward = 0.0
        start = time.perf_counter()
        for _ in range(count):
            begin = time.perf_counter()
            loss = self.model(self.batch).pow(2).mean()
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            forward, backward = forward + middle - begin, backward + end - middle
        return (time.perf_counter() - start) / count, forward / count, backward / count


def row_of(share: float, moved: int, measured: list[dict[str, float]], run: Run) -> Row:
    """One share of I/O over compute, with some of the states in host memory."""
    columns = {name: Spread.of([one[name] for one in measured]) for name in measured[0]}
    value = columns.pop("step_seconds")
    ratio = columns.pop("ratio")
    report = run.engine.report()
    cached = report.cached / report.on_nvme
    facts = {
        "bytes_per_step": moved, "cached_ratio": cached, "updates_kept_count": report.updates_kept,
        "updates_rolled_back_count": report.updates_rolled_back,
    }  # fmt: skip
    name = f"I/O = {share:g} x compute" + (f", {cached:.0%} cached" if cached else "")
    return Row(
        name=name,
        unit="s",
        rounds=len(measured),
        value=value,
        ratio=ratio,
        others=columns,
        facts=facts,
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
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--gpu-memory", default="48MiB")
    parser.add_argument("--cpu-memory", default="192MiB")
    parser.add_argument(
        "--caches",
        type=float,
        nargs="+",
        default=[0.0],
        help=(
            "shares of the states that stay in host memory, beside --cpu-memory; the "
            "rate is that of the first of them"
        ),
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the optimizer, and as many for the model"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.33, 1.0, 3.0],
        help="I/O time over compute time",
    )
    parser.add_argument(
        "--update", default="auto", choices=["auto", "speculative", "exact", "plain"]
    )
    parser.add_argument(
        "--clip",
        default=None,
        choices=["global", "previous", "unit"],
        help="clip every step by this norm (default: clip none)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        memory = Run(
            options, Path(folder, "memory"), parameters="gpu", gradients="gpu", optimizer="gpu"
        )
        runs = {cache: Run(options, Path(folder, str(cache)), cache) for cache in options.caches}
        memory.steps(2)
        moved, fetched = {}, {}
        for cache, run in runs.items():
            run.steps(3)
            traffic, report = run.engine.plan(), run.engine.report()
            moved[cache], fetched[cache] = traffic.read + traffic.update_written, traffic.fetched
        rows: dict[tuple[float, float], list[dict[str, float]]]
        rows = {(share, cache): [] for share in options.shares for cache in runs}
        for _ in range(options.rounds):
            before = memory.steps(options.steps)
            for share, cache in rows:
                run = runs[cache]
                rate = moved[options.caches[0]] / (share * before[0])
                # at most: a turn finds some of it resident
                io, in_backward = moved[cache] / rate, fetched[cache] / 2 / rate
                if run.engine.io is not None:
                    run.engine.io.set_faults(bytes_per_second=rate)
                run.steps(3)  # what update="auto" learns from the new rate, it does two steps later
                step, _, _ = run.steps(options.steps)
                run.engine.drain()
                if run.engine.io is not None:
                    run.engine.io.set_faults()
                # A shared machine is not as fast now as it was a moment ago.
                after_it = memory.steps(options.steps)
                compute, forward, backward = (
                    statistics.mean(pair) for pair in zip(before, after_it, strict=True)
                )
                before = after_it
                bound = max(forward, io - in_backward) + max(backward, in_backward)
                after = (compute + io) / max(compute, io)
                rows[share, cache].append(
                    {
                        "step_seconds": step,
                        "ratio": step / max(compute, io),
                        "compute_seconds": compute,
                        "step_over_compute_ratio": step / compute,
                        "one_after_the_other_ratio": after,
                        "step_over_exact_bound_ratio": step / bound,
                    }
                )
        found = [
            row_of(share, moved[cache], measured, runs[cache])
            for (share, cache), measured in rows.items()
        ]
        settings = vars(options) | {"parameters": report.parameters}
        summary = Summary.of(__file__, QUESTION, LIMIT, found, seeds=[0], settings=settings)
        for line in summary.table():
            print(line)
        summary.write(options.json)
        for run in (memory, *runs.values()):
            run.engine.close()


if __name__ == "__main__":
    main()
