#!/usr/bin/env python3
"""What the engine's transfers reach of plain ones: both directions of the link to the compute
device, and NVMe to it.

  host to device   units that are at home in host memory come into the compute arena, as before a
                   forward (the store's `start` and `wait`, two units ahead); against one large copy
                   from pinned memory by torch, non_blocking, then a synchronize
  device to host   gradients go home (`bring_home`); against the same copy the other way
  NVMe to device   units on NVMe come into the arena, through staging where the drive cannot reach
                   the device; against reading as many bytes of a file into touched memory on huge
                   pages with `infinity.nvme`; and, where the drive can reach the device after all
                   (GPUDirect Storage), straight into the arena, against the same
Everyone runs once per round, in an order that turns; ratios are taken within a round. GB = 1e9
bytes. Without a GPU the compute device is host memory and the plain copy one of torch's, with its
threads.

  python benchmarks/gpu/links.py --nvme /mnt/nvme0 --json links.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from infinity import nvme
from infinity.bench.summary import Row, Spread, Summary
from infinity.config import Config, Tuning
from infinity.device import ComputeDevice, copy_alone
from infinity.observe import Recorder
from infinity.placement.spec import BF16, BlockSpec, Kind
from infinity.quantities import parse_bytes
from infinity.tier import GPU, TIERS
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store

QUESTION = (
    "How near do the engine's transfers to the compute device come to plain copies and reads?"
)
LIMIT = "a plain copy or read of as many bytes, in the same round"
AHEAD = 2
PIECE_BYTES = 4 << 20


class Units:
    """`count` units of `nbytes` each, at home on `tier`, and an arena that holds a few of them."""

    def __init__(
        self, tier: Any, count: int, nbytes: int, folder: Path, kind: str, gpu_direct: Any = "off"
    ) -> None:
        self.device = ComputeDevice(kind)
        places = AHEAD + 2
        config = Config(
            nvme=folder,
            gpu_memory=places * nbytes + (nbytes if tier == "cpu" else 0),
            cpu_memory=(count + 1) * nbytes * (2 if tier == "cpu" else 0) + (256 << 20),
            tuning=Tuning(cache=0, device=kind, gpu_direct=gpu_direct),
        )
        self.store = Store(config, self.device, Recorder())
        self.gradients, self.params = [], []
        for number in range(count):
            common = {
                "elements": nbytes // 2,
                "format": BF16,
                "tier": TIERS[tier],
                "span": nbytes,
                "at": 0,
            }
            self.params.append(
                self.store.add(
                    BlockSpec(unit=number, kind=Kind.PARAM, name=f"unit {number}", **common)
                )
            )
            if tier == "cpu":
                self.gradients.append(
                    self.store.add(
                        BlockSpec(unit=number, kind=Kind.GRAD, name=f"gradient {number}", **common)
                    )
                )
        self.store.open(
            self.store.placement.layout(places * nbytes, nbytes if tier == "cpu" else 0)
        )
        self.content = self.store.reserve(GPU, nbytes).tensor.fill_(1) if tier == "cpu" else None

    def write(self) -> None:
        """Give every unit content, so that it is read."""
        noise = torch.randint(0, 256, (PIECE_BYTES,), dtype=torch.uint8)
        for block in self.params:
            self.store.resident.begin_update(block)
            for begin in self.store.staging.chunks(block):
                (chunk,) = self.store.staging.check_out(ChunkRequest([block], begin))
                chunk.tensor.copy_(noise[: chunk.tensor.numel()])
                chunk.commit()
                chunk.release()
            self.store.resident.end_update([block])

    def fetch(self) -> None:
        """Bring all of them to the compute device, in order."""
        for number in range(len(self.params) + AHEAD):
            if number < len(self.params):
                self.store.resident.start(self.params[number])
            if number >= AHEAD:
                self.store.resident.wait(self.params[number - AHEAD])
                self.store.resident.release(self.params[number - AHEAD])

    def bring_home(self) -> None:
        """Copy one unit's gradients home, for every unit."""
        for block in self.gradients:
            for here, there in self.store.staging.bring_home(
                block, self.content[: block.nbytes], add=False
            ):
                copy_alone(here, there)


