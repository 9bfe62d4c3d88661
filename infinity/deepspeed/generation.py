"""Generation of text with an engine that trains: the functions that frameworks call before and
after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from infinity.deepspeed.zero import GatheredParameters

_Model = TypeVar("_Model", bound=nn.Module)


@contextmanager
def unwrap_model_for_generation(model: _Model) -> Iterator[_Model]:
    """Inside the context, all parameters of an engine are in memory, so that many forwards read
    them once."""
    with GatheredParameters(model.parameters()):
        yield model


class ParameterOffload:
    """The `parameter_offload` of an optimizer of DeepSpeed, as TRL uses it. TRL removes its hooks
    before generation, and restores them. There are none, because hooks of this engine leave
    gathered parameters alone. So it is also the module without parameters that TRL visits."""

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> ParameterOffload:
        """The module that TRL visits."""
        return self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """None."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None."""
        return iter(())

    def _register_deepspeed_module(self, module: object) -> None:
        """Does nothing."""
