"""Tensors that users assigned to `.grad`.

[Note: an assigned gradient is the tensor itself]
In PyTorch `parameter.grad = tensor` keeps the tensor, so a later change of it is one of the
gradient. The engine copies it to its home, and must not keep memory that nothing else needs. So it
remembers where the tensor is (`AssignedTensor`). Before the engine uses the gradient it looks
whether the content changed, by a digest: a write through an alias or an array changes no version
counter. When the tensor dies, its memory is kept until then if its content changed, or if a view of
it is left.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.sharding.views import Window

_WORD = 8  # bytes that a digest reads at a time


class AssignedTensor:
    """The memory of a dense `tensor`, which this object does not keep alive without need."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype, self._device = tensor.dtype, tensor.device
        self._place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._digest = _digest(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._kept: torch.UntypedStorage | None = None
        mine = weakref.ref(self)

        def died(_: object) -> None:
            assigned = mine()
            if assigned is not None:
                assigned._tensor_dies()

        self._tensor = weakref.ref(tensor, died)

    def tensor(self) -> torch.Tensor | None:
        """The tensor, or when it died one of the same memory; None where nothing can change it any
        more."""
        tensor = self._tensor()
        return tensor if tensor is not None or self._kept is None else self._on(self._kept)

    def take(self) -> torch.Tensor | None:
        """The tensor, if its content changed since this object was made or this was last asked."""
        tensor = self.tensor()
        if tensor is None:
            return None
        before, self._digest = self._digest, _digest(tensor)
        if self._kept is not None and _tensors(self._kept) == 1:
            self._kept = None  # which is `tensor` alone
        return tensor if self._digest != before else None

    def note(self) -> None:
        """The content that the tensor has now is known."""
        self.take()

    def _on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with torch.no_grad():
            empty = torch.empty(0, dtype=self._dtype, device=self._device)
            return empty.set_(storage, *self._place)

    def _tensor_dies(self) -> None:
        if not self._storage.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
            others = _tensors(storage) > 1  # beside the tensor itself
            if others or _digest(self._on(storage)) != self._digest:
                self._kept = storage


def _tensors(storage: torch.UntypedStorage) -> int:
    """How many tensors are of this storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _digest(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        flat = tensor.detach().contiguous().view(-1)
        if flat.data_ptr() % _WORD:
            flat = flat.clone()
        return Window(flat, 0, flat.numel()).digest() if flat.numel() else 0
