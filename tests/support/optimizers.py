"""The optimizer family: each with its reference and its settings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

import infinity


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, in plain torch."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    beta1, beta2 = group["betas"]
                    momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * (beta1 * momentum + (1 - beta1) * p.grad).sign())
                    momentum.mul_(beta2).add_((1 - beta2) * p.grad)


class AdEMAMix(torch.optim.Optimizer):
    """Algorithm 1 of arXiv 2409.03137 with the schedulers of its section 3, in plain torch. Rates
    grow from the first beta."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        names = ("betas", "alpha", "t_alpha", "t_beta3", "eps", "weight_decay")
        values = (betas, alpha, t_alpha, t_beta3, eps, weight_decay)
        super().__init__(params, {"lr": lr, **dict(zip(names, values, strict=True))})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2, last = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    names = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
                    state["step"] = torch.tensor(0.0)
                    state |= {name: torch.zeros_like(p) for name in names}
                state["step"] += 1
                t = int(state["step"])
                alpha, beta3 = group["alpha"], last
                if group["t_alpha"]:
                    alpha = min(t * alpha / group["t_alpha"], alpha)
                if group["t_beta3"]:
                    low, high, part = math.log(beta1), math.log(last), t / group["t_beta3"]
                    beta3 = min(math.exp(low * high / ((1 - part) * high + part * low)), last)
                m1, m2, nu = state["exp_avg"], state["exp_avg_slow"], state["exp_avg_sq"]
                m1.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                m2.mul_(beta3).add_(p.grad, alpha=1 - beta3)
                nu.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = nu.sqrt() / math.sqrt(1 - beta2**t) + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * ((m1 / (1 - beta1**t) + alpha * m2) / root))


class Member(NamedTuple):
    """One of the family: ours, the reference, their settings, and the configuration that keeps its
    states."""

    ours: type[torch.optim.Optimizer]
    theirs: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    algorithm: str = "adam"


FAMILY = {
    "adam": Member(infinity.Adam, torch.optim.Adam, {"lr": 1e-3, "eps": 1e-6}),
    "decay": Member(
        infinity.Adam,
        torch.optim.Adam,
        {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "adamw": Member(
        infinity.AdamW, torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}
    ),
    "adagrad": Member(
        infinity.Adagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.05},
        "adagrad",
    ),
    "lion": Member(infinity.Lion, Lion, {"lr": 1e-3, "weight_decay": 0.1}, "lion"),
    "ademamix": Member(
        infinity.AdEMAMix,
        AdEMAMix,
        {"eps": 1e-6, "alpha": 3.0, "t_alpha": 4, "t_beta3": 5, "weight_decay": 0.1},
        "ademamix",
    ),
    "sgd": Member(infinity.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}, "sgd"),
    "momentum": Member(
        infinity.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "momentum"
    ),
    "nesterov": Member(
        infinity.SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        "momentum",
    ),
}
