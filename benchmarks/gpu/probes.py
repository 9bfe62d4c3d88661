#!/usr/bin/env python3
"""What a machine really has, before long parts depend on it: host memory that is touched, and the
rate of the drive.

  benchmarks/gpu/probes.py memory --bytes 124GiB --slice 32GiB --json FILE
  benchmarks/gpu/probes.py drive --bytes 4GiB --nvme DIR --json FILE

The memory of some virtual machines grows while it is touched, so each slice is noted as it comes:
where the kernel ends this process, FILE says how far it came.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from infinity.free_memory import read_host
from infinity.quantities import parse_bytes

PIECE_BYTES = 16 << 20  # of the drive, as large as the engine's stripes or larger
PIECES = 16  # in memory at once


def touch(nbytes: int, slice_bytes: int, output: Path) -> dict[str, Any]:
    """Touch `nbytes` in slices, with what the machine says that it has before and after each."""
    slices: list[dict[str, Any]] = []
    kept = []
    result = {"asked_bytes": nbytes, "slices": slices, "touched_bytes": 0}

    def look() -> dict[str, int]:
        host = read_host()
        return {} if host is None else {"total_bytes": host.total, "free_bytes": host.free}

    while result["touched_bytes"] < nbytes:
        size, start = min(slice_bytes, nbytes - result["touched_bytes"]), time.perf_counter()
        before = look()
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        kept.append(memory)
        result["touched_bytes"] += size
        seconds = time.perf_counter() - start
        slices.append({"bytes": size, "seconds": seconds, "before": before, "after": look()})
        output.write_text(json.dumps(result, indent=1))
    return result


def rates(nbytes: int, nvme: Path) -> dict[str, Any]:
    """Bytes per second of `nbytes`, written and then read, by O_DIRECT."""
    import torch

    from infinity import nvme as files

    free = shutil.disk_usage(nvme).free
    nbytes = min(nbytes, free // 2)
    tensors = list(files.empty(PIECES * PIECE_BYTES, dtype=torch.uint8).split(PIECE_BYTES))
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    rounds = max(1, nbytes // (PIECES * PIECE_BYTES))
    turns = [[nvme / f"probe-{turn}-{i}" for i in range(PIECES)] for turn in range(rounds)]
    result: dict[str, Any] = {"bytes": rounds * PIECES * PIECE_BYTES, "free_bytes": free}
    try:
        for name, work in (("write", files.write_many), ("read", files.read_many)):
            start = time.perf_counter()
            for paths in turns:
                work(list(zip(tensors, paths, strict=True)))
            seconds = time.perf_counter() - start
            result[f"{name}_bytes_per_second"] = result["bytes"] / seconds
    finally:
        for path in itertools.chain.from_iterable(turns):
            path.unlink(missing_ok=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["memory", "drive"])
    parser.add_argument("--bytes", type=parse_bytes, required=True)
    parser.add_argument("--slice", type=parse_bytes, default=32 << 30)
    parser.add_argument("--nvme", type=Path, default=Path())
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "memory":
        result = touch(options.bytes, options.slice, options.json)
    else:
        result = rates(options.bytes, options.nvme)
    options.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
