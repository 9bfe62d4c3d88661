"""`infinity.Adagrad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from infinity.optim.kernels import Hyper
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import AMOUNT, POSITIVE, Range, Rule
from infinity.placement.spec import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), as `torch.optim.Adagrad` with an initial sum of zero;
    see `Optimizer`.

    For a model wrapped with `Config(algorithm="adagrad")`, which keeps one moment.
    """

    rule: ClassVar[Rule] = Rule(
        kernel="adagrad",
        algorithms={"adagrad": {}},
        states={"sum": Kind.EXP_AVG_SQ},
        settings={"lr": AMOUNT, "lr_decay": AMOUNT, "weight_decay": AMOUNT, "eps": POSITIVE},
        torch=torch.optim.Adagrad,
        counts_in_state=True,
        states_from_start=True,
        deepspeed="adagrad",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        start = group.get("initial_accumulator_value", 0)
        self._check("initial_accumulator_value", start, Range(lambda start: bool(start == 0)))

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        values = {"lr": lr, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        return Hyper(cls.rule.kernel, step, values)
