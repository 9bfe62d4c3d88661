"""What a program does with the weights of its model, beside calling it: expressions of two weights
`w` and `v` (width, width) and of numbers `x` (rows, width), and ways to run one.

An expression gives one tensor. A way is given an expression, and gives another one of the same
value. So every expression can be run in every way, and in several at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Expression = Callable[[Tensor, Tensor, Tensor], Tensor]


def _squares(w: Tensor) -> Tensor:
    return (w * w).sum()


def _mixed(w: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(w) * v + w


def _product(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w.t())


@functools.cache
def _script() -> Any:
    return torch.jit.script(_mixed)  # type: ignore[no-untyped-call]


def _scripted(w: Tensor, v: Tensor) -> Any:
    """Not optimized: what is optimized in its third run has other bits than in its first."""
    with torch.jit.optimized_execution(False):  # type: ignore[no-untyped-call]
        return _script()(w, v)


class Saves(torch.autograd.Function):
    """A product that saves the weight and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, w.t())
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, transposed = ctx.saved_tensors
        return gradient @ transposed.t(), gradient.t() @ x + w * 0.125


class Keeps(torch.autograd.Function):
    """A product that keeps the weight as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.w, gradient.t() @ ctx.x


class KeepsViews(torch.autograd.Function):
    """A product that keeps views of the weight as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.parts = x, (w[:3], w[3:])
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ torch.cat(ctx.parts), gradient.t() @ ctx.x


class Recomputes(torch.autograd.Function):
    """An expression that is computed once more in the backward."""

    @staticmethod
    def forward(ctx: Any, expression: Expression, *given: Tensor) -> Tensor:
        ctx.expression = expression
        ctx.save_for_backward(*given)
        return expression(*given).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.expression(*leaves)
        if not found.requires_grad:
            return None, None, None, None
        return None, *torch.autograd.grad(found, leaves, gradient, allow_unused=True)


