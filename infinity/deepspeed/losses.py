"""Losses before a backward: divided for an accumulation, and scaled in fp16.

[Note: two ways to go backward]
`engine.backward(loss)` divides the loss by the number of forwards of a step, and scales it in fp16.
A script may also call `loss.backward()` itself. Then the engine does not see the loss, and divides
where gradients enter the model: each output of the engine is another tensor of the same data, whose
gradient is divided on its way back. `engine.backward` switches that off for its own pass, also for
other engines whose outputs are in the loss. In fp16 a script calls `engine.scale(loss).backward()`.
Without the scale a pass raises, because gradients would vanish.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from infinity.backward import handed_on
from infinity.deepspeed.answers import Answers
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.errors import in_words
from infinity.losses.lazy_logits import LazyLogits
from infinity.optim.optimizer import Optimizer


class Losses:
    """Divides and scales the losses of one engine."""

    running: ClassVar[weakref.WeakSet[Losses]] = weakref.WeakSet()
    """The `Losses` of all engines whose `backward` runs and divides the loss itself."""

    def __init__(self, engine: Answers) -> None:
        self._engine = engine

    def _divisor(self, by_forwards: bool = True) -> float:
        """The divisor of a loss. Ranks average gradients. So for a sum, the loss is multiplied by
        the number of ranks."""
        engine = self._engine
        ranks = engine.world_size if engine.settings.average == "sum" else 1
        return (engine.gradient_accumulation_steps() if by_forwards else 1) / ranks

    def backward(
        self, loss: object, optimizer: Optimizer, retain_graph: bool, by_forwards: bool
    ) -> torch.Tensor:
        """Run the backward from `loss`. Returns the divided loss."""
        wide, divisor = checked(loss), self._divisor(by_forwards)
        divided = wide if divisor == 1 else wide / divisor
        Losses.running.add(self)
        try:
            optimizer.scale(divided).backward(retain_graph=retain_graph)
        finally:
            Losses.running.discard(self)
        return divided

    def watch(self, outputs: Any) -> Any:
        """`outputs` of the model. If the script may run the backward itself, they have other
        tensors of the same data, through which gradients enter the model."""
        optimizer = self._engine.optimizer
        if optimizer is None or (self._divisor() == 1 and optimizer.clipping.scaler is None):
            return outputs
        return mapped(_Entrances(self, outputs).of, outputs)

    def enter(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that enters the model for the `gradient` of an output."""
        optimizer = self._engine.optimizer
        if self in Losses.running or optimizer is None:
            return gradient
        if not optimizer.loss_is_scaled:
            raise RuntimeError(
                "Loss scaling is required in fp16: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        divisor = self._divisor()
        return gradient if divisor == 1 or Losses.running else gradient / divisor


class _Entrances:
    """The tensors in the `outputs` of one forward, as the script gets them. Equal tensors stay
    equal, and views of one tensor stay views of one tensor."""

    def __init__(self, losses: Losses, outputs: Any) -> None:
        self._losses = losses
        self._made: dict[int, torch.Tensor] = {}
        found: dict[int, torch.Tensor] = {}
        mapped(lambda value: found.setdefault(id(value), value), outputs)
        tensors = [each for each in found.values() if type(each) is torch.Tensor]
        self._shared = Counter(id(_base(each)) for each in tensors)

    def of(self, value: Any) -> Any:
        """The replacement of `value`, a leaf of the outputs."""
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._entrance(value)
        return self._made[id(value)]

    def _entrance(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, LazyLogits):
            return value.through(self._enter)
        base = _base(value)
        if base is value or self._shared[id(base)] < 2 or value.is_conj() or value.is_neg():
            return self._enter(value)
        whole: torch.Tensor = self.of(base)
        return whole.as_strided(value.size(), value.stride(), value.storage_offset())

    def _enter(self, value: torch.Tensor) -> torch.Tensor:
        return _Entrance.apply(value, self._losses)  # type: ignore[no-untyped-call]


def _base(value: torch.Tensor) -> torch.Tensor:
    """The base of the view `value` in autograd, if it has the same dtype; else `value`."""
    base = value._base
    return value if base is None or base.grad_fn is None or base.dtype != value.dtype else base


class _Entrance(torch.autograd.Function):
    """The place where gradients enter a model; see [Note: two ways to go backward]."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, losses: Losses) -> torch.Tensor:
        ctx.losses = losses
        return handed_on(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.losses.enter(gradient), None


def checked(loss: object) -> torch.Tensor:
    """`loss` in fp32 or wider, because a scaled loss would overflow fp16. Raises `ConfigError` if
    it is no loss."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else in_words(loss)
        )
        raise DeepSpeedConfigError(f"the loss is {found}; it must be a scalar tensor")
    if not loss.requires_grad:
        raise DeepSpeedConfigError(
            "the loss has no gradients to give: it was computed under torch.no_grad(), of what was "
            "detached, or of frozen parameters alone"
        )
    return loss.float() if loss.dtype.itemsize < 4 else loss


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with the results of `function` for its leaves, also inside of dataclasses."""

    def leaf(value: Any) -> Any:
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return function(value)
        made = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(made, each.name, mapped(function, getattr(value, each.name)))
        return made

    return tree_map(leaf, tree)
