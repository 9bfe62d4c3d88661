"""Generating text with an engine that trains: what frameworks do before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from infinity.deepspeed.zero import GatheredParameters

_Model = TypeVar("_Model", bound=nn.Module)


@contextmanager
def unwrap_model_for_generation(model: _Model) -> Iterator[_Model]:
    """Inside, all parameters of an engine are in memory, so that many forwards read them once."""
    with GatheredParameters(model.parameters()):
        yield model


class ParameterOffload:
    """What an optimizer of DeepSpeed has under `parameter_offload`, as TRL uses it: it takes hooks
    away before it generates, and brings them back. There are none: hooks of this engine leave
    gathered parameters alone. So it is also the module without parameters that TRL goes through."""

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> ParameterOffload:
        """The module whose hooks are meant."""
        return self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """None."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None."""
        return iter(())

    def _register_deepspeed_module(self, module: object) -> None:
        """Nothing."""
