"""Host memory: where its pages lie on machines with several memory nodes, as the kernel tells."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest
import torch

from infinity import device
from infinity.device import HUGE_PAGE, HostMemory, huge_pages, memory_nodes
from infinity.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="the kernel knows no memory nodes"
)


def policy(memory: torch.Tensor) -> str:
    """How the kernel chooses the node of a page of `memory`."""
    areas = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    below = [area for area in areas if int(area[0], 16) <= memory.data_ptr()]
    return max(below, key=lambda area: int(area[0], 16))[1]


def may_choose_nodes() -> bool:
    """Whether this process may say where its memory lies (containers often must not):
    get_mempolicy(2) is allowed alike."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    return (
        number is not None
        and ctypes.CDLL(None).syscall(
            ctypes.c_long(number), None, None, None, None, ctypes.c_long(0)
        )
        == 0
    )


@pytest.mark.skipif(not may_choose_nodes(), reason="the process may not choose memory nodes")
def test_pages_are_spread_over_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one node is told that it has two of that kind, which changes nothing but the
    policy."""
    (node,) = memory_nodes()[:1]
    monkeypatch.setattr(device, "memory_nodes", lambda: [node, node])
    for memory in (huge_pages(3 * HUGE_PAGE), HostMemory(HUGE_PAGE).tensor):
        assert policy(memory) == f"interleave:{node}"
        assert memory.zero_().sum() == 0
    assert policy(torch.ones(HUGE_PAGE)) == "default"


def test_one_node_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_nodes", lambda: [0])
    assert policy(huge_pages(HUGE_PAGE)) == "default"


def test_memory_comes_although_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_nodes", lambda: [1000, 1001])
    memory = huge_pages(HUGE_PAGE)
    assert policy(memory) == "default"
    assert memory.zero_().sum() == 0


@pytest.mark.parametrize(
    ("line", "nodes"), [("0", [0]), ("0-1", [0, 1]), ("0-1,3,8-9", [0, 1, 3, 8, 9])]
)
def test_the_nodes_that_may_be_used(
    line: str, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = (
        f"Name:\tpython\nMems_allowed:\t0003\nMems_allowed_list:\t{line}\n"
        "voluntary_ctxt_switches:\t1\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: status)
    assert memory_nodes() == nodes


def test_where_nothing_says_so_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert memory_nodes() == []


class Cudart:
    """What torch gives of CUDA's runtime; refuses to pin when told."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned.append((address, nbytes))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned = [each for each in self.pinned if each[0] != address]
        return 0


def inherited(memory: torch.Tensor) -> bool:
    """Whether a forked child would have the pages of `memory`."""
    address, flags = memory.data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0]
        if "-" in span:
            begin, end = (int(each, 16) for each in span.split("-"))
            within = begin <= address < end
        elif line.startswith("VmFlags:") and within:
            flags = line
    return "dc" not in flags.split()


def test_pinned_memory_is_not_copied_to_children() -> None:
    cudart = Cudart(0)
    plain, pinned = HostMemory(HUGE_PAGE + 5), HostMemory(HUGE_PAGE + 5, cudart)
    assert cudart.pinned == [(pinned.tensor.data_ptr(), HUGE_PAGE + 5)]
    assert (inherited(plain.tensor), inherited(pinned.tensor)) == (True, False)
    pinned.close()
    pinned.close()
    assert not cudart.pinned


@pytest.mark.parametrize("least", [HUGE_PAGE, HUGE_PAGE + 1])
def test_much_memory_is_said_to_be_pinned(
    least: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is, and when it was."""
    monkeypatch.setattr(device, "SLOW_TO_PIN", least)
    caplog.set_level("INFO", "infinity")
    said: list[list[str]] = []

    class Noting(Cudart):
        def cudaHostRegister(self, *values: int) -> int:
            said.append(list(caplog.messages))
            return super().cudaHostRegister(*values)

    HostMemory(HUGE_PAGE, Noting(0)).close()
    if least > HUGE_PAGE:
        assert (said, caplog.messages) == ([[]], [])
    else:
        assert said == [["pinning 2 MiB of host memory for the GPU ..."]]
        assert re.fullmatch(r"pinned 2 MiB in \d+\.\d s", caplog.messages[1])


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(device, "_forget_error", lambda: forgotten.append(True))
    with pytest.raises(
        ConfigError,
        match=r"CUDA could not pin 4096 bytes of host memory \(error 2\); lower cpu_memory",
    ):
        HostMemory(4096, Cudart(2))
    assert forgotten == [True], "the next kernel would be blamed"
