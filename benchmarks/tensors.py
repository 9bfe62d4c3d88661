#!/usr/bin/env python3
"""Tensors to a drive and back: `infinity.nvme` against DeepSpeed's async_io, torch.save/load and
safetensors.

Groups (--groups), each in a process of its own and with one set of files that every method
overwrites and reads:
  locked-large, locked-mid, locked-small        each side's own memory for I/O, on huge pages where
                                                it manages to: DeepSpeed's locked tensors; views of
                                                one infinity.nvme.empty, pinned
  ordinary-large, ordinary-mid, ordinary-small  torch.empty on ordinary pages
  files-large, files-mid, files-small           a dict of tensors in one file, flushed: save and
                                                load
large is one tensor of --large bytes, mid --mid tensors of 16 MiB, small --small tensors of 1 MiB.

DeepSpeed is first run with each of --deepspeed (block size, queue depth, threads, overlap), --sweep
times; its fastest setting for writing and that for reading then stand beside ours in every round,
and ratios are those of neighbours in a round. Files are written once and memory is touched before
anything is timed; the order turns from round to round. CPU seconds are those of the process with
all its threads. GB = 1e9 bytes.

Run it with a python that has both packages: PYTHONPATH=. python benchmarks/tensors.py --json
benchmarks/results/tensors.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinity import nvme
from infinity.bench.summary import Row, Spread, Summary
from infinity.device import huge_pages

QUESTION = (
    "How fast do tensors reach a drive and come back, beside DeepSpeed, torch and safetensors?"
)
LIMIT = "DeepSpeed's async_io at its best setting, for files safetensors, in the same round"
MIB = 1 << 20
SIZES = {
    "large": lambda options: [options.large],
    "mid": lambda options: [16 * MIB] * options.mid,
    "small": lambda options: [MIB] * options.small,
}
GROUPS = [f"{kind}-{size}" for kind in ("locked", "ordinary", "files") for size in SIZES]


def deepspeed_module() -> Any | None:
    """DeepSpeed's async_io extension, or None when it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError:
        return None
    return AsyncIOBuilder().load(verbose=False)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], None], nbytes: int) -> dict[str, float]:
    """GB/s and CPU seconds per GB of `work`."""
    cpu, start = cpu_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return {"GBps": nbytes / 1e9 / seconds, "cpu_s_per_GB": (cpu_seconds() - cpu) / (nbytes / 1e9)}


