"""Backwards with lazy tensors as outputs or inputs.

torch disables `__torch_function__` while a class answers a call. It would then be disabled for the
user's hooks and recomputation in the backward, too. So this module gives autograd the gradient
edges of lazy tensors, and the backward runs with `__torch_function__` enabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import has_torch_function_unary, is_tensor_like


def grad(outputs: Any, inputs: Any, **named: Any) -> Any:
    """`torch.autograd.grad`."""
    among = _several(inputs)
    if not _all_require_grad(among):
        return _as_it_is(torch.autograd.grad, outputs, among, **named)
    zeros = named.pop("materialize_grads", False)
    found = torch.autograd.grad(_read(outputs), _edges(among), **named)
    if not zeros:
        return found
    kept = bool(named.get("create_graph"))
    return tuple(
        torch.zeros_like(each, requires_grad=kept) if one is None else one
        for one, each in zip(found, among, strict=True)
    )


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`."""
    among = _several(() if inputs is None else inputs)
    run, how = torch.autograd.backward, (grad_tensors, retain_graph, create_graph)
    if not _all_require_grad(among):
        _as_it_is(run, tensors, *how, inputs=among)
        return
    for each in filter(is_tensor_like, among):
        if not each.is_leaf:
            _as_it_is(torch.Tensor.retain_grad, each)
    run(_read(tensors), *how, inputs=_edges(among) or None)


def backward_of(tensor: torch.Tensor, gradient: Any = None, *args: Any, **named: Any) -> None:
    """`tensor.backward(...)`."""
    backward(tensor, gradient, *args, **named)


ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: grad,
    torch.autograd.backward: backward,
    torch.Tensor.backward: backward_of,
}
"""The answers of lazy tensors, by function of torch."""


def _several(tensors: Any) -> tuple[Any, ...]:
    single = is_tensor_like(tensors) or isinstance(tensors, torch.autograd.graph.GradientEdge)
    return (tensors,) if single else tuple(tensors)


def _all_require_grad(inputs: Iterable[Any]) -> bool:
    return all(each.requires_grad for each in inputs if is_tensor_like(each))


def _edges(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        _as_it_is(get_gradient_edge, each) if is_tensor_like(each) else each for each in inputs
    )


def _read(outputs: Any) -> tuple[Any, ...]:
    """`outputs`, with lazy tensors replaced by their values."""
    with torch.enable_grad():  # a backward inside of a backward finds it off
        return tuple(
            each * 1 if is_tensor_like(each) and has_torch_function_unary(each) else each
            for each in _several(outputs)
        )


def _as_it_is(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call `function` with `__torch_function__` disabled. `function` must run no code of the
    user."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **named)
