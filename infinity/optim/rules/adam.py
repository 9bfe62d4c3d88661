"""`infinity.AdamW` and `infinity.Adam`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from infinity.errors import ConfigError
from infinity.optim.kernels import Hyper
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import AMOUNT, POSITIVE, TWO_RATES, Rule
from infinity.placement.spec import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adam(Optimizer):
    """Adam (Kingma & Ba, arXiv 1412.6980): weight decay is added to the gradient, as in
    `torch.optim.Adam`; see `Optimizer`."""

    rule: ClassVar[Rule] = Rule(
        kernel="adam",
        algorithms={"adam": {}},
        states={"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ},
        settings={"lr": AMOUNT, "betas": TWO_RATES, "eps": POSITIVE, "weight_decay": AMOUNT},
        torch=torch.optim.Adam,
        counts_in_state=True,
        deepspeed="adam",
    )
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Also refuses a `decoupled_weight_decay` other than `decoupled`."""
        super().refuse_unsupported(group)
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if bool(decoupled) != self.decoupled:
            raise ConfigError(
                f"{type(self).__name__}: decoupled_weight_decay={decoupled} in a group is another "
                f"optimizer; use infinity.{'Adam' if self.decoupled else 'AdamW'}"
            )

    @classmethod
    def hyper(cls, group: dict[str, Any], step: int) -> Hyper:
        """If `bias_correction`, an option of DeepSpeed, is False, both corrections are 1."""
        beta1, beta2 = group["betas"]
        corrects = group.get("bias_correction", True)
        remaining1, remaining2 = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        values = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled": cls.decoupled,
            "bias_correction1": remaining1,
            "bias_correction2_sqrt": remaining2**0.5,
        }
        return Hyper(cls.rule.kernel, step, values)


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101): weight decay acts on the parameter; see
    `Optimizer`."""

    rule: ClassVar[Rule] = replace(
        Adam.rule,
        torch=torch.optim.AdamW,
        deepspeed="adamw",
        trainer={
            "adamw_torch": "fp32",
            "adamw_torch_fused": "fp32",
            "paged_adamw_32bit": "fp32",
            "adamw_torch_8bit": "int8",
            "adamw_bnb_8bit": "int8",
            "adamw_8bit": "int8",
            "paged_adamw_8bit": "int8",
        },
    )
    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)
