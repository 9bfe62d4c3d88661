"""Products with a weight in tiles and a product of low rank that is added to it.

[Note: sums of tiles]
PEFT adds the factors of an adapter to a whole bank of experts, and autograd keeps the dense sum. In
tiles, each use of a tile adds the part of the factors that belongs to its experts. Only the tile
and the factors are kept. The backward computes the sum of the tile, and its product, once more.
Each expert has a product of its own, so the bits are those of the whole bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as trees


class Factors(NamedTuple):
    """`scaling * lhs @ rhs` is added to a bank (experts, n, m)."""

    lhs: torch.Tensor
    """(experts, n, rank)."""

    rhs: torch.Tensor
    """(experts, rank, m)."""

    scaling: float

    def of(self, begin: int, end: int) -> Factors:
        """The factors of the experts [begin, end)."""
        return Factors(self.lhs[begin:end], self.rhs[begin:end], self.scaling)

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight`, the same experts of a bank, plus the product, in its dtype."""
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, self.lhs, self.rhs, alpha=self.scaling)


def run_on_sum(
    weight: torch.Tensor, factors: Factors, run: Callable[..., torch.Tensor], *given: Any
) -> torch.Tensor:
    """`run(factors.added(weight), *given)`. Autograd keeps `weight`, `factors` and `given`."""
    leaves, form = trees.tree_flatten(given)
    lhs, rhs, scaling = factors
    return _RunOnSum.apply(run, form, scaling, weight, lhs, rhs, *leaves)  # type: ignore[no-untyped-call]


class _RunOnSum(torch.autograd.Function):
    """See `run_on_sum`."""

    @staticmethod
    def forward(ctx: Any, run: Any, form: Any, scaling: float, *leaves: Any) -> torch.Tensor:
        kind = leaves[0].device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.how = run, form, scaling
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = {at: leaf for at, leaf in enumerate(leaves) if at not in tensors}
        ctx.save_for_backward(*(leaves[at] for at in tensors))
        return _computed(leaves, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[3:]
        leaves = [
            ctx.others[at] if at in ctx.others else next(saved).detach().requires_grad_(needs)
            for at, needs in enumerate(needed)
        ]
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            output = _computed(leaves, *ctx.how)
        wanted = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, None, None, *(next(found) if needs else None for needs in needed)


def _computed(leaves: Sequence[Any], run: Any, form: Any, scaling: float) -> torch.Tensor:
    weight, lhs, rhs, *given = leaves
    return run(Factors(lhs, rhs, scaling).added(weight), *trees.tree_unflatten(given, form))


class AddedTo(torch.autograd.Function):
    """`total`, a handle for a bank plus the product of factors, as a function of these. Code that
    bypasses Python's API sees it."""

    @staticmethod
    def forward(
        ctx: Any, total: Any, bank: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor
    ) -> Any:
        ctx.scaling = total.factors.scaling
        ctx.save_for_backward(lhs, rhs)
        return total.again()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        lhs, rhs = ctx.saved_tensors
        part = gradient * ctx.scaling
        return None, gradient, part.bmm(rhs.mT), lhs.mT.bmm(part)
