"""The base of the optimizer family: a real `torch.optim.Optimizer` whose states the engine keeps and updates.

[Note: torch.amp.GradScaler]
`scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()` works: GradScaler leaves optimizers whose `step` takes
it as `grad_scaler` to divide by the scale themselves, and asks only what they found; with a FutureWarning, for this way may end
some day. It is for fp32 parameters under autocast. The scale is not known before the step, so no update that began in backward
is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from infinity.errors import ConfigError, NonFiniteError
from infinity.optim.kernels import Hyper, Segment, segments_of
from infinity.optim.scaler import LossScaler, scaled_loss
from infinity.optim.step import Updater
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind

log = logging.getLogger("infinity")


class Optimizer(torch.optim.Optimizer):
    """What the optimizers over parameters of a wrapped model have in common; each adds its hyper-parameters.

    `step` fixes the gradient norm, the clip factor and this step's hyper-parameters, and returns; the update runs beside
    what follows, and the next forward waits for it unit by unit. A parameter that got no gradient is left alone, as in torch;
    so one that was trainable when the model was wrapped may be frozen (`requires_grad_(False)`) and thawed between steps.
    `grad_norm` is the exact global L2 norm of the last step before clipping to `max_grad_norm`, and `clipped_grad_norm` after
    it; None where no norm was needed.

    With fp16 parameters the loss is scaled, `optimizer.scale(loss).backward()`, by `loss_scaler` (default: `LossScaler()`),
    and a step with a gradient that is infinite or NaN is left out: no state, parameter or count changes by a bit. With
    `skip_nonfinite` that is so for every precision, without scaling; by default such a step is taken, and logged if a norm
    was needed. `skipped_steps` counts what was left out.

    Raises `ConfigError` when a value is out of range, and when a parameter does not belong to a model wrapped by
    `infinity.wrap`; `NonFiniteError` from `step` when the smallest loss scale is too large.
    """

    _step_supports_amp_scaling = True  # see [Note: torch.amp.GradScaler]

    states: ClassVar[dict[str, Kind]]
    """The states by torch's names; `master` is added for parameters that have one."""
    by_kernels: ClassVar[bool] = True
    """Whether `segments` says all that is done, so that the engine may begin it at any time."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self._check("max_grad_norm", max_grad_norm, max_grad_norm is None or max_grad_norm > 0)
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.loss_scaler = loss_scaler
        """What scales the loss; None where nothing does."""
        self.grad_norm: float | None = None
        self.clipped_grad_norm: float | None = None
        self.skipped_steps = 0
        self._reminded = False
        self._updater: Updater | None = None
        self._units: dict[int, Unit] = {}
        self._steps: dict[int, int] = {}  # updates so far, by id of the parameter
        super().__init__(params, defaults)

    # What a rule adds

    def algorithms(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The values of `Config.algorithm` under which the states of `group` are kept."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        raise NotImplementedError

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the kernels take them."""
        raise NotImplementedError

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when `group`, from a state dict of torch, asks for what the kernels do not do."""
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ConfigError(
                    f"{type(self).__name__}: {name}=True is not supported; infinity.adapt runs the optimizer of torch that has it"
                )

    def _check_group(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        who = type(self).__name__
        self.refuse_unsupported(group)
        self.check(group)
        for unit in units:
            if unit.algorithm not in self.algorithms(group):
                raise ConfigError(
                    f"{who} needs other states than the model was wrapped with (algorithm={unit.algorithm!r}); "
                    f"use infinity.Config(algorithm={self.algorithms(group)[0]!r})"
                )

    def _check(self, name: str, value: Any, good: bool) -> None:
        if not good:
            raise ConfigError(f"{type(self).__name__}: {name}={value} is out of range")

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters must be of the same wrapped model."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self._check_group(group, ())
            self._adopt(group)
        except BaseException:
            del self.param_groups[-1]
            raise

    def _adopt(self, group: dict[str, Any]) -> None:
        who = type(self).__name__
        for parameter in group["params"]:
            if not isinstance(parameter, ShardedParameter):
                raise ConfigError(f"{who} got a parameter of no wrapped model; first model = infinity.wrap(model, config)")
            unit = type(parameter).unit
            updater = unit.updater
            if not isinstance(updater, Updater) or self._updater not in (None, updater):
                raise ConfigError(f"the parameters of one {who} must belong to one wrapped model whose engine is open")
            self._updater = updater
            if not unit.trainable:  # as in torch: it gets no gradient, and cannot be made to
                continue
            self._check_group(group, [unit])
            if unit.index not in self._units:
                updater.adopt(unit, self)
                self._units[unit.index] = unit
            if unit.dtype is torch.float16 and self.loss_scaler is None:
                self.loss_scaler = LossScaler()
            self._steps.setdefault(id(parameter), 0)

    @property
    def updater(self) -> Updater:
        """The engine's updater."""
        if self._updater is None:
            raise ConfigError(f"{type(self).__name__} has no parameters")
        return self._updater

    # The step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward` on instead of `loss`: `loss` times the loss scale, or `loss` where nothing scales it.

        In fp16 a loss overflows at scales from 2**16 on: compute it in fp32.
        """
        if self.loss_scaler is None:
            return loss
        return scaled_loss(loss, self.loss_scaler.scale, self.updater)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Start the update of every parameter that has a gradient, and return; `closure`, if any, computes the loss first.

        `grad_scaler` is given by `torch.amp.GradScaler.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        units = list(self._units.values())
        self.updater.settle(units)
        scales = [(unit.gradients.grad_scale, unit.gradients.loss_scale) for unit in units]
        if grad_scaler is not None:
            for unit in units:
                unit.gradients.loss_scale *= grad_scaler.get_scale()
        elif self.loss_scaler is not None:
            self._remind(units, self.loss_scaler)
        watching = self.skip_nonfinite or self.loss_scaler is not None or grad_scaler is not None
        norm = None
        if self.max_grad_norm is not None:
            norm = self.updater.clip(self.max_grad_norm, units)
        elif watching:
            norm = self.updater.norm(units)
        self.grad_norm = self.clipped_grad_norm = norm
        if grad_scaler is not None:
            _tell(grad_scaler, self, norm)
        if norm is not None and not math.isfinite(norm) and not self._take_nonfinite(units, norm, watching, grad_scaler):
            return loss
        if norm is not None and self.max_grad_norm is not None:
            self.clipped_grad_norm = norm * min(1.0, self.max_grad_norm / (norm + 1e-6))
        updates = [(unit, self.segments(unit)) for unit in units if any(unit.gradients.accumulated) and not unit.gradients.spent]
        counted = [id(p) for unit, _ in updates for p, group in self._updated(unit) if group is not None]
        try:
            self._start(updates)
        except BaseException:  # refused: the step has not been, and may be tried again
            for unit, scale in zip(units, scales, strict=True):
                unit.gradients.grad_scale, unit.gradients.loss_scale = scale
            raise
        for key in counted:
            self._steps[key] += 1
        if self.loss_scaler is not None and grad_scaler is None and norm is not None and math.isfinite(norm):
            self.loss_scaler.update(finite=True)
        return loss

    def _start(self, updates: Sequence[tuple[Unit, tuple[Segment, ...]]]) -> None:
        """Update the units."""
        self.updater.post(updates)

    def _remind(self, units: Sequence[Unit], scaler: LossScaler) -> None:
        unscaled = any(
            any(unit.gradients.accumulated) and not unit.gradients.spent and unit.gradients.loss_scale == 1.0 for unit in units
        )
        if unscaled and scaler.scale != 1.0 and not self._reminded:
            self._reminded = True
            log.warning(
                "the loss was not scaled, so fp16 gradients below 6e-8 are lost: call optimizer.scale(loss).backward(), or ask "
                "for no scaling with loss_scaler=infinity.LossScaler(1.0, window=None)"
            )

    def _take_nonfinite(self, units: Sequence[Unit], norm: float, skips: bool, grad_scaler: Any) -> bool:
        """Whether a step with a gradient that is not finite goes on; if not, it has ended."""
        if not skips:
            self.updater.warn_nonfinite(norm, units)
            return True
        name, number = self.updater.first_nonfinite(units), self.updater.posted_steps + self.updater.skipped_steps + 1
        self.updater.skip(units)
        self.skipped_steps += 1
        if self.loss_scaler is None or grad_scaler is not None:
            log.warning("step %d is skipped: the gradient of %s is not finite", number, name)
            return False
        before = self.loss_scaler.scale
        if not self.loss_scaler.update(finite=False):
            raise NonFiniteError(
                f"the gradient of {name} is not finite at the smallest loss scale, {before:g} (skipped step {number}); the model "
                "or its data overflow fp16: lower the learning rate, or train in bf16",
                name,
            )
        after = self.loss_scaler.scale
        log.info("step %d is skipped: the gradient of %s is not finite at loss scale %g; now %g", number, name, before, after)
        return False

    def segments(self, unit: Unit) -> tuple[Segment, ...]:
        """What the next step does to this rank's shard of `unit`, with the gradients and hyper-parameters of now."""
        return segments_of(
            unit, [None if group is None else self.hyper(group, self._steps[id(p)] + 1) for p, group in self._updated(unit)]
        )

    def _updated(self, unit: Unit) -> list[tuple[torch.Tensor, dict[str, Any] | None]]:
        """The parameters of `unit`, each with its group if it has a gradient and is this optimizer's to update."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return [
            (parameter, groups.get(id(parameter)) if present else None)
            for parameter, present in zip(unit.parameters, unit.gradients.accumulated, strict=True)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; `set_to_none` is accepted and makes no difference."""
        for unit in self._units.values():
            unit.gradients.clear()

    # States

    def state_dict(self) -> dict[str, Any]:
        """As in torch: per parameter `step`, the states by torch's names and, for bf16 and fp16 parameters, the fp32 `master`.

        Waits for pending updates. All states are returned in host memory, so this needs as much as they have bytes; with
        several ranks every rank must call it and gets the whole, of DTensors, too: plain tensors. A parameter that was never
        updated has no state, as in torch; its master, if it has more bits than the parameter, is in `masters`, by its number.
        """
        self.updater.drain()
        packed = super().state_dict()
        numbers = self._numbers()
        masters = packed["masters"] = {}
        for unit in self._units.values():
            for name, kind in self._kinds():
                if kind not in unit.blocks or not unit.blocks[kind].written:
                    continue
                full = unit.gather(kind)
                for parameter, place in zip(unit.parameters, unit.layout.places, strict=True):
                    steps = self._steps.get(id(parameter), 0)
                    if steps:
                        state = packed["state"].setdefault(numbers[id(parameter)], {"step": torch.tensor(float(steps))})
                        state[name] = whole(full[place.offset : place.end].view(place.shape), parameter).clone()
                    elif kind is Kind.MASTER and id(parameter) in numbers:
                        masters[numbers[id(parameter)]] = whole(
                            full[place.offset : place.end].view(place.shape), parameter
                        ).clone()
        if self.loss_scaler is not None:
            packed["loss_scaler"] = self.loss_scaler.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or the torch optimizer of the same name and parameters, which has no masters: these
        stay as they are. Moments that it does not have begin anew. Of DTensors it may have the whole, or DTensors.
        """
        numbers, states, masters = self._numbers(), state_dict["state"], state_dict.get("masters")
        self.load_header(state_dict | {"steps": [_updates(states.get(number, {})) for number in numbers.values()]})
        for unit in self._units.values():
            mine = [states.get(numbers.get(id(p), -1), {}) for p in unit.parameters]
            if masters is not None and Kind.MASTER in unit.blocks:  # then one that is not there is the parameter, widened
                unit.store.forget(unit.blocks[Kind.MASTER])
                unmoved = [masters.get(numbers.get(id(p), -1)) for p in unit.parameters]
                mine = [s if m is None else {**s, "master": m} for s, m in zip(mine, unmoved, strict=True)]
            for name, kind in self._kinds():
                if kind in unit.blocks and any(state.get(name) is not None for state in mine):
                    self._restore(unit, kind, [state.get(name) for state in mine])

    def header(self) -> dict[str, Any]:
        """What there is beside the states: `param_groups` as in `state_dict`, `steps` (the updates of every parameter, in that
        order), `skipped_steps`, and where the loss is scaled `loss_scaler`.
        """
        groups, steps = super().state_dict()["param_groups"], [self._steps.get(key, 0) for key in self._numbers()]
        header = {"param_groups": groups, "steps": steps, "skipped_steps": self.skipped_steps}
        return header if self.loss_scaler is None else header | {"loss_scaler": self.loss_scaler.state_dict()}

    def load_header(self, header: dict[str, Any]) -> None:
        """Take over what `header` gave. All moments begin anew; masters are the weights, and stay."""
        for group in header["param_groups"]:
            self._check_group(self.defaults | group, self._units.values())
        self.updater.drain()
        super().load_state_dict({"state": {}, "param_groups": header["param_groups"]})
        if self.loss_scaler is not None and "loss_scaler" in header:
            self.loss_scaler.load_state_dict(header["loss_scaler"])
        self.skipped_steps = header.get("skipped_steps", self.skipped_steps)
        self._steps = dict(zip(self._numbers(), header["steps"], strict=True))
        for unit in self._units.values():
            for kind in self.states.values():
                if kind in unit.blocks:
                    unit.store.forget(unit.blocks[kind])

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that this optimizer may update."""
        return tuple(self._units.values())

    def _kinds(self) -> list[tuple[str, Kind]]:
        return [*self.states.items(), ("master", Kind.MASTER)]

    def _numbers(self) -> dict[int, int]:
        """The number of each parameter in a state dict, by its id."""
        return {id(p): number for number, p in enumerate(p for g in self.param_groups for p in g["params"])}

    @staticmethod
    def _restore(unit: Unit, kind: Kind, values: list[torch.Tensor | None]) -> None:
        full = unit.gather(kind)
        for parameter, place, value in zip(unit.parameters, unit.layout.places, values, strict=True):
            if value is not None:
                full[place.offset : place.end].view(place.shape).copy_(part_in(value, parameter))
        unit.write(kind, unit.shard_of(full))


def _updates(state: dict[str, Any]) -> int:
    """How many updates made `state`; `torch.optim.SGD` does not count them, and needs to know of the first only."""
    return int(state.get("step", 1 if state else 0))


def _tell(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer, norm: float | None) -> None:
    """What `GradScaler.update` wants to know of every optimizer: whether it met an infinity or a NaN."""
    found = torch.tensor(0.0 if norm is not None and math.isfinite(norm) else 1.0)
    found_inf_per_device: dict[Any, Any] = grad_scaler._found_inf_per_device(optimizer)
    found_inf_per_device[found.device] = found
