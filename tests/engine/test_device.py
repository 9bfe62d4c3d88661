"""Host memory: where its pages lie on machines with several memory nodes, as the kernel tells, and
how it is pinned for a GPU."""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity import device, pinning
from infinity.device import HUGE_PAGE, HostMemory, huge_pages, memory_nodes
from infinity.errors import BudgetError, ConfigError, EngineClosedError
from infinity.free_memory import Growth, Memory, read_host

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="the kernel knows no memory nodes"
)


MIB = 1 << 20


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
    """What torch gives of CUDA's runtime. It refuses to pin from call `refuses` on, and each call
    from `stops` on waits for `go`."""

    def __init__(self, refuses: int = 1000, stops: int = 1000) -> None:
        self.refuses, self.stops = refuses, stops
        self.go, self.waits = threading.Event(), threading.Event()
        self.pinned: list[tuple[int, int]] = []
        self.calls = 0
        self.threads: set[str] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.calls >= self.stops:
            self.waits.set()
            assert self.go.wait(30)
        if self.calls >= self.refuses:
            return 2
        self.pinned.append((address, nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        (self.last,) = (each for each in self.pinned if each[0] == address)
        self.pinned.remove(self.last)
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
    cudart = Cudart()
    plain, pinned = HostMemory(HUGE_PAGE + 5), HostMemory(HUGE_PAGE + 5, cudart)
    pinned.pin()
    assert cudart.pinned == [(pinned.tensor.data_ptr(), HUGE_PAGE + 5)]
    assert (inherited(plain.tensor), inherited(pinned.tensor)) == (True, False)
    pinned.close()
    pinned.close()
    assert not cudart.pinned


@pytest.mark.parametrize("least", [HUGE_PAGE, HUGE_PAGE + 1])
def test_much_memory_is_said_to_be_pinned(
    least: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is, now and then meanwhile, and when it was."""
    monkeypatch.setattr(pinning, "SLOW_TO_PIN", least)
    monkeypatch.setattr(pinning, "SLICE_BYTES", HUGE_PAGE // 4)
    monkeypatch.setattr(pinning, "SAY_SECONDS", 0)
    caplog.set_level("INFO", "infinity")
    said: list[list[str]] = []

    class Noting(Cudart):
        def cudaHostRegister(self, *values: int) -> int:
            said.append(list(caplog.messages))
            return super().cudaHostRegister(*values)

    memory = HostMemory(HUGE_PAGE, Noting())
    memory.pin()
    memory.close()
    if least > HUGE_PAGE:
        assert (said, caplog.messages) == ([[]] * 4, [])
        return
    first = "pinning 2 MiB of host memory for the GPU ..."
    assert said[0] == [first]
    assert said[3] == [first, *(f"pinned {part} of 2 MiB ..." for part in SAID)]
    assert caplog.messages[:4] == said[3]
    assert re.fullmatch(r"pinned 2 MiB in \d+\.\d s", caplog.messages[4])
    monkeypatch.setattr(pinning, "SAY_SECONDS", 3600)
    memory = HostMemory(HUGE_PAGE, Cudart())
    memory.pin()
    memory.close()
    assert caplog.messages[5:] == [first, caplog.messages[-1]]


def test_where_nothing_can_be_pinned_copies_do_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_forget_error", lambda: None)

    class Refusing(Cudart):
        def cudaHostRegister(self, *values: int) -> int:
            return pinning.NOT_SUPPORTED

    runtime = Refusing()
    memory = HostMemory(HUGE_PAGE, runtime)
    memory.pin()
    memory.await_pinned()
    assert memory.cut(memory.tensor) == [HUGE_PAGE]
    assert ["pins no host memory" in each for each in caplog.messages] == [True]
    memory.close()  # unpins nothing, for nothing is pinned


def host_says(monkeypatch: pytest.MonkeyPatch, *free: int, **more: Any) -> None:
    """The machine has `free` bytes of 5 MiB, of which each look shows one, and says `more`."""
    readings = iter(free)
    monkeypatch.setattr(
        device,
        "read_host",
        lambda: Memory(5 * MIB, next(readings), "this machine")._replace(**more),
    )
    monkeypatch.setattr(device, "TOUCHED_BYTES", MIB)
    monkeypatch.setattr(device, "LEAST_FREE_BYTES", MIB)


def test_memory_that_is_not_there_is_refused_before_the_kernel_ends_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_says(monkeypatch, 4 * MIB, 4 * MIB, 3 * MIB, 2 * MIB, MIB)
    with pytest.raises(
        BudgetError,
        match=r"^this machine has no more host memory after 3 MiB of 4 MiB: 1 MiB of 5 MiB are "
        r"free; lower cpu_memory, or leave it out for a part of what is free$",
    ):
        HostMemory(4 * MIB)
    host_says(monkeypatch, 4 * MIB, 4 * MIB, 3 * MIB, 2 * MIB)
    assert not HostMemory(3 * MIB).tensor.any()


def test_more_than_the_machine_shows_has_addresses() -> None:
    """Or it could not grow: by default the kernel refuses what is obviously too much."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this kernel promises no more than it has")
    host = read_host()
    assert host is not None
    assert huge_pages(2 * host.total).nbytes == 2 * host.total  # none is touched


def test_addresses_that_the_kernel_refuses_are_an_error_of_ours() -> None:
    with pytest.raises(
        BudgetError,
        match=r"^the kernel refuses 1048576 TiB of host memory: .*; lower cpu_memory, or ",
    ):
        huge_pages(1 << 60)


def test_memory_that_grows_is_touched_beyond_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    host_says(monkeypatch, *[MIB] * 5, growth=Growth.LIKELY)
    assert not HostMemory(4 * MIB).tensor.any()
    totals = iter([5 * MIB, 10 * MIB, 10 * MIB, 10 * MIB, 10 * MIB])
    monkeypatch.setattr(device, "read_host", lambda: Memory(next(totals), MIB, "this machine"))
    assert not HostMemory(4 * MIB).tensor.any()


SAID = ("512 KiB", "1 MiB", "1.5 MiB")


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of five slices is `4 * SLICE + 5` bytes."""
    monkeypatch.setattr(pinning, "SLICE_BYTES", SLICE)


SLICE = 4096
FIVE = 4 * SLICE + 5


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that forgot an error, which CUDA would tell their next kernel."""
    names: list[str] = []
    monkeypatch.setattr(
        pinning, "_forget_error", lambda: names.append(threading.current_thread().name)
    )
    return names


@contextmanager
def pinning_beside(cudart: Cudart, nbytes: int = FIVE) -> Iterator[HostMemory]:
    memory = HostMemory(nbytes, cudart)
    try:
        memory.pin(nullcontext)
        yield memory
    finally:
        cudart.go.set()
        memory.close()
    assert not cudart.pinned
    assert not [each for each in threading.enumerate() if each.name == "infinity-pinning"]


def test_memory_is_pinned_in_slices_on_a_thread(slices: None) -> None:
    cudart = Cudart(stops=3)
    with pinning_beside(cudart) as memory:
        begin = memory.tensor.data_ptr()
        assert cudart.waits.wait(30)
        assert memory.cut(memory.tensor[100 : 2 * SLICE]) == [SLICE - 100, SLICE], "both are pinned"
        cudart.go.set()
        memory.await_pinned()
        sizes = [SLICE, SLICE, SLICE, SLICE, 5]
        assert cudart.pinned == [(begin + SLICE * i, size) for i, size in enumerate(sizes)]
        assert memory.cut(memory.tensor) == sizes
        assert cudart.threads == {"infinity-pinning"}


def test_the_thread_is_in_what_it_is_told_to_be_in(slices: None) -> None:
    inside: list[str] = []

    @contextmanager
    def beside() -> Iterator[None]:
        inside.append(threading.current_thread().name)
        yield
        inside.append(f"{cudart.calls} calls")

    cudart = Cudart()
    memory = HostMemory(FIVE, cudart)
    memory.pin(beside)
    memory.await_pinned()
    memory.close()
    assert inside == ["infinity-pinning", "5 calls"]


def test_one_slice_takes_no_thread(slices: None) -> None:
    cudart = Cudart()
    with pinning_beside(cudart, SLICE) as memory:
        assert cudart.pinned == [(memory.tensor.data_ptr(), SLICE)]
        assert cudart.threads == {threading.current_thread().name}


@pytest.mark.parametrize(
    ("begin", "end", "sizes"),
    [
        (0, SLICE, [SLICE]),
        (1, SLICE, [SLICE - 1]),
        (SLICE - 1, SLICE + 1, [1, 1]),
        (SLICE, 2 * SLICE, [SLICE]),
        (3 * SLICE - 8, FIVE, [8, SLICE, 5]),
        (7, 7, None),
    ],
)
def test_a_copy_is_cut_where_a_slice_ends(
    begin: int, end: int, sizes: list[int] | None, slices: None
) -> None:
    with pinning_beside(Cudart()) as memory:
        assert memory.cut(memory.tensor[begin:end]) == sizes
        assert memory.cut(torch.ones(3)) is None


def test_a_copy_waits_for_its_slices(slices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third slice is not pinned before somebody waits for it."""
    cudart = Cudart(stops=3)

    class Condition(threading.Condition):
        def wait_for(self, *values: Any) -> Any:
            cudart.go.set()
            return super().wait_for(*values)

    ours = SimpleNamespace(Condition=Condition, Thread=threading.Thread)
    monkeypatch.setattr(pinning, "threading", ours)
    with pinning_beside(cudart) as memory:
        assert memory.cut(memory.tensor[SLICE : 2 * SLICE + 1]) == [SLICE, 1]
        assert len(cudart.pinned) >= 3


@pytest.mark.parametrize("beside", [None, nullcontext])
@pytest.mark.parametrize("refused", [1, 3])
def test_memory_that_cannot_be_pinned_is_refused(
    refused: int, beside: type[nullcontext[None]] | None, slices: None, forgotten: list[str]
) -> None:
    """Nothing after the slice that was refused is tried, and `close` unpins what was before it."""
    cudart = Cudart(refuses=refused)
    memory = HostMemory(FIVE, cudart)
    refusal = rf"CUDA could not pin {FIVE} bytes of host memory \(error 2\); lower cpu_memory"
    if beside is None:
        with pytest.raises(ConfigError, match=refusal):
            memory.pin()
    else:
        memory.pin(beside)
    for _ in range(2):
        with pytest.raises(ConfigError, match=refusal):
            memory.await_pinned()
        with pytest.raises(ConfigError, match=refusal):
            memory.cut(memory.tensor[3 * SLICE :])
    assert (cudart.calls, len(cudart.pinned)) == (refused, refused - 1)
    name = "MainThread" if beside is None else "infinity-pinning"
    assert forgotten == [name], "the next kernel of this thread would be blamed"
    memory.close()
    assert not cudart.pinned


def test_whatever_fails_on_the_thread_is_told(slices: None) -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise ZeroDivisionError("on purpose")
        yield

    memory = HostMemory(FIVE, Cudart())
    memory.pin(broken)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        memory.await_pinned()
    memory.close()


def test_close_ends_it_after_the_slice_that_is_under_way(
    slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is told, and the slices that were pinned are not any more."""
    cudart = Cudart(stops=3)
    memory = HostMemory(FIVE, cudart)
    memory.pin(nullcontext)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            memory.await_pinned()
        except EngineClosedError as error:
            told.append(error)
        cudart.go.set()  # the slice is under way until the one who waits is told

    assert cudart.waits.wait(30)
    waiter = threading.Thread(target=wait)
    waiter.start()
    memory.close()
    waiter.join()
    assert len(told) == 1 and (cudart.calls, cudart.pinned) == (3, [])
    assert not [each for each in threading.enumerate() if each.name == "infinity-pinning"]


def test_an_interrupt_while_it_closes_leaves_nothing_pinned(
    slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = Cudart(stops=3)
    memory = HostMemory(FIVE, cudart)
    memory.pin(nullcontext)
    assert cudart.waits.wait(30)
    (thread,) = (each for each in threading.enumerate() if each.name == "infinity-pinning")
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.close()
    cudart.go.set()
    thread.join()
    assert (cudart.calls, cudart.pinned) == (3, [])
