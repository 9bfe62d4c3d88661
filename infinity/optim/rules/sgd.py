"""`infinity.SGD`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from infinity.optim.kernels import Hyper
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, is_amount
from infinity.optim.scaler import LossScaler
from infinity.placement.spec import Kind


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`; see `Optimizer`.

    For a model wrapped with `Config(algorithm="momentum")`, which keeps one moment, or "sgd", which
    keeps none.
    """

    states: ClassVar[dict[str, Kind]] = {"momentum_buffer": Kind.EXP_AVG}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        **torch_options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
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
        return ("momentum",) if group["momentum"] else ("sgd", "momentum")

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        for name in ("lr", "momentum", "weight_decay"):
            self._check(name, group[name], is_amount)
        self._check("dampening", group["dampening"], math.isfinite)
        fits = not group["nesterov"] or (group["momentum"] > 0 and group["dampening"] == 0)
        wrong = f"{group['nesterov']} without momentum, or with dampening,"
        self._check("nesterov", wrong, lambda _: fits)

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        values = {
            name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")
        }
        return Hyper("sgd", step, {"lr": float(group["lr"]), "first_step": step == 1} | values)

    def hyper_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> Hyper:
        """The hyper-parameters of the next update of `parameter`: the first with a momentum makes
        it, as in torch."""
        hyper = super().hyper_of(parameter, group)
        first = not self.state.get(parameter)
        return hyper._replace(values=hyper.values | {"first_step": first})

    def _has_states(self, key: int) -> bool:
        """Whether the group of the parameter has a momentum."""
        group = self._group_of(key)
        return group is not None and bool(group["momentum"])
