"""`TiledLinear`: a linear layer in parts, each of which is moved alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.deepspeed.errors import DeepSpeedUsageError
from infinity.deepspeed.zero import GatheredParameters


class TiledLinear(nn.Module):
    """Like `torch.nn.Linear`, in `out_splits` times `in_splits` layers.

    `linears[row][column]` has the outputs from `out_parts[row]` to `out_parts[row + 1]` and the
    inputs from `in_parts[column]` to `in_parts[column + 1]`. The last column has the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `linear_cls`. With `input_is_already_split` the input is a list of
        parts. Without `combine_out_splits` the output is a list of parts. Raises `RuntimeError` for
        more parts than features."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        self.out_parts = _bounds("out", out_features, out_splits)
        widths = [end - start for start, end in pairwise(self.in_parts)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, end - start, bias=bias and column == in_splits - 1, **options)
                for column, width in enumerate(widths)
            )
            for start, end in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self._copy(init_linear)

    def forward(self, input_: Any) -> Any:
        """The output, (..., out_features), or its parts."""
        given = [input_] if self.in_splits == 1 and not self.input_is_already_split else input_
        if isinstance(given, torch.Tensor):
            sizes = [end - start for start, end in pairwise(self.in_parts)]
            given = torch.split(given, sizes, dim=-1)
        if len(given) != self.in_splits:
            raise DeepSpeedUsageError(
                f"TiledLinear got {len(given)} parts of its input; in_splits is {self.in_splits}"
            )
        return self._combined([self._row(row, given) for row in self.linears])

    def _row(self, row: Any, given: Sequence[torch.Tensor]) -> Any:
        total: Any = None
        for linear, part in zip(row, given, strict=True):
            output = linear(part)
            total = output if total is None else total + output
        return total

    def _combined(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the weight and the bias of `other`. All ranks call it."""
        with (
            GatheredParameters(list(other.parameters())),
            GatheredParameters(list(self.parameters()), modifier_rank=0),
        ):
            self._copy(other)

    @torch.no_grad()
    def _copy(self, other: nn.Linear) -> None:
        row: Any
        for row, (top, bottom) in zip(self.linears, pairwise(self.out_parts), strict=True):
            for linear, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                linear.weight.copy_(other.weight[top:bottom, left:right])
            if row[-1].bias is not None:
                row[-1].bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """For layers that return their output and the bias separately."""

    def _row(self, row: Any, given: Sequence[torch.Tensor]) -> Any:
        total: Any = None
        bias: Any = None
        for linear, part in zip(row, given, strict=True):
            output, bias = linear(part)
            total = output if total is None else total + output
        return total, bias

    def _combined(self, outputs: list[Any]) -> Any:
        if not self.combine_out_splits:
            return [output for output, _ in outputs], [bias for _, bias in outputs]
        biases = [bias for _, bias in outputs if bias is not None]
        whole = torch.cat([output for output, _ in outputs], dim=-1)
        return whole, torch.cat(biases, dim=-1) if biases else None


def _bounds(name: str, features: int, parts: int) -> list[int]:
    """The starts of the parts, and the end of the last one. The first parts are longer by one."""
    if not 1 <= parts <= features:
        raise DeepSpeedUsageError(
            f"TiledLinear: {name}_splits={parts} must be from 1 to {features}, the number of "
            "features"
        )
    size, rest = divmod(features, parts)
    return [part * size + min(part, rest) for part in range(parts + 1)]
