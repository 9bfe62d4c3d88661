"""AdamW as `native/cpu_adam/cpu_adam.h` specifies it, in plain torch operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from support.models import rounded

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


class SpecifiedAdamW(torch.optim.Optimizer):
    """AdamW with fp32 masters: each scalar in double, rounded once to fp32; each tensor operation
    rounded on its own."""

    def __init__(self, params: Any, max_grad_norm: float | None = None, **settings: Any) -> None:
        super().__init__(params, SETTINGS | settings)
        self.max_grad_norm, self.grad_norm = max_grad_norm, 0.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        used = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        self.grad_norm = math.sqrt(sum(p.grad.double().square().sum().item() for _, p in used))
        scale = (
            1.0
            if self.max_grad_norm is None
            else min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        )
        for group, p in used:
            self._update(p, self.state[p], group, scale)

    @staticmethod
    def _update(
        p: torch.Tensor, state: dict[str, Any], group: dict[str, Any], scale: float
    ) -> None:
        def single(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.float32)

        if not state:
            state |= {
                "step": 0,
                "master": getattr(p, "master", p.detach()).float().clone(),
                "m": torch.zeros(p.shape),
                "v": torch.zeros(p.shape),
            }
        state["step"] += 1
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        g = p.grad.float() * single(scale)
        w = state["master"]
        if decay:
            w = w * single(1 - lr * decay)
        m = single(beta1) * state["m"] + single(1 - beta1) * g
        v = single(beta2) * state["v"] + (single(1 - beta2) * g) * g
        # torch takes the fp32 root from MKL, which may be off by one place; this one is correctly
        # rounded.
        d = v.double().sqrt().float() / single(math.sqrt(1 - beta2 ** state["step"])) + single(
            group["eps"]
        )
        w = w - single(lr / (1 - beta1 ** state["step"])) * (m / d)
        state |= {"master": w, "m": m, "v": v}
        p.copy_(rounded(w, p.dtype))


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters to `dtype`, with their values of before as `master`; buffers stay, as with
    `Config(precision=...)`."""
    for parameter in model.parameters():
        parameter.master = parameter.detach().float().clone()  # type: ignore[attr-defined]
        parameter.data = (
            rounded(parameter.data, dtype) if parameter.requires_grad else parameter.data.to(dtype)
        )
    return model
