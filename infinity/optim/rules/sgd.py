"""`infinity.SGD`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from infinity.optim.kernels import Hyper
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import AMOUNT, FINITE, SWITCH, Range, Rule
from infinity.placement.spec import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`; see `Optimizer`.

    For a model wrapped with `Config(algorithm="momentum")`, which keeps one moment, or "sgd", which
    keeps none.
    """

    rule: ClassVar[Rule] = Rule(
        kernel="sgd",
        algorithms={"sgd": {}, "momentum": {"momentum": 0.9}},
        states={"momentum_buffer": Kind.EXP_AVG},
        settings={
            "lr": AMOUNT,
            "momentum": AMOUNT,
            "dampening": FINITE,
            "weight_decay": AMOUNT,
            "nesterov": SWITCH,
        },
        torch=torch.optim.SGD,
        deepspeed="sgd",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **options)

    @classmethod
    def algorithms(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group.get("momentum") else ("sgd", "momentum")

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        fits = not group["nesterov"] or (group["momentum"] > 0 and group["dampening"] == 0)
        wrong = f"{group['nesterov']} without momentum, or with dampening,"
        self._check("nesterov", wrong, Range(lambda _: fits))

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        names = ("momentum", "dampening", "weight_decay", "nesterov")
        values = {"lr": float(group["lr"]), "first_step": step == 1}
        return Hyper(cls.rule.kernel, step, values | {name: group[name] for name in names})

    def hyper_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> Hyper:
        """The hyper-parameters of the next update of `parameter`: the first with a momentum makes
        it, as in torch."""
        hyper = super().hyper_of(parameter, group)
        first = not self.state.get(parameter)
        return hyper._replace(values=hyper.values | {"first_step": first})

    def _has_states(self, key: int) -> bool:
        """Whether the group of the parameter has a momentum."""
        group = self.members.group_of(key, self.param_groups)
        return group is not None and bool(group["momentum"])
