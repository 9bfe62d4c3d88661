"""`Io`: an I/O engine with the functions of `infinity.nvme` as methods."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from infinity import native
from infinity.device import huge_pages
from infinity.errors import NvmeError
from infinity.nvme import tensor_file
from infinity.nvme.open_files import Files
from infinity.nvme.requests import check, memory_of
from infinity.nvme.submit import Submitter, bytes_of
from infinity.nvme.ticket import Ticket

Item = Sequence[Any]
"""(tensor, path) or (tensor, path, offset)."""


class Io:
    """An I/O engine of your own, with the functions of the module as methods; see
    [Note: what every call promises] in `infinity/nvme/__init__.py`.

    `engine` is "io_uring", "posix" or "auto". At most `depth` device requests of `request_bytes`
    bytes (a multiple of 4096) are in flight at a time. The POSIX engine has `threads` workers. None
    takes the measured default of `native/aio/aio.h`. Owns native threads and, from their first use,
    16 MiB of staging memory (32 MiB with CUDA). `close`, the end of a `with` block, and garbage
    collection end it; each waits for the I/O in flight. Raises `ValueError` for impossible options,
    and `RuntimeError` if `engine` is "io_uring" and the machine does not allow it.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        depth: int | None = None,
        threads: int | None = None,
        request_bytes: int | None = None,
    ) -> None:
        options = {"depth": depth, "threads": threads, "request_bytes": request_bytes}
        given = {name: value for name, value in options.items() if value is not None}
        self._submitter = Submitter(native.make_engine(engine, **given))

    @property
    def engine(self) -> Any:
        """The native engine: `kind`, `counters()`, `set_faults(...)`. Raises `ValueError` after
        `close`, and in a forked child."""
        return self._submitter.engine

    def write(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
        """Write the bytes of `tensor` to `path` from byte `offset`; blocks."""
        self.write_async(tensor, path, offset).wait()

    def read(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> torch.Tensor:
        """Fill `tensor` with the bytes of `path` from byte `offset` and return it; blocks."""
        self.read_async(tensor, path, offset).wait()
        return tensor

    def write_async(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> Ticket:
        """Start writing `tensor`, which must not change before the ticket is done."""
        return self._start("write", [(tensor, path, offset)])

    def read_async(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> Ticket:
        """Start reading `tensor`. Its content is undefined before the ticket is done."""
        return self._start("read", [(tensor, path, offset)])

    def write_many(self, items: Iterable[Item]) -> None:
        """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
        self.write_many_async(items).wait()

    def read_many(self, items: Iterable[Item]) -> list[torch.Tensor]:
        """Fill the tensor of every (tensor, path, offset) of `items` and return the tensors;
        blocks. A missing offset is 0."""
        items = list(items)
        self.read_many_async(items).wait()
        return [item[0] for item in items]

    def write_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start writing every (tensor, path, offset) of `items`. One ticket is for all of them."""
        return self._start("write", items)

    def read_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start reading every (tensor, path, offset) of `items`. One ticket is for all of them."""
        return self._start("read", items)

    def pin(self, tensor: torch.Tensor) -> bool:
        """Pin the memory of a CPU tensor until `close`, so that I/O in it and in its views takes
        less CPU time.

        The `Io` keeps the tensor until then. Returns False if the kernel refuses (RLIMIT_MEMLOCK,
        or a Linux before 5.19); I/O then works as before. A fork copies pinned memory. Raises
        `ValueError` for a tensor on another device, and for memory that is pinned already.
        """
        address, nbytes = memory_of("write", tensor, "pin")
        if not tensor.is_cpu:
            raise ValueError("pin: only memory of the host can be pinned")
        return self._submitter.pin(tensor, address, nbytes)

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Save `tensors` by name as a safetensors file, with `metadata` (strings by name). Blocks.

        The new file is written beside `path`, flushed to the drive, and renamed. After an error or
        a kill, `path` is as it was before. Tensors must be contiguous, on "cpu" or "cuda". Tensors
        that share memory are each saved in full. Raises `TypeError` or `ValueError` for a tensor,
        name, dtype or metadata that the format cannot hold, `FileError` if the system refuses the
        file, and `NvmeError` if writing fails.
        """
        tensor_file.save(self._submitter, tensors, path, metadata)

    def load(
        self,
        path: str | os.PathLike[str],
        names: Iterable[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file by name, on `device` ("cpu" or a CUDA device).
        Blocks.

        `names` selects tensors; None loads all. On the CPU the drive writes into the tensors
        without a copy. Tensors that are neighbors in the file share one allocation, which the last
        of them frees: clone a tensor that is to outlive its neighbors. Before it makes tensors,
        raises `WeightsError` if the file is cut off or damaged, or lacks one of `names`, and
        `ValueError` for another device. Raises `FileError` if the file cannot be opened, and
        `NvmeError` if reading fails.
        """
        return tensor_file.load(self._submitter, path, names, device)

    def drain(self) -> None:
        """Wait for every ticket. Raises the first `NvmeError` that no call of `Ticket.wait`
        raised."""
        self._submitter.drain()

    def close(self) -> None:
        """Wait for every ticket and end the threads. Then raises as `drain` does. May be called
        twice."""
        self._submitter.close()

    def __enter__(self) -> Io:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, operation: str, items: Iterable[Item]) -> Ticket:
        requests = [check(operation, *item) for item in items]
        submitter = self._submitter
        with Files(requests if operation == "write" else ()) as files, submitter.ticket() as ticket:
            for request in requests:
                files.get(request.path)  # opens or makes the file even if there are no bytes
                if request.tensor.is_cpu:
                    submitter.move(ticket, operation, files, request)
                else:
                    pieces = [(request.offset, bytes_of(request.tensor))]
                    whole = request.offset, request.nbytes
                    with suppress(NvmeError):  # the ticket raises it too
                        submitter.stage(
                            operation, files, request.path, pieces, ticket=ticket, whole=whole
                        )
                if operation == "read" and not request.tensor.is_inference():
                    torch.autograd.graph.increment_version(request.tensor)
        return ticket


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a CPU tensor of `shape` on huge pages, for repeated reads and writes: I/O reaches it
    without a copy and with the least work.

    The content is undefined. `dtype` None is torch's default dtype. The address is a multiple of
    2 MiB, and memory comes in pages of 2 MiB: for many small tensors, make one and use views of it.
    `Io.pin` it for the least CPU time. An ordinary tensor works too, but its bytes may pass a
    buffer. Raises `BudgetError` if the kernel refuses the memory.
    """
    dtype = dtype or torch.get_default_dtype()
    return huge_pages(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)
