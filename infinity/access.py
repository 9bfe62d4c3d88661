"""The states of one parameter, by name: `infinity.get` and `infinity.set`."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError, EngineClosedError, in_words
from infinity.optim.family import states_of
from infinity.placement.spec import Kind
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.tiles import TiledWeight
from infinity.sharding.unit import Unit
from infinity.sharding.use import place_of


def get_state(
    parameter: torch.Tensor, name: str = "value", *, local: bool = False
) -> torch.Tensor | None:
    """`infinity.get`: a copy of one state of `parameter`, of a wrapped model, on the host.

    `name` is "value" (in the parameter's dtype), "grad" (as `Engine.gradient`), "master" (fp32), or
    a moment by torch's name, in fp32, such as "exp_avg" of Adam. Before the first step a moment is
    zeros, and a master the value. None for a gradient that there is not.

    The state has the shape of the parameter, and every rank must call this. With `local=True` it is
    what this rank has of the flat parameter, (n,), maybe nothing; ranks need not call it alike, but
    for a gradient. Waits for pending updates.

    Raises `ConfigError` for a parameter of no wrapped model, and for a state that it has not.
    """
    if isinstance(parameter, TiledWeight):
        parts = [get_state(piece, name, local=local) for piece in parameter.pieces]
        return parameter.cat(parts, 0 if local else parameter.dimension)
    unit, index, kind = _find(parameter, name)
    if kind is Kind.GRAD:
        gradient = unit.listeners.grads.fetch(unit.facts, index)
        if gradient is None or not local:
            return gradient
        return unit.facts.share_of(index, part_in(gradient, unit.facts.parameters[index]))
    unit.listeners.updates.drain()
    found = unit.states.part(kind, index) if local else unit.states.parameter(kind, index)
    if name == "master":
        found = found.float()
    return found if local else whole(found, unit.facts.parameters[index])


def set_state(
    parameter: torch.Tensor, name: str, value: torch.Tensor, *, local: bool = False
) -> None:
    """`infinity.set`: replace one state of `parameter`, by the names and shapes of `infinity.get`.

    `value` may have any dtype and device. A new value takes its master along, and a new master its
    value, which is the master rounded. Every rank must call it: with the same `value`, or with
    `local=True` with its own part. Waits for pending updates.

    Raises `ConfigError` like `infinity.get`, and for a wrong shape or kind of value;
    `ShardedParameterError` inside of a forward, a backward or `infinity.gathered`.
    """
    if isinstance(parameter, TiledWeight):
        _set_tiles(parameter, name, value, local)
        return
    unit, index, kind = _find(parameter, name)
    _check_value(unit.facts.names[index], parameter, value)
    given = parameter.shape if not local else (unit.facts.overlap(index).length,)
    if tuple(value.shape) != tuple(given):
        raise ConfigError(
            f"infinity.set: the {name} of {unit.facts.names[index]} has shape {tuple(given)}, not "
            f"{tuple(value.shape)}"
        )
    value = value.detach().cpu()
    if kind is Kind.GRAD:
        unit.listeners.grads.set(
            unit.facts, index, _spread(unit, index, value) if local else value.clone()
        )
        return
    states = unit.states
    part = (
        value if local else unit.facts.share_of(index, part_in(value, unit.facts.parameters[index]))
    )
    states.put(kind, index, part, "infinity.set")
    unit.on_device.renew()


def _set_tiles(weight: TiledWeight, name: str, value: torch.Tensor, local: bool) -> None:
    """`set_state` of a weight in tiles."""
    found = [_find(piece, name)[:2] for piece in weight.pieces]
    called = " and on to ".join(unit.facts.names[index] for unit, index in (found[0], found[-1]))
    _check_value(called, weight, value)
    lengths = [unit.facts.overlap(index).length for unit, index in found]
    given = (sum(lengths),) if local else tuple(weight.shape)
    if tuple(value.shape) != given:
        raise ConfigError(
            f"infinity.set: the {name} of {called} has shape {given}, not {tuple(value.shape)}"
        )
    parts = value.split(lengths) if local else weight.divided(value)
    for piece, part in zip(weight.pieces, parts, strict=True):
        set_state(piece, name, part, local=local)


def _check_value(name: str, parameter: torch.Tensor, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"infinity.set: {name} is given {in_words(value)}; give a tensor")
    kind = ""
    if value.is_meta:
        kind = "a tensor on the meta device"
    elif value.layout is not torch.strided:
        kind = f"a {str(value.layout).removeprefix('torch.')} tensor"
    elif value.is_complex() and not parameter.is_complex():
        kind = "a complex tensor"
    if kind:
        raise ConfigError(f"infinity.set: {name} is given {kind}; give a dense one of real numbers")


def _find(parameter: torch.Tensor, name: str) -> tuple[Unit, int, Kind]:
    """The unit of `parameter`, its index there, and the kind of block that has state `name`."""
    place = place_of(parameter)
    if place is None:
        raise ConfigError("infinity.get and infinity.set take a parameter of a wrapped model")
    unit, index = place
    if not unit.data.tier:
        raise EngineClosedError(
            f"{unit.facts.names[index]} has no data any more, because its engine was closed"
        )
    kinds = {"value": Kind.PARAM}
    if unit.facts.trainable:
        master = Kind.MASTER if Kind.MASTER in unit.blocks else Kind.PARAM
        kinds |= {"grad": Kind.GRAD, "master": master, **states_of(unit.facts.algorithm)}
    if name not in kinds:
        raise ConfigError(
            f"{unit.facts.names[index]} has no state {name!r}; it has {', '.join(map(repr, kinds))}"
        )
    return unit, index, kinds[name]


def _spread(unit: Unit, index: int, part: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of a parameter of which this rank's part is `part`."""
    place, overlap = unit.facts.layout.places[index], unit.facts.overlap(index)
    full = torch.zeros(place.end - place.offset, dtype=part.dtype)
    full[overlap.in_parameter : overlap.in_parameter + overlap.length] = part
    return full.view(place.shape)
