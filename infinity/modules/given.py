"""Tensors of state dicts that users have, which a wrapped model does not see written.

[Note: what a state dict shares]
In plain PyTorch the tensors of `model.state_dict()` are the parameters, so a loader may write them
in place. Those of a wrapped model are copies. So what was given is remembered weakly, and compared
before the next forward and step: a version that has moved, or other bytes of a small tensor, raise.
`load_state_dict` takes values over and forgets what was given.
"""

from __future__ import annotations

import weakref
import zlib
from typing import NamedTuple

import torch

from infinity.directories.mapped import LEAST_BYTES
from infinity.errors import ShardedParameterError


class _GivenTensor(NamedTuple):
    """One tensor, as it was given."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    digest: int | None


class GivenTensors:
    """Those of the state dicts of one model. For the thread that runs the model."""

    def __init__(self) -> None:
        self._given: list[tuple[str, _GivenTensor]] = []

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is given under `name`."""
        given = _GivenTensor(weakref.ref(tensor), tensor._version, _digest(tensor))
        self._given.append((name, given))

    def forget(self) -> None:
        """What was given may be written from now on."""
        self._given.clear()

    def check(self) -> None:
        """Raise `ShardedParameterError` where a tensor that was given is written, once."""
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
    """Of the bytes of a small tensor on the host; None for others, which would take long."""
    if tensor.nbytes >= LEAST_BYTES or tensor.device.type != "cpu":
        return None
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes())
