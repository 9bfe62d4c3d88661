"""A wrapped model gets its data back, so that it can be wrapped once more with what came to it.

[Note: adapters after wrap]
`wrap` decides the layout of all parameters at once. So parameters that come later, such as adapters
of PEFT, are taken in by another `wrap` of the model around them. It first closes the engine. The
parameters then are plain ones, mapped from files: frozen ones from the files of the user that are
their home, others from unnamed files as in a state dict (`directories/mapped`). So this takes no
memory that the kernel cannot have back. Masters keep their low bits. Moments and gradients are
gone, as with any new optimizer.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import nn

from infinity.directories.mapped import mapped
from infinity.engine import ATTRIBUTE, Engine
from infinity.errors import ConfigError, WeightsError
from infinity.modules.load import aliases_of
from infinity.placement.spec import Kind
from infinity.sharding.codec import round_to
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.unit import Unit
from infinity.sharding.use import GatheredParameter
from infinity.tiers.originals import StoredBytes


class KeptValue(NamedTuple):
    """What a parameter had in its engine beside its data: a place in a file, or a master (fp32)."""

    data: torch.Tensor
    place: StoredBytes | None = None


class KeptValues:
    """The values of a model that is wrapped once more, by the names of its parameters. It lacks
    those whose data is all there is of them."""

    where = "the engine before"

    def __init__(self, model: nn.Module, values: dict[int, KeptValue]) -> None:
        self._values = {
            name: values[number]
            for number, names in aliases_of(model).items()
            if number in values
            for name in names
        }

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `name`: fp32 for a master."""
        return self._values[name].data.dtype

    def stored(self, name: str) -> StoredBytes | None:
        """Where the bytes of `name` lie in a file of the user."""
        return self._values[name].place

    def read_into(self, name: str, target: torch.Tensor, bounds: tuple[slice, ...] = ()) -> None:
        """Copy `name`, or the part of it within `bounds`, into `target`. A master is rounded as an
        update rounds it, so that the parameter stays what it was."""
        data = self._values[name].data
        round_to(target, data[bounds] if bounds else data)


def outgrown(model: nn.Module) -> Engine | None:
    """The one engine in `model`, if parameters came to what it wrapped."""
    engines = [vars(m)[ATTRIBUTE] for m in model.modules() if ATTRIBUTE in vars(m)]
    managed = (ShardedParameter, GatheredParameter)
    if len(engines) != 1:
        return None
    has_others = any(not isinstance(p, managed) for p in engines[0].model.parameters())
    return engines[0] if has_others else None


def unwrap(engine: Engine, model: nn.Module) -> KeptValues:
    """Close `engine`, whose parameters are plain ones then. `model` holds them, and maybe more;
    what is returned has its names. Every rank calls it.

    Raises `ConfigError` for DTensors, for committed states, and inside of a forward, before
    anything is changed.
    """
    if engine.config.durability != "off":
        raise ConfigError(
            "the model got parameters after wrap, and the states that are committed are those of "
            "before; with durability add adapters before wrap"
        )
    _check(engine.units)
    engine.drain()
    kept: dict[int, KeptValue] = {}
    values = [_values_of(unit, kept) for unit in engine.units]
    units = engine.units
    engine.close()
    for unit, data in zip(units, values, strict=True):
        unit.data.restore(data)
    return KeptValues(model, kept)


def _check(units: tuple[Unit, ...]) -> None:
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if is_dtensor(parameter):
                raise ConfigError(
                    f"{name} is a DTensor of a wrapped model, which cannot be wrapped once more: "
                    "add what is missing before infinity.wrap"
                )
        if unit.blocks[Kind.PARAM].copy.pins:
            raise ConfigError(
                f"{unit.name} is in use; call infinity.wrap outside of a forward, a backward and "
                "infinity.gathered"
            )


def _values_of(unit: Unit, kept: dict[int, KeptValue]) -> list[torch.Tensor]:
    """The parameters of `unit`, mapped; notes in `kept` what else there is of them."""
    found = unit.states.in_files()
    if found is not None:
        for parameter, value, place in zip(unit.parameters, found, unit.stored, strict=True):
            kept[id(parameter)] = KeptValue(value, place if _is_there(place) else None)
        return found
    found = _split(unit, unit.states.gather(Kind.PARAM))
    if Kind.MASTER in unit.blocks and unit.blocks[Kind.MASTER].written:
        masters = _split(unit, unit.states.gather(Kind.MASTER))
        for parameter, master in zip(unit.parameters, masters, strict=True):
            kept[id(parameter)] = KeptValue(master)
    return found


def _is_there(place: StoredBytes) -> bool:
    """Whether the file can be opened again: the engine has it open, also when it was deleted."""
    try:
        os.close(place.file.open())
    except (OSError, WeightsError):
        return False
    return True


def _split(unit: Unit, flat: torch.Tensor) -> list[torch.Tensor]:
    return [
        mapped(flat[place.offset : place.end].view(place.shape), unit.files)
        for place in unit.layout.places
    ]
