"""`infinity.Lion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from infinity.optim.kernels import Hyper
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, are_decay_rates, is_amount
from infinity.optim.scaler import LossScaler
from infinity.placement.spec import Kind


class Lion(Optimizer):
    """Lion (Chen et al., arXiv 2302.06675): steps of one length, by the sign of a momentum; see
    `Optimizer`.

    For a model wrapped with `Config(algorithm="lion")`, which keeps one moment. Weight decay acts
    on the parameter.
    """

    states: ClassVar[dict[str, Kind]] = {"exp_avg": Kind.EXP_AVG}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        **torch_options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            max_grad_norm,
            skip_nonfinite,
            loss_scaler,
            error_if_nonfinite,
            clip,
            norm_group,
            torch_options,
        )

    def algorithms(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The values of `Config.algorithm` under which the states of `group` are kept."""
        return ("lion",)

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        self._check("betas", group["betas"], are_decay_rates, "two numbers")
        for name in ("lr", "weight_decay"):
            self._check(name, group[name], is_amount)

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        beta1, beta2 = group["betas"]
        values = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
        }
        return Hyper("lion", step, values)
