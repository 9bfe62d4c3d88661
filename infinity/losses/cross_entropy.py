"""Computes the cross entropy of a large vocabulary, with the logits of a few tokens at a time.

[Note: chunks of tokens]
The forward computes the logits of one chunk of tokens, keeps their loss, and drops them. The
backward computes them again. So a step has one more product with the weight of the projection, and
autograd saves hidden states instead of logits. Each chunk uses torch's own operators. So with one
chunk the results are bitwise equal to the plain model.

[Note: the sum of chunks]
The gradient of the weight is the sum over all chunks. A plain model computes it in one product,
which adds in fp32 and rounds once. Here the factors are widened to at least fp32, and the products
are added in that precision. So the sum is rounded once, too.

Example: 64 chunks in bf16 have the gradients 256 and then 63 times 1. The next bf16 number after
256 is 258, so a sum in bf16 stays 256. The true sum is 319, which rounds to 320.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional


class LogitsStep(NamedTuple):
    """One elementwise operation on logits, between the projection and the loss."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    """The dtype of the result."""
    saves: bool
    """Whether autograd saves the result."""


class AutocastState(NamedTuple):
    """The autocast state of one kind of device, for a backward to enter again."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> AutocastState:
        """The current state for this `kind` of device."""
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def entered(self) -> AbstractContextManager[object]:
        """A context with this autocast, without its cache of casts."""
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


class LossReduction(NamedTuple):
    """The arguments of torch's `cross_entropy` that select, weigh and add tokens."""

    reduction: str
    """"none", "sum" or "mean"."""
    ignore_index: int
    label_smoothing: float


