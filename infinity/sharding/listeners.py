"""The objects that the parts of a unit tell and ask. They come from higher layers.

Parts know facts and no unit, so each call names the unit by its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.device import add_alone
from infinity.sharding.facts import UnitFacts
from infinity.tiers.block import Block

Result = TypeVar("Result")


class Border:
    """The calls from units to the hooks of the model. This base class does nothing."""

    def touched(self, facts: UnitFacts) -> bool:
        """A parameter was touched while its unit is SHARDED. Returns True if the unit is UNSHARDED
        now."""
        return False

    def records_backward(self) -> bool:
        """Whether code of a backward runs now whose graph may outlive the backward."""
        return False

    def copied(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """A copy of parameter `index`, inside a forward or a backward of this thread; None outside
        of both."""
        return None

    def call(self, module: nn.Module, function: Callable[..., Result], *inputs: Any) -> Result:
        """`function(*inputs)`, with the parameters of `module` present as in a call of it."""
        return function(*inputs)

    def packing(self) -> AbstractContextManager[object]:
        """The context in which autograd saves views of units so that the units may move."""
        return nullcontext()

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` if another thread is inside a forward or backward. `what` names the
        action of the caller."""

    def end_interrupted(self, what: str) -> None:
        """End the calls that an exception cut off, because their uses would be in the way. Raises
        like `check_thread`."""


class Updates:
    """The calls from units to the updater. This base class adds with one thread, and does nothing
    else."""

    def gradients_came(self, facts: UnitFacts) -> None:
        """The unit has as many gradients as in the last step, so they may be final."""

    def square_ahead(self, facts: UnitFacts, all_came: bool) -> float | None:
        """The sum of squares of the gradients, if it is useful before the step. `all_came` says
        that there are as many gradients as in the last step."""
        return None

    def add_gradients(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.add_(source)` for contiguous tensors (n,) of one dtype, with any number of
        threads."""
        add_alone(target, source)

    def rollback(self, facts: UnitFacts) -> None:
        """The content or the gradients of the unit are about to change. Returns when no speculative
        update of the unit is in flight."""

    def await_readers(self, facts: UnitFacts) -> None:
        """Return when no update reads the gradients of the unit. It waits for no place on the
        compute device."""

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten outside of a step. Returns when that is allowed."""

    def drain(self) -> None:
        """Return when no update is under way. Updates that began before their step are rolled back.
        Parameters show all other updates."""

    def look(self) -> None:
        """Return when parameters may be read."""


class Grads:
    """The calls from units to the answers of `.grad`. This base class has no gradients."""

    def get(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`."""
        return None

    def set(self, facts: UnitFacts, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`; None forgets it."""

    def fetch(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """A copy of `.grad` on the host, whole."""
        return None

    def changing(
        self,
        facts: UnitFacts,
        indices: Iterable[int],
        change: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """The gradients of these parameters are about to change. `change` does the same to a tensor
        in place; None means that they are replaced."""

    def forgetting(self, facts: UnitFacts, indices: Iterable[int]) -> None:
        """The gradients of these parameters are about to be forgotten."""

    def settled(self, facts: UnitFacts) -> None:
        """The gradients that the engine has of the unit are final."""


class UnitListeners:
    """The listeners of the units of an engine. All its units share one of these.

    The listeners are made of filled units, so `connect` comes last. Until then a unit tells the
    base classes.
    """

    def __init__(self) -> None:
        self.updates, self.border, self.grads = Updates(), Border(), Grads()

    def connect(self, updates: Updates, border: Border, grads: Grads) -> None:
        """From now on units tell these."""
        self.updates, self.border, self.grads = updates, border, grads
