"""Faults that uses of weights once had, put back: programs with uses must find each of these."""

from __future__ import annotations

from typing import Any

import torch

from infinity.optim.assigned import AssignedTensor
from infinity.optim.gradient_object import GradientObject
from infinity.optim.kernel_states import KernelStates
from infinity.optim.lazy_gradient import LazyGradients
from infinity.optim.lazy_norm import NormTaken
from infinity.optim.state_entry import StateEntry
from infinity.sharding import lazy_tensor, parameter, tiles, twins, value
from infinity.sharding.parameter_data import ParameterData
from random_programs.mutations import Mutation, nothing


def _placeholder(real: Any) -> Any:
    def fetch(self: Any) -> torch.Tensor:
        return torch.full_like(real(self), 0.125)

    return fetch


def _own_accumulator(real: Any) -> Any:
    def make(self: Any) -> torch.Tensor:
        return twins.Blank.of(self.tensor).requires_grad_(self.tensor.requires_grad)

    return make


def _hook_on_the_handle(real: Any) -> Any:
    def hook(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return hook


def _another_parameter(real: Any) -> Any:
    def passing(parameter: torch.Tensor, hook: Any) -> Any:
        return hook

    return passing


def _not_linked(real: Any) -> Any:
    return lambda self: self


def _old_values(real: Any) -> Any:
    """What was read first stays."""
    read: dict[Any, torch.Tensor] = {}

    def fetch(self: Any) -> torch.Tensor:
        key = id(self.source), self.place
        if key not in read:
            read[key] = real(self)
        return read[key].clone()

    return fetch


def _views_of_the_whole(real: Any) -> Any:
    def part_of(self: Any, whole: torch.Tensor) -> torch.Tensor:
        found = real(self, whole)
        start = whole.reshape(-1)[: found.numel()]
        return start.view(found.shape) if found.dim() else found

    return part_of


def _blind_gradients(real: Any) -> Any:
    grad = torch.autograd.grad

    def gradients(outputs: Any, inputs: Any, **named: Any) -> Any:
        found = real[grad](outputs, inputs)
        return tuple(None if g is None else torch.zeros_like(g) for g in found)

    return real | {grad: gradients}


def _as_it_is(real: Any) -> Any:
    return lambda self, value: value


def _no_views(real: Any) -> Any:
    def write(self: Any, written: Any) -> None:
        real(self, [each for each in written if not isinstance(each, lazy_tensor.LazyView)])

    return write


OF_USES = (
    Mutation("a handle answers with a placeholder", value.LazyValue, "fetch", _placeholder, 1),
    Mutation(
        "a handle answers with what was read first", value.LazyValue, "fetch", _old_values, 23
    ),
    Mutation(
        "a weight in tiles answers with a placeholder", tiles.TiledWeight, "fetch", _placeholder, 2
    ),
    Mutation(
        "a handle has an accumulator of its own", twins.Twins, "_make_handle", _own_accumulator, 0
    ),
    Mutation(
        "views begin where the weight does", lazy_tensor.LazyView, "part_of", _views_of_the_whole, 0
    ),
    Mutation("hooks belong to the handle", parameter, "_hook", _hook_on_the_handle, 62),
    Mutation("hooks get the object of the engine", parameter, "passing", _another_parameter, 62),
    Mutation("a weight in tiles leads nowhere", tiles.TiledWeight, "relink", _not_linked, 23),
    Mutation(
        "tiles have no gradients for autograd.grad", tiles, "_BACKWARDS", _blind_gradients, 430
    ),
    Mutation(
        "writes to views of handles are swallowed", lazy_tensor.Copies, "write", _no_views, 12
    ),
    Mutation(
        "writes to results that share memory with a copy are swallowed",
        lazy_tensor.Copies,
        "guarded",
        _as_it_is,
        64,
    ),
    Mutation("an update counts no version up", ParameterData, "outdate", nothing, 83),
    Mutation("a norm is computed when it is read", NormTaken, "freeze", nothing, 110),
    Mutation("an assigned gradient does not follow its tensor", AssignedTensor, "take", nothing, 6),
    Mutation(
        "a gradient that another one replaced is that one", GradientObject, "leave", nothing, 453
    ),
    Mutation("a gradient of two parameters is two gradients", LazyGradients, "_join", nothing, 275),
    Mutation(
        "a cleared or deleted entry of optimizer.state stays", KernelStates, "restart", nothing, 10
    ),
    Mutation("a changed entry of optimizer.state is lost", StateEntry, "_change", nothing, 117),
)
"""What programs with uses must find."""
