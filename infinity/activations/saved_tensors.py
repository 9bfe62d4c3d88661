"""Packs saved tensors that are no parameters: in place, or as views of bytes that
`infinity.tiers.activations` moves.

[Note: a saved tensor that changes]
Torch notes the version of a saved tensor, and its backward raises if the tensor was changed in
place. Torch cannot do this if hooks pack the tensor, so it is done here. The packed object has an
alias of the tensor, without memory, that shares the version counter. It must not keep the tensor
itself, because the tensor refers to the node that saves it. Half of that reference cycle is in C++.
So it would never be collected if a loss is dropped without its backward. (A write by `.data` does
not change the counter. Then the backward gets the content of the first save or the content of now.)

[Note: storages move, not tensors]
Many operators save views of one storage: chunks of a fused projection, the input of three linear
layers, the hidden state that a norm and the residual connection read. The whole storage moves once,
while its version is the same. Each view is made again on the storage that comes back. A view of a
part keeps a whole storage in plain PyTorch, too.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.sharding.tensor_parallel import local
from infinity.tiers.activations import Activations
from infinity.tiers.saved_storage import SavedStorage

LEAST_BYTES = 64 << 10
"""Smaller storages stay: on a link of 25 GB/s their copy takes 3 us, less than the request for it.
Small storages, such as statistics of norms, are a hundredth of all."""
_PLAIN = (torch.Tensor, nn.Parameter)  # a subclass, such as a DTensor, needs more than bytes


class StorageHolder(Protocol):
    """A storage that comes back on request."""

    def fetch(self) -> torch.UntypedStorage:
        """Its content on the compute device."""


class Packed(Protocol):
    """The object that autograd keeps of a tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor."""


class Divider(Protocol):
    """Divides saved tensors among tensor parallel ranks."""

    def entering(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside the context, saved tensors are the inputs of `module`."""

    def pack(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Packed | None:
        """This rank's part of `tensor`, which has `storage`; None if it is not divided."""


class _OffloadedStorage:
    """An offloaded storage. It lives as long as the tensors that were packed from it."""

    __slots__ = ("__weakref__", "saved", "tier")

    def __init__(self, tier: Activations, saved: SavedStorage) -> None:
        self.tier, self.saved = tier, saved

    def fetch(self) -> torch.UntypedStorage:
        """Its content on the compute device. Raises like `Activations.fetch`."""
        return self.tier.fetch(self.saved)

    def __del__(self) -> None:
        self.tier.drop(self.saved)


class SavedInPlace:
    """A saved tensor that stays where it is."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises the `RuntimeError` of plain PyTorch if it was changed in place."""
        _check_version(self.tensor, self.version, self.tensor)
        return self.tensor


class OffloadedTensor:
    """A saved tensor with an offloaded or divided storage."""

    __slots__ = (
        "conjugate",
        "counter",
        "negative",
        "offset",
        "shape",
        "storage",
        "stride",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, storage: StorageHolder) -> None:
        self.storage, self.version = storage, tensor._version
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()
        self.counter = tensor.detach()
        self.counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def unpack(self) -> torch.Tensor:
        """The same view of the same bytes, on the compute device. Raises like `fetch` of its
        storage, and like `SavedInPlace`."""
        like = self.counter
        storage = self.storage.fetch()
        view = torch.empty(0, dtype=like.dtype, device=like.device).set_(
            storage, self.offset, self.shape, self.stride
        )
        _check_version(like, self.version, view)
        if self.conjugate:
            view = view.conj()
        return torch._neg_view(view) if self.negative else view


def _check_version(counter: torch.Tensor, version: int, tensor: torch.Tensor) -> None:
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {counter._version}; "
            f"expected version {version} instead"
        )


class SavedTensorOffloader:
    """Packs tensors that autograd saves in the model's forwards. `tier` is None if all of them stay
    on `device`. `partitions` divides tensors among tensor parallel ranks."""

    def __init__(
        self,
        tier: Activations | None,
        model: nn.Module,
        device: torch.device,
        partitions: Divider | None = None,
    ) -> None:
        self._tier, self._device, self.partitions = tier, device, partitions
        self._known: weakref.WeakValueDictionary[
            tuple[int, int], SavedInPlace | _OffloadedStorage
        ] = weakref.WeakValueDictionary()
        # Buffers live as long as the model, so moving a copy of one saves no memory. A weak
        # reference keeps other storages from getting its number.
        buffers = [
            buffer
            for buffer in model.buffers()
            if type(buffer) in _PLAIN and buffer.layout is torch.strided
        ]
        self._buffers = [StorageWeakRef(buffer.untyped_storage()) for buffer in buffers]
        self._lasting = {reference.cdata for reference in self._buffers}

    def held_by(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The storage that lives longer if autograd saves `tensor`. None if no storage counts: that
        of a buffer lives on anyway."""
        storage = _storage_of(tensor)
        return None if storage is None or storage._cdata in self._lasting else storage

    def pack_here(self, tensor: torch.Tensor) -> torch.Tensor | SavedInPlace:
        """Like `pack`, for a tensor that stays where it is."""
        return tensor if _storage_of(tensor) is None else SavedInPlace(tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        """The object that autograd keeps of `tensor`, which is no view of a parameter."""
        if (divided := self._divide(tensor)) is not None:
            return divided
        storage = _storage_of(tensor)
        if storage is None:
            return tensor
        number = storage._cdata
        if (
            self._tier is None
            or storage.nbytes() < LEAST_BYTES
            or tensor.device != self._device
            or number in self._lasting
        ):
            return SavedInPlace(tensor)
        key = number, tensor._version
        known = self._known.get(key)
        if isinstance(known, _OffloadedStorage):
            self._tier.save_again(known.saved)
            return OffloadedTensor(tensor, known)
        if known is None and (saved := self._tier.save(storage)) is not None:
            offloaded = self._known[key] = _OffloadedStorage(self._tier, saved)
            return OffloadedTensor(tensor, offloaded)
        in_place = SavedInPlace(tensor)
        self._known.setdefault(key, in_place)
        return in_place

    def _divide(self, tensor: torch.Tensor) -> Packed | None:
        """This rank's part of `tensor`; None if it is not divided."""
        if self.partitions is None:
            return None
        mine = local(tensor)
        storage = _storage_of(mine)
        if storage is None or mine.device != self._device or storage._cdata in self._lasting:
            return None
        return self.partitions.pack(tensor, storage)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor. None for a tensor of another class or without bytes, such as a
    fake or functional tensor."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage
