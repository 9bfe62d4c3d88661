"""The memory that an engine may take if its `Config` gives no bytes: readings of the machine, and
arithmetic on them. Imports no torch.

[Note: free memory]
Host memory. Data loaders, other processes and the page cache need a part: a tenth of all, at least
2 GiB and at most 16 GiB, but never more than half of the free memory.

A GPU. Before the first step the memory for the model's own computation is not known: activations,
workspaces, logits. Half of the free memory stays for it. Example: of 24 GB with 23 free, states get
11.5. A model of 7 billion parameters with checkpointed activations, 4 x 2048 tokens and 32,000
words takes 5.2 of the rest: 2.1 for the inputs of 32 blocks, 1 inside of a block, and 2.1 for two
fp32 copies of the logits.

The CPU as compute device. All of this lies in host memory. A quarter of the memory after the
reserve stays for the computation.

These guesses refuse no states. If states need it, they may take nine tenths of the free memory of a
GPU, and all host memory except the reserve.

[Note: one pool]
An integrated GPU (GB10, Jetson) has no memory of its own: CUDA reports the host's memory. Bytes of
one budget are then missing in the other. Both are chosen as for the CPU as compute device.

[Note: memory that grows]
A sandbox, or a virtual machine whose host plugs memory in, shows less than it has: MemTotal grows
while memory is touched. So `cpu_memory` in bytes may exceed MemTotal. It is refused when touching
finds no more memory (`infinity.device.HostMemory`). "auto" cannot use memory that MemTotal does not
show. Its message says that the total looks elastic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from infinity.errors import BudgetError, ConfigError
from infinity.quantities import format_bytes

LEAST_RESERVE = 2 << 30
MOST_RESERVE = 16 << 30


class Growth(Enum):
    """Whether the total of a memory grows while it is touched; see [Note: memory that grows]."""

    NONE = "none"
    POSSIBLE = "possible"
    LIKELY = "likely"


class Memory(NamedTuple):
    """Total and free bytes of one memory. `owner` is its name in messages."""

    total: int
    free: int
    owner: str
    growth: Growth = Growth.NONE
    is_integrated: bool = False
    """Whether a GPU and the host share it."""


class Available(NamedTuple):
    """The memory of this node for its `ranks` ranks.

    They share the host memory; None if it is not known. Each has the memory of its own GPU; None if
    the compute device is the CPU.
    """

    host: Memory | None
    gpu: Memory | None
    ranks: int = 1

    @property
    def is_one_pool(self) -> bool:
        """Whether the compute device computes in host memory; see [Note: one pool]."""
        if self.gpu is None:
            return True
        return self.gpu.is_integrated or (
            self.host is not None and self.gpu.total == self.host.total
        )


class Budgets(NamedTuple):
    """Bytes that a rank may take on the compute device and in host memory."""

    gpu: int
    cpu: int


class Budget(NamedTuple):
    """One budget, and the source of its number. `is_given`: the number is of the configuration."""

    nbytes: int
    source: str
    is_given: bool = False


@dataclass(frozen=True)
class Choice:
    """The budgets of one engine."""

    gpu: Budget
    cpu: Budget
    spare: int = 0
    """Bytes of the compute device that "auto" leaves free beside `gpu`, for the computation."""

    @property
    def for_activations(self) -> int:
        """The part of `spare` for saved activations; the rest is for the computation."""
        return self.spare * 3 // 4

    @property
    def budgets(self) -> Budgets:
        """The numbers."""
        return Budgets(self.gpu.nbytes, self.cpu.nbytes)

    @property
    def is_given(self) -> bool:
        """Whether the configuration says both."""
        return self.gpu.is_given and self.cpu.is_given

    def at_most(self, least: Sequence[float]) -> Choice:
        """The same where several ranks choose, of whose `budgets` these are the `least`."""
        lowered = [
            Budget(int(number), f"{own.source}; another rank has less")
            if number < own.nbytes and not own.is_given
            else own
            for own, number in zip((self.gpu, self.cpu), least, strict=False)
        ]
        return replace(self, gpu=lowered[0], cpu=lowered[1]) if lowered else self

    def describe(self) -> str:
        """One line for a log."""
        return "; ".join(
            f"{key} is {format_bytes(budget.nbytes)} ({budget.source})"
            for key, budget in (("gpu_memory", self.gpu), ("cpu_memory", self.cpu))
        )


# Readings


def read_host(root: Path = Path("/")) -> Memory | None:
    """The host memory that this process may use, from the kernel and its control groups; None if
    the kernel does not tell.

    The file systems /proc and /sys lie below `root`. Reclaimable memory counts as free.
    """
    known = _numbers(root / "proc/meminfo")
    if "MemTotal" not in known or "MemAvailable" not in known:
        return None
    total, free = known["MemTotal"] * 1024, known["MemAvailable"] * 1024
    found = Memory(total, free, "this machine", _growth(root, total))
    for limit, used in _control_groups(root):
        if limit < found.total:
            found = Memory(limit, found.free, "the control group")
        found = found._replace(free=min(found.free, max(limit - used, 0)))
    return found


def _growth(root: Path, total: int) -> Growth:
    """Whether MemTotal may grow. A sandbox shows powers of two, but a kernel keeps a part for
    itself. virtio-mem plugs memory into a virtual machine."""
    is_plugged = any((root / "sys/bus/virtio/drivers/virtio_mem").glob("virtio*"))
    if is_plugged or total.bit_count() == 1:
        return Growth.LIKELY
    flags = [line for line in _lines(root / "proc/cpuinfo") if line.startswith("flags")]
    has_no_host = bool(flags) and "hypervisor" not in flags[0].split()
    return Growth.NONE if has_no_host else Growth.POSSIBLE


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use in bytes of each control group around this process that limits
    memory."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places, kind = [mounts, mounts / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            places = [mounts / "memory"]
            kind = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        # A container sees its own group at the top, and its path from outside or with "..".
        for group in (own, *own.parents):
            for place in places if ".." not in group.parts else ():
                limit, used = (_number(place / group / name) for name in kind)
                if limit is not None and used is not None:
                    yield limit, max(used - _reclaimable(place / group), 0)


def _reclaimable(group: Path) -> int:
    """Bytes of the page cache that count as use of a control group. Version 1 has another name for
    them, with those of the groups below."""
    known = _numbers(group / "memory.stat")
    return sum(
        known.get(f"total_{name}", known.get(name, 0)) for name in ("inactive_file", "active_file")
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None  # else "max", or no such file


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    lines = (line.replace(":", " ").split() for line in _lines(path))
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


# Arithmetic


def reserve(host: Memory) -> int:
    """Bytes of host memory that no engine takes by itself; see [Note: free memory]."""
    return min(max(host.total // 10, LEAST_RESERVE), MOST_RESERVE, host.free // 2)


def choose(
    gpu: int | str, cpu: int | str, found: Available, least: Budgets, keeps: bool = False
) -> Choice:
    """The budgets of one rank, by the fields `gpu_memory` and `cpu_memory` of a `Config`.

    The states need `least`. For inference the compute device `keeps` units that it has room for.
    Raises `BudgetError` for more than the machine has, and `ConfigError` if that is needed and not
    known.
    """
    if found.is_one_pool:
        stated_gpu = _stated("gpu_memory", gpu, found.host, found.ranks)
    else:
        stated_gpu = _stated("gpu_memory", gpu, found.gpu, 1)
        if stated_gpu and found.gpu is not None:
            _check_free(stated_gpu.nbytes, found.gpu)
    stated_cpu = _stated("cpu_memory", cpu, found.host, found.ranks)
    if stated_gpu and stated_cpu:
        return Choice(stated_gpu, stated_cpu)
    if found.gpu is not None and not found.is_one_pool:
        chosen = stated_gpu or _of_gpu(found.gpu, least.gpu)
        return Choice(
            chosen,
            stated_cpu or _of_host(_known("cpu_memory", found.host), found.ranks),
            0 if stated_gpu else found.gpu.free - chosen.nbytes,
        )
    key = "cpu_memory" if stated_gpu else "gpu_memory"
    return _of_both(stated_gpu, stated_cpu, _known(key, found.host), found.ranks, least, keeps)


def most_of_device(gpu: int | str, cpu: int | str, found: Available) -> int:
    """Bytes of the compute device that states may take at most. Raises as `choose`."""
    if isinstance(gpu, int):
        return gpu
    return choose(gpu, cpu, found, Budgets(1 << 62, 0)).budgets.gpu


def _stated(key: str, value: int | str, memory: Memory | None, sharing: int) -> Budget | None:
    """The budget of the configuration; None for "auto"."""
    if value == "auto":
        return None
    if isinstance(value, str):
        memory = _known(key, memory)
        nbytes = int(memory.free * Fraction(value.rstrip("%")) / 100) // sharing
        free = format_bytes(memory.free)
        return Budget(nbytes, f"{value} of the {free} that are free{_among(sharing)}")
    if memory is not None and memory.growth is Growth.NONE and value > memory.total:
        raise BudgetError(
            f"{key}={value} ({format_bytes(value)}) is more than {memory.owner} has, "
            f"{memory.total} ({format_bytes(memory.total)}); lower it, or leave it out for a part "
            "of what is free"
        )
    return Budget(value, "given", is_given=True)


def _check_free(nbytes: int, gpu: Memory) -> None:
    """Raise `BudgetError` if torch could not allocate the bytes: a GPU has no reclaimable
    memory."""
    if nbytes > gpu.free:
        raise BudgetError(
            f"gpu_memory={nbytes} ({format_bytes(nbytes)}) is more than the {gpu.free} "
            f"({format_bytes(gpu.free)}) that are free of {gpu.owner}; lower it, or end the "
            "processes that nvidia-smi lists"
        )


def _known(key: str, memory: Memory | None) -> Memory:
    if memory is None:
        raise ConfigError(
            f"{key} is to be a part of the memory, but /proc/meminfo does not say how much there "
            f"is; give {key} in bytes"
        )
    return memory


def _of_gpu(memory: Memory, least: int) -> Budget:
    half = memory.free // 2
    nbytes = max(half, min(least, memory.free * 9 // 10))
    part = "half of" if nbytes == half else "what states need of"
    return Budget(nbytes, f"auto: {part} the {format_bytes(memory.free)} that are free")


def _of_host(host: Memory, ranks: int) -> Budget:
    return Budget((host.free - reserve(host)) // ranks, f"{_free(host)}{_among(ranks)}")


def _of_both(
    gpu: Budget | None,
    cpu: Budget | None,
    host: Memory,
    ranks: int,
    least: Budgets,
    keeps: bool,
) -> Choice:
    """Two budgets in host memory, of which one may be given.

    The states get their least bytes, and the compute device a quarter of the rest. With all states
    elsewhere it needs room for units in use and units that come. The rest is cache. If it `keeps`
    units, it gets all of the rest.
    """
    spare = (host.free - reserve(host)) // ranks
    need_gpu = gpu.nbytes if gpu else least.gpu
    need_cpu = cpu.nbytes if cpu else least.cpu
    states = max(spare - spare // 4, min(need_gpu + need_cpu, spare))
    left = max(states - need_gpu - need_cpu, 0)
    beside = 0 if gpu else spare - states
    source = (
        f"{_free(host)} and {format_bytes((spare - states) * ranks)} for the computation"
        f"{_among(ranks)}"
    )
    if gpu is None:
        part = left if cpu or keeps else left // 4
        gpu = Budget(min(need_gpu, states) + part, source)
        cpu = cpu or Budget(states - gpu.nbytes, source)
    elif cpu is None:  # the compute device may take less than given
        cpu = Budget(max(states - gpu.nbytes, min(least.cpu, spare)), source)
    return Choice(gpu, cpu, beside)


def _free(host: Memory) -> str:
    free, stays = format_bytes(host.free), format_bytes(reserve(host))
    text = f"auto: {free} of {host.owner} are free, less {stays}"
    if host.growth is Growth.LIKELY:
        text += (
            f"; its total of {format_bytes(host.total)} looks elastic, so give cpu_memory in bytes "
            "where it has more"
        )
    return text


def _among(ranks: int) -> str:
    return f", among {ranks} ranks of this node" if ranks > 1 else ""
