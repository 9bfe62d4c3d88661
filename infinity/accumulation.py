"""Gradients of several micro-batches for one optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import nn

from infinity.engine import Engine, engine
from infinity.errors import ConfigError, in_words
from infinity.modules.interleave import MicroBatch


def accumulate(
    model: nn.Module,
    micro_batches: Iterable[Any],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    order: Literal["vertical", "horizontal"] = "vertical",
    reduction: Literal["mean", "sum"] = "mean",
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward of every micro-batch; returns their losses (0-dimensional, detached,
    not divided).

    `model` is wrapped. A mapping is passed as `model(**batch)`, a tuple or a list as
    `model(*batch)`, and any other value as `model(batch)`. `loss(outputs, batch)` makes the loss
    (default: `outputs.loss`). With `reduction="mean"` each loss is divided by the number of
    micro-batches before its backward. `scale` is applied last: `optimizer.scale`, or `scale` of a
    `torch.amp.GradScaler`. Forward and loss run under the autocast around the call, backward
    outside of it.

    order="horizontal" runs one micro-batch after the other. order="vertical" takes all of them
    through a unit before the next unit. So parameters, and gradients on NVMe, move once per call
    and not once per micro-batch. Losses, gradients and weights have the same bits in both orders.
    They have the bits of a loop of your own, too, unless the model draws random numbers: here each
    micro-batch draws from a state of its own, the first one from the current state. In vertical
    order the model's code runs on several threads, one at a time. The activations of all
    micro-batches are alive at once: with activation checkpointing one hidden state per checkpoint
    and micro-batch. A module with values from one forward to the next (running statistics) sees
    them unit by unit. Of several errors the first one is raised.

    A callable instead of a batch does forward and backward itself: `work(begin_backward)` calls
    `begin_backward(loss)` right before the backward, and returns the loss. Then all are callables,
    and `loss`, `reduction` and `scale` have no part in it.

    Raises `ConfigError` for invalid values, under `torch.no_grad()`, and if `model` is not wrapped;
    `RuntimeError` inside of a forward or backward of the model, or of another call.
    """
    interleaver, batches = engine(model).interleaver(), _listed(micro_batches)
    _check("order", order, ("vertical", "horizontal"))
    _check("reduction", reduction, ("mean", "sum"))
    _check_work(batches, loss, scale)
    works: _Works | _Callables = _Callables(batches)
    if not callable(batches[0]):
        autocast = [
            _autocast_of(kind)
            for kind in dict.fromkeys(("cpu", interleaver.device.torch.type))
            if torch.is_autocast_enabled(kind)
        ]
        divisor = len(batches) if reduction == "mean" else None
        works = _Works(model, batches, loss, divisor, scale, autocast)
    interleaver.run(
        [functools.partial(works.run, index) for index in range(len(batches))],
        order == "vertical",
    )
    return works.losses


class _Callables:
    """Micro-batches that run forward and backward themselves."""

    def __init__(self, works: Sequence[Callable[[Callable[..., None]], torch.Tensor]]) -> None:
        self._works = works
        self.losses = [torch.empty(0)] * len(works)
        """The loss that each returned, detached."""

    def run(self, index: int, micro_batch: MicroBatch) -> None:
        """Run the micro-batch with this index."""
        self.losses[index] = self._works[index](micro_batch.begin_backward).detach()


