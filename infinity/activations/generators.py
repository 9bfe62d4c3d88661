"""Random generators of Python, numpy and torch, so that a repeated forward draws the same numbers.
Torch's checkpoints restore torch's own generator of each device."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class DrawnState(NamedTuple):
    """A random generator: how to read and set its state, and its state when it was noted."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    state: Any

    def was_used(self) -> bool:
        """Whether it has another state now."""
        return not _same(self.read(), self.state)


def generator_state(value: Any) -> DrawnState | None:
    """The state of a random generator; None for any other object."""
    if isinstance(value, torch.Generator):
        return DrawnState(value.get_state, value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return DrawnState(value.getstate, value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return DrawnState(lambda: bits.state, lambda new: setattr(bits, "state", new), bits.state)
    if numpy is not None and isinstance(value, numpy.RandomState):
        return DrawnState(value.get_state, value.set_state, value.get_state())
    return None


def common_states() -> list[DrawnState]:
    """The states of the modules `random` and `numpy.random`."""
    found = [DrawnState(random.getstate, random.setstate, random.getstate())]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "set_state"):
        found.append(DrawnState(numpy.get_state, numpy.set_state, numpy.get_state()))
    return found


def _same(state: Any, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, Mapping):
        return all(_same(state[key], other[key]) for key in state)
    if type(state) is tuple and len(state) < 10:
        return all(map(_same, state, other))
    return bool((state == other).all()) if hasattr(state, "all") else bool(state == other)
