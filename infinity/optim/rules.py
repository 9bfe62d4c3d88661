"""`infinity.Adagrad`, `infinity.Lion` and `infinity.SGD`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from infinity.optim.kernels import Hyper
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, are_decay_rates, is_amount
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
