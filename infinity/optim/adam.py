"""`infinity.AdamW`: a real `torch.optim.Optimizer` whose states the engine keeps and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.optim.kernels import Hyper, Segment, segments_of
from infinity.optim.step import Updater
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind

_STATES = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ, "master": Kind.MASTER}


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over parameters of a wrapped model, with fp32 masters and moments.

    `step` fixes the gradient norm, the clip factor and this step's hyper-parameters, and returns; the update runs beside
    what follows, and the next forward waits for it unit by unit. `grad_norm` is the exact global L2 norm of the last step,
    before clipping to `max_grad_norm`. A parameter that got no gradient is left alone, as in `torch.optim.AdamW`.

    Raises `ConfigError` when a parameter does not belong to a model wrapped by `infinity.wrap`, or is not trainable.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
    ) -> None:
        for name, value, good in (
            ("lr", lr, lr >= 0), ("betas", betas, all(0 <= beta < 1 for beta in betas)), ("eps", eps, eps > 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("max_grad_norm", max_grad_norm, max_grad_norm is None or max_grad_norm > 0),
        ):  # fmt: skip
            if not good:
                raise ConfigError(f"AdamW: {name}={value} is out of range")
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self._updater: Updater | None = None
        self._units: dict[int, Unit] = {}
        self._steps: dict[int, int] = {}  # updates so far, by id of the parameter
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters must be trainable ones of the same wrapped model."""
        super().add_param_group(param_group)
        try:
            self._adopt(self.param_groups[-1]["params"])
        except BaseException:
            del self.param_groups[-1]
            raise

    def _adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if not isinstance(parameter, ShardedParameter):
                raise ConfigError("AdamW got a parameter of no wrapped model; first model = infinity.wrap(model, config)")
            unit = type(parameter).unit
            if not unit.trainable:
                raise ConfigError(f"{unit.name_of(parameter)} was frozen (requires_grad=False) when the model was wrapped")
            updater = unit.updater
            if not isinstance(updater, Updater) or self._updater not in (None, updater):
                raise ConfigError("the parameters of one AdamW must belong to one wrapped model whose engine is open")
            self._updater = updater
            if unit.index not in self._units:
                updater.adopt(unit, self)
                self._units[unit.index] = unit
            self._steps.setdefault(id(parameter), 0)

    @property
    def updater(self) -> Updater:
        """The engine's updater."""
        if self._updater is None:
            raise ConfigError("AdamW has no parameters")
        return self._updater

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the update of every parameter that has a gradient, and return; `closure`, if any, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        units = list(self._units.values())
        self.updater.settle(units)
        scales = [unit.grad_scale for unit in units]
        if self.max_grad_norm is not None:
            self.grad_norm = self.updater.clip(self.max_grad_norm, units)
        updates = [(unit, self.segments(unit)) for unit in units if any(unit.accumulated) and not unit.spent]
        counted = [id(p) for unit, _ in updates for p, group in self._updated(unit) if group is not None]
        try:
            self.updater.post(updates)
        except BaseException:  # refused: the step has not been, and may be tried again
            for unit, scale in zip(units, scales, strict=True):
                unit.grad_scale = scale
            raise
        for key in counted:
            self._steps[key] += 1
        return loss

    def segments(self, unit: Unit) -> tuple[Segment, ...]:
        """What the next step does to this rank's shard of `unit`, with the gradients and hyper-parameters of now."""
        return segments_of(
            unit, [None if group is None else _hyper(group, self._steps[id(p)] + 1) for p, group in self._updated(unit)]
        )

    def _updated(self, unit: Unit) -> list[tuple[torch.Tensor, dict[str, Any] | None]]:
        """The parameters of `unit`, each with its group if it has a gradient and is this optimizer's to update."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return [
            (parameter, groups.get(id(parameter)) if present else None)
            for parameter, present in zip(unit.parameters, unit.accumulated, strict=True)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; `set_to_none` is accepted and makes no difference."""
        for unit in self._units.values():
            unit.zero_gradients()

    def state_dict(self) -> dict[str, Any]:
        """As in torch: per parameter `step`, `exp_avg`, `exp_avg_sq` and, for bf16 and fp16 parameters, the fp32 `master`.

        Waits for pending updates. All states are returned in host memory, so this needs as much as they have bytes; with
        several ranks every rank must call it and gets the whole.
        """
        self.updater.drain()
        packed = super().state_dict()
        numbers = {id(p): number for number, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for unit in self._units.values():
            for name, kind in _STATES.items():
                if kind not in unit.blocks or not unit.blocks[kind].written:
                    continue
                full = unit.gather(kind)
                for parameter, place in zip(unit.parameters, unit.layout.places, strict=True):
                    steps = self._steps.get(id(parameter), 0)
                    if steps:
                        state = packed["state"].setdefault(numbers[id(parameter)], {"step": torch.tensor(float(steps))})
                        state[name] = full[place.offset : place.end].view(place.shape).clone()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or a `torch.optim.AdamW` of the same parameters (masters are then the parameters).

        States that it does not have begin anew.
        """
        self.updater.drain()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = {id(p): number for number, p in enumerate(p for g in self.param_groups for p in g["params"])}
        states = state_dict["state"]
        self._steps = {key: int(states[number]["step"]) if number in states else 0 for key, number in numbers.items()}
        for unit in self._units.values():
            mine = [states.get(numbers.get(id(p), -1), {}) for p in unit.parameters]
            for name, kind in _STATES.items():
                if kind in unit.blocks:
                    unit.store.forget(unit.blocks[kind])
                    if any(name in state for state in mine):
                        self._restore(unit, kind, [state.get(name) for state in mine])

    @staticmethod
    def _restore(unit: Unit, kind: Kind, values: list[torch.Tensor | None]) -> None:
        derived = kind is Kind.MASTER and not unit.blocks[kind].written
        full = unit.gather(Kind.PARAM).float() if derived else unit.gather(kind)
        for place, value in zip(unit.layout.places, values, strict=True):
            if value is not None:
                full[place.offset : place.end].view(place.shape).copy_(value)
        unit.write(kind, unit.shard_of(full))


def _hyper(group: dict[str, Any], step: int) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step)
