"""Adapters of PEFT on banks of experts in tiles (`target_parameters`).

PEFT registers a parametrization of the bank for the time of a forward. A bank in tiles is no
parameter of its module. So inside that forward the module has an `AdaptedBank` in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.tiles.banks import AdaptedBank, TiledBank
from infinity.tiles.low_rank import Factors

_LAYERS = "peft.tuners.lora.layer"
_adapted: ContextVar[Mapping[tuple[int, str], AdaptedBank]] = ContextVar("adapted")


def adapted_bank(module: nn.Module, name: str) -> AdaptedBank | None:
    """The bank `name` of `module` with the adapter of the forward under way, if it has one."""
    return _adapted.get({}).get((id(module), name))


def wrapper_class() -> Any:
    """The class of PEFT with an adapter of one parameter; None if PEFT is not imported."""
    return getattr(sys.modules.get(_LAYERS), "ParamWrapper", None)


def teach_peft() -> None:
    """Let the wrappers of PEFT, if it is imported, add adapters to banks in tiles."""
    kind = wrapper_class()
    if kind is None or hasattr(kind._activate_lora, "on_parameters"):
        return
    on_parameters = kind._activate_lora

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        bank = self.get_param()
        adapters = [name for name in active_adapters if name in self.lora_A]
        if not adapters or not isinstance(bank, TiledBank):
            with on_parameters(self, active_adapters):
                yield
            return
        _check(self.parameter_name, bank, adapters)
        total = AdaptedBank.of(bank, Factors(*self.get_delta_factors(adapters[0])))
        key = id(self.get_base_layer()), self.parameter_name
        before = _adapted.set({**_adapted.get({}), key: total})
        try:
            yield
        finally:
            _adapted.reset(before)

    _activate_lora.on_parameters = on_parameters  # type: ignore[attr-defined]
    kind._activate_lora = _activate_lora


def _check(name: str, bank: TiledBank, adapters: list[str]) -> None:
    if len(adapters) > 1:
        raise ConfigError(
            f"{name}, a bank of experts in tiles, takes one adapter at a time; activate one, or "
            "give wrap units=[...], so that the bank stays whole"
        )
    if bank.dtype.itemsize == 1:
        raise ConfigError(
            f"{name}, a bank of experts of {bank.dtype} in tiles, takes no adapters; add them "
            "before infinity.tile, so that the bank stays whole"
        )
