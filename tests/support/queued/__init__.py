"""The device "queued": one that computes beside the host, as a GPU does, played by threads.

Streams are threads, operators and copies wait in their queues, the memory faults when the host
touches it, and what is freed is overwritten as early as a real allocator may reuse it. So what
comes too early, or is let go of too early, gives a wrong number or ends the process. A copy that
crosses the end of pinned memory is refused.

`torch.queued` has what `infinity.device` uses of `torch.cuda`. The C++ side is built once for each
version of torch and of the sources.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from infinity import build, native
from infinity.device import ComputeDevice
from infinity.optim import kernels as optim_kernels
from infinity.sharding import collectives
from support import compiled, cuda_on_cpu

NAME = "queued"
_HERE = Path(__file__).parent
_SOURCES = (_HERE / "machine.h", _HERE / "backend.cpp")
_TORCH = Path(torch.__file__).parent


class _Runtime(ModuleType):
    """`torch.queued`."""

    def __init__(self, native: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self.native = native
        pin = SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: native.pin(address, nbytes),
            cudaHostUnregister=lambda address: native.unpin(address),
        )
        self.cudart = lambda: pin
        self.manual_seed = self.manual_seed_all = torch.default_generator.manual_seed

    def Stream(self, device: object, priority: int = 0) -> torch.Stream:
        return torch.Stream(NAME, priority=priority)

    def Event(self, blocking: bool = False) -> torch.Event:
        return torch.Event(NAME)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "a simulated device"

    def is_current_stream_capturing(self) -> bool:
        return False

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device: object = None) -> torch.Stream:
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        number = self.native.current_stream()
        return torch.Stream(stream_id=number, device_index=0, device_type=kind)

    def set_stream(self, stream: torch.Stream) -> None:
        self.native.set_stream(stream.stream_id)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before = self.native.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.native.set_stream(before)

    def synchronize(self, device: object = None) -> None:
        self.native.synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(is_integrated=False)

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return 8 << 30, 8 << 30

    def memory_reserved(self, device: object = None) -> int:
        return 0

    memory_allocated = max_memory_allocated = memory_reserved

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def set_pace(
        self,
        seed: int = 0,
        random: bool = False,
        compute_us: float = 0,
        copy_us: float = 0,
        copy_bytes_per_us: float = 0,
    ) -> None:
        """How long an operator and a copy take at least, in microseconds; if `random`, from nothing
        to twice of that, by `seed`."""
        self.native.set_pace(seed, random, compute_us, copy_us, copy_bytes_per_us)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing happens that is queued on the caller's stream now, nor what comes after
        it."""
        self.native.hold()
        try:
            yield
        finally:
            self.native.let_go()

    def host_waits(self) -> dict[str, int]:
        """How often each thread had to wait for the device since the last `reset_counts`."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        waits = self.native.counts()["host_waits"]
        return {names.get(number, "a thread of autograd"): count for number, count in waits.items()}


class QueuedDevice(ComputeDevice):
    """The compute device of an engine."""

    def begin_thread(self) -> None:
        self._runtime.native.ignore_captures()

    @staticmethod
    def _choose(kind: Any) -> torch.device:
        return torch.device(NAME, 0)


class QueuedKernels:
    """`infinity._cuda` for the device: the CUDA kernels run on the CPU, by the threads of its
    streams, when their turn comes."""

    def __init__(self) -> None:
        self.native, self.on_cpu = load().native, cuda_on_cpu.load()
        self.norm_blocks = self.on_cpu.cuda.norm_blocks
        self.updates, self.slow_updates = 0, 0
        """Those for which the kernels copy elements one by one: without a gradient, or at addresses
        that are no multiples of four elements."""

    def update(self, rule: str, *values: Any, **named: Any) -> None:
        parts = [*values]
        bytes_of = {"fp32": 4, "bf16": 2, "fp16": 2, "split": 2, "int8": 1, "none": 1}
        formats = {0: 1, 2: 3, 4: 5, 6: 8, 7: 8}  # of grad, param, master, first, second
        odd = [parts[at] % (4 * bytes_of[parts[dtype]]) for at, dtype in formats.items()]
        self.updates += 1
        self.slow_updates += any(odd) or parts[0] == 0
        for place in formats:
            parts[place] = self.native.shadow(parts[place])
        self.on_cpu.cuda.update(rule, *parts, **named)

    def squared_norm(self, address: int, dtype: str, n: int, **named: int) -> None:
        places = {name: self.native.shadow(named[name]) for name in ("block_sums", "total")}
        self.on_cpu.cuda.squared_norm(self.native.shadow(address), dtype, n, **named | places)


class DeviceWithKernels(QueuedDevice):
    """One that updates what is in its memory."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.has_kernels = True


@contextmanager
def kernels() -> Iterator[QueuedKernels]:
    """Inside, engines are made with kernels on the device."""
    made = QueuedKernels()
    made.on_cpu.push_to(made.native.address_of_push())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ComputeDevice", DeviceWithKernels)
        patch.setattr(native, "cuda", lambda: made)
        patch.setattr(optim_kernels, "device_of", lambda tensor: nullcontext())
        patch.setattr(optim_kernels, "stream_of", lambda tensor: load().current_stream().stream_id)
        yield made
    made.on_cpu.push_to(0)


def let_gloo_reach_it() -> SimpleNamespace:
    """Let groups of this process gather and reduce tensors of the device, as NCCL does those of a
    GPU: the host learns that all ranks have come, and what they bring then comes by itself.

    `before_gathered()` of the result is called before what was gathered is queued to come."""
    told = SimpleNamespace(before_gathered=lambda: None)
    arriving = []  # for good: what a copy reads stays
    backends, real_gather = vars(collectives)["_backends"], vars(collectives)["_gather"]

    def gather(full: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        arriving.append(torch.empty(full.shape, dtype=full.dtype))
        real_gather(arriving[-1], shard.cpu(), group=group)
        told.before_gathered()
        full.copy_(arriving[-1], non_blocking=True)

    def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        whole = full.cpu()
        dist.all_reduce(whole, group=group)
        arriving.append(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        shard.copy_(arriving[-1], non_blocking=True)

    vars(collectives).update(
        _gather=gather,
        _reduce_scatter=reduce_scatter,
        _backends=lambda group: {**backends(group), NAME: "gloo"},
    )
    return told


def move(model: nn.Module) -> nn.Module:
    """`model`, whose parameters are on the device from now on, and still the same objects.

    For torch does not let the data of a CPU's parameter be that of a device of this kind.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(NAME)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def load() -> _Runtime:
    """`torch.queued`, built and registered where it is not yet."""
    found = getattr(torch, NAME, None)
    if found is None:
        torch.utils.rename_privateuse1_backend(NAME)
        found = _Runtime(compiled.module("_queued", _SOURCES, _command)[0])
        torch._register_device_module(NAME, found)
    return found


def _command(target: Path) -> list[str]:
    return [
        *("c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *compiled.INCLUDES,
        *(str(_HERE / "backend.cpp"), "-o", str(target), f"-L{_TORCH / 'lib'}"),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
