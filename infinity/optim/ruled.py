"""A `torch.optim.Optimizer` with a rule: checks its groups and computes the kernels' arguments.
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
    """The methods that a class of `optim/rules` adds to its record. See `Optimizer`."""

    rule: ClassVar[Rule]

    @classmethod
    def algorithms(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The values of `Config.algorithm` that keep the states of `group`."""
        return tuple(cls.rule.algorithms)

    @classmethod
    def usual_settings(cls) -> dict[str, Any]:
        """The default hyper-parameters."""
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
        """Raise `ConfigError` when `group`, from a state dict of torch, sets an option that the
        kernels do not support."""
        refuse_unsupported(type(self).__name__, group)

    def check_group(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when parameters of `units` cannot be in `group`."""
        self.refuse_unsupported(group)
        self.check(group)
        self.check_algorithm(group, units)

    def check_algorithm(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when a unit does not keep the states that `group` needs."""
        who = type(self).__name__
        for unit in units:
            if unit.facts.algorithm not in self.algorithms(group):
                raise ConfigError(
                    f"{who} needs other states than the model was wrapped with "
                    f"(algorithm={unit.facts.algorithm!r}); use "
                    f"infinity.Config(algorithm={self.algorithms(group)[0]!r})"
                )

    def _check(self, name: str, value: Any, allowed: Range) -> None:
        """Raise `ConfigError` when the value of a hyper-parameter is not `allowed`."""
        check_value(type(self).__name__, name, value, allowed)

    def check_hyper(self, group: dict[str, Any]) -> None:
        """Raise the error that `hyper` or a kernel would raise for `group`."""
        for value in self.hyper(group, 1).values.values():
            float(value)
