"""The optimizer of DeepSpeed's `"type": "Muon"`, as an optimizer of torch for `infinity.adapt`.

[Note: the numbers of Muon]
The numbers are those of DeepSpeed 0.19.8: Nesterov momentum, five Newton-Schulz iterations, and a
factor for tall matrices. "gram" iterates on the Gram matrix unless a matrix is square, and
"standard" on the matrix itself. "standard" iterates in bf16. "gram" iterates in fp16 if the CPU
computes in it, else in fp32, like DeepSpeed on a CPU. On a GPU DeepSpeed uses fp16. Momentum is
fp32. In DeepSpeed it has the dtype of the gradients.

A parameter without a gradient stays unchanged, as in optimizers of torch.

[Note: clipped values]
At stage 0 gradients are clipped before Muon. At stages 1 to 3 DeepSpeed clips the results of Muon,
by the norm of these and of the gradients for Adam (`ClippedMuon`). `get_global_grad_norm` returns
that norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity.optim.foreign import Adapted
from infinity.optim.norm import clip_factor
from infinity.optim.scaler import LossScaler
from infinity.optim.step import Step
from infinity.sharding.unit import Unit

_STEPS = 5
_FACTORS = (3.4445, -4.7750, 2.0315)
_RESTART = 2
"""The iteration on the Gram matrix that begins with a newly computed matrix."""
_WITHOUT = ("embed", "lm_head")
"""Adam updates parameters with these in their names."""
_MUON = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM = ("lr", "betas", "eps", "weight_decay")
_RATES = {True: 0.02, False: 3e-4}
"""The default learning rates of DeepSpeed."""


class Muon(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, and Adam for other groups. See [Note: the numbers of Muon].

    Parameters of groups with `use_muon` have two or more dimensions. Adam's weight decay acts on
    the parameter with `adam_w_mode`, else on the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = _RATES[True],
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
        use_muon: bool = True,
        clip: float = 1.0,
    ) -> None:
        """`clip` multiplies the results of Muon, and the gradients for Adam."""
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"ns_method": ns_method, "betas": tuple(betas), "eps": eps}
        defaults |= {"adam_w_mode": adam_w_mode, "use_muon": use_muon, "clip": clip}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients. `closure` is not called."""
        for group in self.param_groups:
            update = self._by_muon if group["use_muon"] else self._by_adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(group, parameter, parameter.grad)

    @torch.no_grad()
    def square(self) -> float:
        """The sum of squares of the values that a step would clip. Changes nothing."""
        found = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                clipped = parameter.grad
                if clipped is not None and group["use_muon"]:
                    before = self.state.get(parameter, {}).get("momentum_buffer")
                    momentum = torch.zeros_like(clipped) if before is None else before.clone()
                    clipped = _muon_update(clipped, momentum, group["momentum"], group["ns_method"])
                found += 0.0 if clipped is None else float(clipped.norm()) ** 2
        return found

    def _by_muon(
        self, group: Mapping[str, Any], parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        update = _muon_update(
            gradient, state["momentum_buffer"], group["momentum"], group["ns_method"]
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        clipped = update.reshape(parameter.shape) * group["clip"]
        parameter.add_(clipped, alpha=-group["lr"])

    def _by_adam(
        self, group: Mapping[str, Any], parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["step"] = 0
        state["step"] += 1
        first, second = group["betas"]
        gradient = gradient * group["clip"]
        if not group["adam_w_mode"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        square = state["exp_avg_sq"] / (1 - second ** state["step"])
        if group["adam_w_mode"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(mean / (square.sqrt() + group["eps"]), alpha=-group["lr"])


class ClippedMuon(Adapted):
    """`Muon` by `infinity.adapt` at stages 1 to 3; see [Note: clipped values]."""

    def __init__(
        self,
        groups: Iterable[Any],
        limit: float,
        max_grad_norm: float | None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        """`limit` is the norm limit, in place of `max_grad_norm`. Gradients are measured."""
        super().__init__(
            Muon,
            groups,
            {},
            max_grad_norm=math.inf,
            skip_nonfinite=skip_nonfinite,
            loss_scaler=loss_scaler,
        )
        self._limit = limit

    def _post(self, step: Step) -> None:
        factors = {share.unit: factor for share, factor in step.factors.items()}
        shares = [share.unit for share in step.shares]
        norm = math.sqrt(sum(self._square(unit, factors[unit]) for unit in shares))
        factor = clip_factor(norm, self._limit)
        self.grad_norm, self.clipped_grad_norm = norm, norm * factor
        for group in self.param_groups:
            group["clip"] = factor
        super()._post(step)

    def _square(self, unit: Unit, factor: float) -> float:
        bench = self.bench(unit)
        try:
            optimizer: Any = bench.lay_out(self, None)
            self._give_gradients(unit, bench, factor)
            return float(optimizer.square())
        finally:
            bench.clear()


def halves(
    groups: Iterable[Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Each of `groups`, with names in `parameters`, as one group for Muon and one for Adam.

    Muon gets parameters of two or more dimensions, except embeddings and the head, by their names.
    `settings` are those of the configuration. The settings of a group take precedence.
    """
    for group in groups:
        names = [name for name in group["params"] if parameters[name].requires_grad]
        for by_muon, keys in ((True, _MUON), (False, _ADAM)):
            mine = [name for name in names if _is_for_muon(name, parameters[name]) is by_muon]
            if not mine:
                continue
            found = {key: settings[key] for key in keys if key in settings}
            rate = settings.get("muon_lr" if by_muon else "adam_lr", found.get("lr"))
            found["lr"] = _RATES[by_muon] if rate is None else rate
            found |= {key: group[key] for key in keys if key in group}
            found["adam_w_mode"] = settings.get("adam_w_mode", True)
            yield found | {"params": mine, "use_muon": by_muon}


def _is_for_muon(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 2 and not any(part in name.lower() for part in _WITHOUT)


def _muon_update(
    gradient: torch.Tensor, momentum: torch.Tensor, beta: float, method: str
) -> torch.Tensor:
    finite = torch.isfinite(gradient).all()
    momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - beta), momentum))
    blended = gradient.lerp(momentum, beta)
    matrix = blended.view(len(blended), -1) if blended.ndim == 4 else blended  # of a convolution
    iterated = (_by_gram if method == "gram" else _by_matrix)(matrix)
    rows, columns = gradient.size(-2), gradient.size(-1)
    iterated = iterated * (math.sqrt(rows / columns) if rows > columns else 1.0)
    return torch.where(finite, iterated.to(gradient.dtype).view(blended.shape), blended)


def _by_matrix(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.to(torch.bfloat16)
    tall = matrix.size(-2) > matrix.size(-1)
    wide = wide.mT if tall else wide
    wide = _iterated(wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7))
    return wide.mT if tall else wide


def _iterated(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = _FACTORS
    for _ in range(_STEPS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def _by_gram(matrix: torch.Tensor) -> torch.Tensor:
    a, b, c = _FACTORS
    tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if tall else matrix
    wide = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(_gram_dtype())
    if wide.size(-1) <= wide.size(-2):
        return _iterated(wide)
    gram, product = wide @ wide.mT, None
    for number in range(_STEPS):
        if number == _RESTART and product is not None:
            wide = product @ wide
            gram, product = wide @ wide.mT, None
        update = b * gram + c * gram @ gram
        if product is None:
            product = update.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = a * product + update @ product
        if number < _STEPS - 1 and number + 1 != _RESTART:
            half = a * gram + update @ gram
            gram = a * half + update @ half
    assert product is not None
    return wide.mT @ product.mT if tall else product @ wide


def _gram_dtype() -> torch.dtype:
    return torch.float16 if torch.ops.mkldnn._is_mkldnn_fp16_supported() else torch.float32
