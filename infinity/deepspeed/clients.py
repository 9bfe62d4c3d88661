"""Optimizers of DeepSpeed that a script builds by itself, before `infinity.initialize`.

They hold parameters, groups and numbers, which `infinity.initialize` adopts. Without it they update
like those of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.refused import Lacking
from infinity.optim.optimizer import Optimizer
from infinity.optim.rules.adagrad import Adagrad
from infinity.optim.rules.adam import Adam
from infinity.optim.rules.lion import Lion

DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedCPUAdam(Lacking, torch.optim.Adam):
    """Adam. With `adamw_mode` AdamW, whose decay acts on the parameter."""

    computed_by: ClassVar[type[Optimizer]] = Adam
    instead = "step() updates all of its parameters, and a step that was taken stays"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        self.fp32_optimizer_states = fp32_optimizer_states
        if not bias_correction:
            self.defaults["bias_correction"] = False
            for group in self.param_groups:
                group.setdefault("bias_correction", False)

    def step(self, closure: Any = None) -> Any:
        """Like that of torch, which always corrects the bias. Raises `ConfigError` before anything
        is changed if a group turns the correction off."""
        if not all(group.get("bias_correction", True) for group in self.param_groups):
            raise DeepSpeedConfigError(
                f"{type(self).__name__}(bias_correction=False) steps only in an engine of "
                "infinity.initialize; give it that, or leave bias_correction out"
            )
        return super().step(closure)


class FusedAdam(DeepSpeedCPUAdam):
    """The same as `DeepSpeedCPUAdam`. The home of the states decides where updates run."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode
        )


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad."""

    computed_by: ClassVar[type[Optimizer]] = Adagrad

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPULion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675)."""

    computed_by: ClassVar[type[Optimizer]] = Lion

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average, gradient = state["exp_avg"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(average.lerp(gradient, 1 - beta1).sign_(), alpha=group["lr"])
                average.lerp_(gradient, 1 - beta2)
        return loss


class FusedLion(DeepSpeedCPULion):
    """The same as `DeepSpeedCPULion`. The home of the states decides where updates run."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