class Infinity:
    """`infinity.nvme`, a file for each tensor, one call."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        paths: list[Path],
        engine: str,
        pinned: torch.Tensor | None,
    ) -> None:
        self._io = nvme.Io(engine)
        if pinned is not None:
            self._io.pin(pinned)
        self._items = list(zip(tensors, paths, strict=True))

    def write(self) -> None:
        self._io.write_many(self._items)

    def read(self) -> None:
        self._io.read_many(self._items)


class DeepSpeed:
    """`aio_handle`, a file for each tensor: everything submitted, then one wait, as its swappers
    do."""

    def __init__(
        self, tensors: list[torch.Tensor], paths: list[Path], module: Any, setting: str
    ) -> None:
        block, depth, threads, overlap = map(int, setting.split(","))
        self._handle = module.aio_handle(block, depth, False, bool(overlap), threads)
        self._items = list(zip(tensors, map(str, paths), strict=True))

    def write(self) -> None:
        for tensor, path in self._items:
            if self._handle.async_pwrite(tensor, path, 0) != 0:
                raise RuntimeError("async_pwrite")
        self._wait()

    def read(self) -> None:
        for tensor, path in self._items:
            if self._handle.async_pread(tensor, path, 0) != 0:
                raise RuntimeError("async_pread")
        self._wait()

    def _wait(self) -> None:
        if self._handle.wait() != len(self._items):
            raise RuntimeError("wait")


class OneFile:
    """A dict of tensors in one file, on the drive when `write` returns; read with a cold page cache
    into new memory."""

    def __init__(self, tensors: list[torch.Tensor], path: Path, kind: str) -> None:
        self._tensors = {f"t{i:04}": tensor for i, tensor in enumerate(tensors)}
        self._path, self._kind = path.with_suffix(f".{kind}"), kind

    def write(self) -> None:
        if self._kind == "infinity":
            nvme.save(self._tensors, self._path)
            return
        if self._kind == "torch":
            torch.save(self._tensors, self._path)
        else:
            from safetensors.torch import save_file

            save_file(self._tensors, self._path)
        descriptor = os.open(self._path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def prepare_read(self) -> None:
        """Evict the file, and leave the allocator pages that the machine backs already, so that
        nobody pays for first touches."""
        descriptor = os.open(self._path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        self._loaded: dict[str, torch.Tensor] = {}
        huge_pages(int(2.2 * sum(tensor.nbytes for tensor in self._tensors.values()))).fill_(1)

    def read(self) -> None:
        if self._kind == "infinity":
            self._loaded = nvme.load(self._path)
        elif self._kind == "torch":
            self._loaded = torch.load(self._path, weights_only=True)
        else:
            from safetensors.torch import load_file

            # It maps the file; what is to be in memory has to be copied out of it.
            self._loaded = {name: tensor.clone() for name, tensor in load_file(self._path).items()}

    def check(self) -> None:
        if not all(
            torch.equal(self._loaded[name], tensor) for name, tensor in self._tensors.items()
        ):
            raise RuntimeError(f"{self._kind} read other bytes")
        self._path.unlink()


def fill(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Touch them: with some content that differs from tensor to tensor."""
    pattern = torch.randint(
        0, 256, (max(map(torch.Tensor.numel, tensors)) + len(tensors),), dtype=torch.uint8
    )
    for i, tensor in enumerate(tensors):
        tensor.copy_(pattern[i : i + tensor.numel()])
    return tensors


