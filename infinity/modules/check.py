"""Refuses models that `infinity.wrap` cannot manage, before anything is changed. Each error names
the object and says what to do instead."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, SimpleNamespace
from typing import NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.config import Config, Tuning
from infinity.device import is_graphed
from infinity.errors import ConfigError, in_words
from infinity.measure.rates import DTYPES
from infinity.sharding.codec import stored_as
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tensor_parallel import local
from infinity.sharding.views import GatheredParameter

_ANYWHERE = 1 << 20
"""The assumed address of a tensor without memory: numpy takes no null pointer."""


def check_arguments(model: object, config: object, units: object, seed: object) -> None:
    """Raise `ConfigError` if an argument of `infinity.wrap` has a wrong type, or if the seed does
    not fit in 64 bits."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"infinity.wrap takes a torch.nn.Module, not {in_words(model)}")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config is {in_words(config)}; {_way_to_a_config(config)}")
    if isinstance(units, (str, type)) or not isinstance(units, (Iterable, NoneType)):
        raise ConfigError(
            f"units is {in_words(units)}; give a list of classes or modules of the model, for "
            "example units=[torch.nn.TransformerEncoderLayer]"
        )
    for unit in units if isinstance(units, Sequence) else ():
        if not isinstance(unit, (type, nn.Module)):
            raise ConfigError(
                f"units holds {in_words(unit)}; give classes or modules of the model themselves"
            )
    if not isinstance(seed, (SupportsIndex, NoneType)):
        raise ConfigError(f"seed is {in_words(seed)}; give an integer")
    if seed is not None and not -(1 << 63) <= operator.index(seed) < 1 << 64:
        raise ConfigError(f"seed is {in_words(seed)}; torch takes integers of 64 bits")


def _way_to_a_config(value: object) -> str:
    if isinstance(value, Mapping):
        return "for its keys write infinity.Config(**config)"
    if isinstance(value, Tuning):
        return "write infinity.Config(tuning=...)"
    if isinstance(value, (str, os.PathLike)):
        return "for a directory on NVMe write infinity.Config(nvme=...)"
    return "give an infinity.Config, or leave it out"


def check_model(model: nn.Module, dtype: torch.dtype | None, trains: bool = True) -> None:
    """Raise `ConfigError` for the first module, parameter or buffer that the engine cannot manage,
    or cannot train if the model `trains`. Floating-point parameters become `dtype`, if it is given.
    """
    _check_modules(model)
    refuse_lazy(model)
    _check_parameters(model, dtype, trains)
    _check_memory(model)


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, which keeps gradients or "
                "copies of its own; wrap the module in it (.module): the engine serves all ranks "
                "that torchrun starts"
            )
        if is_graphed(module):
            raise ConfigError(
                f"the forward of {name or 'the model'} was replaced by make_graphed_callables, "
                "whose graphs read parameters where they were then; wrap the model without that"
            )
        if getattr(vars(module).get("_hf_hook"), "offload", False):
            raise ConfigError(
                f"{name or 'the model'} was offloaded by accelerate (cpu_offload, disk_offload, or "
                "a device_map), which moves its parameters itself: load the model without that, or "
                "call accelerate.hooks.remove_hook_from_submodules(model); infinity.wrap places "
                "parameters"
            )
        if (
            isinstance(module, torch.jit.ScriptModule)
            and next(module.parameters(), None) is not None
        ):
            raise ConfigError(
                f"{name or 'the model'} is a ScriptModule with parameters; TorchScript calls no "
                "Python hooks, which bring them: wrap the module that it was made from"
            )


