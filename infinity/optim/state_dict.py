"""State dicts of the optimizer family: their content, and the checks whether it fits an optimizer.

A state dict is a dict of torch (`state` by the number of the parameter, `param_groups`), with fp32
masters beside the moments. `Optimizer` calls these functions. A rule adds checks in `check_state`
and `check_hyper`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from infinity.directories.mapped import mapped
from infinity.errors import ConfigError
from infinity.optim.clipping import Clipping
from infinity.optim.kernel_states import KernelStates
from infinity.optim.rule import Rule
from infinity.optim.state_tensors import StateCopy
from infinity.optim.state_view import OptimizerStates
from infinity.placement.spec import Kind
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.unit import Unit, unit_of
from infinity.sharding.use import place_of


class SavedOptimizer(Protocol):
    """The parts of an optimizer that these functions use."""

    rule: ClassVar[Rule]
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    clipping: Clipping

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that it may update."""

    def check_group(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when `group` cannot be that of parameters in `units`."""

    def check_hyper(self, group: dict[str, Any]) -> None:
        """Raise when the hyper-parameters of `group` are not those of a kernel."""

    def check_state(
        self, unit: Unit, parameter: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        """Raise `ConfigError` when `state` cannot be that of `parameter`, which is in `group`."""


def misfit(optimizer: SavedOptimizer, what: str) -> ConfigError:
    """The error for a state dict that cannot be loaded, because of `what`."""
    return ConfigError(
        f"{type(optimizer).__name__}: the state dict does not fit, and nothing was loaded: {what}"
    )


def numbers(optimizer: SavedOptimizer) -> dict[int, int]:
    """The number of each parameter in a state dict, by its id."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {id(p): number for number, p in enumerate(parameters)}


def kinds(optimizer: SavedOptimizer) -> list[tuple[str, Kind]]:
    """The states by torch's names, and the master."""
    return [*optimizer.rule.states.items(), ("master", Kind.MASTER)]


def copies_of(
    optimizer: SavedOptimizer, keeper: KernelStates, view: OptimizerStates
) -> dict[torch.Tensor, dict[str, Any]]:
    """The states of every parameter that has an entry in `view`: whole tensors on the host, mapped
    from unnamed files (`directories/mapped`); every rank must call it. See [Note: a tensor of a
    state dict] in `state_tensors`."""
    copied: dict[torch.Tensor, dict[str, Any]] = {}
    for parameter, entry in view.items():
        copied[parameter] = {"step": _count(keeper, parameter)} if entry else {}
    check_in_groups(copied, optimizer)
    here = numbers(optimizer)
    for unit in optimizer.units:  # a rule without moments has masters and counts
        if Kind.MASTER in unit.blocks and unit.blocks[Kind.MASTER].written:
            for parameter in unit.parameters:
                counted = id(parameter) in here and keeper.counts.get(id(parameter))
                if counted and not copied.get(parameter):
                    copied[parameter] = {"step": _count(keeper, parameter)}
    add_blocks(copied, optimizer, keeper)
    return copied


def _count(keeper: KernelStates, parameter: torch.Tensor) -> torch.Tensor:
    slot = keeper.slot(parameter, "step")
    return StateCopy.of(slot.fetch(), slot)


def check_in_groups(copied: dict[torch.Tensor, dict[str, Any]], optimizer: SavedOptimizer) -> None:
    """Leave out empty states of parameters that are in no group; raises `ConfigError` for other
    states of these, as torch does."""
    here = numbers(optimizer)
    for parameter in [parameter for parameter in copied if id(parameter) not in here]:
        if copied.pop(parameter):
            raise ConfigError(
                f"{type(optimizer).__name__}: {name_of(parameter)} of the wrapped model was taken "
                "out of its group and has states, which a state dict has no number for; delete "
                "them: del optimizer.state[parameter]"
            )


def add_blocks(
    copied: dict[torch.Tensor, dict[str, Any]], optimizer: SavedOptimizer, keeper: KernelStates
) -> None:
    """Add the states in blocks of units for the parameters with states in `copied`."""
    for unit in optimizer.units:
        for name, kind in kinds(optimizer):
            states = [copied.get(parameter) for parameter in unit.parameters]
            if kind not in unit.blocks or not any(states):
                continue
            if kind is Kind.MASTER and not unit.blocks[kind].written:
                continue
            full = unit.states.gather(kind)
            for parameter, place, state in zip(
                unit.parameters, unit.layout.places, states, strict=True
            ):
                if state:
                    part = whole(full[place.offset : place.end].view(place.shape), parameter)
                    slot = keeper.slot(parameter, name)
                    state[name] = StateCopy.of(mapped(part, unit.facts.files), slot)


def add_masters(packed: dict[str, Any], optimizer: SavedOptimizer) -> None:
    """Add to `packed`, a state dict, the `masters` of parameters without states."""
    number_of, masters = numbers(optimizer), packed.setdefault("masters", {})
    for unit in optimizer.units:
        if Kind.MASTER not in unit.blocks or not unit.blocks[Kind.MASTER].written:
            continue
        full = unit.states.gather(Kind.MASTER)
        for parameter, place in zip(unit.parameters, unit.layout.places, strict=True):
            number = number_of.get(id(parameter))
            if number is not None and not packed["state"].get(number):
                part = whole(full[place.offset : place.end].view(place.shape), parameter)
                masters[number] = mapped(part, unit.facts.files)


def name_of(parameter: torch.Tensor) -> str:
    """The name of a parameter."""
    place = place_of(parameter)
    return "a parameter" if place is None else place[0].names[place[1]]


def restore(unit: Unit, kind: Kind, values: list[torch.Tensor | None]) -> None:
    """Replace the states of `kind` of the parameters of `unit` by `values` that are not None. Every
    rank must call it."""
    full = unit.states.gather(kind)
    for parameter, place, value in zip(unit.parameters, unit.layout.places, values, strict=True):
        if value is not None:
            full[place.offset : place.end].view(place.shape).copy_(part_in(value, parameter))
    unit.states.write(kind, unit.facts.shard_of(full))


def states_in(state_dict: Mapping[str, Any], optimizer: SavedOptimizer) -> list[Mapping[str, Any]]:
    """The states of each parameter in `state_dict`, in the order of the groups; raises
    `ConfigError` for states that do not fit."""
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(key), kind):
            raise misfit(optimizer, f"it has no {key!r}, as state_dict() of an optimizer has")
    groups, states = state_dict["param_groups"], state_dict["state"]
    check_header(state_dict, optimizer)
    named = [number for group in groups for number in group["params"]]
    # Of parameters that were never updated, and have no state.
    masters = state_dict.get("masters", {})
    if not isinstance(masters, Mapping):
        raise misfit(optimizer, f"its masters are a {type(masters).__name__}")
    unknown = next((number for number in (*states, *masters) if number not in named), None)
    if unknown is not None:
        raise misfit(
            optimizer, f"it has a state of parameter {unknown!r}, which none of its groups has"
        )
    found = [states.get(number, {}) for number in named]
    owned = [
        (group, parameter) for group in optimizer.param_groups for parameter in group["params"]
    ]
    for (group, parameter), state in zip(owned, found, strict=True):
        optimizer.check_state(unit_of(type(parameter).source), parameter, state, group)
    found = [
        {**state, "master": masters[n]} if n in masters else state
        for n, state in zip(named, found, strict=True)
    ]
    for (group, parameter), number, state in zip(owned, named, found, strict=True):
        if number in masters:
            optimizer.check_state(unit_of(type(parameter).source), parameter, state, group)
    return found


