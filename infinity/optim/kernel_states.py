"""The contents of `optimizer.state` if the states are blocks of the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from infinity.errors import ConfigError, in_words
from infinity.optim.rule import Rule
from infinity.optim.state_tensors import CountSlot, MomentSlot, Slot
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding.unit import Unit


class KernelStates:
    """The keeper of the states of an optimizer with `rule`. See `state_view.Keeper`. Error texts
    call the optimizer `owner`.

    The keeper holds no reference to the optimizer, so it does not keep the optimizer alive.
    """

    changes_values = False

    def __init__(self, owner: str, rule: Rule) -> None:
        self._owner, self._rule = owner, rule
        self.updater: Updater | None = None
        """The engine's updater. None until the optimizer has parameters."""
        self.counts: dict[int, int] = {}
        """Updates so far, by the id of the parameter."""
        self.places: dict[int, tuple[Unit, int]] = {}
        """The unit of each parameter, by its id, and its index there."""
        self._slots: dict[tuple[int, str], Slot] = {}

    def slot(self, parameter: torch.Tensor, name: str) -> Slot:
        """The slot of the state `name` of `parameter`. "master" is a state, too."""
        key = id(parameter), name
        if key not in self._slots:
            unit, index = self.places[id(parameter)]
            if name == "step":
                made: Slot = CountSlot(unit, unit.facts.names[index], self.counts, id(parameter))
            else:
                kind = {"master": Kind.MASTER, **self._rule.states}[name]
                counts, number = self.counts, id(parameter)
                made = MomentSlot(unit, index, kind, name, lambda: counts.get(number, 0))
            self._slots[key] = made
        return self._slots[key]

    def content(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The slots of `parameter`, by torch's names."""
        return {name: self.slot(parameter, name) for name in self._names(parameter)}

    def _names(self, parameter: torch.Tensor) -> list[str]:
        unit, _ = self.places[id(parameter)]
        moments = [name for name, kind in self._rule.states.items() if kind in unit.blocks]
        return [*(["step"] if self._rule.counts_in_state else []), *moments]

    def check(self, parameter: torch.Tensor, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The states of `wanted` that `parameter` can have.

        Raises `ConfigError` if torch's optimizer could not step with `wanted`, and
        `ShardedParameterError` while the parameter is in use."""
        unit, index = self.places[id(parameter)]
        unit.states.check_unused(index, "optimizer.state")
        where = f"{self._owner}: optimizer.state of {unit.facts.names[index]}"
        names = self._names(parameter)
        given = {name for name, value in wanted.items() if name != "master" and value is not None}
        if not given:
            if self._rule.states_from_start:
                raise ConfigError(
                    f"{where}, of a wrapped model, is emptied, and the optimizer of torch could "
                    "not step without; write zeros into its tensors: "
                    "optimizer.state[parameter]['step'].zero_()"
                )
            return {}
        if given != set(names):
            raise ConfigError(
                f"{where}, of a wrapped model, would have {', '.join(sorted(given))}, and it takes "
                f"{' and '.join(names) or 'nothing'}; give all of them, or an empty dict to begin "
                "anew"
            )
        kept = {name: wanted[name] for name in (*names, "master") if wanted.get(name) is not None}
        if Kind.MASTER not in unit.blocks:
            kept.pop("master", None)
        for name, value in kept.items():
            self._check_value(f"{name!r} of {where}", self.slot(parameter, name), value)
        return kept

    def _check_value(self, name: str, slot: Slot, value: Any) -> None:
        problem = ""
        if not isinstance(value, torch.Tensor):
            problem = in_words(value)
        elif value.is_meta or value.layout is not torch.strided or value.is_complex():
            problem = "no dense tensor of real numbers"
        elif tuple(value.shape) != slot.shape and not (slot.shape == () and value.numel() == 1):
            problem = f"of shape {tuple(value.shape)}"
        elif not slot.shape and not (float(value) >= 0 and float(value).is_integer()):
            problem = f"{float(value)}, and no count"
        if problem:
            raise ConfigError(
                f"{name}, of a wrapped model, is {problem}; give a tensor of shape {slot.shape}"
            )

    def write(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], changed: Collection[str]
    ) -> None:
        """Replace the states `changed`."""
        if not self.counts.get(id(parameter)):
            self.counts[id(parameter)] = int(not self._rule.counts_in_state)
        for name in changed:
            self.slot(parameter, name).replace(entry[name])

    def restart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Restart all moments of these parameters. Masters stay, because they are the weights."""
        taken = dict[Unit, list[int]]()
        for parameter in parameters:
            unit, index = self.places[id(parameter)]
            taken.setdefault(unit, []).append(index)
        updater = self.updater
        if updater is None:
            return
        updater.drain()
        for unit, positions in taken.items():
            kinds = [kind for kind in self._rule.states.values() if kind in unit.blocks]
            updater.owners.forget_states(UnitShare(unit, tuple(sorted(positions))), kinds)
            for index in positions:
                self.counts[id(unit.facts.parameters[index])] = 0
