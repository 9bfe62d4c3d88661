#!/usr/bin/env python3
"""How much of the ranks' communication hides behind compute: training steps of two ranks,
collectives slowed to known rates.

Two processes on this machine train one model over gloo, all states in memory. Compute is the step
with collectives as fast as they are, less the time in which the model's thread waited for them
(gathers, and the settling of gradients at the step): what the step would take if communication were
free. For each share the rate is set so that what one rank sends in a step takes that share of
compute, measured in the same round. The CPU time that gloo takes from compute counts as part of the
step. Printed per share: step time over max(compute, communication), and what running one after the
other would give. Rounds are interleaved; medians and the spread over rounds are reported, of the
slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from overlap import Block
from torch import nn

import infinity
from infinity.bench.summary import Row, Spread, Summary

QUESTION = "How much of the ranks' communication hides behind compute?"
LIMIT = "the longer of compute and communication, in the same round"
RANKS = 2


class Run:
    """This rank's part of the model, and the times of its steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
        numel = sum(p.numel() for p in model.parameters())
        unit = 4 * numel // options.depth
        # With `--units` places a unit is gathered for the forward and again for the backward, as
        # where parameters do not fit.
        memory = (options.units + 2) * unit + (8 << 20) if options.units else 8 * numel + (64 << 20)
        where = {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}
        config = infinity.Config(
            gpu_memory=memory,
            cpu_memory=20 * numel + (64 << 20),
            precision="fp32",
            tuning=infinity.Tuning(threads=1, device="cpu"),
            **where,
        )
        self.model = infinity.wrap(model, config, group=dist.group.WORLD)
        self.engine = infinity.engine(self.model)
        self.exchange = self.engine.units[0].exchange
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(options.batch, options.width)
        self.sent = 0.0
        post = self.exchange.post

        def counted(
            operation: str,
            unit: str,
            join: object,
            sent: float = 0,
            *others: object,
            **named: object,
        ) -> object:
            self.sent += sent
            return post(operation, unit, join, sent, *others, **named)

        self.exchange.post = counted

    def steps(self, count: int) -> tuple[float, float, float]:
        """Per step: seconds, seconds in which this rank waited for collectives, and bytes that it
        sent."""
        self.exchange.rest()
        dist.barrier()
        before, self.sent, settling = self._waited(), 0.0, 0.0
        start = time.perf_counter()
        for _ in range(count):
            self.model(self.batch).pow(2).mean().backward()
            begin = time.perf_counter()
            self.exchange.rest()  # what `step` would begin with
            settling += time.perf_counter() - begin
            self.optimizer.step()
            self.optimizer.zero_grad()
        # Gathers for the next step: with those of the step before in, those of each step count once
        self.exchange.rest()
        end = time.perf_counter()
        return (
            (end - start) / count,
            (self._waited() - before + settling) / count,
            self.sent / count,
        )

    def _waited(self) -> float:
        return sum(self.engine.recorder.seconds("wait collective").values())


def measure(options: argparse.Namespace, rank: int) -> list[dict[str, float]]:
    """One rank's rows, one per round and share."""
    torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.meeting}/rendezvous", rank=rank, world_size=RANKS
    )
    run = Run(options)
    run.steps(3)
    rows = []
    for _ in range(options.rounds):
        run.exchange.bytes_per_second = None
        plain, waited, sent = run.steps(options.steps)
        compute = torch.tensor(plain - waited)
        dist.all_reduce(compute, op=dist.ReduceOp.MAX)
        for share in options.shares:
            run.exchange.bytes_per_second = sent / (share * compute.item())
            step, _, _ = run.steps(options.steps)
            rows.append(
                {
                    "share": share,
                    "compute_s": compute.item(),
                    "plain_s": plain,
                    "step_s": step,
                    "sent": sent,
                }
            )
    run.engine.close()
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Start the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument(
        "--units",
        type=int,
        default=4,
        help="units that fit into gpu_memory at once (0: all of them)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of the model, for each rank"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.33, 1.0, 3.0],
        help="communication over compute",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (options.meeting / f"rows{options.rank}.json").write_text(
            json.dumps(measure(options, options.rank))
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, *sys.argv[1:], "--meeting", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(RANKS)]
        if max(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
        rows = [json.loads(Path(folder, f"rows{rank}.json").read_text()) for rank in range(RANKS)]
    slower = [max(pair, key=lambda row: row["step_s"]) for pair in zip(*rows, strict=True)]
    found = []
    for share in options.shares:
        mine = [row for row in slower if row["share"] == share]
        columns = {
            key: Spread.of([row[key] for row in mine]) for key in ("compute_s", "plain_s", "sent")
        }
        found.append(
            Row(
                name=f"communication = {share:g} x compute",
                unit="s",
                rounds=len(mine),
                value=Spread.of([row["step_s"] for row in mine]),
                ratio=Spread.of(
                    [row["step_s"] / (max(1.0, share) * row["compute_s"]) for row in mine]
                ),
                others={
                    "compute_seconds": columns["compute_s"],
                    "step_at_full_speed_seconds": columns["plain_s"],
                    "sent_bytes": columns["sent"],
                },
                facts={"one_after_the_other_ratio": (1 + share) / max(1.0, share)},
            )
        )
    settings = {
        key: value for key, value in vars(options).items() if key not in ("rank", "meeting")
    } | {"ranks": RANKS}
    summary = Summary.of(__file__, QUESTION, LIMIT, found, seeds=[0], settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
