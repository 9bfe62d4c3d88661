"""The same work through fio, for comparison: equal file, request size, requests in flight and time.

Both sides use huge pages that were touched before. fio allocates with malloc, which gets huge pages
through `GLIBC_TUNABLES`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from infinity.bench.io.patterns import READ_SHARE
from infinity.bench.io.rig import Measured
from infinity.bench.io.search import Setting
from infinity.errors import InfinityError

ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_DIRECTION = {"read": "read", "write": "write", "mixed": "rw"}


def require_fio() -> str:
    """The path of fio. Raises `InfinityError` with the way out if it is not installed."""
    found = shutil.which("fio")
    if found is None:
        raise InfinityError(
            "`compare_fio` needs fio, which is not installed; install it with: apt-get install fio"
        )
    return found


def arguments(
    mode: str,
    setting: Setting,
    files: Sequence[tuple[str, int]],
    seconds: float,
    direct: bool,
    ring: bool,
    registered: bool,
) -> list[str]:
    """The arguments of fio for `mode` (read, write, mixed) at once on `files` (path, bytes), which
    exist and have been written.

    Transfers are sequential, over the file again and again until the time ends, with the same
    number of requests in flight. They go through io_uring if possible (`ring`), even beside our
    POSIX threads, and otherwise through libaio. fio's own threads (psync) are no comparison: each
    has a buffer smaller than a huge page. Memory is pinned for fio's ring if it is pinned for ours.
    """
    options = [
        "--name=global",
        f"--rw={_DIRECTION[mode]}",
        f"--bs={setting.request_bytes}",
        f"--iodepth={setting.depth}",
        f"--ioengine={'io_uring' if ring else 'libaio'}",
        f"--direct={int(direct)}",
        "--time_based=1",
        f"--runtime={max(round(seconds * 1000), 1)}ms",
        "--group_reporting=1",
        "--allow_file_create=0",
        # fio would change every buffer before it writes it. The engine does not.
        "--scramble_buffers=0",
        "--thread=1",
        "--output-format=json",
    ]
    if mode == "mixed":
        options.append(f"--rwmixread={round(READ_SHARE * 100)}")
    if ring and registered:
        options += ["--fixedbufs=1", "--registerfiles=1"]
    for number, (path, size) in enumerate(files):
        size -= size % setting.request_bytes
        # fio takes a colon in a file name for a separator.
        options += [
            f"--name=path{number}",
            f"--filename={path.replace(':', chr(92) + ':')}",
            f"--size={size}",
        ]
    return options


def parse(output: dict[str, Any]) -> Measured:
    """The result of a run of fio: all jobs together, over the time of the longest, with the CPU
    time of its report."""
    jobs = output["jobs"]
    moved = {way: sum(int(job[way]["io_bytes"]) for job in jobs) for way in ("read", "write")}
    seconds = max(int(job[way]["runtime"]) for job in jobs for way in ("read", "write")) / 1000
    cpu = sum(
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * int(job["job_runtime"]) / 1000 for job in jobs
    )
    return Measured(moved["read"], moved["write"], seconds, cpu)


def run(program: str, options: Sequence[str]) -> Measured:
    """Run fio and read its report. Raises `InfinityError` with fio's message if it fails."""
    process = subprocess.Popen(
        [program, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    try:
        stdout, stderr = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        said = " ".join((stderr or stdout).split())[-300:] or f"exit status {process.returncode}"
        raise InfinityError(f"fio failed: {said}")
    return parse(json.loads(stdout[stdout.index("{") :]))
