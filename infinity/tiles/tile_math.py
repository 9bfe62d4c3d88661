"""Products with a weight in tiles, one tile after the other.

[Note: memory of a product]
The output is allocated once. Each tile writes its own columns. The nodes of autograd pass tensors
with a shape and one element of memory. A token stands for the columns that a tile has written. A
carrier stands for the gradient of the input. So the backward knows the order of the tiles, and each
tile gets a view of the gradient of the output.

[Note: one rounding]
The gradient of the input is a sum over the tiles. Each tile adds its product to the sum of the
tiles behind it, in fp32 if the input has 16 bits. The sum is rounded to the dtype of the input
once, as in one kernel for the whole weight. Products of 16-bit matrices are not rounded before
that. A GPU computes them with `out_dtype`, other devices with fp32 copies of `_ROWS` outputs at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_ATEN: Any = torch.ops.aten
_ROWS = 1024


def linear(
    given: torch.Tensor, tiles: Sequence[nn.Module], bias: torch.Tensor | None, across: bool
) -> torch.Tensor:
    """`given` (..., n) times a weight (m, n) in `tiles` of its rows, or with `across` a weight (n,
    m) in tiles of its columns, plus `bias` (m,): (..., m). Autocast applies as in `F.linear`."""
    kind = given.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    given = _cast(given, lower)
    bias = None if bias is None else _cast(bias, lower)
    every: list[Any] = list(tiles)
    widths = [tile.weight.shape[1 if across else 0] for tile in every]
    with torch.autocast(kind, enabled=False):
        output = given.new_empty((*given.shape[:-1], sum(widths)))
        carrier: Any = _Carry.apply(given) if given.requires_grad else None  # type: ignore[no-untyped-call]
        tokens, begin = [], 0
        for tile, width in zip(every, widths, strict=True):
            added = None if bias is None else bias.detach()[begin : begin + width]
            place = output.narrow(-1, begin, width)
            carrier, token = tile(_linear_tile, lower, carrier, given, added, place, across)
            tokens.append(token)
            begin += width
        joined: torch.Tensor = _JoinColumns.apply([output], widths, bias, *tokens)  # type: ignore[no-untyped-call]
    return joined


def embedding(
    ids: torch.Tensor, tiles: Sequence[nn.Module], padding: int | None, by_count: bool
) -> torch.Tensor:
    """The rows `ids` of a weight (n, m) in `tiles` of its rows: (*ids.shape, m). `padding` is a row
    that gets no gradient. With `by_count`, gradients are divided by how often an id occurs. Raises
    `IndexError` on the CPU for an id that is no row; on a GPU an assertion fails there.

    Every tile is used, whatever the ids are, so that all ranks bring the same units in one order.
    """
    every: list[Any] = list(tiles)
    first = every[0].weight
    rows = [tile.weight.shape[0] for tile in every]
    _check_ids(ids, sum(rows))
    output = torch.empty((*ids.shape, first.shape[1]), dtype=first.dtype, device=ids.device)
    tokens, begin = [], 0
    for tile, count in zip(every, rows, strict=True):
        tokens.append(tile(_embedding_tile, ids, begin, output, padding, by_count))
        begin += count
    return _JoinRows.apply([output], *tokens)  # type: ignore[no-untyped-call]


def _cast(tensor: torch.Tensor, lower: torch.dtype | None) -> torch.Tensor:
    """`tensor` as autocast to `lower` passes it to a product."""
    if lower is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(lower)


def _check_ids(ids: torch.Tensor, rows: int) -> None:
    outside = ((ids < 0) | (ids >= rows)).any()
    if ids.device.type == "cpu":
        if outside:
            raise IndexError("index out of range in self")
    else:
        torch._assert_async(~outside)


def _linear_tile(weight: torch.Tensor, lower: torch.dtype | None, *rest: Any) -> Any:
    return _LinearTile.apply(_cast(weight, lower), *rest)  # type: ignore[no-untyped-call]


def _embedding_tile(weight: torch.Tensor, *rest: Any) -> Any:
    return _EmbeddingTile.apply(weight, *rest)  # type: ignore[no-untyped-call]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of inputs of `dtype` are summed up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _shape_alone(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape of `like`, with one element of memory."""
    return torch.zeros((), dtype=dtype, device=like.device).expand(like.shape)


