"""Checks what a call asks for, before anything moves."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class IoRequest(NamedTuple):
    """One tensor's bytes at `offset` of the file, checked."""

    tensor: torch.Tensor
    address: int
    nbytes: int
    path: bytes
    offset: int


def check(
    operation: str, tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0
) -> IoRequest:
    """Raises what is wrong with them, before anything has moved."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"the path {os.fsdecode(name)!r} has a null byte")
    if type(offset) is not int or offset < 0:
        raise ValueError(f"offset must be a number of bytes, 0 or more, not {offset!r}")
    return IoRequest(
        tensor, *memory_of(operation, tensor, f"{operation} of {os.fsdecode(name)}"), name, offset
    )


def refuse_memory(tensor: torch.Tensor) -> None:
    """Let a tensor of a wrapped model that has no memory say so, with a way out."""
    refuse = getattr(tensor, "refuse_memory", None)
    if refuse is not None:
        refuse("the address")


def memory_of(operation: str, tensor: torch.Tensor, what: str) -> tuple[int, int]:
    """Address and length of the tensor's memory, which `operation` may use."""
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
    # Of a parameter that lives on another tier: raises an error with its name.
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
