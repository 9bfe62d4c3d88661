"""Budgets that a `Config` leaves open follow from what is free, less a reserve that is stated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.errors import BudgetError, ConfigError
from infinity.free_memory import (
    LEAST_RESERVE,
    MOST_RESERVE,
    Available,
    Budgets,
    Growth,
    Memory,
    choose,
    read_host,
    reserve,
)

GIB = 1 << 30
NOTHING = Budgets(0, 0)


def host(total: float, free: float) -> Memory:
    return Memory(int(total * GIB), int(free * GIB), "this machine")


def gpu(total: float, free: float) -> Memory:
    return Memory(int(total * GIB), int(free * GIB), "the GPU")


# Readings


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine of 64 GiB of which 40 are available, in the control groups `groups`."""
    meminfo = (
        "MemTotal:       67108864 kB\nMemFree:         1048576 kB\n"
        "MemAvailable:   41943040 kB\nHugePages_Total:       0\n"
    )
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(directory: str, limit: object, used: object, stat: str = "") -> dict[str, str]:
    """The files of a control group of version 2."""
    where = f"sys/fs/cgroup/{directory}".rstrip("/")
    return {
        f"{where}/memory.max": f"{limit}\n",
        f"{where}/memory.current": f"{used}\n",
        f"{where}/memory.stat": stat,
    }


def old_group(directory: str, limit: object, used: object, stat: str = "") -> dict[str, str]:
    """Those of version 1."""
    where = f"sys/fs/cgroup/memory/{directory}".rstrip("/")
    return {
        f"{where}/memory.limit_in_bytes": f"{limit}\n",
        f"{where}/memory.usage_in_bytes": f"{used}\n",
        f"{where}/memory.stat": stat,
    }


OLD_LINE = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/\n"
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "files", "total", "free"),
    [
        ("", {}, 64, 40),
        ("0::/\n", group("", "max", 30 * GIB), 64, 40),
        ("0::/job\n", group("job", 16 * GIB, 6 * GIB), 16, 10),
        # What files hold can be reclaimed.
        (
            "0::/job\n",
            group(
                "job",
                16 * GIB,
                14 * GIB,
                f"anon {6 * GIB}\nfile {8 * GIB}\ninactive_file {5 * GIB}\nactive_file {3 * GIB}\n",
            ),
            16,
            10,
        ),
        # The tightest of the groups around counts, and what is free of each.
        (
            "0::/user/job\n",
            group("user/job", "max", GIB) | group("user", 32 * GIB, 31 * GIB),
            32,
            1,
        ),
        (
            "0::/user/job\n",
            group("user/job", 8 * GIB, GIB) | group("user", 32 * GIB, 30 * GIB),
            8,
            2,
        ),
        # Over its limit for a moment.
        ("0::/job\n", group("job", GIB, 2 * GIB), 1, 0),
        # A container: its own group is at the top, its path is that of the outside.
        ("0::/docker/abc\n", group("", 4 * GIB, GIB), 4, 3),
        ("0::/../../other\n", group("", 4 * GIB, GIB), 4, 3),
        (OLD_LINE, old_group("docker/abc", 16 * GIB, 6 * GIB), 16, 10),
        (OLD_LINE, old_group("", 4 * GIB, GIB), 4, 3),
        (OLD_LINE, old_group("docker/abc", UNLIMITED, 6 * GIB), 64, 40),
        (
            OLD_LINE,
            old_group(
                "docker/abc",
                16 * GIB,
                6 * GIB,
                f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n",
            ),
            16,
            13,
        ),
        # Both versions at once: version 2 has no memory files there.
        (OLD_LINE + "0::/\n", old_group("docker/abc", 16 * GIB, 6 * GIB), 16, 10),
    ],
)
def test_control_groups_limit_what_is_free(
    tmp_path: Path, groups: str, files: dict[str, str], total: int, free: int
) -> None:
    found = read_host(tree(tmp_path, groups, files))
    assert found is not None
    assert (found.total, found.free) == (total * GIB, free * GIB)
    assert found.owner == ("this machine" if total == 64 else "the control group")


