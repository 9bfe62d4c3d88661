"""The optimizer family: each with its reference and its settings."""

from __future__ import annotations

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
