"""The base of the optimizer family: a real `torch.optim.Optimizer` whose states the engine keeps
and updates.

[Note: torch.amp.GradScaler]
`scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()` works as with an optimizer
of torch. GradScaler divides `.grad` by the scale, which becomes a factor of a lazy gradient
(`optim/lazy_gradient`), and leaves out `step` where one is not finite. It is for fp32 parameters
under autocast. The scale is not known before the step, so no update that began in backward is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch

from infinity.backward import in_backward
from infinity.errors import ConfigError, NonFiniteError, ShardedParameterError, in_words
from infinity.optim.compared import StepComparer, shared_settings
from infinity.optim.groups import (
    UNSUPPORTED,
    belonging,
    check_once,
    check_parameters,
    check_torch_options,
    check_value,
    with_pieces,
)
from infinity.optim.kernel_states import KernelStates
from infinity.optim.kernels import Hyper, Segment, segments_of
from infinity.optim.norm import NormGroup, apply_clips, clip_factor, group_of, over_parts
from infinity.optim.scaler import LossScaler, scaled_loss
from infinity.optim.state_dict import (
    add_masters,
    check_header,
    check_state,
    copies_of,
    kinds,
    numbers,
    restore,
    states_in,
    updates_in,
)
from infinity.optim.state_view import Keeper, OptimizerStates
from infinity.optim.step import Step, UnitShare
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding.tiles import TiledWeight
from infinity.sharding.unit import Unit

log = logging.getLogger("infinity")


CLIPS = ("global", "previous", "unit")
"""Whose norm clips the gradients of a unit: that of the step, that of the step before, or its
own."""


class Norms(NamedTuple):
    """Of the gradients of a step, unscaled; None where nothing depends on it."""

    norm: float | None
    """That of all."""
    squares: list[float] | None = None
    """With `clip="unit"`, the squared norm of each share."""


class Optimizer(torch.optim.Optimizer):
    """What the optimizers over parameters of a wrapped model have in common; each adds its
    hyper-parameters.

    `step` fixes the gradient norm, the clip factor and this step's hyper-parameters, and returns;
    the update runs beside what follows, and the next forward waits for it unit by unit. A parameter
    that got no gradient is left alone, as in torch; so one that was trainable when the model was
    wrapped may be frozen (`requires_grad_(False)`) and thawed between steps. `grad_norm` is the
    exact global L2 norm of the last step before clipping to `max_grad_norm`, and
    `clipped_grad_norm` after it; None where no norm was needed. With `max_grad_norm=math.inf` it is
    measured, and nothing is clipped.

    With `clip="previous"` the norm of the step before clips a step, so its factor is known in its
    backward, and the updates that begin there are final even where every step is clipped. The first
    step is clipped by its own norm; infinite and NaN norms clip nothing later. Deterministic, and
    the same bits in every placement, but other numbers than torch's: a step whose norm jumps is
    clipped too late. `grad_norm` stays the step's own.

    With `clip="unit"` every unit (see `units` of `wrap`) is clipped by the norm of its own
    gradients. That is another operation than the global clip, like layer-wise clipping: it also
    turns the gradient of the whole model. A factor needs no other unit, so no update that begins in
    backward is redone because of it. Deterministic, and the same bits in every placement; with
    other units there are other numbers. `grad_norm` stays the global norm. Where a unit has
    parameters of several optimizers, each clips what is its own, and their updates begin in `step`.

    `norm_group` (a process group, or a `DeviceMesh` of one dimension) has the ranks that hold other
    parts of the model, such as the stages of a pipeline. Norms are then those of all parts, and a
    step is skipped on all of them or on none. Its ranks make like optimizers and step alike.

    The gradients stay until `zero_grad`, as in torch: another `step` applies them again, and a
    backward adds to them. Several optimizers may have parameters of one model, also of one unit:
    norm, clipping and `zero_grad` concern an optimizer's own.

    With fp16 parameters the loss is scaled, `optimizer.scale(loss).backward()`, by `loss_scaler`
    (default: `LossScaler()`), and a step with a gradient that is infinite or NaN is left out: no
    state, parameter or count changes by a bit. With `skip_nonfinite` that is so for every
    precision, without scaling. By default such a step is taken, as in torch, and logged if a norm
    was needed: with `max_grad_norm` a NaN makes all gradients NaN, and an infinity makes the finite
    ones zeros (with `clip="unit"` those of its unit). With `error_if_nonfinite` `step` raises
    `NonFiniteError` before anything is changed, unless the loss is scaled, which skips.
    `skipped_steps` counts what was left out.

    Raises `ConfigError` when a value is out of range. Raises it, too, when a parameter has another
    optimizer or does not belong to a wrapped model. `step` raises `NonFiniteError` also when the
    smallest loss scale is too large.

    `foreach`, `fused` and `capturable` of torch's optimizers are accepted and change nothing.
    """

    states: ClassVar[dict[str, Kind]]
    """The states by torch's names; `master` is added for parameters that have one."""
    counts_in_state: ClassVar[bool] = False
    """Whether torch has the number of updates in `state`, as "step"."""
    states_from_start: ClassVar[bool] = False
    """Whether the optimizer of torch makes its states when it is made."""
    by_kernels: ClassVar[bool] = True
    """Whether `segments` says all that is done, so that the engine may begin it at any time."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        error_if_nonfinite: bool = False,
        clip: str = "global",
        norm_group: NormGroup = None,
        torch_options: Mapping[str, Any] | None = None,
    ) -> None:
        who = type(self).__name__
        check_parameters(who, params)
        defaults |= check_torch_options(who, torch_options or {})
        self._check("max_grad_norm", max_grad_norm, lambda norm: norm is None or norm > 0)
        if not isinstance(loss_scaler, (LossScaler, NoneType)):
            raise ConfigError(
                f"{type(self).__name__}: loss_scaler is {in_words(loss_scaler)}; give "
                "infinity.LossScaler(), or leave it out"
            )
        if skip_nonfinite and error_if_nonfinite:
            raise ConfigError(
                f"{type(self).__name__}: a step is skipped or raises; give skip_nonfinite "
                "or error_if_nonfinite"
            )
        if clip not in CLIPS:
            raise ConfigError(
                f"{type(self).__name__}: clip={in_words(clip)}; give one of {', '.join(CLIPS)}"
            )
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.error_if_nonfinite, self.clip = error_if_nonfinite, clip
        self._norm_group = group_of(norm_group)
        self.scaler = loss_scaler
        """What scales the loss; None where nothing does. `loss_scaler` is its public name."""
        self.grad_norm: float | None = None
        self.clipped_grad_norm: float | None = None
        self._last_norm: float | None = None  # of the last step that had a finite one
        self.skipped_steps = 0
        self.overflow = False
        """Whether the last `step` was left out, because a gradient was not finite."""
        self._reminded = False
        self._comparer = StepComparer()
        self._parts_agree = self._norm_group is None
        self._updater: Updater | None = None
        self._shares: dict[int, UnitShare] = {}  # by the index of the unit
        self._kernel_states = KernelStates(type(self))
        self._steps = self._kernel_states.counts  # updates so far, by id of the parameter
        self._view = OptimizerStates(type(self).__name__, self._keeper())
        # What `state` is while torch packs a state dict.
        self._packing: dict[torch.Tensor, dict[str, Any]] | None = None
        # The group of each parameter, by its id, as `param_groups` were when a step was fixed last;
        # what begins before the next one is a guess.
        self._groups: dict[int, dict[str, Any]] | None = None
        self._adopted: set[int] = set()  # ids of the parameters in `_shares`
        super().__init__(params, defaults)
        if self._shares:
            try:
                self.updater.made(self)
            except BaseException:
                self.updater.owners.release(self)
                raise

    # What a rule adds

    def algorithms(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The values of `Config.algorithm` under which the states of `group` are kept."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when a hyper-parameter of `group` is out of range."""
        raise NotImplementedError

    def hyper(self, group: dict[str, Any], step: int) -> Hyper:
        """The hyper-parameters of update number `step` (from 1) of a parameter of `group`, as the
        kernels take them."""
        raise NotImplementedError

    def hyper_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> Hyper:
        """The hyper-parameters of the next update of `parameter`, which is in `group`."""
        hyper = self.hyper(group, self._steps.get(id(parameter), 0) + 1)
        return hyper._replace(sign=-1.0) if group.get("maximize") else hyper

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` when `group`, from a state dict of torch, asks for what the kernels
        do not do."""
        for name, values in UNSUPPORTED.items():
            if group.get(name) in values:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={group[name]} is not supported; infinity.adapt "
                    "runs the optimizer of torch that has it"
                )

    def check_group(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when `group` cannot be that of parameters in `units`."""
        self.refuse_unsupported(group)
        self.check(group)
        self.check_algorithm(group, units)

    def check_algorithm(self, group: dict[str, Any], units: Iterable[Unit]) -> None:
        """Raise `ConfigError` when `units` do not have the states that `group` asks for."""
        who = type(self).__name__
        for unit in units:
            if unit.algorithm not in self.algorithms(group):
                raise ConfigError(
                    f"{who} needs other states than the model was wrapped with "
                    f"(algorithm={unit.algorithm!r}); use "
                    f"infinity.Config(algorithm={self.algorithms(group)[0]!r})"
                )

    def _check(
        self, name: str, value: Any, is_good: Callable[[Any], bool], kind: str = "a number"
    ) -> None:
        """Raise `ConfigError` where the value of a hyper-parameter is not of its `kind`, or not
        good."""
        check_value(type(self).__name__, name, value, is_good, kind)

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters must be of the same wrapped model."""
        param_group["params"] = with_pieces(param_group["params"])
        super().add_param_group(param_group)
        self._groups = None
        try:
            group = self.param_groups[-1]
            self.check_group(group, ())
            self._adopt(group, group["params"])
        except BaseException:
            del self.param_groups[-1]
            raise

    def _adopt(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Take over these parameters of `group`, or raise before anything is changed."""
        updater, taken = belonging(type(self).__name__, parameters, self._updater)
        if updater is None:
            return
        self.check_group(group, taken)
        for unit, positions in taken.items():
            updater.owners.check_free(UnitShare(unit, tuple(positions)), self)
        self._updater = updater
        for unit, positions in taken.items():
            updater.adopt(UnitShare(unit, tuple(sorted(positions))), self)
            mine = self._shares[unit.index].positions if unit.index in self._shares else ()
            self._shares[unit.index] = UnitShare(unit, tuple(sorted({*mine, *positions})))
            if unit.dtype is torch.float16 and self.scaler is None:
                self.scaler = LossScaler()
            for index in positions:
                self._know(unit, index)
        self._adopted |= set(map(id, parameters))

    def _follow_groups(self) -> None:
        """Take over what was done to `param_groups` since the last step. Raises `ConfigError` for
        what cannot be done here."""
        members: set[int] = set()
        for group in self.param_groups:
            if any(isinstance(parameter, TiledWeight) for parameter in group["params"]):
                group["params"] = with_pieces(group["params"])
            self.refuse_unsupported(group)
            self.check_algorithm(group, self.units)
            new = [p for p in group["params"] if id(p) not in self._adopted]
            check_once(type(self).__name__, members, group["params"])
            if new:
                self._adopt(group, new)
        if members != self._adopted:
            self._leave(members)

    def _leave(self, members: set[int]) -> None:
        """Have a share of the parameters of these ids alone. States of the others stay."""
        for number, (unit, positions) in list(self._shares.items()):
            left = tuple(i for i in positions if id(unit.parameters[i]) in members)
            self._shares[number] = UnitShare(unit, left)
        self._adopted = members

    def _know(self, unit: Unit, index: int) -> None:
        """Parameter `index` of `unit` is one of this optimizer, from now on or again."""
        parameter = unit.parameters[index]
        self._kernel_states.updater = self._updater
        self._kernel_states.places[id(parameter)] = unit, index
        self._steps.setdefault(id(parameter), 0)
        self._view.know([parameter])
        if self.states_from_start:
            self._view.renew([id(parameter)])

    @property
    def updater(self) -> Updater:
        """The engine's updater."""
        if self._updater is None:
            raise ConfigError(f"{type(self).__name__} has no parameters")
        return self._updater

    # `optimizer.state`

    @property
    def state(self) -> Any:
        """As in torch: of each parameter that was updated a dict of its states, by torch's names.

        Its tensors are those that the engine keeps: reading one fetches it, and what is written in
        place replaces it (as `infinity.get` and `infinity.set`). With several ranks all of them do
        so alike. An entry that is deleted or emptied begins anew. Waits for pending updates.

        Raises `ConfigError` for an entry with which the optimizer of torch could not step, and
        `ShardedParameterError` inside of a forward or a backward.
        """
        return self._view if self._packing is None else self._packing

    @state.setter
    def state(self, entries: Any) -> None:
        self._view.replace_all(entries)

    def _keeper(self) -> Keeper:
        return self._kernel_states

    def _has_states(self, key: int) -> bool:
        """Whether torch has states of the parameter of this id, once it was updated."""
        return True

    def _packed(self, states: dict[torch.Tensor, dict[str, Any]]) -> dict[str, Any]:
        """The state dict of torch with these `states`."""
        self._packing = states
        try:
            return super().state_dict()
        finally:
            self._packing = None

    # The step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward` on instead of `loss`: `loss` times the loss scale, or `loss`
        where nothing scales it.

        In fp16 a loss overflows at scales from 2**16 on: compute it in fp32.
        """
        if self.scaler is None:
            return loss
        return scaled_loss(loss, self.scaler.scale, self.updater.scales)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What scales the loss; None where nothing does."""
        return self.scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies the next loss by; 1 where nothing scales it."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def loss_is_scaled(self) -> bool:
        """Inside of a backward: whether its loss went through `scale`, or need not."""
        return self.loss_scale == 1.0 or self.updater.scales.noted

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the update of every parameter that has a gradient, and return; `closure`, if any,
        computes the loss first. There are three phases:

        1. Measure: gradients become final on all ranks, and their norm is computed where anything
           depends on it.
        2. Fix: the step is left out, or becomes a `Step`: the clip factor, and what is done to
           every unit.
        3. Post: the updater takes it, and makes it beside what follows.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if in_backward():
            raise ShardedParameterError(
                f"{type(self).__name__}.step() inside of a backward: gradients of a wrapped model "
                "are final after it. Step once after backward(); with "
                'Tuning(update="speculative") the engine updates each unit inside of the '
                "backward itself, and keeps no gradient longer than it must"
            )
        self._follow_groups()
        self._view.settle()
        shares = list(self._shares.values())
        norms = self._measure(shares)
        norm = norms.norm
        step = self._fix(shares, norms)
        self.overflow = step is None
        if step is not None:
            self._post(step)
            self._steps.update(step.counts)
            self._view.renew(key for key in step.counts if self._has_states(key))
            if norm is not None and math.isfinite(norm):
                self._last_norm = norm
            if self.scaler is not None and norm is not None and math.isfinite(norm):
                self.scaler.update(finite=True)
        self.updater.stepped_by(self)
        return loss

    def _measure(self, shares: Sequence[UnitShare]) -> Norms:
        """Phase 1."""
        if not self._parts_agree:
            self.updater.compare_parts(self._norm_group, shared_settings(self))
            self._parts_agree = True
        self.updater.settle([share.unit for share in shares], self._comparer.step(self))
        if self.scaler is not None:
            self._remind(shares, self.scaler)
        norm = squares = None
        if self._skips or self.error_if_nonfinite or self.max_grad_norm is not None:
            if self.clips_by_unit:
                squares = self.updater.norm.each(shares)
                norm = math.sqrt(sum(squares))
            else:
                norm = self.updater.norm.of(shares)
            norm = over_parts(norm, self._norm_group)
        self.grad_norm = self.clipped_grad_norm = norm
        return Norms(norm, squares)

    def _fix(self, shares: Sequence[UnitShare], norms: Norms) -> Step | None:
        """Phase 2. Returns None for a step that is left out, because a gradient is not finite."""
        norm, squares = norms
        if norm is not None and not math.isfinite(norm):
            if self._skips:
                self._skip(shares)
                return None
            self.updater.norm.take_nonfinite(
                norm, shares, self.updater.next_number, self.error_if_nonfinite
            )
        own = [norm] * len(shares) if squares is None else map(math.sqrt, squares)
        factors = dict(zip(shares, map(self._factor, own), strict=True))
        if squares is not None:
            clipped = zip(squares, factors.values(), strict=True)
            own_norm = math.sqrt(sum(square * factor**2 for square, factor in clipped))
            self.clipped_grad_norm = over_parts(own_norm, self._norm_group)
        elif norm is not None:
            self.clipped_grad_norm = norm * self._factor(norm)
        for share, factor in factors.items():
            apply_clips([share], factor)
        self._groups = None
        segments = {
            share: self.segments(share.unit, factor)
            for share, factor in factors.items()
            if share.present()
        }
        updated = [
            id(share.unit.parameters[index]) for share in segments for index in share.present()
        ]
        return Step(
            number=self.updater.next_number,
            factors=factors,
            loss_scale=self.loss_scale,
            segments=segments,
            counts={key: self._steps[key] + 1 for key in updated},
            foreseen=self.clips_by_unit
            or (self.clip == "previous" and self._last_norm is not None),
        )

    @property
    def clips_by_unit(self) -> bool:
        """Whether the norm of a unit alone clips it."""
        return self.clip == "unit"

    def _factor(self, norm: float | None) -> float:
        """What clips gradients of the norm `norm`; while that is not known (None), what will clip
        them if anything is known of that, else 1."""
        if self.clip == "previous" and self._last_norm is not None:
            norm = self._last_norm
        limit = self.max_grad_norm
        if norm is None or limit is None or limit == math.inf:
            return 1.0
        return clip_factor(norm, limit)

    def _post(self, step: Step) -> None:
        """Phase 3. Raises before anything is changed."""
        self.updater.post(step)

    @property
    def _skips(self) -> bool:
        """Whether a step with a gradient that is not finite is left out."""
        return self.skip_nonfinite or self.scaler is not None

    def _skip(self, shares: Sequence[UnitShare]) -> None:
        """Leave a step out: a gradient is not finite."""
        name, number = self.updater.norm.first_nonfinite(shares), self.updater.next_number
        self.updater.skip(shares)
        self.skipped_steps += 1
        if self.scaler is None:
            log.warning("step %d is skipped: the gradient of %s is not finite", number, name)
            return
        before = self.scaler.scale
        if not self.scaler.update(finite=False):
            raise NonFiniteError(
                f"the gradient of {name} is not finite at the smallest loss scale, {before:g} "
                f"(skipped step {number}); the model or its data overflow fp16: lower the "
                "learning rate, or train in bf16",
                name,
            )
        after = self.scaler.scale
        log.info(
            "step %d is skipped: the gradient of %s is not finite at loss scale %g; now %g",
            number,
            name,
            before,
            after,
        )

    def _remind(self, shares: Sequence[UnitShare], scaler: LossScaler) -> None:
        unscaled = any(
            share.present() and share.unit.gradients.loss_scale == 1.0 for share in shares
        )
        if unscaled and scaler.scale != 1.0 and not self._reminded:
            self._reminded = True
            log.warning(
                "the loss was not scaled, so fp16 gradients below 6e-8 are lost: call "
                "optimizer.scale(loss).backward(), or ask for no scaling with "
                "loss_scaler=infinity.LossScaler(1.0, window=None)"
            )

    def ahead(self, unit: Unit) -> tuple[Segment, ...] | None:
        """What the next step does to this rank's shard of `unit` as far as is known before it; None
        where it is not worth a guess."""
        norm = None
        if self.clips_by_unit and self.max_grad_norm is not None:
            square = self.updater.norm.ahead(self._shares[unit.index])
            if square is None or not math.isfinite(square):
                return None
            norm = math.sqrt(square)
        return self.segments(unit, self._factor(norm))

    def segments(self, unit: Unit, factor: float) -> tuple[Segment, ...]:
        """What the next step does to this rank's shard of `unit`, with the gradients and
        hyper-parameters of now, and gradients clipped by `factor`."""
        hypers = [
            None if group is None else self.hyper_of(p, group) for p, group in self._updated(unit)
        ]
        return segments_of(unit, hypers, factor)

    def _updated(self, unit: Unit) -> list[tuple[torch.Tensor, dict[str, Any] | None]]:
        """The parameters of `unit`, each with its group if it has a gradient and is this
        optimizer's to update."""
        return [
            (parameter, self._group_of(id(parameter)) if unit.gradients.has(index) else None)
            for index, parameter in enumerate(unit.parameters)
        ]

    def _group_of(self, key: int) -> dict[str, Any] | None:
        """The group of the parameter of this id."""
        if self._groups is None:
            self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return self._groups.get(key)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters. Without `set_to_none` they become
        zeros, as in torch, which the next step takes; that reads and writes them."""
        if self._updater is not None:
            self._updater.forget(list(self._shares.values()), set_to_none)

    # States

    def state_dict(self) -> dict[str, Any]:
        """As in torch: per parameter `step`, the states by torch's names and, for bf16 and fp16
        parameters, the fp32 `master`.

        Waits for pending updates. States are mapped from unnamed files, as by `Engine.state_dict`,
        so they take no memory that the kernel cannot have back. With several ranks every rank must
        call it and gets the whole, of DTensors, too: plain tensors. A parameter that was never
        updated has no state, as in torch; its master, if it has more bits than the parameter, is in
        `masters`, by its number.
        """
        self.updater.drain()
        packed = self._packed(self._copied_states())
        add_masters(packed, self)
        if self.scaler is not None:
            packed["loss_scaler"] = self.scaler.state_dict()
        if self.clip == "previous":
            packed["last_norm"] = self._last_norm
        return packed

    def _copied_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """What a state dict has of each parameter with states."""
        return copies_of(self, self._kernel_states, self._view)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or the torch optimizer of the same name and parameters,
        which has no masters: these stay as they are. Moments that it does not have begin anew. Of
        DTensors it may have the whole, or DTensors.

        Raises `ConfigError` when anything in it does not fit, a shape, a type, a group or a count,
        before anything is changed.
        """
        states = states_in(state_dict, self)
        self.load_header(state_dict | {"steps": [updates_in(state) for state in states]})
        if "masters" in state_dict:  # then one that is not there is the parameter, widened
            for share in self._shares.values():
                self.updater.owners.forget_states(
                    share, [Kind.MASTER] if Kind.MASTER in share.unit.blocks else []
                )
        self._load_states(dict(zip(numbers(self), states, strict=True)))

    def _load_states(self, states: dict[int, Mapping[str, Any]]) -> None:
        """Take over the states of the parameters, by their id."""
        for unit in self.units:
            mine = [states.get(id(parameter), {}) for parameter in unit.parameters]
            for name, kind in kinds(self):
                if kind in unit.blocks and any(state.get(name) is not None for state in mine):
                    restore(unit, kind, [state.get(name) for state in mine])
            unit.on_device.renew()

    def check_hyper(self, group: dict[str, Any]) -> None:
        """Raise when `hyper`, or a kernel that takes it, would."""
        for value in self.hyper(group, 1).values.values():
            float(value)

    def check_state(
        self, unit: Unit, parameter: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        """Raise `ConfigError` when `state` cannot be that of `parameter`, which is in `group`."""
        check_state(unit, parameter, state, self)

    def header(self) -> dict[str, Any]:
        """What there is beside the states: `param_groups` as in `state_dict`, `steps` (the updates
        of every parameter, in that order), `skipped_steps`, `last_norm` (for `clip="previous"`),
        and where the loss is scaled `loss_scaler`.
        """
        groups = self._packed({})["param_groups"]
        steps = [self._steps.get(key, 0) for key in numbers(self)]
        header = {
            "param_groups": groups,
            "steps": steps,
            "skipped_steps": self.skipped_steps,
            "last_norm": self._last_norm,
        }
        return header if self.scaler is None else header | {"loss_scaler": self.scaler.state_dict()}

    def load_header(self, header: dict[str, Any]) -> None:
        """Take over what `header` gave. All moments begin anew; masters are the weights, and
        stay."""
        check_header(header, self)
        self.updater.drain()
        self._take(header)
        self.forget_states()

    def take_header(self, header: dict[str, Any]) -> None:
        """Take over what `header` gave. The states are those that belong to it."""
        check_header(header, self)
        self._take(header)

    def _take(self, header: dict[str, Any]) -> None:
        steps = dict(zip(numbers(self), header["steps"], strict=True))
        self.take_groups(header)
        if self.scaler is not None and "loss_scaler" in header:
            self.scaler.load_state_dict(header["loss_scaler"])
        self.skipped_steps = header.get("skipped_steps", self.skipped_steps)
        self._last_norm = header.get("last_norm")
        self._view.forget()
        self._steps.update(dict.fromkeys(self._steps, 0) | steps)
        self._view.renew(
            key
            for key, count in steps.items()
            if self.states_from_start or (count and self._has_states(key))
        )

    def take_groups(self, header: dict[str, Any]) -> None:
        """Take over the hyper-parameters of a `header`."""
        missing = [
            {name: self.defaults[name] for name in self.defaults if name in mine}
            for mine in self.param_groups
        ]
        groups = [
            filled | group for filled, group in zip(missing, header["param_groups"], strict=True)
        ]
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.__dict__.pop("state", None)  # which torch left beside the property
        self._groups = None

    def forget_states(self) -> None:
        """All moments begin anew."""
        for share in self._shares.values():
            self.updater.owners.forget_states(
                share, [kind for kind in self.states.values() if kind in share.unit.blocks]
            )

    def facts_so_far(self) -> list[tuple[str, object]]:
        """What the steps so far have brought, which is the same on all ranks."""
        found: list[tuple[str, object]] = [("the number of updates", sum(self._steps.values()))]
        return [*found, ("the last norm", self._last_norm)] if self.clip == "previous" else found

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that this optimizer may update."""
        return tuple(share.unit for share in self._shares.values())


def is_amount(value: Any) -> bool:
    """Whether `value` is a finite number from 0 on."""
    return bool(0 <= value < math.inf)


def are_decay_rates(betas: Any) -> bool:
    """Whether `betas` are two decay rates; raises `TypeError` or `ValueError` where they are no two
    numbers."""
    first, second = betas
    return bool(0 <= first < 1 and 0 <= second < 1)
