"""The functions of `infinity.nvme`, which share one `Io`."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Mapping

import torch

from infinity.nvme.io import Io, Item
from infinity.nvme.ticket import Ticket


class _Shared:
    """The `Io` of the module's functions: made when it is first needed, once per process, ended
    when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._io: Io | None = None

    def get(self) -> Io:
        with self._lock:
            if self._io is None:
                self._io = Io()
            return self._io

    def forget(self) -> None:
        """In a forked child, where nobody can say who held the lock."""
        self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        with self._lock:
            if self._io is not None:
                self._io.close()


_shared = _Shared()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared.forget)


def write(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
    """Write the bytes of `tensor` to `path`, from byte `offset` on; blocks."""
    _shared.get().write(tensor, path, offset)


def read(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> torch.Tensor:
    """Fill `tensor` with the bytes of `path` from byte `offset` on, and return it; blocks."""
    return _shared.get().read(tensor, path, offset)


def write_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start writing; `tensor` must not change before the ticket is done."""
    return _shared.get().write_async(tensor, path, offset)


def read_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start reading; what is in `tensor` is undefined before the ticket is done."""
    return _shared.get().read_async(tensor, path, offset)


def write_many(items: Iterable[Item]) -> None:
    """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
    _shared.get().write_many(items)


def read_many(items: Iterable[Item]) -> list[torch.Tensor]:
    """Read every (tensor, path, offset) of `items` and return the tensors; blocks. A missing offset
    is 0."""
    return _shared.get().read_many(items)


def write_many_async(items: Iterable[Item]) -> Ticket:
    """Start writing every (tensor, path, offset); the ticket is that of all of them."""
    return _shared.get().write_many_async(items)


def read_many_async(items: Iterable[Item]) -> Ticket:
    """Start reading every (tensor, path, offset); the ticket is that of all of them."""
    return _shared.get().read_many_async(items)


def drain() -> None:
    """Wait for every ticket; raises the `NvmeError` of the first that failed without having been
    waited for."""
    _shared.get().drain()


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save `tensors` by name as a safetensors file, whole or not at all (see `Io.save`); blocks."""
    _shared.get().save(tensors, path, metadata)


def load(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, all or those in `names`, on `device` (see
    `Io.load`); blocks."""
    return _shared.get().load(path, names, device)
