"""Notices writes to tensors of state dicts that users have, because a wrapped model does not see
them.

[Note: tensors of a state dict]
In plain PyTorch the tensors of `model.state_dict()` share memory with the parameters, so a loader
may write them in place. Those of a wrapped model are copies. So the tensors that were given out are
remembered by weak references, and compared before the next forward and step. A changed version
counter, or a changed byte of a small tensor, raises. `load_state_dict` copies the values and
forgets these tensors.
"""

from __future__ import annotations

import weakref
import zlib
from typing import NamedTuple

import torch

from infinity.directories.mapped import LEAST_BYTES
from infinity.errors import ShardedParameterError


class _GivenTensor(NamedTuple):
    """One tensor, with its version and digest when it was given out."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    digest: int | None


class GivenTensors:
    """The tensors that state dicts of one model gave out. The thread that runs the model calls all
    methods."""

    def __init__(self) -> None:
        self._given: list[tuple[str, _GivenTensor]] = []

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Remember `tensor`, which is given out as `name`."""
        given = _GivenTensor(weakref.ref(tensor), tensor._version, _digest(tensor))
        self._given.append((name, given))

    def forget(self) -> None:
        """Forget all tensors: they may be written from now on."""
        self._given.clear()

    def check(self) -> None:
        """Raise `ShardedParameterError`, once, if a tensor that was given out has been written."""
        alive = [(name, given) for name, given in self._given if given.tensor() is not None]
        self._given = alive
        for name, (reference, version, digest) in alive:
            tensor = reference()
            if tensor is None or (tensor._version == version and _digest(tensor) == digest):
                continue
            self.forget()
            raise ShardedParameterError(
                f"{name} of state_dict() was changed in place, and a wrapped model does not see "
                "that: its state dict has copies. Load it: model.load_state_dict(state), or write "
                "parameters inside of `with infinity.gathered(model, write=True):`"
            )


def _digest(tensor: torch.Tensor) -> int | None:
    """The CRC-32 of the bytes of a small tensor on the host. None for other tensors, which would
    take long."""
    if tensor.nbytes >= LEAST_BYTES or tensor.device.type != "cpu":
        return None
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes())
