"""Probes of this machine: the limits of the kernel. Shared by `infinity doctor` and `infinity
bench`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infinity import native
from infinity.errors import InfinityError

_IO_URING_SETUP, _IO_URING_ENTER = 425, 426  # the same numbers on every architecture
_IO_URING_PARAMS = 120  # sizeof(struct io_uring_params)
_BLOCK = 4096


BUSY = 0.25
"""The share of its CPUs that a machine may use before a benchmark."""


def load_problem() -> str | None:
    """None if this machine has its CPUs free for a benchmark, otherwise a sentence with its
    load."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY * cpus:
        return None
    return (
        f"The load average was {load:.1f} on {cpus} CPUs before the benchmark began: other work "
        "makes steps and bounds slower."
    )


def io_uring_problem() -> str | None:
    """None if this process can create and enter an io_uring, otherwise the reason."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = int(call(_IO_URING_SETUP, 2, ctypes.create_string_buffer(_IO_URING_PARAMS)))
    if descriptor < 0:
        code = ctypes.get_errno()
        switch = " ".join(lines("/proc/sys/kernel/io_uring_disabled")) or "0"
        if code == errno.EPERM and switch != "0":
            return f"switched off by the kernel setting io_uring_disabled = {switch}"
        return _refusal("io_uring_setup", code)
    try:
        # Submits nothing and waits for nothing.
        entered = int(call(_IO_URING_ENTER, descriptor, 0, 0, 0, None, 0)) >= 0
        return None if entered else _refusal("io_uring_enter", ctypes.get_errno())
    finally:
        os.close(descriptor)


def _refusal(call: str, code: int) -> str:
    """The reason why the kernel refuses a system call."""
    if code == errno.EPERM:
        return f"{call} is refused (EPERM): a container's seccomp profile blocks it"
    if code == errno.ENOSYS:
        return f"{call} is not there (ENOSYS): the kernel lacks it, or a seccomp profile hides it"
    return f"{call}: {os.strerror(code)}"


def io_engine_problem() -> str | None:
    """None if the engine will use io_uring, otherwise the reason why it will use POSIX threads."""
    try:
        available, reason = native.aio().io_uring_available()
    except InfinityError as error:
        return io_uring_problem() or str(error)
    return None if available else str(io_uring_problem() or reason)


def direct_io_problem(directory: Path) -> str | None:
    """None if a 4096-byte O_DIRECT write to a temporary file in `directory` works, otherwise the
    reason."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".infinity-doctor-") as handle:
            try:
                # Through the descriptor, so no link of that name can lead elsewhere.
                descriptor = os.open(f"/proc/self/fd/{handle.fileno()}", os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                return f"O_DIRECT refused: {error.strerror}"
            try:
                with mmap.mmap(-1, _BLOCK) as block:
                    os.write(descriptor, block)
            except OSError as error:
                return f"O_DIRECT write failed: {error.strerror}"
            finally:
                os.close(descriptor)
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return None


def gpu_direct_problem(device: str, directories: Sequence[Path]) -> str | None:
    """None if cuFile lets the drives of `directories` write to the memory of `device`, otherwise
    the reason why parameters pass host memory."""
    if device == "cpu":
        return "there is no GPU"
    try:
        with ExitStack() as stack:
            cufile = native.cufile()
            stack.callback(cufile.close)
            for directory in filter(Path.is_dir, directories):
                handle = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=directory, prefix=".infinity-doctor-")
                )
                file = native.file_at(os.dup(handle.fileno()), handle.name)
                stack.callback(file.close)
                stack.callback(cufile.engine(file, threads=1).close)
    except (RuntimeError, OSError, InfinityError) as error:
        return str(error)
    return None


def lines(path: str | Path) -> list[str]:
    """The lines of a small text file. Empty if it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def huge_pages() -> dict[str, Any]:
    """The mode of transparent huge pages (None: the kernel has none) and the number of reserved
    pages."""
    modes = " ".join(lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = modes.partition("[")[2].partition("]")[0]
    meminfo = dict(line.split(":", 1) for line in lines("/proc/meminfo") if ":" in line)
    return {
        "transparent": chosen or None,
        "reserved": int(meminfo.get("HugePages_Total", "0").split()[0]),
    }


def memlock_limit() -> int | None:
    """Bytes of memory that this process may lock, or None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
