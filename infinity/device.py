"""The compute device and the memory it can reach: the only file that says torch.cuda.

[Note: one team of threads]
On the CPU each thread that calls a large torch operator gets a team of OpenMP threads of its own.
With a second team there are more threads than CPUs. From then on libgomp lets every team sleep
between two operators instead of spinning. The model then waits for a wake-up at each of its
thousands of operators. So threads of the engine call no operator that uses a team. They call
`copy_alone` and `zero_alone` instead.

Threads that run the model in turns (`infinity.modules.interleave`) cannot avoid it. Each operator
that uses a team then takes some 70 us more: little beside large operators, twice the time with very
small ones. Ending a team with each turn (`omp_pause_resource_all`) does not help: the threads of
the next team took 4 to 8 ms to find a CPU on a machine with four.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import mmap
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from infinity import native
from infinity.errors import BudgetError, ConfigError
from infinity.free_memory import Growth, Memory, read_host
from infinity.observe import Meter, Ranges
from infinity.pinning import Pinning
from infinity.quantities import format_bytes

log = logging.getLogger("infinity")

HUGE_PAGE = 2 << 20
TOUCHED_BYTES = 1 << 30
"""Bytes of host memory that are touched between two readings of the free memory."""
LEAST_FREE_BYTES = 256 << 20
"""Bytes that touching leaves to other processes."""
GPU_PAGE = 64 << 10  # in which a GPU shows its memory to other devices
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values of this variable with which cuBLAS gives the same bits at every run, by its documentation
("Results reproducibility")."""
_MPOL_INTERLEAVE = 3
# Of mmap(2), on x86_64 and aarch64. Without it the kernel refuses more memory than the machine
# shows; see [Note: memory that grows] in infinity/free_memory.py.
_MAP_NORESERVE = 0x4000
# Up to this size (at::internal::GRAIN_SIZE) torch's operators run on the calling thread.
ALONE_ELEMENTS = 32768


def cudart() -> Any:
    """CUDA's runtime, to pin memory for all of its devices."""
    return torch.cuda.cudart()


def huge_pages(nbytes: int, residue: int = 0, inherited: bool = True) -> torch.Tensor:
    """A uint8 tensor of shape (nbytes,) on memory of its own, not touched yet, on huge pages if the
    kernel gives them.

    Its address is `residue` past a multiple of 2 MiB (0 <= residue < 2 MiB). The pages are freed
    with the last view of it. A forked child has them only if they are `inherited`. Raises
    `BudgetError` if the kernel refuses so many addresses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes + residue + HUGE_PAGE, flags=flags)
    except OSError as error:
        raise BudgetError(
            f"the kernel refuses {format_bytes(nbytes)} of host memory: {error.strerror}; lower "
            "cpu_memory, or raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    # Without the rest, which a huge page would round up to 2 MiB.
    pages = (residue + nbytes) // HUGE_PAGE * HUGE_PAGE
    if pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, begin, pages)
    if not inherited:
        memory.madvise(mmap.MADV_DONTFORK)
    _interleave(whole.data_ptr() + begin, pages, memory_nodes())
    return whole[begin + residue :][:nbytes]


def memory_nodes() -> list[int]:
    """The NUMA nodes whose memory this process may use, from /proc/self/status ("0-1,3"); [] if it
    does not list them."""
    try:
        found = re.search(
            r"^Mems_allowed_list:\s*([\d,-]+)$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    spans = [part.split("-") for part in found[1].split(",")] if found else []
    return [node for span in spans for node in range(int(span[0]), int(span[-1]) + 1)]


def _interleave(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Spread untouched pages over several NUMA nodes. Otherwise all lie on the node of the thread
    that touches them, and CPU Adam has the bandwidth of this node only. A refusal is ignored."""
    # Of mbind(2), which libc does not have.
    number = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
    if len(nodes) < 2 or number is None or nbytes == 0:
        return
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    mbind = ctypes.CDLL(None).syscall
    long, pointer = ctypes.c_long, ctypes.c_void_p
    mbind(
        long(number),
        pointer(address),
        long(nbytes),
        long(_MPOL_INTERLEAVE),
        mask,
        long(64 * len(mask) + 1),
        long(0),
    )


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` for contiguous tensors (n,), on this thread alone if they are on the
    host; see [Note: one team of threads]."""
    if target.device.type != "cpu":
        target.copy_(source)
        return
    if target.dtype == source.dtype:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return
    for part, values in zip(_pieces(target), _pieces(source), strict=True):
        part.copy_(values)


def zero_alone(target: torch.Tensor) -> None:
    """`target.zero_()` on this thread alone, for a contiguous host tensor (n,)."""
    target.view(torch.uint8).numpy().fill(0)


def add_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.add_(source)` for contiguous tensors (n,) of one dtype, alone like `copy_alone`; the
    same bits."""
    for part, values in zip(_pieces(target), _pieces(source), strict=True):
        part.add_(values)


def divide_alone(target: torch.Tensor, divisor: int) -> None:
    """`target.div_(divisor)` for a contiguous tensor (n,), on this thread alone if it is on the
    host; the same bits."""
    for part in _pieces(target):
        part.div_(divisor)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts for which torch's operators start no team of threads."""
    return tensor.split(ALONE_ELEMENTS) if tensor.device.type == "cpu" else (tensor,)


