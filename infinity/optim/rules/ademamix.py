"""`infinity.AdEMAMix`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from infinity.optim.kernels import Hyper
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import AMOUNT, POSITIVE, Range, Rule, are_rates
from infinity.placement.spec import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STEPS = Range(lambda steps: steps is None or 0 < steps < math.inf, "a number of steps, or None")


class AdEMAMix(Optimizer):
    """AdEMAMix (Pagliardini et al., arXiv 2409.03137): AdamW with a second, slow average of the
    gradients, weighted by `alpha`. See `Optimizer`.

    For a model wrapped with `Config(algorithm="ademamix")`, which keeps three moments. The
    arguments equal those of bitsandbytes. The third of `betas` is the rate of the slow average. The
    slow average has no bias correction. Alpha grows linearly from 0 until step `t_alpha`. The third
    rate grows from the first until step `t_beta3`, so that the half-life of the average grows
    linearly. With None, alpha or the rate is constant. Weight decay acts on the parameter.
    """

    rule: ClassVar[Rule] = Rule(
        kernel="ademamix",
        algorithms={"ademamix": {}},
        states={
            "exp_avg": Kind.EXP_AVG,
            "exp_avg_slow": Kind.EXP_AVG_SLOW,
            "exp_avg_sq": Kind.EXP_AVG_SQ,
        },
        settings={
            "lr": AMOUNT,
            "betas": Range(are_rates(3), "three numbers"),
            "alpha": AMOUNT,
            "t_alpha": _STEPS,
            "t_beta3": _STEPS,
            "eps": POSITIVE,
            "weight_decay": AMOUNT,
        },
        counts_in_state=True,
        trainer={
            "ademamix": "fp32",
            "paged_ademamix_32bit": "fp32",
            "ademamix_8bit": "int8",
            "paged_ademamix_8bit": "int8",
        },
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "t_alpha": t_alpha,
            "t_beta3": t_beta3,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, **options)

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        beta1, beta2, beta3 = map(float, group["betas"])
        t_alpha = group["t_alpha"]
        values = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "beta3": _rate(step, group["t_beta3"], beta1, beta3),
            "alpha": float(group["alpha"]) * min(step / t_alpha if t_alpha else 1.0, 1.0),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "bias_correction1": 1 - beta1**step,
            "bias_correction2_sqrt": (1 - beta2**step) ** 0.5,
        }
        return Hyper(cls.rule.kernel, step, values)


def _rate(step: int, steps: int | None, start: float, end: float) -> float:
    """The rate of the slow average at `step`. It grows from `start` to `end`, which it reaches at
    step number `steps`.

    Section 3 of the paper. For a rate of 0, 1 / ln(rate) is taken to be 0.
    """
    if not steps or step >= steps or end == 0:
        return end
    part = step / steps
    from_start = (1 - part) / math.log(start) if start else 0.0
    return min(math.exp(1 / (from_start + part / math.log(end))), end)
