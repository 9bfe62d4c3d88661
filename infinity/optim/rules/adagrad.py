"""`infinity.Adagrad`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from infinity.optim.kernels import Hyper
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, is_amount
from infinity.optim.scaler import LossScaler
from infinity.placement.spec import Kind


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), as `torch.optim.Adagrad` with an initial sum of zero;
    see `Optimizer`.

    For a model wrapped with `Config(algorithm="adagrad")`, which keeps one moment.
    """

    states: ClassVar[dict[str, Kind]] = {"sum": Kind.EXP_AVG_SQ}
    counts_in_state = states_from_start = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        **torch_options: Any,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
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
        return ("adagrad",)

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        for name in ("lr", "lr_decay", "weight_decay"):
            self._check(name, group[name], is_amount)
        self._check("eps", group["eps"], lambda eps: 0 < eps < math.inf)
        start = group.get("initial_accumulator_value", 0)
        self._check("initial_accumulator_value", start, lambda start: start == 0)

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Hyper(
            "adagrad", step, {"lr": lr, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        )