def _functional_call(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    module = nn.Linear(x.shape[-1], x.shape[-1], bias=False, device="meta")
    called = functools.partial(torch.func.functional_call, module)
    return called({"weight": w * 2}, x) + called({"weight": v}, x)


def _other_weights(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Weights that a network makes, and a recomputation that needs them again."""
    module = nn.Linear(x.shape[-1], x.shape[-1], bias=False, device="meta")
    for scale in (1.0, -0.5):
        made = {"weight": w * scale + v * x.mean()}
        x = x + checkpoint(torch.func.functional_call, module, made, (x,), use_reentrant=False)
    return x


def _handed_in_chunks(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """A loss in chunks, each of them a checkpoint that is handed the weight."""
    parts = [checkpoint(_product, w, part, use_reentrant=False) for part in x.split(2)]
    return torch.cat(parts) + (x @ v)


def _in_place_of_a_copy(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    copy = w.clone()
    copy.mul_(2).add_(v)
    copy[1:3].zero_()
    return copy


def _tokens(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([[1, 4, 1], [0, 2, 3]]), w) + v[0]


EXPRESSIONS: dict[str, Expression] = {
    "linear": lambda w, v, x: functional.linear(x, w),
    "views": lambda w, v, x: w[:5] @ v.t(),
    "columns": lambda w, v, x: w[:, :3].t() @ v[::2].t(),
    "multi_dot": lambda w, v, x: torch.linalg.multi_dot([x, w, v.t()]),
    "view first": lambda w, v, x: w.view(-1)[: w.shape[1]] * v,
    "einsum": lambda w, v, x: torch.einsum("ij,kj->ik", w, v),
    "chunks": lambda w, v, x: torch.stack([(part * part).mean() for part in w.unbind(1)]) * v,
    "norms": lambda w, v, x: torch.stack([w.norm(), v.flatten().norm(), (w + v).norm(1)]),
    "difference": lambda w, v, x: (w - v.detach() + 0.5) * v,
    "saves": lambda w, v, x: Saves.apply(x, w) + x @ v,  # type: ignore[no-untyped-call]
    "keeps": lambda w, v, x: Keeps.apply(x, w) @ v,  # type: ignore[no-untyped-call]
    "keeps views": lambda w, v, x: KeepsViews.apply(x, w),  # type: ignore[no-untyped-call]
    "func.grad": lambda w, v, x: torch.func.grad(_squares)(w) * v,
    "func.vjp": lambda w, v, x: torch.func.vjp(_squares, w)[1](torch.ones((), dtype=w.dtype))[0],
    "func.jvp": lambda w, v, x: torch.func.jvp(_squares, (w,), (torch.ones_like(w),))[1] * v,
    "func.jacrev": lambda w, v, x: torch.func.jacrev(lambda w: (w * w).sum(0))(w),
    "func.vmap": lambda w, v, x: torch.func.vmap(torch.dot)(w, v),
    "func.both": lambda w, v, x: torch.func.vmap(torch.func.grad(_squares))(w) + v,
    "functionalize": lambda w, v, x: torch.func.functionalize(_mixed)(w, v),
    "functional_call": _functional_call,
    "jacobian": lambda w, v, x: torch.autograd.functional.jacobian(_squares, w) * v,
    "scripted": lambda w, v, x: _scripted(w, v),
    "tensor": lambda w, v, x: torch.tensor(w) * v,
    "new_tensor": lambda w, v, x: x.new_tensor(w) + v,
    "asarray": lambda w, v, x: torch.asarray(w, copy=True) * v,
    "numpy": lambda w, v, x: torch.tensor(w.detach().float().numpy()) * v,
    "tolist": lambda w, v, x: torch.tensor(w[0].tolist()) * v,
    "item": lambda w, v, x: w[0, 1].item() * v,
    "data": lambda w, v, x: w.data * v,
    "detach": lambda w, v, x: w.detach()[1:] * w[1:] + v[0],
    "copy": _in_place_of_a_copy,
    "out": lambda w, v, x: torch.mul(w.detach(), v.detach(), out=torch.empty_like(w)),
    "cat": lambda w, v, x: torch.cat([w[1:], v[:2]]),
    "addmm": lambda w, v, x: torch.addmm(v, w, v, beta=0.5),
    "bmm": lambda w, v, x: torch.bmm(w[None], v[None]),
    "where": lambda w, v, x: torch.where(w > 0, w, v * 2),
    "index": lambda w, v, x: w[[0, 2, 2]] * v[1],
    "mask": lambda w, v, x: w[torch.arange(w.shape[0]) % 3 == 0] @ v,
    "tokens": _tokens,
    "foreach": lambda w, v, x: torch._foreach_mul([w, v], 2.0)[0] + w,
    "solve": lambda w, v, x: torch.linalg.solve(w @ w.t() + 9 * torch.eye(w.shape[0]), v),
    "layer_norm": lambda w, v, x: functional.layer_norm(x, (x.shape[-1],), w[0], v[1]),
    "convolution": lambda w, v, x: functional.conv1d(x.t()[None], w[..., None]) + v[0, 0],
    "double": lambda w, v, x: w.double() @ v.double(),
    "in chunks": _handed_in_chunks,
    "other weights": _other_weights,
    "dlpack": lambda w, v, x: torch.from_dlpack(w.detach()) * v,
}
IN_A_BLOCK = (
    *("linear", "views", "multi_dot", "chunks", "saves", "keeps", "func.vmap"),
    *("functional_call", "scripted", "tensor", "detach", "copy", "tokens", "in chunks"),
    *("other weights", "cat", "foreach"),
)
"""Expressions that a block of a model computes of its own weights."""


@contextlib.contextmanager
def _hooked(*weights: Tensor) -> Any:
    """Inside, gradients of these are doubled."""
    handles = [each.register_hook(lambda g: g * 2) for each in weights if each.requires_grad]
    yield handles


def _by(make: Callable[[], Any]) -> Callable[[Expression], Expression]:
    """Run it inside of a context."""

    def way(expression: Expression) -> Expression:
        def run(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            with make():
                return expression(w, v, x)

        return run

    return way


def _checkpoint(reentrant: bool) -> Callable[[Expression], Expression]:
    return lambda expression: functools.partial(checkpoint, expression, use_reentrant=reentrant)


def _doubled(expression: Expression) -> Expression:
    """Double the gradient that the expression brings to its first argument."""

    def run(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        alias = w.view_as(w)
        if alias.requires_grad:
            alias.register_hook(lambda g: g * 2)
        return expression(alias, v, x)

    return run


def _compiled(expression: Expression) -> Expression:
    def run(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return _mixed_later(expression(w, v, x), w)

    return run


def _mixed_later(found: Tensor, w: Tensor) -> Tensor:
    compiled: Any = torch.compile(_squares, backend="eager", dynamic=False)
    return found * compiled(w).to(found.dtype)


WAYS: dict[str, Callable[[Expression], Expression]] = {
    "checkpoint": _checkpoint(reentrant=False),
    "reentrant": _checkpoint(reentrant=True),
    "recomputes": lambda run: functools.partial(Recomputes.apply, run),
    "autocast": _by(lambda: torch.autocast("cpu", torch.bfloat16)),
    "uncached": _by(lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)),
    "on the host": _by(lambda: torch.autograd.graph.save_on_cpu()),
    "alias": _doubled,
    "compiled": _compiled,
    "no_grad": _by(torch.no_grad),
}


def made(name: str, ways: tuple[str, ...]) -> Expression:
    """The expression of that name, run in these ways, of which the first is the innermost."""
    expression = EXPRESSIONS[name]
    for way in ways:
        expression = WAYS[way](expression)
    return expression


class Uses(nn.Module):
    """A block that computes an expression of its own weights: of a parameter, or with `borrows` of
    the weight of a module in it, which it does not call."""

    def __init__(self, width: int, name: str, borrows: bool) -> None:
        super().__init__()
        self.name = name
        self.inner = nn.Linear(width, width, bias=False)
        if not borrows:
            self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if "weight" in self._parameters:
            found = EXPRESSIONS[self.name](self.weight, self.weight, rows)
            x = x + 0.1 * self.inner(x)
        else:
            found = EXPRESSIONS[self.name](self.inner.weight, self.inner.weight, rows)
        if found.shape == rows.shape:
            return x + torch.tanh(found).view_as(x)
        return x + 0.1 * torch.tanh(found.float().square().mean()).to(x.dtype)
