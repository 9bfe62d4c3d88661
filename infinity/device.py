"""The compute device and the memory it can reach: the only file that says torch.cuda."""

from __future__ import annotations

import mmap
from typing import Any, Literal

import torch

from infinity.errors import ConfigError

HUGE_PAGE = 2 << 20


def _cudart() -> Any:
    return torch.cuda.cudart()


def huge_pages(nbytes: int, residue: int = 0) -> torch.Tensor:
    """A uint8 tensor of shape (nbytes,) on memory of its own, on huge pages where the kernel gives them, not touched yet.

    Its address is `residue` past a multiple of 2 MiB (0 <= residue < 2 MiB). The pages go back with the last view of it.
    """
    memory = mmap.mmap(-1, nbytes + residue + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    pages = (residue + nbytes) // HUGE_PAGE * HUGE_PAGE  # not the rest, which a huge page would round up to 2 MiB
    if pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, begin, pages)
    return whole[begin + residue :][:nbytes]


class HostMemory:
    """`nbytes` of host memory on huge pages where the kernel gives them, touched once so that no page fault comes later.

    `tensor` is a uint8 tensor of shape (nbytes,) whose address is a multiple of 2 MiB. `pin=True` registers it with CUDA.
    """

    def __init__(self, nbytes: int, pin: bool = False) -> None:
        self.tensor = huge_pages(nbytes).zero_()
        self._pinned = pin and nbytes > 0
        if self._pinned:
            code = _cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
            if int(code) != 0:
                raise ConfigError(f"CUDA could not pin {nbytes} bytes of host memory (error {int(code)}); lower cpu_memory")

    def close(self) -> None:
        """Unpin; the pages go back to the system when the last tensor on them is gone."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)


class ComputeDevice:
    """Where the model runs. With `shares_host`, its memory is host memory: NVMe reads land in it without a further copy."""

    def __init__(self, kind: Literal["auto", "cpu", "cuda"]) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device='cuda', but torch sees no CUDA device; use device='cpu' or 'auto'")
        use_cuda = kind != "cpu" and torch.cuda.is_available()
        self.torch = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
        self.shares_host = not use_cuda
        self._host: list[HostMemory] = []
        self._streams: list[Any] = [torch.cuda.Stream(self.torch) for _ in range(2)] if use_cuda else []

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of host memory, pinned when the device is not the CPU; freed by `close`."""
        memory = HostMemory(nbytes, pin=not self.shares_host)
        self._host.append(memory)
        return memory.tensor

    def compute_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of `nbytes` on the compute device."""
        if self.shares_host:
            return self.host_memory(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host `source` to compute `target` (same dtype and shape) and return when it is there."""
        self._copy(target, source, 0)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy compute `source` to host `target` after the work queued on the caller's stream; return when it is there."""
        self._copy(target, source, 1)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        if self.shares_host:
            target.copy_(source)
            return
        copies = self._streams[stream]
        copies.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        copies.synchronize()

    def close(self) -> None:
        """Give back the host memory."""
        for memory in self._host:
            memory.close()
        self._host.clear()
