"""The arguments of optimizers: parameters, groups, and the options of torch's optimizers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, in_words
from infinity.optim.rule import Range
from infinity.optim.updater import Updater
from infinity.sharding.parameter import TRAINED, ShardedParameter
from infinity.sharding.tiles import TiledWeight, pieces_of
from infinity.sharding.unit import Unit, unit_of

log = logging.getLogger("infinity")

WITHOUT_EFFECT = ("foreach", "fused", "capturable")
"""Options by which torch chooses how to compute the same numbers."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"amsgrad": (True,), "differentiable": (True,)}
"""Options by which torch computes other numbers, and the values that do."""


def check_parameters(who: str, params: Any) -> None:
    """Raise `ConfigError` for a value that is no list of parameters or groups."""
    if isinstance(params, (str, torch.Tensor, nn.Module)) or not isinstance(params, Iterable):
        way_out = "; for a single one write [parameter]" * isinstance(params, torch.Tensor)
        raise ConfigError(
            f"{who} takes a list of parameters such as model.parameters(), not "
            f"{in_words(params)}{way_out}"
        )


def check_torch_options(who: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Accept the options of torch's optimizers; returns the hyper-parameters of groups among them.

    Raises `ConfigError` for options that the kernels do not support, and `TypeError` for unknown
    ones.
    """
    for name in options:
        if name not in (*WITHOUT_EFFECT, *UNSUPPORTED, "maximize"):
            raise TypeError(f"{who} has no option {name!r}")
    if options.get("differentiable"):
        raise ConfigError(
            f"{who}: differentiable=True is not supported, because updates run outside of "
            "autograd; leave it out"
        )
    refuse_unsupported(who, options)
    ignored = [f"{name}={on}" for name, on in options.items() if on and name in WITHOUT_EFFECT]
    if ignored:
        log.warning(
            "%s: %s changes nothing: the engine has kernels of its own, for whole units",
            who,
            " and ".join(ignored),
        )
    return {"maximize": True} if options.get("maximize") else {}


def refuse_unsupported(who: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options by which torch computes other numbers."""
    for name, values in UNSUPPORTED.items():
        if options.get(name) in values:
            raise ConfigError(
                f"{who}: {name}={options[name]} is not supported; infinity.adapt runs the "
                "optimizer of torch that has it"
            )


def check_value(who: str, name: str, value: Any, allowed: Range) -> None:
    """Raise `ConfigError` if the value of the hyper-parameter `name` is not `allowed`."""
    try:
        problem = "" if allowed.contains(value) else f"={value} is out of range"
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        problem = f" is {in_words(value)}, not {allowed.kind}"
        if _is_written_number(value):
            problem += f"; write {name}=float({value!r})"
    if problem:
        raise ConfigError(f"{who}: {name}{problem}")


def _is_written_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def belonging(
    who: str, parameters: Sequence[Any], updater: Updater | None
) -> tuple[Updater | None, dict[Unit, list[int]]]:
    """The updater of these parameters, and the indices of trainable ones by unit. `updater` is that
    of earlier parameters.

    Raises `ConfigError` for a value that is no parameter of one wrapped model.
    """
    taken = dict[Unit, list[int]]()
    seen = set[int]()
    for parameter in parameters:
        if not isinstance(parameter, ShardedParameter):
            raise ConfigError(
                f"{who} got a parameter of no wrapped model; first model = "
                "infinity.wrap(model, config), once more where parameters came later"
            )
        unit = unit_of(type(parameter).source)
        check_once(who, seen, [parameter])
        found = unit.listeners.updates
        if not isinstance(found, Updater) or updater not in (None, found):
            raise ConfigError(
                f"the parameters of one {who} must belong to one wrapped model whose engine is open"
            )
        updater = found
        if unit.facts.only_runs:
            raise ConfigError(f"{who} got {unit.name_of(parameter)}, but {TRAINED}")
        # As in torch: parameters of other units never get a gradient.
        if unit.trainable:
            taken.setdefault(unit, []).append(unit.position(parameter))
    return updater, taken


def check_once(who: str, seen: set[int], parameters: Iterable[Any]) -> None:
    """Add the ids of these parameters to `seen`. Raises `ConfigError` for an id that was there,
    because torch would update the parameter twice."""
    for parameter in parameters:
        if id(parameter) in seen:
            name = (
                type(parameter).source.name_of(parameter)
                if isinstance(parameter, ShardedParameter)
                else in_words(parameter)
            )
            raise ConfigError(f"{who} got {name} twice; give every parameter once")
        seen.add(id(parameter))


def with_pieces(given: Any) -> Any:
    """The parameters of a group, with the tiles of each weight in tiles."""
    if isinstance(given, (torch.Tensor, set)):
        return pieces_of([given]) if isinstance(given, torch.Tensor) else given
    found: list[Any] = []
    for each in given:
        name, parameter = each if isinstance(each, tuple) else ("", each)
        if not isinstance(parameter, TiledWeight):
            found.append(each)
        elif name:
            found += ((f"{name}_tiles.{i}.weight", p) for i, p in enumerate(parameter.pieces))
        else:
            found += parameter.pieces
    return found
