"""An optimizer of torch's kind with a rule: what its groups may ask for, and what the kernels take.
It knows no engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from infinity.errors import ConfigError
from infinity.optim.groups import check_value, refuse_unsupported
from infinity.optim.kernels import Hyper
from infinity.optim.rule import Range, Rule
from infinity.sharding.unit import Unit


class RuledOptimizer(torch.optim.Optimizer):
    """What a class of `optim/rules` adds to its record; see `Optimizer`."""

    rule: ClassVar[Rule]

    @classmethod
    def algorithms(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The values of `Config.algorithm` under which the states of `group` are kept."""
        return tuple(cls.rule.algorithms)

    @classmethod
    def usual_settings(cls) -> dict[str, Any]:
        """The hyper-parameters by default."""
        known = inspect.signature(cls.__init__).parameters
        return {name: known[name].default for name in cls.rule.settings}

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        for name, allowed in self.rule.settings.items():
            self._check(name, group[name], allowed)

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        raise NotImplementedError

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when `group`, from a state dict of torch, asks for what the kernels
        do not do."""
        refuse_unsupported(type(self).__name__, group)

    def check_group(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when `group` cannot be that of parameters in `units`."""
        self.refuse_unsupported(group)
        self.check(group)
        self.check_algorithm(group, units)

    def check_algorithm(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when `units` do not have the states that `group` asks for."""
        who = type(self).__name__
        for unit in units:
            if unit.algorithm not in self.algorithms(group):
                raise ConfigError(
                    f"{who} needs other states than the model was wrapped with "
                    f"(algorithm={unit.algorithm!r}); use "
                    f"infinity.Config(algorithm={self.algorithms(group)[0]!r})"
                )

    def _check(self, name: str, value: Any, allowed: Range) -> None:
        """Raise `ConfigError` where the value of a hyper-parameter is not `allowed`."""
        check_value(type(self).__name__, name, value, allowed)

    def check_hyper(self, group: dict[str, Any]) -> None:
        """Raise when `hyper`, or a kernel that takes it, would."""
        for value in self.hyper(group, 1).values.values():
            float(value)
