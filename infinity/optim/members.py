"""The parameters of an optimizer: which units have them, and in which group each is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.optim.groups import belonging
from infinity.optim.owners import Owner
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater
from infinity.sharding.unit import Unit


class Members:
    """The parameters of one optimizer, which errors call `owner`. For the thread that runs the
    model."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._updater: Updater | None = None
        self._shares: dict[int, UnitShare] = {}  # by the index of the unit
        self._ids: set[int] = set()  # of the parameters in `_shares`
        # The group of each parameter, by its id, when the last step was fixed. Updates that begin
        # before the next step guess that it stays.
        self._groups: dict[int, dict[str, Any]] | None = None

    def __bool__(self) -> bool:
        """Whether it has a share of a unit."""
        return bool(self._shares)

    @property
    def is_bound(self) -> bool:
        """Whether it belongs to an engine."""
        return self._updater is not None

    @property
    def updater(self) -> Updater:
        """The engine's updater. Raises `ConfigError` while there are no parameters."""
        if self._updater is None:
            raise ConfigError(f"{self._owner} has no parameters")
        return self._updater

    @property
    def shares(self) -> list[UnitShare]:
        """Its parameters of each unit."""
        return list(self._shares.values())

    def share_of(self, unit: Unit) -> UnitShare:
        """Its parameters of `unit`."""
        return self._shares[unit.index]

    def claim(
        self,
        optimizer: Owner,
        parameters: Sequence[torch.Tensor],
        check: Callable[[Iterable[Unit]], None],
    ) -> Mapping[Unit, Sequence[int]]:
        """Make these parameters belong to `optimizer`, or raise before anything is changed. `check`
        raises if their units do not fit. Returns their units and indices."""
        updater, taken = belonging(self._owner, parameters, self._updater)
        if updater is None:
            return {}
        check(taken)
        for unit, positions in taken.items():
            updater.owners.check_free(UnitShare(unit, tuple(positions)), optimizer)
        self._updater = updater
        for unit, positions in taken.items():
            updater.adopt(UnitShare(unit, tuple(sorted(positions))), optimizer)
            mine = self._shares[unit.index].positions if unit.index in self._shares else ()
            self._shares[unit.index] = UnitShare(unit, tuple(sorted({*mine, *positions})))
        self._ids |= set(map(id, parameters))
        return taken

    def others(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The `parameters` that are no members."""
        return [parameter for parameter in parameters if id(parameter) not in self._ids]

    def keep(self, ids: set[int]) -> None:
        """Drop members that do not have one of these ids. Their states stay."""
        if ids == self._ids:
            return
        for number, (unit, positions) in list(self._shares.items()):
            left = tuple(i for i in positions if id(unit.parameters[i]) in ids)
            self._shares[number] = UnitShare(unit, left)
        self._ids = ids

    def regroup(self) -> None:
        """The groups may have changed."""
        self._groups = None

    def group_of(self, key: int, groups: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        """The group of the parameter with this id."""
        if self._groups is None:
            self._groups = {id(p): group for group in groups for p in group["params"]}
        return self._groups.get(key)

    def updated(self, unit: Unit, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """For each parameter of `unit` its group, or None if it has no gradient or is no member."""
        return [
            self.group_of(id(parameter), groups) if unit.gradients.has(index) else None
            for index, parameter in enumerate(unit.parameters)
        ]