def run_group(group: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`rows`: one for each method, round and direction; `sweep`: by direction, the GB/s of each of
    DeepSpeed's settings."""
    # OpenMP workers spin after each fill and comparison, and would be counted as CPU time of the
    # I/O
    torch.set_num_threads(1)
    kind, size = group.split("-")
    sizes = SIZES[size](options)
    module = None if kind == "files" else deepspeed_module()
    ours = theirs = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    pinned = nvme.empty(sum(sizes), dtype=torch.uint8) if kind == "locked" else None
    if pinned is not None:
        ours = list(pinned.split(sizes))
    if kind == "locked" and module is not None:
        owner, like = module.aio_handle(MIB, 8, False, True, 1), torch.empty(0, dtype=torch.uint8)
        theirs = [owner.new_cpu_locked_tensor(size, like) for size in sizes]
    fill(ours)
    total = sum(sizes)
    methods: dict[str, Any] = {}
    if kind == "files":
        methods = {
            name: OneFile(ours, folder / "all", name)
            for name in ("infinity", "torch", "safetensors")
        }
    else:
        paths = [folder / f"{i:04}" for i in range(len(sizes))]
        engines = {
            f"infinity {engine}": Infinity(ours, paths, engine, pinned)
            for engine in options.engines
        }
        peers = {}
        if module is not None:
            fill(theirs)
            peers = {
                f"deepspeed {s}": DeepSpeed(theirs, paths, module, s) for s in options.deepspeed
            }
        first = dict(list(engines.items())[:1])  # beside what it is compared with
        methods = first | peers | engines

    def measured(name: str) -> dict[str, dict[str, float]]:
        method = methods[name]
        written = timed(method.write, total)
        time.sleep(options.pause)
        if kind == "files":
            method.prepare_read()
        else:
            last = (ours if name.startswith("infinity") else theirs)[-1]
            expected = last.clone()
            last.zero_()
        read = timed(method.read, total)
        time.sleep(options.pause)
        if kind == "files":
            method.check()
        elif not torch.equal(last, expected):
            raise RuntimeError(f"{name} read other bytes")
        return {"write": written, "read": read}

    swept = [name for name in methods if name.startswith("deepspeed")]
    sweep: dict[str, dict[str, float]] = {"write": {}, "read": {}}
    if len(swept) > 1:
        turns = [{name: measured(name) for name in swept} for _ in range(options.sweep + 1)][1:]
        for direction, rates in sweep.items():
            rates |= {
                name: statistics.median(turn[name][direction]["GBps"] for turn in turns)
                for name in swept
            }
        best = {max(rates, key=rates.__getitem__) for rates in sweep.values()}
        methods = {
            name: method for name, method in methods.items() if name not in swept or name in best
        }
    rows = []
    for number in range(options.rounds + 1):
        for name in list(methods)[:: 1 if number % 2 else -1]:
            figures = measured(name)
            if number > 0:
                rows += [
                    {"method": name, "round": number, "direction": d} | figures[d]
                    for d in ("write", "read")
                ]
    return {"rows": rows, "sweep": sweep}


def rows_of(
    group: str,
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    sweep: dict[str, dict[str, float]],
) -> list[Row]:
    """For each direction and method its rate, and of ours the ratio to each peer's best setting,
    round by round."""
    result = []
    for direction in ("write", "read"):
        rates: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for row in rows:
            if row["direction"] == direction:
                rates.setdefault(row["method"], []).append(row["GBps"])
                cpu.setdefault(row["method"], []).append(row["cpu_s_per_GB"])
        best: dict[str, str] = {}
        for name in rates:
            family = name.split()[0]
            if family != "infinity" and (
                family not in best
                or statistics.median(rates[name]) > statistics.median(rates[best[family]])
            ):
                best[family] = name
        for name, mine in rates.items():
            ratios = {}
            if name.startswith("infinity"):
                ratios = {
                    family: Spread.of([a / b for a, b in zip(mine, rates[peer], strict=True)])
                    for family, peer in best.items()
                }
            others = {
                f"over_{family}_ratio": ratio
                for family, ratio in ratios.items()
                if family == "torch"
            }
            result.append(
                Row(
                    name=f"{group}, {direction}, {name}",
                    unit="GB/s",
                    rounds=options.rounds,
                    value=Spread.of(mine),
                    ratio=ratios.get("deepspeed", ratios.get("safetensors")),
                    others={"cpu_seconds_per_gb": Spread.of(cpu[name])} | others,
                    facts={
                        f"swept_{setting}_gb_per_second": rate
                        for setting, rate in sweep[direction].items()
                        if setting == name
                    },
                )
            )
    return result


def environment(group: str) -> dict[str, str]:
    """With huge pages for every allocation where the group says so; glibc reads this when a process
    starts."""
    return os.environ | {
        "GLIBC_TUNABLES": f"glibc.malloc.hugetlb={0 if group.startswith('ordinary') else 1}"
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="on the drive to be measured (default: a temporary one)",
    )
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS)
    parser.add_argument("--large", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--mid", type=int, default=200)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sweep", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before each timed call")
    parser.add_argument("--engines", nargs="+", default=["io_uring", "posix"])
    parser.add_argument(
        "--deepspeed",
        nargs="+",
        default=[
            "1048576,8,1,1",
            "1048576,32,1,1",
            "4194304,16,1,1",
            "8388608,32,1,1",
            "1048576,32,4,0",
        ],
    )
    parser.add_argument("--json", type=Path, default=None, help="a file for the summary")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_group(options.groups[0], options, options.directory)))
        return
    rows: list[Row] = []
    for group in options.groups:
        with tempfile.TemporaryDirectory(
            prefix="infinity-tensors-", dir=options.directory
        ) as folder:
            command = [
                sys.executable,
                __file__,
                *sys.argv[1:],
                "--child",
                "--groups",
                group,
                "--directory",
                folder,
            ]
            child = subprocess.run(
                command, env=environment(group), stdout=subprocess.PIPE, text=True, check=True
            )
        rows += rows_of(group, options, **json.loads(child.stdout.splitlines()[-1]))
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=vars(options))
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