def read_values(tensor: torch.Tensor) -> list[Any]:
    """`tolist` of a small tensor, but this thread sleeps until the values are there. `tolist` of a
    tensor on a GPU spins until the stream reaches it, and takes a CPU from the optimizer."""
    if tensor.device.type == "cpu":
        return tensor.tolist()
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    runtime: Any = torch.get_device_module(tensor.device)
    end = runtime.Event(blocking=True)
    end.record(runtime.current_stream(tensor.device))
    end.synchronize()
    return here.tolist()


def profiler_ranges() -> Ranges | None:
    """NVTX ranges for a profiler (Nsight Systems), if the environment has INFINITY_NVTX=1."""
    if os.environ.get("INFINITY_NVTX", "0") in ("", "0"):
        return None
    try:
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("infinity"))
    except RuntimeError as error:
        raise ConfigError(
            "INFINITY_NVTX is set, but this torch has no NVTX; unset it, or install torch for CUDA"
        ) from error
    return Ranges(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)


def is_graphed(module: torch.nn.Module) -> bool:
    """Whether `torch.cuda.make_graphed_callables` has replaced the module's forward, which then
    reads parameters at their addresses of that time."""
    return getattr(vars(module).get("forward"), "__module__", "") == "torch.cuda.graphs"


def stream_of(tensor: torch.Tensor) -> int:
    """The stream of the caller's work on a tensor of a CUDA device, as the kernels take it."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Inside, the device of a CUDA tensor is the current device of the thread, as our kernels need
    it. A new thread has the first device."""
    return torch.cuda.device(tensor.device)


def touch(
    memory: torch.Tensor,
    way_out: str = "lower cpu_memory, or leave it out for a part of what is free",
) -> None:
    """Zero host memory, of shape (nbytes,), in slices of TOUCHED_BYTES.

    Raises `BudgetError` with `way_out` if the machine has no more memory and its total does not
    grow, before the kernel ends a process.
    """
    slices = memory.split(TOUCHED_BYTES)
    before = read_host() if len(slices) > 1 else None
    for number, part in enumerate(slices):
        host = None if before is None else read_host()
        if before is not None and host is not None and not _has_room(host, before, part.nbytes):
            raise BudgetError(
                f"{host.owner} has no more host memory after "
                f"{format_bytes(number * TOUCHED_BYTES)} of {format_bytes(memory.nbytes)}: "
                f"{format_bytes(host.free)} of {format_bytes(host.total)} are free; {way_out}"
            )
        part.zero_()


def _has_room(host: Memory, before: Memory, nbytes: int) -> bool:
    """Whether `nbytes` more may be touched: they are free, or the total has grown since `before`,
    or is likely to grow."""
    grows = host.growth is Growth.LIKELY or host.total > before.total
    return grows or host.free >= nbytes + LEAST_FREE_BYTES