class _Works:
    """Forward and backward of each micro-batch of one call of `accumulate`."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Callable[[Any, Any], torch.Tensor] | None,
        divisor: int | None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None,
        autocast: Sequence[tuple[str, dict[str, Any]]],
    ) -> None:
        """Losses are divided by `divisor`, unless it is None. `autocast` is on around the call."""
        self._model, self._batches, self._loss = model, batches, loss
        self._divisor, self._scale, self._autocast = divisor, scale, autocast
        self.losses = [torch.empty(0)] * len(batches)
        """The loss of each micro-batch, detached and not divided."""

    def run(self, index: int, micro_batch: MicroBatch) -> None:
        """Run the micro-batch with this index."""
        value = self._forward(self._batches[index])
        self.losses[index] = value.detach()
        total = value if self._divisor is None else value / self._divisor
        total = total if self._scale is None else self._scale(total)
        micro_batch.begin_backward(total)
        with ExitStack() as stack:
            for kind, _ in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if self._autocast:
                # A recomputation cannot use casts that were made without autograd.
                torch.clear_autocast_cache()
            total.backward()
        if self._autocast:
            torch.clear_autocast_cache()

    def _forward(self, batch: Any) -> torch.Tensor:
        with ExitStack() as stack:
            for kind, options in self._autocast:
                stack.enter_context(torch.autocast(kind, **options))
            outputs = _call(self._model, batch)
            value = _loss_of(outputs) if self._loss is None else self._loss(outputs, batch)
            del outputs
            _check_loss(value)
        return value


def no_sync(wrapped: nn.Module | Engine) -> AbstractContextManager[None]:
    """Inside, the gradients of backwards wait for later gradients, before ranks send each other
    more than their memory demands:

        for number, batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else infinity.no_sync(model):
                model(**batch).loss.backward()

    The sums are the same to rounding, also when the last backward before the step is inside. With
    stage 0, and along the replicate dimension of a mesh, each rank sums its own gradients. The
    first backward outside, or the step, averages them over the ranks. With stages 2 and 3 a rank
    only has memory for its shard of the gradients. So every backward reduce-scatters them, inside
    as outside. With stage 1 whole gradients are kept, and reduced once per step anyway. All ranks
    must do alike. Also `infinity.engine(model).no_sync()` and, as with DistributedDataParallel,
    `model.no_sync()`.
    """
    return (wrapped if isinstance(wrapped, Engine) else engine(wrapped)).no_sync()


def _check_work(batches: list[Any], loss: object, scale: object) -> None:
    """Raise `ConfigError` if there is no work, or work that cannot be done together."""
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"infinity.accumulate: loss is {in_words(loss)}; give a function of what the model "
            "returned and of its micro-batch"
        )
    if not batches:
        raise ConfigError("there are no micro-batches to accumulate")
    if not torch.is_grad_enabled():
        raise ConfigError(
            "infinity.accumulate runs backward; call it outside of torch.no_grad() and "
            "torch.inference_mode()"
        )
    others = [each for each in batches if not callable(each)]
    if 0 < len(others) < len(batches):
        raise ConfigError(
            f"infinity.accumulate: some micro-batches are callables and one is "
            f"{in_words(others[0])}; give callables only, or batches only"
        )
    if not others and (loss is not None or scale is not None):
        raise ConfigError(
            "infinity.accumulate: micro-batches that are callables compute and scale their losses "
            "themselves; leave out loss and scale"
        )


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"infinity.accumulate: {name}={value!r} must be one of {', '.join(map(repr, allowed))}"
        )


def _listed(micro_batches: object) -> list[Any]:
    """All micro-batches as a list; raises `ConfigError` for a single micro-batch."""
    if isinstance(micro_batches, (Mapping, torch.Tensor, str)):
        raise ConfigError(
            f"infinity.accumulate takes a list of micro-batches, not {in_words(micro_batches)}; "
            "for a single one write [batch]"
        )
    if not isinstance(micro_batches, Iterable):
        raise ConfigError(
            f"infinity.accumulate takes a list of micro-batches, not {in_words(micro_batches)}"
        )
    return list(micro_batches)


def _loss_of(outputs: Any) -> Any:
    """The loss that a model of transformers returns if its inputs have labels."""
    found = getattr(outputs, "loss", None)
    if found is None:
        raise ConfigError(
            f"the model returned no loss, but {in_words(outputs)}: put labels into each "
            "micro-batch, or give infinity.accumulate(..., loss=function)"
        )
    return found


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else in_words(value)
        )
        raise ConfigError(
            f"infinity.accumulate: the loss is {found}; it must be a tensor of one element"
        )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _autocast_of(kind: str) -> tuple[str, dict[str, Any]]:
    """The autocast that is on for this kind of device, as arguments of `torch.autocast`."""
    return kind, {
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
