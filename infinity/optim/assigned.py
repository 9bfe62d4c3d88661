"""Tensors that users assigned to `.grad`.

[Note: an assigned gradient is the tensor itself]
In PyTorch `parameter.grad = tensor` keeps the tensor, so a later change of the tensor changes the
gradient. The engine copies the tensor, and must not keep memory that nothing else needs. An
`AssignedTensor` therefore refers to the tensor weakly. Before the engine uses the gradient, it
compares a digest of the content with the previous digest. A version counter does not suffice: a
write through an alias or an array does not change it. When the tensor dies, its memory is kept
until the next comparison if the content changed. It is kept longer while a view of it exists.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.sharding.views import Window

_WORD = 8  # bytes that a digest reads at a time


class AssignedTensor:
    """A weak reference to a dense `tensor` and its memory. See the note."""

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
        """The tensor. After its death, a tensor of the same memory if that is kept, else None."""
        tensor = self._tensor()
        return tensor if tensor is not None or self._kept is None else self._on(self._kept)

    def take(self) -> torch.Tensor | None:
        """The tensor if its content changed since the last `take` or `note`, else None."""
        tensor = self.tensor()
        if tensor is None:
            return None
        before, self._digest = self._digest, _digest(tensor)
        if self._kept is not None and _tensors(self._kept) == 1:
            self._kept = None  # no other tensor uses it
        return tensor if self._digest != before else None

    def note(self) -> None:
        """Ignore changes of the content until now."""
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
    """The number of tensors with this storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _digest(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        flat = tensor.detach().contiguous().view(-1)
        if flat.data_ptr() % _WORD:
            flat = flat.clone()
        return Window(flat, 0, flat.numel()).digest() if flat.numel() else 0