def check_header(header: Mapping[str, Any], optimizer: SavedOptimizer) -> None:
    """Raise `ConfigError` when the groups of `header` are not those of `optimizer`, or a value in
    it is out of range."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    groups = header["param_groups"]
    if not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    ):
        raise misfit(optimizer, "one of its groups has no list of parameters")
    counts = [len(group["params"]) for group in groups]
    if counts != sizes:
        raise misfit(optimizer, f"its groups have {counts} parameters, and here {sizes}")
    for group in groups:
        try:
            optimizer.check_group(optimizer.defaults | group, optimizer.units)
            optimizer.check_hyper(optimizer.defaults | group)
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise misfit(optimizer, f"a hyper-parameter has a wrong type: {error}") from error
    scaler = optimizer.clipping.scaler
    if scaler is not None and "loss_scaler" in header:
        scaler.check(header["loss_scaler"])
    last_norm = header.get("last_norm")
    if last_norm is not None and not (isinstance(last_norm, float) and 0 <= last_norm < math.inf):
        raise misfit(optimizer, f"its last norm is {last_norm!r}, and no finite number")


def check_state(unit: Unit, parameter: torch.Tensor, state: Any, optimizer: SavedOptimizer) -> None:
    """Raise `ConfigError` when `state` cannot be that of `parameter`."""
    name_of = unit.name_of(parameter)
    if not isinstance(state, Mapping):
        raise misfit(optimizer, f"the state of {name_of} is a {type(state).__name__}")
    step = state.get("step", 0)
    is_scalar = isinstance(step, torch.Tensor) and step.numel() == 1 and not step.is_meta
    is_number = is_scalar or isinstance(step, (int, float))
    if not is_number or not (float(step) >= 0 and float(step).is_integer()):
        raise misfit(optimizer, f"the step of {name_of} is {step!r}, and no count")
    ours = {name for name, _ in kinds(optimizer)} - {"master"}
    others = sorted(map(str, state.keys() - {"step", "master"}))
    if ours and others and ours.isdisjoint(others):  # our states would restart without a warning
        raise misfit(
            optimizer,
            f"{name_of} has {', '.join(others)}, of another optimizer, and "
            f"{type(optimizer).__name__} keeps {', '.join(sorted(ours))}",
        )
    for name, kind in kinds(optimizer):
        value = state.get(name)
        if kind not in unit.blocks or value is None:
            continue
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_meta:
            raise misfit(optimizer, f"{name} of {name_of} is no tensor of floating-point values")
        if value.shape != parameter.shape:
            shapes = (
                f"{name} of {name_of} has shape {list(value.shape)}, and {name_of} "
                f"{list(parameter.shape)}"
            )
            raise misfit(optimizer, shapes)


def updates_in(state: Mapping[str, Any]) -> int:
    """The number of updates in `state`. `torch.optim.SGD` does not count them, and only the first
    matters to it."""
    return int(state.get("step", 1 if state.keys() - {"master"} else 0))
