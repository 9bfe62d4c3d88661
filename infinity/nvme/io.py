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
    """An I/O engine of your own, with the methods that the module has as functions (see the note
    there).

    `engine` is "io_uring", "posix" or "auto". `depth` device requests of `request_bytes` bytes (a
    multiple of 4096) are in flight at a time, and the POSIX engine has `threads` workers; what is
    None is as the native engine measured it to be best. Owns native threads, and 16 MiB of staging
    memory (32 MiB with CUDA) once something needed it. Ends with `close`, with the end of a `with`
    block, or when it is dropped; each waits for what is in flight. Raises `ValueError` for options
    that cannot be, `RuntimeError` where io_uring was asked for and cannot be had.
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
        """The native engine: `kind`, `counters()`, `set_faults(...)`. Raises `ValueError` when it
        is closed."""
        return self._submitter.engine

    def write(self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
        """Write the bytes of `tensor` to `path`, from byte `offset` on; blocks."""
        self.write_async(tensor, path, offset).wait()

    def read(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> torch.Tensor:
        """Fill `tensor` with the bytes of `path` from byte `offset` on, and return it; blocks."""
        self.read_async(tensor, path, offset).wait()
        return tensor

    def write_async(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> Ticket:
        """Start writing; `tensor` must not change before the ticket is done."""
        return self._start("write", [(tensor, path, offset)])

    def read_async(
        self, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
    ) -> Ticket:
        """Start reading; what is in `tensor` is undefined before the ticket is done."""
        return self._start("read", [(tensor, path, offset)])

    def write_many(self, items: Iterable[Item]) -> None:
        """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
        self.write_many_async(items).wait()

    def read_many(self, items: Iterable[Item]) -> list[torch.Tensor]:
        """Read every (tensor, path, offset) of `items` and return the tensors; blocks. A missing
        offset is 0."""
        items = list(items)
        self.read_many_async(items).wait()
        return [item[0] for item in items]

    def write_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start writing every (tensor, path, offset); the ticket is that of all of them."""
        return self._start("write", items)

    def read_many_async(self, items: Iterable[Item]) -> Ticket:
        """Start reading every (tensor, path, offset); the ticket is that of all of them."""
        return self._start("read", items)

    def pin(self, tensor: torch.Tensor) -> bool:
        """Pin the memory of `tensor`, on the CPU, until `close`: I/O in it, and in views of it,
        then takes less CPU time.

        The `Io` keeps the tensor as long. False where the kernel refuses (RLIMIT_MEMLOCK, before
        Linux 5.19): all works as before. A process that forks copies what it has pinned. Raises
        `ValueError` when some of it is pinned already.
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
        """Save `tensors` by name as a safetensors file, which other tools read too; `metadata` are
        strings by name. Blocks.

        The file is there whole or not at all: it is written beside `path`, flushed to the drive,
        and renamed; an error or a kill leaves what was there before. Tensors may be on any device
        and must be contiguous; those that share memory are saved each for itself. Raises
        `TypeError` or `ValueError` for what the format cannot hold.
        """
        tensor_file.save(self._submitter, tensors, path, metadata)

    def load(
        self,
        path: str | os.PathLike[str],
        names: Iterable[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file by name, all or those in `names`, on `device` ("cpu" or
        a CUDA device). Blocks.

        On the CPU they are views of one piece of memory. The data lands there without a copy, and
        the memory is freed with the last view: clone what is to outlive the others. Raises
        `WeightsError` for a file that is cut off or damaged, or has no tensor of such a name,
        before tensors are made; `NvmeError` when reading fails.
        """
        return tensor_file.load(self._submitter, path, names, device)

    def drain(self) -> None:
        """Wait for every ticket; raises the `NvmeError` of the first that failed without having
        been waited for."""
        self._submitter.drain()

    def close(self) -> None:
        """Wait for every ticket and end the threads; then raises as `drain` does. May be called
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
                files.get(request.path)  # also for a tensor of no bytes
                if request.tensor.is_cpu:
                    submitter.move(ticket, operation, files, request)
                else:
                    pieces = [(request.offset, bytes_of(request.tensor))]
                    whole = request.offset, request.nbytes
                    with suppress(NvmeError):  # the ticket says so
                        submitter.stage(
                            operation, files, request.path, pieces, ticket=ticket, whole=whole
                        )
                if operation == "read" and not request.tensor.is_inference():
                    torch.autograd.graph.increment_version(request.tensor)
        return ticket


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the CPU on huge pages, touched, where a block begins: I/O reaches it without a
    copy and with least work.

    For tensors that are read or written again and again. Memory comes in pages of 2 MiB: make one
    tensor and use views of it where many small ones are needed; `Io.pin` it for the least CPU time.
    The content is undefined. An ordinary tensor works too: its bytes pass a buffer.
    """
    dtype = dtype or torch.get_default_dtype()
    return huge_pages(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)
