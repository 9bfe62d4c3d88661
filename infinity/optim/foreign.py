"""Any other `torch.optim.Optimizer` over parameters of a wrapped model, on a slow path: one unit
after the other on the host.

[Note: the costs]
A unit's gradients, its parameters in fp32 and its states are in host memory together, beside the
budgets. `step` returns when all units are done. No update runs beside the model. Between steps the
states lie on the tier of `Config.optimizer`: with "nvme" in unnamed files in the directories, which
end with the process, else in host memory. Each rank computes the whole unit, so a rule may depend
on a whole parameter.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from infinity.errors import ConfigError, in_words
from infinity.optim.kernels import Segment
from infinity.optim.norm import NormGroup
from infinity.optim.optimizer import Optimizer, Options
from infinity.optim.rule import Rule
from infinity.optim.scaler import LossScaler
from infinity.optim.state_dict import add_blocks, check_in_groups, misfit
from infinity.optim.state_tensors import StateCopy, StateTensor
from infinity.optim.state_view import Keeper
from infinity.optim.step import Step
from infinity.optim.trial import begin, has_modes, refuse_strange_states, step_of, try_out
from infinity.optim.workbench import BenchStates, Carried, Workbench, host_copy
from infinity.placement.spec import MOMENTS, Kind
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.unit import Unit

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("infinity")


def adapt(
    optimizer: type[torch.optim.Optimizer],
    params: Iterable[Any],
    *,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    loss_scaler: LossScaler | None = None,
    error_if_nonfinite: bool = False,
    clip: str = "global",
    norm_group: NormGroup = None,
    **settings: Any,
) -> Adapted:
    """An optimizer that updates the parameters of a wrapped model as `optimizer(params,
    **settings)` would update plain ones.

    For example `infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=1e-3)`. Masters,
    clipping, loss scaling, groups, schedulers and state dicts are as in `infinity.AdamW`;
    parameters in bf16 or fp16 are updated in fp32. Slow: see the note in `infinity.optim.foreign`.
    Wrap with `Config(algorithm="other")`, so that no place is kept for other states. An optimizer
    with `train()` and `eval()`, as those without a schedule, has them here, too: outside of a
    forward, a backward and `infinity.gathered`.

    Raises `ConfigError` for an optimizer that is infinity's own, that needs a closure, sparse
    gradients or a backward of its own (LOMO), or whose states are tensors of other classes, as
    those in 8 bits of torchao. For wrong `settings`, raises the error of `optimizer` itself.
    """
    if not (
        isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    ) or issubclass(optimizer, Optimizer):
        raise ConfigError(
            "infinity.adapt takes a class of torch.optim optimizers that is not "
            f"infinity's own, not {in_words(optimizer)}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{optimizer.__name__} evaluates the loss inside its step, for all parameters at once, "
            "but infinity updates unit by unit; use an optimizer whose step needs no closure"
        )
    if issubclass(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"{optimizer.__name__} updates by sparse gradients alone, and gradients are dense "
            "here; use infinity.AdamW"
        )
    if hasattr(optimizer, "fused_backward"):
        raise ConfigError(
            f"{optimizer.__name__} updates parameters in its own fused_backward, and infinity "
            "updates them in step(); use infinity.AdamW, whose updates begin in the backward with "
            "Tuning(update='speculative')"
        )
    adapted = AdaptedWithModes if has_modes(optimizer) else Adapted
    return adapted(
        optimizer,
        params,
        settings,
        max_grad_norm=max_grad_norm,
        skip_nonfinite=skip_nonfinite,
        loss_scaler=loss_scaler,
        error_if_nonfinite=error_if_nonfinite,
        clip=clip,
        norm_group=norm_group,
    )


class Adapted(Optimizer):
    """The result of `infinity.adapt`: an `Optimizer` whose rule is the torch optimizer `kind` with
    `settings`."""

    rule: ClassVar[Rule] = Rule("", {each: {} for each in MOMENTS}, states={}, settings={})
    by_kernels: ClassVar[bool] = False

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Iterable[Any],
        settings: dict[str, Any],
        **options: Unpack[Options],
    ) -> None:
        self.kind, self.settings = kind, settings
        self._benches: dict[Unit, Workbench] = {}
        # Of two dimensions, because Muon takes only these.
        some = kind([nn.Parameter(torch.zeros(2, 2))], **settings)
        refuse_strange_states(kind, settings)
        self._has_states_at_once = bool(some.state)
        super().__init__(params, some.defaults, **options)
        tier = "on nvme" if any(unit.facts.spill for unit in self.units) else "in host memory"
        log.warning(
            "infinity has no kernels for %s: it updates one unit after the other on the host "
            "while step() waits; one unit needs memory beside the budgets; its states are %s, "
            "beside the budgets",
            kind.__name__,
            tier,
        )

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ConfigError` for DTensors; the torch optimizer has checked its settings."""
        if any(map(is_dtensor, group["params"])):
            raise ConfigError(
                f"{self.kind.__name__} would see of a DTensor what this rank has of it, and not "
                "the whole; with tensor parallelism take infinity.AdamW or one of its family"
            )

    def refuse_unsupported(self, group: dict[str, Any]) -> None:
        """Nothing: all options of the torch optimizer are supported."""

    def segments(self, unit: Unit, factor: float) -> tuple[Segment, ...]:
        """None: the kernels have nothing to do."""
        return ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Raises `ConfigError` if the torch optimizer computes other
        numbers for a part of its parameters."""
        if isinstance(param_group, dict):
            try_out(self.kind, self.settings, param_group)
        super().add_param_group(param_group)
        if self._has_states_at_once:
            self._make_states()

    @property
    def counts(self) -> dict[int, int]:
        """The number of updates of each parameter, by its id."""
        return self._steps

    def _keeper(self) -> Keeper:
        return BenchStates(self, self._kernel_states)

    def _make_states(self) -> None:
        """Make the states that the torch optimizers have before the first step."""
        for unit in self.units:
            kept = Kind.MASTER if Kind.MASTER in unit.blocks else Kind.PARAM
            values = unit.states.gather(kept).float()
            self.bench(unit).lay_out(self, values)
            self.bench(unit).clear()
        self._view.renew(self._steps)

    def _post(self, step: Step) -> None:
        factors = {share.unit: factor for share, factor in step.factors.items()}
        carried = Carried(self.param_groups)
        self.updater.run(step, lambda unit: self._update(unit, factors[unit], carried))
        for unit in set(self.units) - {share.unit for share in step.shares}:
            self._update_nothing(unit, carried)
        carried.apply(self.param_groups)

    def bench(self, unit: Unit) -> Workbench:
        """The torch optimizer of `unit`."""
        if unit not in self._benches:
            spill = unit.facts.spill
            directory = spill[unit.index % len(spill)] if spill else None
            self._benches[unit] = Workbench(unit, directory)
        return self._benches[unit]

    def _update(self, unit: Unit, factor: float, carried: Carried) -> None:
        kept = Kind.MASTER if Kind.MASTER in unit.blocks else Kind.PARAM
        values, bench = unit.states.gather(kept), self.bench(unit)
        try:
            optimizer = bench.lay_out(self, values)
            self._give_gradients(unit, bench, factor)
            optimizer.step()
            carried.note(self.kind, optimizer.param_groups)
        finally:
            bench.clear()
        unit.states.write(kept, unit.facts.shard_of(values))

    def _give_gradients(self, unit: Unit, bench: Workbench, factor: float) -> None:
        """Give the stand-ins the gradients of updated parameters, clipped by `factor`."""
        gradients = unit.states.gather(Kind.GRAD).float()
        for index, group in enumerate(self.members.updated(unit, self.param_groups)):
            if group is not None:
                place = unit.layout.places[index]
                gradient = gradients[place.offset : place.end].view(place.shape)
                if (times := unit.gradients.factor(index, factor)) != 1.0:
                    gradient.mul_(times)
                bench.stands[index].grad = gradient

    def _update_nothing(self, unit: Unit, carried: Carried) -> None:
        """A step for a unit without gradients: the torch optimizer may count it."""
        bench = self.bench(unit)
        try:
            optimizer = bench.lay_out(self, None)
            step_of(optimizer)
            carried.note(self.kind, optimizer.param_groups)
        finally:
            bench.clear()

    def _copied_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """As in torch: per parameter the states of the torch optimizer and, for bf16 and fp16
        parameters, the fp32 `master`."""
        copied = {
            parameter: {
                name: StateCopy.of(value.slot.fetch(), value.slot)
                if isinstance(value, StateTensor)
                else value
                for name, value in entry.items()
            }
            for parameter, entry in self._view.items()
        }
        check_in_groups(copied, self)
        add_blocks(copied, self, self._kernel_states)
        return copied

    def _load_states(self, states: dict[int, Mapping[str, Any]]) -> None:
        super()._load_states(states)
        for unit in self.units:
            self.load_unit_states(
                unit, [states.get(id(parameter), {}) for parameter in unit.parameters]
            )

    def check_hyper(self, group: dict[str, Any]) -> None:
        """Nothing: the torch optimizer checks them."""

    def check_state(
        self, unit: Unit, parameter: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        """As for every optimizer. Tensors must also have the shapes of the torch optimizer's."""
        super().check_state(unit, parameter, state, group)
        if not any(
            isinstance(value, torch.Tensor) and value.numel() > 1 for value in state.values()
        ):
            return
        stand = nn.Parameter(torch.zeros(parameter.shape))
        stand.grad = torch.zeros(parameter.shape)
        optimizer = self.kind([stand], **self.settings)
        optimizer.param_groups[0].update(
            (name, value) for name, value in group.items() if name != "params"
        )
        begin(optimizer)
        optimizer.step()
        made = optimizer.state.get(stand, {})
        for name, value in state.items():
            like = made.get(name)
            if isinstance(like, torch.Tensor) and (
                not isinstance(value, torch.Tensor) or value.shape != like.shape
            ):
                shape = (
                    list(value.shape) if isinstance(value, torch.Tensor) else f"that of {value!r}"
                )
                raise misfit(
                    self,
                    (
                        f"{name} of {unit.name_of(parameter)} has shape {shape}, and should "
                        f"have {list(like.shape)}"
                    ),
                )

    def load_header(self, header: dict[str, Any]) -> None:
        """Load a `header`. All states restart."""
        super().load_header(header)
        self._benches.clear()
        self._view.forget()
        if self._has_states_at_once:
            self._make_states()

    def unit_states(self, unit: Unit) -> list[dict[str, Any]]:
        """The states that the torch optimizer has of each parameter of `unit`; copies, on the
        host."""
        if unit not in self._benches:
            return [{} for _ in unit.parameters]
        bench = self._benches[unit]
        optimizer = bench.lay_out(self, torch.zeros(unit.layout.numel))
        found = [optimizer.state.get(stand, {}) for stand in bench.stands]
        copies = [{name: host_copy(value) for name, value in state.items()} for state in found]
        bench.clear()
        return copies

    def load_unit_states(self, unit: Unit, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of `unit_states`."""
        if any(states):
            bench = self.bench(unit)
            optimizer = bench.lay_out(self, torch.zeros(unit.layout.numel))
            for stand, state in zip(bench.stands, states, strict=True):
                if state:
                    optimizer.state[stand] = {
                        name: host_copy(value) for name, value in state.items() if name != "master"
                    }
            bench.clear()
            self._view.renew(key for key in map(id, unit.parameters) if key in self._steps)


class AdaptedWithModes(Adapted):
    """An `Adapted` whose torch optimizer has `train()` and `eval()`, which change parameters."""

    _mode = ""
    """The last mode that was set; "" if only the groups tell."""

    def train(self) -> None:
        """As of the torch optimizer; every rank calls it. Raises `ShardedParameterError` inside of
        a forward, a backward or `infinity.gathered`."""
        self._switch("train")

    def eval(self) -> None:
        """As `train`."""
        self._switch("eval")

    def load_header(self, header: dict[str, Any]) -> None:
        """As of every adapted optimizer; the mode is that of the groups."""
        super().load_header(header)
        self._mode = ""

    def load_state_dict(self, state_dict: Any) -> None:
        """As of every optimizer; the mode is that of the groups."""
        super().load_state_dict(state_dict)
        self._mode = ""

    def _switch(self, mode: str) -> None:
        if self._mode == mode:
            return
        for unit in self.units:
            unit.states.check_unused(0, f"{self.kind.__name__}.{mode}()")
        self.updater.drain()
        carried = Carried(self.param_groups)
        for unit in self.units:
            kept = Kind.MASTER if Kind.MASTER in unit.blocks else Kind.PARAM
            values = unit.states.gather(kept)
            before, bench = values.clone(), self.bench(unit)
            try:
                optimizer: Any = bench.lay_out(self, values)
                getattr(optimizer, mode)()
                carried.note(self.kind, optimizer.param_groups)
            finally:
                bench.clear()
            if not torch.equal(before, values):
                unit.states.write(kept, unit.facts.shard_of(values))
                unit.on_device.renew()
        carried.apply(self.param_groups)
        self._mode = mode