@pytest.mark.parametrize(
    ("kilobytes", "files", "growth"),
    [
        (64 << 20, {}, Growth.LIKELY),  # to the byte: no kernel has taken its part
        ((64 << 20) - 1, {}, Growth.POSSIBLE),
        ((64 << 20) - 1, {"proc/cpuinfo": "flags\t\t: fpu hypervisor sse\n"}, Growth.POSSIBLE),
        ((64 << 20) - 1, {"proc/cpuinfo": "flags\t\t: fpu sse\n"}, Growth.NONE),
        ((64 << 20) - 1, {"sys/bus/virtio/drivers/virtio_mem/virtio3/x": ""}, Growth.LIKELY),
        ((64 << 20) - 1, {"sys/bus/virtio/drivers/virtio_mem/bind": ""}, Growth.POSSIBLE),
        (64 << 20, group("", GIB, 0), Growth.NONE),
    ],
)
def test_a_total_that_may_grow_is_told(
    tmp_path: Path, kilobytes: int, files: dict[str, str], growth: Growth
) -> None:
    meminfo = f"MemTotal: {kilobytes} kB\nMemAvailable: 4096 kB\n"
    found = read_host(tree(tmp_path, "0::/\n", {"proc/meminfo": meminfo, **files}))
    assert found is not None and found.growth is growth


@pytest.mark.parametrize("growth", [Growth.POSSIBLE, Growth.LIKELY])
def test_what_is_given_is_believed_where_the_total_may_grow(growth: Growth) -> None:
    """Touching finds out; "auto" takes what is seen, and says where that looks like less."""
    machine = host(4, 3)._replace(growth=growth)
    found = Available(machine, gpu(79, 78))
    assert choose(50 * GIB, 96 * GIB, found, NOTHING).budgets == (50 * GIB, 96 * GIB)
    choice = choose("auto", "auto", found, NOTHING)
    assert choice.budgets.cpu == 3 * GIB // 2
    hint = "; its total of 4 GiB looks elastic, so give cpu_memory in bytes where it has more"
    assert choice.cpu.source.endswith(hint) is (growth is Growth.LIKELY)


def test_a_machine_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert read_host(tmp_path) is None
    assert choose(1, 2, Available(None, None), NOTHING).budgets == (1, 2)
    for given_value in ("auto", "80%"):
        with pytest.raises(
            ConfigError, match=r"^cpu_memory is to be .*; give cpu_memory in bytes$"
        ):
            choose(GIB, given_value, Available(None, None), NOTHING)
    with pytest.raises(ConfigError, match=r"^gpu_memory is to be a part"):
        choose("auto", GIB, Available(None, None), NOTHING)


def test_this_machine_says() -> None:
    found = read_host()
    assert found is not None
    assert 0 < found.free <= found.total


# Arithmetic

BYTES = st.integers(0, 1 << 43)
MEMORIES = st.tuples(BYTES, BYTES).map(lambda pair: Memory(max(pair), min(pair), "this machine"))
LEAST = st.builds(Budgets, BYTES, BYTES)
RANKS = st.integers(1, 16)


@given(MEMORIES)
def test_the_reserve_is_a_tenth_within_bounds(memory: Memory) -> None:
    stays = reserve(memory)
    assert stays <= MOST_RESERVE and stays <= memory.free // 2
    assert stays == memory.free // 2 or stays >= max(
        LEAST_RESERVE, min(memory.total // 10, MOST_RESERVE)
    )


