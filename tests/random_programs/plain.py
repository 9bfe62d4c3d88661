"""The update rules in plain torch operations, bit for bit those of `native/cpu_adam/rules.h`.

Each scalar is computed in double precision and rounded once to fp32; each tensor operation is
rounded on its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from support.models import rounded

BETAS = {"adam": (0.9, 0.999), "adamw": (0.9, 0.999), "lion": (0.9, 0.99)}
EPSILON = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10}
STATES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
    "momentum": ("momentum_buffer",),
    "sgd": (),
}
MOMENTUM = 0.9


def _single(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _root(values: torch.Tensor) -> torch.Tensor:
    """torch takes the fp32 root from MKL, which may be off by one place; this one is correctly
    rounded."""
    return values.double().sqrt().float()


class Rule(torch.optim.Optimizer):
    """An optimizer with fp32 masters. A clip factor reaches a gradient when that is clipped again,
    or added to: see `apply`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: str,
        max_grad_norm: float | None,
        watches: bool,
        previous: bool,
        eps: float | None,
    ) -> None:
        """With `previous` the norm of the step before clips a step. `eps` is that of Adam, the
        usual one if None."""
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._rule, self._max_grad_norm, self._watches = rule, max_grad_norm, watches
        self._previous = previous
        self._eps = EPSILON["adam"] if eps is None else eps
        self._last_norm: float | None = None
        self._clips: dict[torch.Tensor, float] = {}
        self.grad_norm: float | None = None
        if rule == "adagrad":  # as torch.optim.Adagrad
            for p in self._all():
                self._begin(p)

    def _begin(self, p: torch.Tensor) -> None:
        """Make the states of a parameter as they are before its first update."""
        moments = {name: torch.zeros(p.shape) for name in STATES[self._rule]}
        self.state[p] |= {"step": 0} | moments

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        """The gradient, clipped."""
        return None if p.grad is None else p.grad.clone().mul_(self._clips.get(p, 1.0))

    def _norm(self) -> float:
        used = [p for p in self._all() if p.grad is not None]
        return math.sqrt(
            sum(self._clips.get(p, 1.0) ** 2 * p.grad.double().square().sum().item() for p in used)
        )

    def apply(self) -> None:
        """Multiply the clip factors into the gradients, in their dtype."""
        for p in self._all():
            if p.grad is not None:
                p.grad.mul_(self._clips.pop(p, 1.0))

    def settle(self, p: torch.Tensor) -> None:
        """`apply`, for one parameter."""
        if p.grad is not None:
            p.grad.mul_(self._clips.pop(p, 1.0))

    def forget(self, p: torch.Tensor) -> None:
        """There is no gradient any more."""
        p.grad = None
        self._clips.pop(p, None)

    def clip(self, most: float, by: float | None = None) -> float:
        """As `Engine.clip_grad_norm_`, or `by` another norm."""
        norm = self._norm()
        factor = most / ((norm if by is None else by) + 1e-6)
        if not factor > 1.0:
            self.apply()
            self._clips = {p: factor for p in self._all() if p.grad is not None}
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self._clips = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.grad_norm = None if self._max_grad_norm is None and not self._watches else self._norm()
        if self._watches and not math.isfinite(self.grad_norm):
            return  # a step with a loss scale is left out
        if self._max_grad_norm is not None:
            self.clip(self._max_grad_norm, self._last_norm if self._previous else None)
        if self.grad_norm is not None and math.isfinite(self.grad_norm):
            self._last_norm = self.grad_norm
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self._begin(p)
        state = self.state[p]
        if not state["step"] and p.dtype != torch.float32:
            state["master"] = p.detach().float()
        state["step"] += 1
        w = state.get("master", p.detach())
        g = p.grad.float() * _single(self._clips.get(p, 1.0))
        decay = group["weight_decay"]
        if decay and self._rule in ("adamw", "lion"):
            w = w * _single(1 - group["lr"] * decay)
        elif decay:
            g = g + _single(decay) * w
        w = getattr(self, "_" + self._rule)(w, g, state, group["lr"])
        if "master" in state:
            state["master"] = w
        p.copy_(rounded(w, p.dtype))

    def _adam(
        self, w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float
    ) -> torch.Tensor:
        beta1, beta2 = BETAS["adam"]
        step = state["step"]
        state["exp_avg"] = _single(beta1) * state["exp_avg"] + _single(1 - beta1) * g
        state["exp_avg_sq"] = _single(beta2) * state["exp_avg_sq"] + (_single(1 - beta2) * g) * g
        d = _root(state["exp_avg_sq"]) / _single((1 - beta2**step) ** 0.5) + _single(self._eps)
        return w - _single(lr / (1 - beta1**step)) * (state["exp_avg"] / d)

    _adamw = _adam

    def _adagrad(
        self, w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float
    ) -> torch.Tensor:
        state["sum"] = state["sum"] + g * g
        return w - _single(lr) * (g / (_root(state["sum"]) + _single(EPSILON["adagrad"])))

    def _lion(
        self, w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float
    ) -> torch.Tensor:
        beta1, beta2 = BETAS["lion"]
        u = _single(beta1) * state["exp_avg"] + _single(1 - beta1) * g
        state["exp_avg"] = _single(beta2) * state["exp_avg"] + _single(1 - beta2) * g
        return w - _single(lr) * u.sign()

    def _sgd(
        self, w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float
    ) -> torch.Tensor:
        return w - _single(lr) * g

    def _momentum(
        self, w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float
    ) -> torch.Tensor:
        before = state["momentum_buffer"]
        m = g if state["step"] == 1 else _single(MOMENTUM) * before + _single(1.0) * g
        state["momentum_buffer"] = m
        return w - _single(lr) * (g + _single(MOMENTUM) * m)

    def follow(self, parameter: torch.Tensor, before: torch.Tensor) -> None:
        """The parameter was written by hand: the master of each element that changed is its new
        value."""
        master = self.state[parameter].get("master") if parameter in self.state else None
        if master is not None:
            now = parameter.detach()
            same = now.view(torch.int16) == before.view(torch.int16)
            self.state[parameter]["master"] = torch.where(same, master, now.float())

    def named_states(self) -> Iterator[tuple[str, Any]]:
        """All states, as `infinity.Optimizer.state_dict` names them."""
        for number, p in enumerate(self._all()):
            state = self.state.get(p, {})
            names = [name for name in (*STATES[self._rule], "master") if name in state]
            if "master" in names and not state["step"]:  # it is the weight, as for the engine
                names.remove("master")
            if names:
                yield f"{number} step", _single(float(state["step"]))
                for name in names:
                    yield f"{number} {name}", state[name]

    def saved(self) -> Any:
        """What `take` takes."""
        states = copy.deepcopy([dict(self.state.get(p, {})) for p in self._all()])
        return states, [g["lr"] for g in self.param_groups], self._last_norm

    def take(self, saved: Any) -> None:
        """Go on where `saved` was called."""
        states, rates, self._last_norm = copy.deepcopy(saved)
        for p, state in zip(self._all(), states, strict=True):
            if state and p.dtype != torch.float32:
                state.setdefault("master", p.detach().float())
            self.state[p] = state
        for group, lr in zip(self.param_groups, rates, strict=True):
            group["lr"] = lr