def refuse_lazy(model: nn.Module) -> None:
    """Raise `ConfigError` for a parameter or buffer that has no shape yet."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(parameter):
            raise ConfigError(
                f"{name} has no shape yet, because its module is lazy: run the model on "
                "one batch before infinity.wrap"
            )


def _check_parameters(model: nn.Module, dtype: torch.dtype | None, trains: bool) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (ShardedParameter, GatheredParameter)):
            _refuse_managed(
                name, isinstance(parameter, GatheredParameter) or bool(type(parameter).source.tier)
            )
        if _is_made_of_others(parameter):
            raise ConfigError(
                f"{name} is a {type(parameter).__name__}, a tensor made of others, which cannot be "
                "laid out as bytes: wrap the model before that type replaces its parameters, or "
                "register it as a buffer, which stays on the compute device"
            )
        if parameter.is_inference() and not parameter.is_meta:
            raise ConfigError(
                f"{name} was made inside of torch.inference_mode(), and autograd cannot use it: "
                "build or load the model outside of that"
            )
        if parameter.layout is not torch.strided or parameter.is_quantized:
            kind = (
                "quantized"
                if parameter.is_quantized
                else str(parameter.layout).removeprefix("torch.")
            )
            raise ConfigError(
                f"{name} is a {kind} tensor; parameters must be dense: convert it, or "
                "register it as a buffer"
            )
        kept = stored_as(parameter, dtype)
        if trains and parameter.requires_grad and kept not in DTYPES.values():
            _refuse_dtype(name, kept)


def _refuse_managed(name: str, is_open: bool) -> None:
    if is_open:
        raise ConfigError(
            f"{name} belongs to a model that is wrapped already: call "
            "infinity.engine(...).unwrap() of that, and wrap one module that holds both"
        )
    raise ConfigError(
        f"{name} has no data any more, because its engine was closed: build the model "
        "again and load your checkpoint"
    )


def _refuse_dtype(name: str, dtype: torch.dtype) -> None:
    way = "keep it as a real parameter (torch.view_as_real)"
    if not dtype.is_complex:
        way = "convert the model with model.float(), or give Config(precision='fp32')"
    raise ConfigError(
        f"{name} is trainable and {str(dtype).removeprefix('torch.')}, and optimizers update fp32, "
        f"bf16 and fp16: {way}, or freeze it with requires_grad_(False)"
    )


class _MemorySpan(NamedTuple):
    """The bytes [begin, end) of tensor `number` of the model. `space` names their device, or a
    storage without memory."""

    space: str
    begin: int
    end: int
    number: int
    name: str
    tensor: torch.Tensor


def _check_memory(model: nn.Module) -> None:
    """Raise `ConfigError` if a parameter shares a byte with another tensor. In a wrapped model it
    would have memory of its own."""
    spans = sorted(_spans(model), key=lambda span: span[:4])
    open_spans: list[_MemorySpan] = []
    for span in spans:
        open_spans = [
            other for other in open_spans if other.space == span.space and other.end > span.begin
        ]
        for other in open_spans:
            either = isinstance(span.tensor, nn.Parameter) or isinstance(other.tensor, nn.Parameter)
            if either and _overlap(other, span):
                first, second = sorted((other, span), key=lambda each: each.number)
                raise ConfigError(
                    f"{first.name} and {second.name} share memory but are two tensors, as .data "
                    "makes them: give both modules the same nn.Parameter to tie them, or clone() "
                    "one of them"
                )
        open_spans.append(span)


def _spans(model: nn.Module) -> Iterator[_MemorySpan]:
    for number, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        mine = local(tensor)
        if mine.numel() == 0 or mine.layout is not torch.strided or _is_made_of_others(mine):
            continue
        storage = mine.untyped_storage()
        address = 0 if mine.is_meta else storage.data_ptr()
        begin = (address or _ANYWHERE) + int(mine.storage_offset()) * mine.itemsize
        last = sum(
            (int(size) - 1) * int(stride)
            for size, stride in zip(mine.shape, mine.stride(), strict=True)
        )
        space = str(mine.device) if address else f"storage {storage._cdata}"
        yield _MemorySpan(space, begin, begin + (last + 1) * mine.itemsize, number, name, tensor)


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own but contains tensors with memory. False for a
    DTensor: its local tensor counts."""
    return bool(is_traceable_wrapper_subclass(tensor)) and not is_dtensor(tensor)


def _overlap(one: _MemorySpan, other: _MemorySpan) -> bool:
    """Whether two tensors have a byte in common. Columns of one matrix have none, although their
    spans overlap."""
    return bool(np.shares_memory(_as_array(one), _as_array(other)))


def _as_array(span: _MemorySpan) -> np.ndarray:
    """An array of the same geometry at the same address. Its elements are never read."""
    tensor = local(span.tensor)
    interface = {
        "version": 3,
        "typestr": f"|V{tensor.itemsize}",
        "data": (span.begin, True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
