"""Checks the arguments of a call before anything moves."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class IoRequest(NamedTuple):
    """The memory of one tensor and its checked place in a file: `nbytes` at `offset` (bytes)."""

    tensor: torch.Tensor
    address: int
    nbytes: int
    path: bytes
    offset: int


def check(
    operation: str, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
) -> IoRequest:
    """Check one (tensor, path, offset) for `operation`, "read" or "write".

    Raises `ValueError` for a wrong path or offset, and the errors of `memory_of`.
    """
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"the path {os.fsdecode(name)!r} has a null byte")
    if type(offset) is not int or offset < 0:
        raise ValueError(f"offset must be a number of bytes, 0 or more, not {offset!r}")
    return IoRequest(
        tensor, *memory_of(operation, tensor, f"{operation} of {os.fsdecode(name)}"), name, offset
    )


def refuse_memory(tensor: torch.Tensor) -> None:
    """Raise `ShardedParameterError` for a tensor of a wrapped model that has no memory now."""
    refuse = getattr(tensor, "refuse_memory", None)
    if refuse is not None:
        refuse("the address")


def memory_of(operation: str, tensor: torch.Tensor, what: str) -> tuple[int, int]:
    """Return the address and length (bytes) of the memory of `tensor`.

    `what` starts each error text. Raises `TypeError` unless `tensor` is a `torch.Tensor` with
    memory of its own. Raises `ValueError` unless it is dense and contiguous on "cpu" or "cuda", and
    `operation` may use it. Raises `ShardedParameterError` if a wrapped model keeps its bytes on
    another tier.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: it takes a torch.Tensor, not {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        refuse_memory(tensor)
        raise TypeError(
            f"{what}: a {type(tensor).__name__} has no memory of its own; give the tensors "
            "that it wraps"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{what}: a tensor on {tensor.device.type} has no bytes that can be moved; use "
            "one on cpu or cuda"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{what}: a {'quantized' if tensor.is_quantized else tensor.layout} tensor is "
            "more than its bytes"
        )
    # For a parameter that lives on another tier this raises an error with its name.
    address = tensor.data_ptr()
    if not tensor.is_contiguous():
        raise ValueError(
            (
                f"{what}: the tensor of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}, but bytes move in one piece; "
            )
            + (
                "write tensor.contiguous()"
                if operation == "write"
                else "read into a .contiguous() tensor and copy_ from it"
            )
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{what}: a lazily conjugated or negated view differs from its bytes; use "
            ".resolve_conj().resolve_neg()"
        )
    if operation == "read" and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what}: the tensor requires grad; read inside torch.no_grad(), or into "
            "tensor.detach()"
        )
    nbytes = tensor.numel() * tensor.itemsize
    if (
        nbytes
        and tensor.storage_offset() * tensor.itemsize + nbytes > tensor.untyped_storage().nbytes()
    ):
        raise ValueError(
            f"{what}: the memory of the tensor of shape {tuple(tensor.shape)} has been "
            "freed or shrunk"
        )
    return address, nbytes
