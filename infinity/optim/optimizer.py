"""The base of the optimizer family: a real `torch.optim.Optimizer` whose states the engine keeps
and updates.

[Note: torch.amp.GradScaler]
`scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()` works as with an optimizer
of torch. GradScaler divides `.grad` by the scale, which becomes a factor of a lazy gradient
(`optim/lazy_gradient`), and leaves out `step` where one is not finite. It is for fp32 parameters
under autocast. The scale is not known before the step. So no update that began in backward is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch

from infinity.backward import in_backward
from infinity.errors import ShardedParameterError
from infinity.optim.clipping import Clipping, Norms
from infinity.optim.compared import StepComparer
from infinity.optim.groups import (
    check_once,
    check_parameters,
    check_torch_options,
    with_pieces,
)
from infinity.optim.kernel_states import KernelStates
from infinity.optim.kernels import Hyper, Segment, segments_of
from infinity.optim.members import Members
from infinity.optim.norm import NormGroup, apply_clips
from infinity.optim.ruled import RuledOptimizer
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


T = TypeVar("T")


class _OfClipping(Generic[T]):
    """An attribute of `Optimizer.clipping` that is also an attribute of the optimizer."""

    def __init__(self, name: str = "") -> None:
        """`name`: the attribute of the clipping, if that has another name."""
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, optimizer: Optimizer, owner: type) -> T:
        return getattr(optimizer.clipping, self._name)

    def __set__(self, optimizer: Optimizer, value: T) -> None:
        setattr(optimizer.clipping, self._name, value)


class Options(TypedDict, total=False):
    """The options of every optimizer beside its hyper-parameters; see `Optimizer`."""

    max_grad_norm: float | None
    skip_nonfinite: bool
    loss_scaler: LossScaler | None
    error_if_nonfinite: bool
    clip: str
    norm_group: NormGroup
    maximize: bool
    amsgrad: bool
    differentiable: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool


class Optimizer(RuledOptimizer):
    """The base of the optimizers over parameters of a wrapped model. Each adds its
    hyper-parameters.

    `step` fixes the gradient norm, the clip factor and the hyper-parameters of this step, and
    returns. The update runs in the background. The next forward waits for it unit by unit. A
    parameter without a gradient does not change, as in torch. So a parameter that was trainable at
    `wrap` may be frozen (`requires_grad_(False)`) and thawed between steps. `grad_norm` is the
    exact global L2 norm of the last step before clipping to `max_grad_norm`, and
    `clipped_grad_norm` the norm after it; None if no norm was needed. With `max_grad_norm=math.inf`
    the norm is measured, and nothing is clipped.

    With `clip="previous"` the norm of the step before clips a step. So the factor is known in the
    backward, and updates that begin there are final even if every step is clipped. The first step
    is clipped by its own norm. Infinite and NaN norms clip no later step. The numbers are
    deterministic, with the same bits in every placement, but differ from torch's: a step whose norm
    jumps is clipped too late. `grad_norm` stays the step's own.

    With `clip="unit"` every unit (see `units` of `wrap`) is clipped by the norm of its own
    gradients. That differs from the global clip, like layer-wise clipping: it also turns the
    gradient of the whole model. A factor needs no other unit, so no update that begins in backward
    is redone because of it. The numbers are deterministic, with the same bits in every placement,
    but depend on the units. `grad_norm` stays the global norm. If a unit has parameters of several
    optimizers, each clips its own, and their updates begin in `step`.

    `norm_group` (a process group, or a `DeviceMesh` of one dimension) has the ranks that hold other
    parts of the model, such as the stages of a pipeline. Then norms are over all parts, and a step
    is skipped on all of them or on none. Its ranks make equal optimizers and take the same steps.

    The gradients stay until `zero_grad`, as in torch: another `step` applies them again, and a
    backward adds to them. Several optimizers may have parameters of one model, also of one unit.
    Norm, clipping and `zero_grad` of an optimizer concern its own parameters.

    With fp16 parameters `optimizer.scale(loss).backward()` scales the loss by `loss_scaler`
    (default: `LossScaler()`). A step with an infinite or NaN gradient is skipped: no state,
    parameter or count changes by a bit. `skip_nonfinite` does that for every precision, without
    scaling. By default such a step is taken, as in torch, and logged if a norm was needed: with
    `max_grad_norm` a NaN makes all gradients NaN, and an infinity makes the finite ones zeros (with
    `clip="unit"` those of its unit). With `error_if_nonfinite` `step` raises `NonFiniteError`
    before anything is changed, unless the loss is scaled. `skipped_steps` counts skipped steps.

    Raises `ConfigError` when a value is out of range. Raises it, too, when a parameter has another
    optimizer or does not belong to a wrapped model. `step` raises `NonFiniteError` also when the
    smallest loss scale is too large.

    `foreach`, `fused` and `capturable` of torch's optimizers are accepted and change nothing.

    One class, because torch, trainers and users take all of it for a `torch.optim.Optimizer`.
    """

    max_grad_norm = _OfClipping[float | None]()
    skip_nonfinite = _OfClipping[bool]()
    error_if_nonfinite = _OfClipping[bool]()
    clip = _OfClipping[str]()
    grad_norm = _OfClipping[float | None]()
    clipped_grad_norm = _OfClipping[float | None]()
    skipped_steps = _OfClipping[int]()
    overflow = _OfClipping[bool]()
    """Whether the last `step` was skipped, because a gradient was not finite."""
    loss_scaler = _OfClipping[LossScaler | None]("scaler")
    """Scales the loss; None if the loss is not scaled."""
    clips_by_unit = _OfClipping[bool]("by_unit")
    """Whether a unit is clipped by its own norm."""
    by_kernels: ClassVar[bool] = True
    """Whether `segments` describes the whole update. Such an update may begin at any time."""

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
        **torch_options: Any,
    ) -> None:
        who = type(self).__name__
        check_parameters(who, params)
        defaults |= check_torch_options(who, torch_options)
        self.clipping = Clipping(
            who, max_grad_norm, skip_nonfinite, loss_scaler, error_if_nonfinite, clip, norm_group
        )
        """Handles gradients before a step."""
        self._comparer = StepComparer()
        self.members = Members(who)
        """Its parameters."""
        self._kernel_states = KernelStates(type(self).__name__, self.rule)
        self._steps = self._kernel_states.counts  # updates so far, by id of the parameter
        self._view = OptimizerStates(type(self).__name__, self._keeper())
        # The value of `state` while torch packs a state dict.
        self._packing: dict[torch.Tensor, dict[str, Any]] | None = None
        super().__init__(params, defaults)
        if self.members:
            try:
                self.updater.listeners.made(self)
            except BaseException:
                self.updater.owners.release(self)
                raise

    def hyper_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> Hyper:
        """The hyper-parameters of the next update of `parameter`, which is in `group`."""
        hyper = self.hyper(group, self._steps.get(id(parameter), 0) + 1)
        return hyper._replace(sign=-1.0) if group.get("maximize") else hyper

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters must be of the same wrapped model."""
        param_group["params"] = with_pieces(param_group["params"])
        super().add_param_group(param_group)
        self.members.regroup()
        try:
            group = self.param_groups[-1]
            self.check_group(group, ())
            self._adopt(group, group["params"])
        except BaseException:
            del self.param_groups[-1]
            raise

    def _adopt(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Claim these parameters of `group`, or raise before anything is changed."""
        taken = self.members.claim(self, parameters, lambda units: self.check_group(group, units))
        for unit, positions in taken.items():
            if unit.facts.dtype is torch.float16 and self.clipping.scaler is None:
                self.clipping.scaler = LossScaler()
            self._kernel_states.updater = self.updater
            found = [unit.facts.parameters[index] for index in positions]
            for index, parameter in zip(positions, found, strict=True):
                self._kernel_states.places[id(parameter)] = unit, index
                self._steps.setdefault(id(parameter), 0)
            self._view.know(found)
            if self.rule.states_from_start:
                self._view.renew(map(id, found))

    def _follow_groups(self) -> None:
        """Adopt changes of `param_groups` since the last step. Raises `ConfigError` for changes
        that are not supported."""
        members: set[int] = set()
        for group in self.param_groups:
            if any(isinstance(parameter, TiledWeight) for parameter in group["params"]):
                group["params"] = with_pieces(group["params"])
            self.refuse_unsupported(group)
            self.check_algorithm(group, self.units)
            new = self.members.others(group["params"])
            check_once(type(self).__name__, members, group["params"])
            if new:
                self._adopt(group, new)
        self.members.keep(members)

    @property
    def updater(self) -> Updater:
        """The engine's updater."""
        return self.members.updater

    # `optimizer.state`

    @property
    def state(self) -> Any:
        """As in torch: for each parameter that was updated, a dict of its states by torch's names.

        Its tensors are the states of the engine: a read fetches one, and a write in place replaces
        it (as `infinity.get` and `infinity.set`). All ranks must do so alike. A deleted or emptied
        entry restarts. Waits for pending updates.

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
        """Whether torch has states of the parameter with this id after an update."""
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
        """`loss` times the loss scale, or `loss` without a scaler. Call `backward` on the result.

        In fp16 a loss overflows at scales from 2**16 on: compute it in fp32.
        """
        scaler = self.clipping.scaler
        return loss if scaler is None else scaled_loss(loss, scaler.scale, self.updater.scales)

    @property
    def loss_scale(self) -> float:
        """The factor of `scale` on the next loss; 1 without a scaler."""
        return self.clipping.loss_scale

    @property
    def loss_is_scaled(self) -> bool:
        """Inside of a backward: whether its loss was scaled, or need not be."""
        return self.loss_scale == 1.0 or self.updater.scales.noted

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the update of every parameter that has a gradient, and return. `closure`, if any,
        computes the loss first. There are three phases:

        1. Measure: gradients become final on all ranks. Their norm is computed if it is needed.
        2. Fix: the step is skipped, or becomes a `Step` with the clip factors and the update of
           every unit.
        3. Post: the updater runs it in the background.
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
        shares = self.members.shares
        norms = self.clipping.measure(self.updater, shares, self._comparer.step(self))
        step = self._fix(shares, norms)
        self.overflow = step is None
        if step is not None:
            self._post(step)
            self._steps.update(step.counts)
            self._view.renew(key for key in step.counts if self._has_states(key))
            self.clipping.taken(norms.norm)
        self.updater.listeners.stepped_by(self)
        return loss

    def _fix(self, shares: Sequence[UnitShare], norms: Norms) -> Step | None:
        """Phase 2. Returns None if the step is skipped, because a gradient is not finite."""
        factors = self.clipping.factors(self.updater, shares, norms)
        if factors is None:
            return None
        for share, factor in factors.items():
            apply_clips([share], factor)
        self.members.regroup()
        segments = {
            share: self.segments(share.unit, factor)
            for share, factor in factors.items()
            if share.present()
        }
        updated = [
            id(share.unit.facts.parameters[index])
            for share in segments
            for index in share.present()
        ]
        return Step(
            number=self.updater.next_number,
            factors=factors,
            loss_scale=self.loss_scale,
            segments=segments,
            counts={key: self._steps[key] + 1 for key in updated},
            foreseen=self.clipping.foreseen,
        )

    def _post(self, step: Step) -> None:
        """Phase 3. Raises before anything is changed."""
        self.updater.post(step)

    def ahead(self, unit: Unit) -> tuple[Segment, ...] | None:
        """The expected update of this rank's shard of `unit` in the next step; None without a
        guess."""
        factor = self.clipping.factor_ahead(self.updater, self.members.share_of(unit))
        return None if factor is None else self.segments(unit, factor)

    def segments(self, unit: Unit, factor: float) -> tuple[Segment, ...]:
        """The update of this rank's shard of `unit` with the current gradients, clipped by
        `factor`, and the current hyper-parameters."""
        groups = self.members.updated(unit, self.param_groups)
        hypers = [
            None if group is None else self.hyper_of(parameter, group)
            for parameter, group in zip(unit.facts.parameters, groups, strict=True)
        ]
        return segments_of(unit, hypers, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters. Without `set_to_none` they become
        zeros, as in torch, which the next step uses; that reads and writes them."""
        if self.members.is_bound:
            self.updater.forget(self.members.shares, set_to_none)

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
        header = self.clipping.header()
        if "loss_scaler" in header:
            packed["loss_scaler"] = header["loss_scaler"]
        if self.clip == "previous":
            packed["last_norm"] = header["last_norm"]
        return packed

    def _copied_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The states of each parameter in a state dict."""
        return copies_of(self, self._kernel_states, self._view)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dict of `state_dict`, also of the torch optimizer of the same name and parameters.
        The torch optimizer has no masters; the present masters stay. Missing moments restart.
        Values of DTensors may be whole tensors or DTensors.

        Raises `ConfigError` before anything is changed, if a shape, a type, a group or a count does
        not fit.
        """
        states = states_in(state_dict, self)
        self.load_header(state_dict | {"steps": [updates_in(state) for state in states]})
        if "masters" in state_dict:  # then one that is not there is the parameter, widened
            for share in self.members.shares:
                self.updater.owners.forget_states(
                    share, [Kind.MASTER] if Kind.MASTER in share.unit.blocks else []
                )
        self._load_states(dict(zip(numbers(self), states, strict=True)))

    def _load_states(self, states: dict[int, Mapping[str, Any]]) -> None:
        """Load the states of the parameters, by their id."""
        for unit in self.units:
            mine = [states.get(id(parameter), {}) for parameter in unit.facts.parameters]
            for name, kind in kinds(self):
                if kind in unit.blocks and any(state.get(name) is not None for state in mine):
                    restore(unit, kind, [state.get(name) for state in mine])
            unit.on_device.renew()

    def check_state(
        self, unit: Unit, parameter: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        """Raise `ConfigError` when `state` cannot be that of `parameter`, which is in `group`."""
        check_state(unit, parameter, state, self)

    def header(self) -> dict[str, Any]:
        """The state dict without states: `param_groups` as in `state_dict`, `steps` (the updates of
        every parameter, in that order), `skipped_steps`, `last_norm` (for `clip="previous"`), and
        with a scaler `loss_scaler`.
        """
        groups = self._packed({})["param_groups"]
        steps = [self._steps.get(key, 0) for key in numbers(self)]
        return {"param_groups": groups, "steps": steps, **self.clipping.header()}

    def load_header(self, header: dict[str, Any]) -> None:
        """Load a `header`. All moments restart. Masters stay."""
        check_header(header, self)
        self.updater.drain()
        self._take(header)
        self.forget_states()

    def take_header(self, header: dict[str, Any]) -> None:
        """Load a `header` that belongs to the present states."""
        check_header(header, self)
        self._take(header)

    def _take(self, header: dict[str, Any]) -> None:
        steps = dict(zip(numbers(self), header["steps"], strict=True))
        self.take_groups(header)
        self.clipping.take(header)
        self._view.forget()
        self._steps.update(dict.fromkeys(self._steps, 0) | steps)
        self._view.renew(
            key
            for key, count in steps.items()
            if self.rule.states_from_start or (count and self._has_states(key))
        )

    def take_groups(self, header: dict[str, Any]) -> None:
        """Load the hyper-parameters of a `header`."""
        missing = [
            {name: self.defaults[name] for name in self.defaults if name in mine}
            for mine in self.param_groups
        ]
        groups = [
            filled | group for filled, group in zip(missing, header["param_groups"], strict=True)
        ]
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.__dict__.pop("state", None)  # which torch left beside the property
        self.members.regroup()

    def forget_states(self) -> None:
        """Restart all moments."""
        for share in self.members.shares:
            self.updater.owners.forget_states(
                share, [kind for kind in self.rule.states.values() if kind in share.unit.blocks]
            )

    def facts_so_far(self) -> list[tuple[str, object]]:
        """Facts about the steps so far, which are equal on all ranks."""
        found: list[tuple[str, object]] = [("the number of updates", sum(self._steps.values()))]
        last = ("the last norm", self.clipping.last_norm)
        return [*found, last] if self.clip == "previous" else found

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that this optimizer may update."""
        return tuple(share.unit for share in self.members.shares)
