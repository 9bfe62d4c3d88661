"""The functions of `infinity.nvme`, which share one `Io`. Their errors stand in
[Note: what every call promises] of `infinity/nvme/__init__.py`."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Mapping

import torch

from infinity.nvme.io import Io, Item
from infinity.nvme.ticket import Ticket


class _Shared:
    """The `Io` of the module's functions: one per process. The first call makes it, and the exit of
    the process closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._io: Io | None = None

    def get(self) -> Io:
        with self._lock:
            if self._io is None:
                self._io = Io()
            return self._io

    def forget(self) -> None:
        """Start over in a forked child, because a thread of the parent may have held the lock."""
        self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        with self._lock:
            if self._io is not None:
                self._io.close()


_shared = _Shared()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared.forget)


def write(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
    """Write the bytes of `tensor` to `path` from byte `offset`; blocks."""
    _shared.get().write(tensor, path, offset)


def read(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> torch.Tensor:
    """Fill `tensor` with the bytes of `path` from byte `offset` and return it; blocks."""
    return _shared.get().read(tensor, path, offset)


def write_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start writing `tensor`, which must not change before the ticket is done."""
    return _shared.get().write_async(tensor, path, offset)


def read_async(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Ticket:
    """Start reading `tensor`. Its content is undefined before the ticket is done."""
    return _shared.get().read_async(tensor, path, offset)


def write_many(items: Iterable[Item]) -> None:
    """Write every (tensor, path, offset) of `items`; blocks. A missing offset is 0."""
    _shared.get().write_many(items)


def read_many(items: Iterable[Item]) -> list[torch.Tensor]:
    """Fill the tensor of every (tensor, path, offset) of `items` and return the tensors; blocks. A
    missing offset is 0."""
    return _shared.get().read_many(items)


def write_many_async(items: Iterable[Item]) -> Ticket:
    """Start writing every (tensor, path, offset) of `items`. One ticket is for all of them."""
    return _shared.get().write_many_async(items)


def read_many_async(items: Iterable[Item]) -> Ticket:
    """Start reading every (tensor, path, offset) of `items`. One ticket is for all of them."""
    return _shared.get().read_many_async(items)


def drain() -> None:
    """Wait for every ticket. Raises the first `NvmeError` that no call of `Ticket.wait` raised."""
    _shared.get().drain()


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save `tensors` by name as a safetensors file, whole or not at all; blocks. See `Io.save`."""
    _shared.get().save(tensors, path, metadata)


def load(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, on `device`; blocks. See `Io.load`.

    `names` selects tensors; None loads all.
    """
    return _shared.get().load(path, names, device)
