"""Restores buffers of a model of `from_pretrained` that neither its files nor its `_init_weights`
have.

transformers builds the model on the meta device. So the values that a constructor computes for such
a buffer are lost, and transformers leaves it uninitialized. Here the constructor runs once more,
with only parameters on the meta device. The model gets the buffers of that run.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.weights.taping import Taping

log = logging.getLogger("infinity")

_MOVE = "_move_missing_keys_from_meta_to_device"
_MARK = 0xA5
"""Each byte of a buffer until the buffer is written."""


@dataclass(frozen=True)
class PretrainedCall:
    """A call of `from_pretrained`: its class, and its arguments."""

    kind: type[nn.Module]
    values: Sequence[Any]
    options: Mapping[str, Any]

    def build(self, config: Any, dtype: torch.dtype | None) -> nn.Module:
        """Build the model once more, with buffers in memory and parameters on the meta device. The
        CPU generator keeps its state."""
        from transformers import initialization
        from transformers.modeling_utils import local_torch_dtype

        taken = inspect.signature(self.kind).parameters
        options = {name: value for name, value in self.options.items() if name in taken}
        options.pop("config", None)
        with ExitStack() as stack:
            stack.enter_context(local_torch_dtype(dtype or torch.get_default_dtype()))
            stack.enter_context(initialization.no_tie_weights())
            stack.enter_context(initialization.no_init_weights())
            stack.enter_context(torch.random.fork_rng(devices=()))
            stack.enter_context(_parameters_on_meta())
            return self.kind(copy.deepcopy(config), *self.values, **options)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the context, parameters lose their memory as modules register them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            kept = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[name] = kept

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def found_again(
    taping: Taping, model: nn.Module, call: PretrainedCall, dtype: torch.dtype | None
) -> Iterator[None]:
    """Inside the context, transformers gives `model` the values that its files lack. At the end,
    buffers that were not written get the values of another run of its constructor. If it gives
    none, they are zeros, and a warning names them."""
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    move = getattr(model, _MOVE)

    def moved(*values: Any, **options: Any) -> None:
        move(*values, **options)
        with taping.paused():
            for name in names:
                _bytes_of(model.get_buffer(name)).fill_(_MARK)

    vars(model)[_MOVE] = moved
    try:
        yield
    finally:
        del vars(model)[_MOVE]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    lost = [name for name in names if name in buffers and _is_marked(buffers[name])]
    if lost:
        _fill(taping, model, {name: buffers[name] for name in lost}, call, dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory of `tensor`; none on the meta device."""
    found = torch.empty(0, dtype=torch.uint8)
    return found if tensor.is_meta else found.set_(tensor.untyped_storage())


def _is_marked(buffer: torch.Tensor) -> bool:
    found = _bytes_of(buffer)
    return bool(found.numel() and (found == _MARK).all())


def _fill(
    taping: Taping,
    model: nn.Module,
    lost: Mapping[str, torch.Tensor],
    call: PretrainedCall,
    dtype: torch.dtype | None,
) -> None:
    problem = ""
    made: dict[str, torch.Tensor] = {}
    try:
        made = dict(call.build(getattr(model, "config", None), dtype).named_buffers())
    except Exception as error:  # of the constructor, which is foreign code
        problem = f" ({type(error).__name__}: {error})"
    for name, buffer in lost.items():
        value = made.get(name, buffer)
        is_good = value is not buffer and value.shape == buffer.shape and not value.is_meta
        with taping.paused(False):  # noted, because a parameter may be computed of it
            buffer.copy_(value if is_good else torch.zeros_like(buffer))
        if is_good:
            continue
        log.warning(
            "%s.from_pretrained inside infinity.init(): the buffer %s is in none of its files, and "
            "its constructor gives it no value when it runs once more%s; it is zeros: write it "
            "after from_pretrained, or in _init_weights",
            call.kind.__name__,
            name,
            problem,
        )