@dataclass(frozen=True)
class EntropyPlan:
    """The computation from hidden states to a loss, and its limit of memory."""

    cast: torch.dtype | None
    """The dtype to which autocast converts the factors of the projection; None: no conversion."""
    steps: Sequence[LogitsStep]
    autocast: AutocastState
    """The autocast around the loss."""
    reduction: LossReduction
    max_bytes: int

    def bytes_per_token(self, vocabulary: int, dtype: torch.dtype) -> int:
        """The most bytes that the logits of one token in `dtype`, with all results computed from
        them, take at once.

        Example: 256,000 logits in bf16, a conversion to fp32, and the loss. The backward of the
        log-softmax holds three tables in fp32: the log-softmax, its gradient, and the gradient of
        its input, 3.1 MB together. The logits are freed before.
        """
        last = self.steps[-1].dtype if self.steps else dtype
        loss = max(last.itemsize, 4) if self.autocast.enabled else last.itemsize
        kept = sum(step.dtype.itemsize for step in self.steps if step.saves)
        return vocabulary * (kept + 3 * loss)

    def parts(self, tokens: int, vocabulary: int, dtype: torch.dtype) -> list[slice]:
        """The chunks of `tokens` tokens, as slices of nearly equal length, at least 1."""
        most = max(self.max_bytes // self.bytes_per_token(vocabulary, dtype), 1)
        number = -(-tokens // most)
        ends = [tokens * each // number for each in range(number + 1)]
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def of_a_chunk(self, parts: int) -> str:
        """The reduction of each chunk, if there are `parts` chunks."""
        whole = parts == 1 or self.reduction.reduction == "none"
        return self.reduction.reduction if whole else "sum"

    def loss(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        reduction: str,
    ) -> torch.Tensor:
        """The loss of one chunk, from logits (tokens, vocabulary) and classes (tokens,)."""
        with self.autocast.entered():
            for step in self.steps:
                logits = step.apply(logits)
            return functional.cross_entropy(
                logits,
                target,
                class_weight,
                ignore_index=self.reduction.ignore_index,
                reduction=reduction,
                label_smoothing=self.reduction.label_smoothing,
            )

    def total(self, target: torch.Tensor, class_weight: torch.Tensor | None) -> torch.Tensor:
        """The divisor of a mean: the number of tokens that count, or the sum of their weights."""
        counted = target != self.reduction.ignore_index
        return counted.sum() if class_weight is None else class_weight[target[counted]].sum()


def project(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cast: torch.dtype | None,
) -> torch.Tensor:
    """The logits (..., vocabulary) of `hidden` (..., width), as `nn.Linear` computes them under an
    autocast to `cast`."""
    # Autocast would cache the cast of the weight from a forward without autograd.
    with torch.autocast(hidden.device.type, enabled=False):
        return functional.linear(*(_cast(each, cast) for each in (hidden, weight, bias)))


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of `hidden` (tokens, width), with at most `plan.max_bytes` bytes of logits at once.
    See [Note: chunks of tokens]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        plan: EntropyPlan,
    ) -> torch.Tensor:
        """Return the loss: (tokens,) with the reduction "none", otherwise ()."""
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        weight, bias = _cast(weight, plan.cast), _cast(bias, plan.cast)
        parts = plan.parts(len(hidden), len(weight), plan.cast or hidden.dtype)
        reduction = plan.of_a_chunk(len(parts))
        losses = []
        for part in parts:
            logits = project(hidden[part], weight, bias, plan.cast)
            losses.append(plan.loss(logits, target[part], class_weight, reduction))
            del logits  # before the next chunk makes its own
        if len(losses) == 1:
            return losses[0]
        if reduction == "none":
            return torch.cat(losses)
        wide = torch.promote_types(losses[0].dtype, torch.float32)
        loss = torch.stack(losses).sum(dtype=wide)
        if plan.reduction.reduction == "mean":
            loss = loss / plan.total(target, class_weight)
        return loss.to(losses[0].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of hidden states, weight and bias. Raises `RuntimeError` for a
        second derivative."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a chunked loss has no second derivative (create_graph=True); take it off with "
                "infinity.chunked_loss(model, max_bytes=None)"
            )
        plan: EntropyPlan = ctx.plan
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        parts = plan.parts(len(hidden), len(weight), plan.cast or hidden.dtype)
        reduction = plan.of_a_chunk(len(parts))
        if reduction != plan.reduction.reduction:  # chunks are summed, and the loss is a mean
            gradient = gradient / plan.total(target, class_weight).to(gradient.dtype)
        sums = _ChunkSums(ctx.needs_input_grad[:3], hidden, weight, bias, len(parts) == 1)
        weight, bias = _cast(weight, plan.cast), _cast(bias, plan.cast)
        for part in parts:
            inputs = _cast(hidden[part], plan.cast).detach()
            share = gradient[part] if reduction == "none" else gradient
            with torch.enable_grad():
                logits = project(inputs.requires_grad_(), weight, bias, plan.cast)
                edge = get_gradient_edge(logits)
                loss = plan.loss(logits, target[part], class_weight, reduction)
            del logits  # the graph of the loss has saved the tensors that it needs
            (of_logits,) = torch.autograd.grad(loss, [edge], share)
            del loss, edge
            sums.add(part, of_logits, inputs.detach(), weight)
            del of_logits
        return *sums.results(), None, None, None


class _ChunkSums:
    """Collects the wanted gradients of hidden states (tokens, width), weight (vocabulary, width)
    and bias (vocabulary,), chunk by chunk. See [Note: the sum of chunks]."""

    def __init__(
        self,
        wanted: Sequence[bool],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        alone: bool,
    ) -> None:
        self._dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        self._alone = alone
        self._hidden = torch.empty_like(hidden) if wanted[0] and not alone else None
        self._weight = self._bias = None
        self._wanted = wanted
        if not alone:
            self._weight = _wide_zeros(weight) if wanted[1] else None
            self._bias = _wide_zeros(bias) if wanted[2] and bias is not None else None

    def add(
        self, part: slice, of_logits: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Add the chunk `part`: the gradient `of_logits` (tokens, vocabulary), and the factors of
        the projection, `inputs` (tokens, width) and `weight` (vocabulary, width)."""
        if self._alone:
            self._hidden = of_logits.mm(weight) if self._wanted[0] else None
            self._weight = of_logits.t().mm(inputs) if self._wanted[1] else None
            self._bias = of_logits.sum(0) if self._wanted[2] else None
            return
        if self._hidden is not None:
            self._hidden[part] = of_logits.mm(weight)
        if self._weight is not None:
            wide = self._weight.dtype
            self._weight.addmm_(of_logits.to(wide).t(), inputs.to(wide))
        if self._bias is not None:
            self._bias += of_logits.sum(0, dtype=self._bias.dtype)

    def results(self) -> list[torch.Tensor | None]:
        """The gradients of hidden states, weight and bias, each in the dtype of its tensor; None if
        not wanted."""
        found = (self._hidden, self._weight, self._bias)
        return [
            None if each is None else each.to(dtype)
            for each, dtype in zip(found, self._dtypes, strict=True)
        ]


def _wide_zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