def seconds(work: Callable[[], object], after: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    after()
    return time.perf_counter() - start


def rounds(
    ways: dict[str, Callable[[], object]], count: int, after: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each of `ways` per round, after one untimed turn each."""
    for work in ways.values():
        seconds(work, after)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(count):
        turned = number % len(names)
        for name in names[turned:] + names[:turned]:
            taken[name].append(seconds(ways[name], after))
    return taken


def compare(name: str, taken: dict[str, list[float]], ours: str, plain: str, nbytes: int) -> Row:
    """One way of the engine beside a plain one."""
    return Row(
        name=name,
        unit="GB/s",
        rounds=len(taken[ours]),
        value=Spread.of([nbytes / s / 1e9 for s in taken[ours]]),
        ratio=Spread.of(
            [theirs / mine for mine, theirs in zip(taken[ours], taken[plain], strict=True)]
        ),
        others={"plain_gb_per_second": Spread.of([nbytes / s / 1e9 for s in taken[plain]])},
    )


def measure(kind: str, folder: Path, count: int, nbytes: int, times: int) -> list[Row]:
    """All comparisons, over `count` units of `nbytes` bytes."""
    total = count * nbytes
    with ExitStack() as stack:
        memory_folder = folder / "memory"
        drive_folder = folder / "drive"
        direct_folder = folder / "direct"
        for each in (memory_folder, drive_folder, direct_folder):
            each.mkdir()
        memory = Units("cpu", count, nbytes, memory_folder, kind)
        stack.callback(memory.store.close)
        drive = Units("nvme", count, nbytes, drive_folder, kind)
        stack.callback(drive.store.close)
        drive.write()
        direct = Units("nvme", count, nbytes, direct_folder, kind, "auto")
        stack.callback(direct.store.close)
        straight_too = bool(direct.store.nvme.direct)
        if straight_too:
            direct.write()
        else:
            direct.store.close()
        target = memory.device.torch
        cuda = target.type == "cuda"
        host = torch.zeros(total, dtype=torch.uint8, pin_memory=cuda)
        there = torch.zeros(total, dtype=torch.uint8, device=target)
        after = torch.cuda.synchronize if cuda else lambda: None
        io = stack.enter_context(nvme.Io())
        read = nvme.empty(total, dtype=torch.uint8)
        items = [
            (piece, folder / "plain.bin", at * PIECE_BYTES)
            for at, piece in enumerate(read.split(PIECE_BYTES))
        ]
        io.write_many(items)
        ways = {
            "arena up": memory.fetch,
            "plain up": lambda: there.copy_(host, non_blocking=True),
            "arena down": memory.bring_home,
            "plain down": lambda: host.copy_(there, non_blocking=True),
            "store": drive.fetch,
            "plain read": lambda: io.read_many(items),
        }
        if straight_too:
            ways["direct"] = direct.fetch
        taken = rounds(ways, times, after)
    pairs = {
        "host_to_device": ("arena up", "plain up"),
        "device_to_host": ("arena down", "plain down"),
        "nvme_to_device": ("store", "plain read"),
        "nvme_to_device_direct": ("direct", "plain read"),
    }
    return [
        compare(name, taken, ours, plain, total)
        for name, (ours, plain) in pairs.items()
        if ours in taken
    ]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nvme", type=Path, help="directory on the drive (default: the one for temporary files)"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--unit-bytes", type=parse_bytes, default=128 << 20, help="of one unit (default: 128MiB)"
    )
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="infinity-links-") as folder:
        rows = measure(
            options.device, Path(folder), options.units, options.unit_bytes, options.rounds
        )
    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else "cpu"
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=vars(options), device=device)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
