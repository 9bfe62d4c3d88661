#!/usr/bin/env python3
"""What offloaded and recomputed activations cost and free: a step of a checkpointed or plain stack
of blocks, beside torch's `save_on_cpu`.

The plain stack is also recomputed by the engine: "all", and "auto" with room for half of the
blocks. Their ratio is to "gpu", which is `recompute="off"`.

Each round trains a step in every way, one after the other in one process; figures are medians over
rounds, with the least and the largest, and ratios are taken within a round. "Held" is what is saved
on the compute device when a forward ends: bytes of storages, counted where autograd saves them. On
the CPU `save_on_cpu` copies into ordinary memory and so frees nothing there; on a GPU it is the way
that torch itself has, one synchronous copy per tensor.

    python benchmarks/activations.py --nvme /mnt/nvme0 [--width 512 --depth 8 --tokens 4096 --rounds
    5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.bench.summary import Row, Spread, Summary

QUESTION = "What does it cost to offload activations, and what does it free?"
LIMIT = "a step that keeps its activations on the compute device, in the same round"


class Block(nn.Module):
    """A residual block of two matrices and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """`depth` blocks; notes the storages of what goes into each and of what it computes first."""

    def __init__(self, width: int, depth: int, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.checkpointed = checkpointed
        self.seen: list[tuple[StorageWeakRef, int]] = []
        for block in self.blocks:
            block.up.register_forward_hook(self.see)  # type: ignore[operator, union-attr]

    def see(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        for tensor in (*args, output):
            self.seen.append(
                (StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            self.seen.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()

    def held(self) -> int:
        """Bytes of what was noted that still are where they were; each storage once."""
        alive = {
            reference.cdata: nbytes for reference, nbytes in self.seen if not reference.expired()
        }
        self.seen.clear()
        return sum(alive.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", type=Path, required=True)
    for name, default in {"width": 512, "depth": 8, "tokens": 4096, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--room",
        type=int,
        default=4,
        help="how many of the largest tensors host memory holds (nvme)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for kind in ("plain", "checkpointed") for row in measure(options, kind)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    summary = Summary.of(
        __file__, QUESTION, LIMIT, rows, seeds=[0], settings=vars(options), device=device
    )
    for line in summary.table():
        print(line)
    summary.write(options.json)


def measure(options: argparse.Namespace, kind: str) -> list[Row]:
    """A row for each way, with blocks that are plain or checkpointed."""
    checkpointed = kind == "checkpointed"
    # An input of a block, or what its first matrix gives.
    largest = 4 * options.tokens * options.width * (1 if checkpointed else 4)
    ways: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "save_on_cpu": None,
        "gpu": {},
        "cpu": {"activations": "cpu"},
        "nvme": {"activations": "nvme", "tuning": {"activation_memory": options.room * largest}},
    }
    if not checkpointed:
        ways |= {"all": {"recompute": "all"}, "auto": {"recompute": "auto"}}
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        steps = {
            name: make(options, checkpointed, Path(folder), name, config)
            for name, config in ways.items()
        }
        for _ in range(3):  # "auto" decides after the first two
            for step in steps.values():
                step()
        order = list(steps)  # in turns: what the machine does besides changes within a round, too
        rounds = [
            {n: steps[n]() for n in order[i % len(order) :] + order[: i % len(order)]}
            for i in range(options.rounds)
        ]
    return [
        Row(
            name=f"{kind}, {name}",
            unit="s",
            rounds=options.rounds,
            value=Spread.of([each[name][0] for each in rounds]),
            ratio=Spread.of([each[name][0] / each["gpu"][0] for each in rounds]),
            facts={"held_mib": rounds[-1][name][1] / 2**20},
        )
        for name in ways
    ]


def make(
    options: argparse.Namespace,
    checkpointed: bool,
    folder: Path,
    name: str,
    config: dict[str, Any] | None,
) -> Callable[[], tuple[float, int]]:
    """A function that trains a step, and gives its seconds and the bytes held at the end of its
    forward. `config`: None for plain PyTorch, which `save_on_cpu` needs, for of two hooks torch
    asks the inner one alone."""
    torch.manual_seed(0)
    memory: dict[str, Any] = {
        "parameters": "gpu",
        "gradients": "gpu",
        "optimizer": "gpu",
        "gpu_memory": "4GiB",
        "cpu_memory": "2GiB",
    }
    (folder / name).mkdir()
    if name == "auto":
        memory["gpu_memory"] = room_for_half(options, memory)
    model = Stack(options.width, options.depth, checkpointed)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    optimizer: torch.optim.Optimizer
    if config is None:
        optimizer = torch.optim.AdamW(model.to(kind).parameters(), fused=True)
    else:
        infinity.wrap(model, infinity.Config(nvme=folder / name, **memory, **config))
        optimizer = infinity.AdamW(model.parameters())
    x = torch.randn(options.tokens, options.width, device=kind)

    def step() -> tuple[float, int]:
        start = time.perf_counter()
        with save_on_cpu(pin_memory=kind != "cpu") if name == "save_on_cpu" else nullcontext():
            loss = model(x)
        held = model.held()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if config is None:
            loss.item()
        else:
            infinity.engine(model).drain()
        return time.perf_counter() - start, held

    return step


def room_for_half(options: argparse.Namespace, memory: dict[str, Any]) -> int:
    """A `gpu_memory` with room for half of what the blocks save."""
    model = Stack(options.width, options.depth, checkpointed=False)
    infinity.wrap(model, infinity.Config(**memory, recompute="auto"))
    with infinity.engine(model) as engine:
        x = torch.randn(options.tokens, options.width, device=engine.device)
        model(x).backward()
        report = engine.report()
    saved = sum(each.input_bytes + each.inside_bytes for each in report.blocks.values())
    return report.budgets["gpu"] - report.activation_room + saved // 2


if __name__ == "__main__":
    main()
