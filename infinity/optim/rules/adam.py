"""`infinity.AdamW` and `infinity.Adam`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from infinity.errors import ConfigError
from infinity.optim.kernels import Hyper
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, are_decay_rates, is_amount
from infinity.optim.scaler import LossScaler
from infinity.placement.spec import Kind


class Adam(Optimizer):
    """Adam (Kingma & Ba, arXiv 1412.6980): weight decay is added to the gradient, as in
    `torch.optim.Adam`; see `Optimizer`."""

    states: ClassVar[dict[str, Kind]] = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
    counts_in_state = True
    decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        **torch_options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
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
        return ("adam",)

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        for name in ("lr", "weight_decay"):
            self._check(name, group[name], is_amount)
        self._check("betas", group["betas"], are_decay_rates, "two numbers")
        self._check("eps", group["eps"], lambda eps: 0 < eps < math.inf)

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Also `decoupled_weight_decay`, by which Adam of torch is AdamW."""
        super().refuse_unsupported(group)
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if bool(decoupled) != self.decoupled:
            raise ConfigError(
                f"{type(self).__name__}: decoupled_weight_decay={decoupled} in a group is another "
                f"optimizer; use infinity.{'Adam' if self.decoupled else 'AdamW'}"
            )

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        return adam(
            float(group["lr"]),
            group["betas"],
            group["eps"],
            group["weight_decay"],
            step,
            self.decoupled,
            group.get("bias_correction", True),
        )


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101): weight decay acts on the parameter; see
    `Optimizer`."""

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            max_grad_norm,
            skip_nonfinite,
            loss_scaler,
            error_if_nonfinite,
            clip,
            norm_group,
            **torch_options,
        )


def adam(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    corrects: bool = True,
) -> Hyper:
    """Update number `step` (from 1) by Adam; unless it `corrects`, as if it came after very many,
    which is `bias_correction=False` of DeepSpeed."""
    beta1, beta2 = betas
    remaining1, remaining2 = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    return Hyper(
        "adam",
        step,
        {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "bias_correction1": remaining1,
            "bias_correction2_sqrt": remaining2**0.5,
        },
    )
