"""States in fp32 from and to the formats of their blocks. The optimizer's kernels read and write the formats themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import native
from infinity.tiers.block import FP32, SPLIT, Format, Kind

_ORDERS = {Kind.EXP_AVG: "first", Kind.EXP_AVG_SQ: "second"}


def round_bf16(values: torch.Tensor) -> torch.Tensor:
    """fp32 `values` as bf16, to nearest and ties away from zero, as the kernels round masters.

    With ties to even, a bf16 with an even last bit would stand for 65537 fp32 values, and 16 bits could not tell them apart.
    """
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def round_to(param: torch.Tensor, values: torch.Tensor) -> None:
    """Write fp32 `values` into `param`, of any dtype, as the kernels round masters."""
    param.copy_(round_bf16(values) if param.dtype == torch.bfloat16 else values)


def decode_master(form: Format, tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """`tensors` are the chunk's bytes of the parameter and the low halves (SPLIT), or of the master; `values` is fp32."""
    if form is SPLIT:
        high, low = (tensor.view(torch.int16).int() for tensor in tensors)
        values.view(torch.int32).copy_((high << 16) + low)
    else:
        values.copy_(tensors[0].view(torch.float32))


def encode_master(form: Format, values: torch.Tensor, param: torch.Tensor, master: torch.Tensor) -> None:
    """Write fp32 `values` as the rounded `param` (of its dtype) and the bytes of `master`."""
    round_to(param, values)
    if form is SPLIT:
        bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
        master.view(torch.int16).copy_((bits - (param.view(torch.int16).int() << 16)).to(torch.int16))
    else:
        master.view(torch.float32).copy_(values)


def decode_moment(form: Format, kind: Kind, chunk: torch.Tensor, values: torch.Tensor) -> None:
    """`chunk` is uint8 in `form`; `values` is fp32."""
    if form is FP32:
        values.copy_(chunk.view(torch.float32))
    else:
        native.cpu_adam().decode(chunk.data_ptr(), form.name, _ORDERS[kind], values.data_ptr(), 0, values.numel())


def encode_moment(form: Format, kind: Kind, values: torch.Tensor, chunk: torch.Tensor) -> None:
    """Write fp32 `values`, rounded to nearest, into `chunk`, uint8 in `form`."""
    if form is FP32:
        chunk.view(torch.float32).copy_(values)
    else:
        values = values.contiguous()
        native.cpu_adam().encode(chunk.data_ptr(), form.name, _ORDERS[kind], values.data_ptr(), 0, values.numel())
