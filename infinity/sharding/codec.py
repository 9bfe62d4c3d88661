"""Converts states between fp32 and the formats of their blocks. The kernels of the optimizer read
and write the formats themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import native
from infinity.device import copy_alone
from infinity.placement.spec import BF16, FP32, SPLIT, Format, Kind


def round_to(param: torch.Tensor, values: torch.Tensor) -> None:
    """Write fp32 `values` into `param`, of any dtype. Rounds as the kernels round masters: to bf16
    with ties away from zero."""
    if param.dtype == torch.bfloat16 and param.device.type != "cpu":
        patterns = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
        param.view(torch.int16).copy_(((patterns.long() + 0x8000) >> 16).to(torch.int16))
    elif param.dtype == torch.bfloat16:
        _split(values, param, torch.empty_like(param, dtype=torch.int16))
    else:
        copy_alone(param, values)


def decode_master(
    form: Format, tensors: Sequence[torch.Tensor], values: torch.Tensor, first: int = 0
) -> None:
    """Fill `values`, fp32, with elements of a master from `first` on. `tensors` are the bytes of a
    chunk: of the parameter and of the low halves (SPLIT), or of the master."""
    if form is SPLIT:
        native.cpu_adam().join(
            *(tensor.data_ptr() + 2 * first for tensor in tensors),
            values.data_ptr(),
            values.numel(),
        )
    else:
        copy_alone(values, tensors[0].view(torch.float32)[first:][: values.numel()])


def encode_master(
    form: Format, values: torch.Tensor, param: torch.Tensor, master: torch.Tensor
) -> None:
    """Write fp32 `values` as the rounded `param` (of its dtype) and the bytes of `master`."""
    if form is SPLIT:
        _split(values, param, master)
    else:
        round_to(param, values)
        copy_alone(master.view(torch.float32), values)


def _split(values: torch.Tensor, param: torch.Tensor, low: torch.Tensor) -> None:
    values = values.contiguous()
    native.cpu_adam().split(values.data_ptr(), param.data_ptr(), low.data_ptr(), values.numel())


def decode_moment(
    form: Format, kind: Kind, chunk: torch.Tensor, values: torch.Tensor, first: int = 0
) -> None:
    """Fill `values`, fp32, with elements of `chunk` from `first` on. `chunk` is uint8 in `form`.
    `values` may be bf16 if `form` is bf16."""
    if form is FP32 or (form is BF16 and values.dtype == torch.bfloat16):
        copy_alone(values, chunk.view(values.dtype)[first:][: values.numel()])
    else:
        native.cpu_adam().decode(
            chunk.data_ptr(), form.name, kind.code, values.data_ptr(), first, values.numel()
        )


def encode_moment(form: Format, kind: Kind, values: torch.Tensor, chunk: torch.Tensor) -> None:
    """Write fp32 `values`, rounded to nearest, into `chunk`, uint8 in `form`."""
    if form is FP32:
        copy_alone(chunk.view(torch.float32), values)
    else:
        values = values.contiguous()
        native.cpu_adam().encode(
            chunk.data_ptr(), form.name, kind.code, values.data_ptr(), 0, values.numel()
        )


def stored_as(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter is stored. This is `dtype` (`Config.precision`) if it is given
    and applies to the parameter, else the parameter's own."""
    converted = parameter.is_floating_point() and (
        parameter.requires_grad or parameter.dtype.itemsize > 1
    )
    return dtype if dtype is not None and converted else parameter.dtype