class _Carry(torch.autograd.Function):
    """Begins the carrier of the gradient of the input: (..., n) in `_sum_dtype`."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.dtype = given.dtype
        return _shape_alone(given, _sum_dtype(given.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype)


class _LinearTile(torch.autograd.Function):
    """Writes the columns of one tile to `place`. Returns the carrier and a token.

    The gradient of the input comes through the carrier, not from here. The input is still an
    argument that autograd knows, so that the gradient of a gradient finds it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        carrier: torch.Tensor | None,
        given: torch.Tensor,
        bias: torch.Tensor | None,
        place: torch.Tensor,
        across: bool,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.across = across
        ctx.save_for_backward(
            given if weight.requires_grad else None, weight if carrier is not None else None
        )
        flat = given.reshape(-1, given.shape[-1])
        into = place[None] if place.ndim == 1 else place.flatten(0, -2)
        matrix = weight if across else weight.t()
        if bias is None:
            torch.mm(flat, matrix, out=into)
        else:
            torch.addmm(bias, flat, matrix, out=into)
        carried = None if carrier is None else _shape_alone(carrier, carrier.dtype)
        return carried, _shape_alone(place, place.dtype)

    @staticmethod
    def backward(ctx: Any, behind: torch.Tensor | None, gradient: torch.Tensor | None) -> Any:
        given, weight = ctx.saved_tensors
        nothing = [None] * 4
        if gradient is None:
            return None, behind, *nothing
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight, carried = None, None
        if ctx.needs_input_grad[0]:
            inputs = given.reshape(-1, given.shape[-1])
            of_weight = inputs.t().mm(flat) if ctx.across else flat.t().mm(inputs)
        if ctx.needs_input_grad[1]:
            matrix = weight.t() if ctx.across else weight
            shape = (*gradient.shape[:-1], matrix.shape[1])
            total = None if behind is None else behind.reshape(-1, matrix.shape[1])
            carried = _added(total, flat, matrix).view(shape)
        return of_weight, carried, *nothing


class _EmbeddingTile(torch.autograd.Function):
    """Writes to `output` the rows of the `ids` in one tile, which begins at row `begin`. Returns a
    token."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        begin: int,
        output: torch.Tensor,
        padding: int | None,
        by_count: bool,
    ) -> torch.Tensor:
        rows = weight.shape[0]
        ctx.begin, ctx.rows, ctx.padding, ctx.by_count = begin, rows, padding, by_count
        ctx.save_for_backward(ids)
        here = (ids >= begin) & (ids < begin + rows)
        found = weight.index_select(0, (ids - begin).clamp(0, rows - 1).reshape(-1))
        torch.where(here[..., None], found.view(output.shape), output, out=output)
        return _shape_alone(output, output.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        here = (ids >= ctx.begin) & (ids < ctx.begin + ctx.rows)
        if ctx.padding is not None:
            here &= ids != ctx.padding
        # One more row takes the gradients of other tiles, and counts as padding.
        local = torch.where(here, ids - ctx.begin, ctx.rows)
        found = _ATEN.embedding_dense_backward(
            gradient, local, ctx.rows + 1, ctx.rows, ctx.by_count
        )
        return found[: ctx.rows], *[None] * 5


class _JoinColumns(torch.autograd.Function):
    """The output. Each token stands for some of its columns."""

    @staticmethod
    def forward(
        ctx: Any,
        output: list[torch.Tensor],
        widths: list[int],
        bias: torch.Tensor | None,
        *tokens: torch.Tensor,
    ) -> torch.Tensor:
        ctx.widths = widths
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return None, None, of_bias, *gradient.split(ctx.widths, -1)


class _JoinRows(torch.autograd.Function):
    """The output. Each token stands for some of its rows."""

    @staticmethod
    def forward(ctx: Any, output: list[torch.Tensor], *tokens: torch.Tensor) -> torch.Tensor:
        ctx.count = len(tokens)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *[gradient] * ctx.count


def _added(
    total: torch.Tensor | None, gradient: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """`total` (k, n) plus `gradient` (k, m) times `matrix` (m, n), in the dtype of sums. Changes
    `total`, unless autograd watches. See [Note: one rounding]."""
    dtype = _sum_dtype(matrix.dtype)
    if torch.is_grad_enabled():
        product = gradient.to(dtype).mm(matrix.to(dtype))
        return product if total is None else total + product
    if dtype is matrix.dtype:
        return gradient.mm(matrix) if total is None else total.addmm_(gradient, matrix)
    if matrix.is_cuda:
        product = torch.mm(gradient, matrix, out_dtype=dtype)
        return product if total is None else total.add_(product)
    if total is None:
        total = torch.zeros(len(gradient), matrix.shape[1], dtype=dtype, device=matrix.device)
    for begin in range(0, len(matrix), _ROWS):
        rows = slice(begin, begin + _ROWS)
        total.addmm_(gradient[:, rows].to(dtype), matrix[rows].to(dtype))
    return total
