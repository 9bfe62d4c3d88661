"""`infinity.Lion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from infinity.optim.kernels import Hyper
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import AMOUNT, TWO_RATES, Rule
from infinity.placement.spec import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Lion(Optimizer):
    """Lion (Chen et al., arXiv 2302.06675): each step has the sign of a momentum and the
    length `lr`. See `Optimizer`.

    For a model wrapped with `Config(algorithm="lion")`, which keeps one moment. Weight decay acts
    on the parameter.
    """

    rule: ClassVar[Rule] = Rule(
        kernel="lion",
        algorithms={"lion": {}},
        states={"exp_avg": Kind.EXP_AVG},
        settings={"lr": AMOUNT, "betas": TWO_RATES, "weight_decay": AMOUNT},
        deepspeed="lion",
        trainer={
            "lion_32bit": "fp32",
            "paged_lion_32bit": "fp32",
            "lion_8bit": "int8",
            "paged_lion_8bit": "int8",
        },
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        beta1, beta2 = group["betas"]
        values = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
        }
        return Hyper(cls.rule.kernel, step, values)