class HostMemory:
    """`nbytes` of host memory on huge pages if the kernel gives them, touched once so that no page
    fault comes later.

    `tensor` is a uint8 tensor of shape (nbytes,) whose address is a multiple of 2 MiB. With
    `cudart`, CUDA's runtime, `pin` pins it. Then no forked child has it, because Linux would copy
    pinned pages to each child at once: all of cpu_memory for every worker of a DataLoader.
    """

    def __init__(self, nbytes: int, cudart: Any = None) -> None:
        self._cudart = cudart
        self._pinning = None if cudart is None or nbytes == 0 else Pinning(nbytes, cudart)
        # Torch fills it on all of its threads. Pinning would touch all pages on one.
        self.tensor = huge_pages(nbytes, inherited=cudart is None)
        touch(self.tensor)

    def pin(self, beside: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        """Pin it, on a thread inside of `beside()` if that takes long; see `Pinning.begin`. Called
        once, and by `restore`."""
        if self._pinning is not None:
            self._pinning.begin(self.tensor, beside)

    def await_pinned(self) -> None:
        """Block until all of it is pinned. Raises the errors of `Pinning.wait`."""
        if self._pinning is not None:
            self._pinning.wait()

    def cut(self, tensor: torch.Tensor) -> list[int] | None:
        """The sizes in bytes of the copies of `tensor`; see `Pinning.cut`."""
        return None if self._pinning is None else self._pinning.cut(tensor)

    def release(self) -> None:
        """Unpin, and give the pages back. The address stays, and the content is lost. A second call
        does nothing."""
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None
        if self.tensor.numel():
            advise = ctypes.CDLL(None, use_errno=True).madvise
            address, nbytes = self.tensor.data_ptr(), self.tensor.numel()  # it begins at a page
            if advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "the kernel takes no memory back (madvise)")

    def restore(self, beside: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        """After `release`: touch all pages, which are zeros then, and pin them as `pin` does.
        Raises the errors of `touch`."""
        touch(self.tensor, "free some, and call engine.wake() again")
        if self._cudart is not None and self.tensor.numel():
            self._pinning = Pinning(self.tensor.numel(), self._cudart)
        self.pin(beside)

    def close(self) -> None:
        """Unpin. The pages are freed with the last tensor on them."""
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None
        self.tensor = torch.empty(0, dtype=torch.uint8)


class Mark(NamedTuple):
    """A point in the work queued on a stream. Of two marks of one stream the later one has the
    higher `number`."""

    number: int
    event: Any


class Copy:
    """A queued copy or update, which ends with `event`; None: it has ended."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block until it has ended."""
        if self.event is not None:
            self.event.synchronize()  # sleeps; a spinning thread would take a CPU from Adam


def find_kernels(device: int) -> bool:
    """Whether the kernels of `native/cuda` run on this CUDA device; a warning says why not."""
    cuda: Any = native.cuda()
    reason = (
        "the package was built without nvcc" if cuda is None else cuda.unavailable_reason(device)
    )
    if reason:
        log.warning(
            "the optimizer kernels cannot run on GPU %d, so the CPU updates all states: %s",
            device,
            reason,
        )
    return not reason


class ComputeDevice:
    """The device that the model runs on. With `unified_memory`, its memory is host memory: NVMe
    reads land in it without a further copy.

    Copies run on a stream of their own for each direction, in the order of the calls. They run
    after a given `Mark` or `Copy`, and wait for nothing else, not even for work that the model
    queued since. Work that needs a copy is queued after it (`follow_copy`) while the host
    continues. Otherwise the caller blocks until the copy completes.

    One class, because it alone differs between the CPU, CUDA and the devices of tests.
    """

    def __init__(self, kind: Literal["auto", "cpu", "cuda"]) -> None:
        self._had_begun = torch.cuda.is_initialized()  # and cuBLAS, perhaps
        self.torch = self._choose(kind)
        self._runtime: Any = torch.get_device_module(self.torch)  # torch.cuda, if it is a GPU
        self.unified_memory = self.torch.type == "cpu"
        self._host: list[HostMemory] = []
        self._up, self._down, self._side, self._updates = (
            # Copies and collectives come before the model, which waits for them.
            None if self.unified_memory else self._runtime.Stream(self.torch, priority=priority)
            for priority in (-1, -1, -1, 0)
        )
        self.has_kernels = self.torch.type == "cuda" and find_kernels(self.torch.index)
        """Whether the kernels of `native/cuda` can work on its memory."""
        self._marks = itertools.count()
        self.copied = Meter()
        """Bytes that were copied to its memory (`written`) and from it (`read`)."""

    def begin_thread(self) -> None:
        """Called by each thread of the engine before any other use of the device.

        A user may capture a CUDA graph meanwhile. In CUDA's default mode no other thread may then
        wait for an event, or allocate: the call would fail, and break the capture. Never raises: if
        CUDA is broken, the next call raises. Does nothing on the CPU, or without the kernels.
        """
        cuda = native.cuda() if self.torch.type == "cuda" else None
        if cuda is not None:
            with suppress(RuntimeError), self._runtime.device(self.torch):
                cuda.ignore_captures()

    @staticmethod
    def _choose(kind: Literal["auto", "cpu", "cuda"]) -> torch.device:
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device='cuda', but torch sees no CUDA device; use device='cpu' or 'auto'"
            )
        if kind == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def nondeterminism(self) -> str:
        """The reason why matrix multiplications of this process may have other bits at every run;
        "" if they have the same bits, or will have after `compute_deterministically`."""
        workspace = os.environ.get(CUBLAS_WORKSPACE, "")
        may_set = not self._had_begun and workspace == ""
        if self.torch.type != "cuda" or workspace in DETERMINISTIC_WORKSPACES or may_set:
            return ""
        return (
            f"{CUBLAS_WORKSPACE} is {workspace or 'not set'}; set it to "
            f"{DETERMINISTIC_WORKSPACES[0]} before the program uses CUDA"
        )

    def compute_deterministically(self) -> None:
        """Make torch use deterministic algorithms from now on, in this process. Operators without
        one raise `RuntimeError`."""
        if self.torch.type == "cuda" and not os.environ.get(CUBLAS_WORKSPACE):
            os.environ[CUBLAS_WORKSPACE] = DETERMINISTIC_WORKSPACES[0]
        torch.use_deterministic_algorithms(True)
        if torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = False  # it chooses by time

    def is_capturing(self) -> bool:
        """Whether the caller's stream records a CUDA graph. Then queued work runs at every replay,
        not now."""
        return self.torch.type != "cpu" and self._runtime.is_current_stream_capturing()

    @property
    def name(self) -> str:
        """The name of the device, for people."""
        return "CPU" if self.torch.type == "cpu" else self._runtime.get_device_name(self.torch)

    def memory(self) -> Memory | None:
        """Its total and free memory; memory that torch caches counts as free. None if it computes
        in host memory."""
        if self.torch.type == "cpu":
            return None
        free, total = self._runtime.mem_get_info(self.torch)
        kept = self._runtime.memory_reserved(self.torch) - self._runtime.memory_allocated(
            self.torch
        )
        is_integrated = bool(self._runtime.get_device_properties(self.torch).is_integrated)
        return Memory(total, min(free + kept, total), "the GPU", is_integrated=is_integrated)

    def peak_bytes(self, reset: bool = False) -> int | None:
        """The most bytes of its memory that torch held since the last `reset`; None on the CPU."""
        if self.torch.type == "cpu":
            return None
        peak = int(self._runtime.max_memory_allocated(self.torch))
        if reset:
            self._runtime.reset_peak_memory_stats(self.torch)
        return peak

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor (nbytes,) of host memory; freed by `close`. If the device is not the CPU,
        it is pinned, perhaps later: copies wait for that, and `await_pinned` raises its errors."""
        memory = HostMemory(nbytes, None if self.unified_memory else self._runtime.cudart())
        self._host.append(memory)
        memory.pin(self._on_a_thread)
        return memory.tensor

    def await_pinned(self) -> None:
        """Block until all host memory is pinned. Raises `ConfigError` if CUDA refuses."""
        for memory in self._host:
            memory.await_pinned()

    @contextmanager
    def _on_a_thread(self) -> Iterator[None]:
        """The context of a new thread that works for this device."""
        self.begin_thread()
        with self._runtime.device(self.torch):
            yield

    def compute_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor (nbytes,) on the compute device; on a GPU it begins at a page, so that
        drives can write to it."""
        if self.unified_memory:
            return self.host_memory(nbytes)
        whole = torch.empty(nbytes + GPU_PAGE, dtype=torch.uint8, device=self.torch)
        return whole[-whole.data_ptr() % GPU_PAGE :][:nbytes]

    def release(self, memory: torch.Tensor) -> None:
        """Give back all host memory, and `memory`, of `compute_memory`, with what torch caches
        there. Content is lost. Every tensor keeps its place in its memory. No copy is under way. A
        second call does nothing.

        Addresses on the host stay. `memory` keeps its storage, whose address `restore` may change.
        """
        for host in self._host:
            host.release()
        if memory.device.type != "cpu":
            self._runtime.synchronize(self.torch)
            memory.untyped_storage().resize_(0)
            self._runtime.empty_cache()

    def restore(self, memory: torch.Tensor) -> None:
        """After `release`: take the memory again, with undefined content, and pin it. May be called
        again after a failure and another `release`. Raises `BudgetError` if the device or the host
        has no room, and the errors of `await_pinned`."""
        if memory.device.type != "cpu":
            try:
                memory.untyped_storage().resize_(int(memory.storage_offset()) + memory.numel())
            except torch.OutOfMemoryError as error:
                raise BudgetError(
                    f"{self.name} has no room for the {format_bytes(memory.numel())} of the "
                    "engine that wakes; free memory there, and call engine.wake() again"
                ) from error
        for host in self._host:
            host.restore(self._on_a_thread)
        self.await_pinned()

    def await_stream(self) -> None:
        """Return when all work on the caller's stream has ended. Then copies to the same memory,
        which wait only for marks, come after it."""
        if self.torch.type != "cpu":
            self._runtime.current_stream(self.torch).synchronize()

    def scratch(self, nbytes: int) -> torch.Tensor:
        """A temporary uint8 tensor (nbytes,) of its memory for the caller's stream, beside all
        budgets."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` if it is in the device's memory, else a copy there, made on the caller's
        stream."""
        return tensor.to(self.torch)

    def random_state(self) -> list[torch.Tensor]:
        """The states of torch's default generators: of the CPU, and of this device."""
        states = [torch.get_rng_state()]
        return states if self.unified_memory else [*states, self._runtime.get_rng_state(self.torch)]

    def set_random_state(self, states: list[torch.Tensor]) -> None:
        """Restore states of `random_state`."""
        torch.set_rng_state(states[0])
        if not self.unified_memory:
            self._runtime.set_rng_state(states[1], self.torch)

    def check_random_state(self, states: list[torch.Tensor]) -> None:
        """Raise `ValueError` for states that `set_random_state` could not restore."""
        kinds = [torch.device("cpu"), self.torch][: 1 if self.unified_memory else 2]
        if len(states) < len(kinds):
            raise ValueError(f"it has {len(states)} of the {len(kinds)} random states of torch")
        for kind, state in zip(kinds, states, strict=False):
            try:
                torch.Generator(kind).set_state(state)
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"a random state of torch is none: {error}") from error

    def fork_random_state(self, count: int) -> list[list[torch.Tensor]]:
        """`count` states: the current state, which does not change, and others that depend only on
        it and on their number."""
        states = [self.random_state()]
        for number in range(1, count):
            digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
            for state in states[0]:
                digest.update(state.numpy().tobytes())
            seed = int.from_bytes(digest.digest(), "little")
            torch.default_generator.manual_seed(seed)
            if not self.unified_memory:
                with self._runtime.device(self.torch):
                    self._runtime.manual_seed(seed)
            states.append(self.random_state())
        self.set_random_state(states[0])
        return states

    def follow(self) -> Callable[[], None]:
        """A function that makes another thread queue its work on the caller's current stream."""
        if self.unified_memory:
            return lambda: None
        stream = self._runtime.current_stream(self.torch)
        return lambda: self._runtime.set_stream(stream)

    def mark(self) -> Mark | None:
        """The end of the work queued on the caller's stream now; None on the CPU, which queues
        nothing."""
        if self.unified_memory:
            return None
        event = self._runtime.Event(blocking=True)  # `reach` sleeps
        return Mark(next(self._marks), self._runtime.current_stream(self.torch).record_event(event))

    def instant(self) -> Any:
        """The current time on the caller's stream, for `between`."""
        if self.torch.type == "cpu":
            return time.perf_counter()
        return self._runtime.current_stream(self.torch).record_event(
            self._runtime.Event(enable_timing=True, blocking=True)
        )

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one `instant` to a later one of the same stream; blocks until the latter is
        reached."""
        if self.torch.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def reach(self, mark: Mark | None) -> None:
        """Block until the work queued before `mark` has ended. Used before writes to the device's
        memory that bypass all streams."""
        if mark is not None:
            mark.event.synchronize()

    @contextmanager
    def side_stream(self, after: Mark | None) -> Iterator[Copy]:
        """Queue the work inside on a stream of its own, after the mark `after`. The yielded `Copy`
        ends with that work."""
        if self.unified_memory:
            yield Copy()
            return
        with self._queued_on(self._side, after) as end:
            yield Copy(end)

    @contextmanager
    def updating(self, after: Mark | None) -> Iterator[Copy]:
        """Queue updates of states in the memory of a device with kernels, after the mark `after`,
        on a stream of their own. The yielded `Copy` ends with them. Does not wait."""
        with self._queued_on(self._updates, after) as end:
            yield Copy(end)

    def upload(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | Copy | None = None
    ) -> None:
        """Copy host `source` to compute `target` (same dtype and shape), after the mark `after`;
        return when it is there."""
        self.begin_upload(target, source, after).wait()

    def begin_upload(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | Copy | None = None
    ) -> Copy:
        """Like `upload`, but return at once: `source` must stay as it is until the copy has
        ended."""
        self.copied.add(written=source.nbytes)
        return self._copy(target, source, self._up, after)

    def download(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | Copy | None = None
    ) -> None:
        """Copy compute `source` to host `target`, after the mark `after`; return when it is
        there."""
        self.begin_download(target, source, after).wait()

    def begin_download(
        self, target: torch.Tensor, source: torch.Tensor, after: Mark | Copy | None = None
    ) -> Copy:
        """Like `download`, but return at once: `source` must stay as it is until the copy has
        ended."""
        self.copied.add(read=source.nbytes)
        return self._copy(target, source, self._down, after)

    def await_copies(self) -> None:
        """Block until the copies that were begun, in both directions, have ended."""
        for stream in (self._up, self._down):
            if stream is not None:
                stream.synchronize()

    def follow_copy(self, copy: Copy) -> None:
        """Queue the caller's later work after `copy`; never waits."""
        if copy.event is not None:
            copy.event.wait(self._runtime.current_stream(self.torch))

    def join(self, copy: Copy, memory: torch.Tensor) -> None:
        """Like `follow_copy`, for a copy that reads or fills `memory` of this device.

        The caller may then use or release `memory`, which is freed in the order of its stream.
        """
        self.follow_copy(copy)
        if copy.event is not None:
            # No effect if it was allocated on this stream.
            memory.record_stream(self._runtime.current_stream(self.torch))

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Mark | Copy | None
    ) -> Copy:
        if self.unified_memory:
            copy_alone(target, source)
            return Copy()
        pairs = self._cut(target, source)
        with self._queued_on(stream, after) as end:
            for part, values in pairs:
                part.copy_(values, non_blocking=True)
            return Copy(end)

    def _cut(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The pieces of a copy of contiguous tensors (n,), when the host tensor is pinned; see
        [Note: one registration for each slice] in `infinity.pinning`."""
        host = target if target.device.type == "cpu" else source
        for memory in self._host:
            sizes = memory.cut(host)
            if sizes is not None and len(sizes) > 1:
                parts = (tensor.view(torch.uint8).split(sizes) for tensor in (target, source))
                return zip(*parts, strict=True)
            if sizes is not None:
                break
        return [(target, source)]

    @contextmanager
    def _queued_on(self, stream: Any, after: Mark | Copy | None) -> Iterator[Any]:
        """Queue the work inside on `stream`, after the mark `after`. Yields the event that is
        recorded at its end."""
        end = self._runtime.Event(blocking=True)
        with self._runtime.device(self.torch), self._runtime.stream(stream):
            if after is not None and after.event is not None:
                stream.wait_event(after.event)
            try:
                yield end
            finally:
                end.record(stream)

    def close(self) -> None:
        """Free the host memory, when no copy uses it any more."""
        self.await_copies()
        for memory in self._host:
            memory.close()
        self._host.clear()