@given(MEMORIES, MEMORIES, RANKS, LEAST)
def test_with_a_gpu(memory: Memory, device: Memory, ranks: int, least: Budgets) -> None:
    assume(memory.total != device.total)  # else they are one
    found = choose("auto", "auto", Available(memory, device, ranks), least).budgets
    assert found.cpu * ranks <= memory.free - reserve(memory) < (found.cpu + 1) * ranks
    assert device.free // 2 <= found.gpu <= max(device.free // 2, device.free * 9 // 10)
    if least.gpu <= device.free * 9 // 10:
        assert found.gpu == max(least.gpu, device.free // 2), "what works is not refused"


@given(MEMORIES, RANKS, LEAST)
def test_without_a_gpu_both_lie_in_host_memory(memory: Memory, ranks: int, least: Budgets) -> None:
    found = choose("auto", "auto", Available(memory, None, ranks), least).budgets
    spare = (memory.free - reserve(memory)) // ranks
    assert spare * 3 // 4 <= sum(found) <= spare
    if sum(least) <= spare:
        assert found.gpu >= least.gpu and found.cpu >= least.cpu, "what works is not refused"
    if sum(least) <= spare * 3 // 4:
        assert sum(found) == spare - spare // 4, "a quarter is for the computation"


@given(MEMORIES, RANKS, LEAST, st.booleans())
def test_an_integrated_gpu_shares_the_host_memory(
    memory: Memory, ranks: int, least: Budgets, is_told: bool
) -> None:
    """Whether the driver says that it is one, or shows the same bytes as its own."""
    total = memory.total + is_told
    device = Memory(total, memory.free, "the GPU", is_integrated=is_told)
    for gpu, cpu in (("auto", "auto"), ("30%", "auto"), ("auto", "30%")):
        alone = choose(gpu, cpu, Available(memory, None, ranks), least)
        assert choose(gpu, cpu, Available(memory, device, ranks), least) == alone
    budgets = choose("auto", "auto", Available(memory, device, ranks), least).budgets
    assert sum(budgets) * ranks <= memory.free


@given(MEMORIES, RANKS, LEAST, BYTES)
def test_without_a_gpu_one_may_be_given(
    memory: Memory, ranks: int, least: Budgets, nbytes: int
) -> None:
    nbytes = min(nbytes, memory.total)
    spare = (memory.free - reserve(memory)) // ranks
    for found, own, need in (
        (choose(nbytes, "auto", Available(memory, None, ranks), least).budgets, 0, least.cpu),
        (choose("auto", nbytes, Available(memory, None, ranks), least).budgets, 1, least.gpu),
    ):
        other = found[1 - own]
        assert found[own] == nbytes
        assert 0 <= other <= spare
        assert other >= min(need, spare * 3 // 4)
        assert sum(found) <= max(spare, nbytes + need)


@given(MEMORIES, RANKS, LEAST)
def test_a_cpu_that_keeps_parameters_gets_what_is_left(
    memory: Memory, ranks: int, least: Budgets
) -> None:
    """All that both get otherwise, less what states need in host memory."""
    available = Available(memory, None, ranks)
    shared = choose("auto", "auto", available, least).budgets
    keeping = choose("auto", "auto", available, least, keeps=True).budgets
    assert sum(keeping) == sum(shared)
    if sum(least) <= sum(shared):
        assert keeping.cpu == least.cpu


def test_worked_numbers() -> None:
    workstation = Available(host(64, 50), gpu(24, 22))
    choice = choose("auto", "auto", workstation, NOTHING)
    assert choice.budgets == (11 * GIB, 50 * GIB - 64 * GIB // 10)
    assert choice.describe() == (
        "gpu_memory is 11 GiB (auto: half of the 22 GiB that are free); cpu_memory is 43.6 GiB "
        "(auto: 50 GiB of this machine are free, less 6.4 GiB)"
    )
    # Parameters that are at home on the GPU take what they need.
    choice = choose("auto", "auto", workstation, Budgets(14 * GIB, GIB))
    assert choice.gpu == (14 * GIB, "auto: what states need of the 22 GiB that are free", False)
    # Eight ranks of a large node.
    node = Available(host(2048, 1816), gpu(80, 78), ranks=8)
    assert choose("auto", "auto", node, NOTHING).budgets == (39 * GIB, 225 * GIB)
    # No GPU: of 14 GiB beside the reserve, a quarter is for activations.
    laptop = Available(host(20, 16), None)
    choice = choose("auto", "auto", laptop, Budgets(GIB // 2, 2 * GIB))
    assert choice.budgets == (GIB // 2 + 2 * GIB, 8 * GIB)
    assert choice.cpu.source == (
        "auto: 16 GiB of this machine are free, less 2 GiB and 3.5 GiB for the computation"
    )


def test_what_auto_leaves_is_for_the_computation() -> None:
    """And three quarters of that for saved activations; nothing where `gpu_memory` is said."""
    host, device = Memory(64 * GIB, 50 * GIB, "this machine"), Memory(24 * GIB, 22 * GIB, "the GPU")
    found = choose("auto", "auto", Available(host, device), NOTHING)
    assert (found.spare, found.for_activations) == (11 * GIB, 33 * GIB // 4)
    assert found.at_most([GIB, GIB]).spare == found.spare
    assert choose(GIB, "auto", Available(host, device), NOTHING).spare == 0
    alone = choose("auto", "auto", Available(host, None), NOTHING)
    free = host.free - reserve(host)
    assert alone.spare == free - sum(alone.budgets) == free // 4
    assert choose(GIB, "auto", Available(host, None), NOTHING).spare == 0


def test_a_part_is_one_of_what_is_free() -> None:
    found = Available(host(64, 8), gpu(24, 20), ranks=2)
    choice = choose("80%", "12.5%", found, NOTHING)
    assert choice.budgets == (16 * GIB, GIB // 2)
    assert choice.cpu.source == "12.5% of the 8 GiB that are free, among 2 ranks of this node"
    assert choose("50%", GIB, Available(host(64, 8), None, 2), NOTHING).budgets == (2 * GIB, GIB)
    assert choose("100%", "0%", found, NOTHING).budgets == (20 * GIB, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_given_stays_to_the_byte(ranks: int) -> None:
    choice = choose(12345, 54321, Available(host(1, 0), gpu(2, 1), ranks), Budgets(GIB, GIB))
    assert choice.budgets == (12345, 54321)
    assert choice.is_given and choice.gpu.source == choice.cpu.source == "given"


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    machine = Available(host(16, 8), gpu(24, 20))
    with pytest.raises(
        BudgetError,
        match=re.escape(
            "gpu_memory=26843545600 (25 GiB) is more than the GPU has, 25769803776 (24 GiB); lower "
            "it, or leave it out for a part of what is free"
        ),
    ):
        choose(25 * GIB, GIB, machine, NOTHING)
    with pytest.raises(BudgetError, match=r"^cpu_memory=.* \(17 GiB\) is more than this machine"):
        choose(GIB, 17 * GIB, machine, NOTHING)
    with pytest.raises(BudgetError, match=r"^gpu_memory=.* \(17 GiB\) is more than this machine"):
        choose(17 * GIB, GIB, Available(host(16, 8), None), NOTHING)
    with pytest.raises(
        BudgetError,
        match=re.escape(
            "gpu_memory=22548578304 (21 GiB) is more than the 21474836480 (20 GiB) that are free "
            "of the GPU; lower it, or end the processes that nvidia-smi lists"
        ),
    ):
        choose(21 * GIB, GIB, machine, NOTHING)
    assert choose(20 * GIB, 16 * GIB, machine, NOTHING).is_given, "the page cache can be reclaimed"


def test_ranks_take_the_least_of_what_is_open() -> None:
    choice = choose("auto", GIB, Available(host(16, 8), gpu(24, 20)), NOTHING)
    assert choice.at_most([10 * GIB, 2 * GIB]) == choice
    lowered = choice.at_most([4 * GIB, 1])
    assert lowered.budgets == (4 * GIB, GIB)
    assert lowered.gpu.source.endswith("that are free; another rank has less")
    assert choice.at_most([]) == choice, "another rank says nothing"
