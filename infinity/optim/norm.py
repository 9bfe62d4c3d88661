"""The gradient norm of a step, over units and ranks, and clipping by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from infinity.errors import ConfigError, EngineClosedError, NonFiniteError
from infinity.optim.kernels import Kernels, nonfinite_gradients, squared_gradient_norm
from infinity.optim.step import UnitShare
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.collectives import Group
from infinity.sharding.unit import Unit
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

NormGroup = dist.ProcessGroup | DeviceMesh | None
"""What optimizers take as `norm_group`."""
ELSEWHERE = "a parameter of another rank of norm_group"
"""Whose gradient is not finite where none of this rank's parameters is to blame."""


class GradientNorm:
    """Reads settled gradients for their norm, and for those that are not finite. All ranks must ask
    alike.

    For the thread that runs the model; `square_ahead` is for the one that brings gradients home.
    """

    def __init__(self, store: Store, units: Sequence[Unit], kernels: Kernels) -> None:
        self._store = store
        self._units = units
        self._kernels = kernels
        self.asked = 0
        """How often the gradients were read for their norm in the last step."""
        self._asked_now = 0
        self._by_unit: set[Unit] = set()
        # What `each` will say of a unit that several ranks share, if no more gradients come.
        self._ahead: dict[Unit, float] = {}

    def end_step(self) -> None:
        """What is asked from now on is for the next step."""
        self.asked = self._asked_now
        self._asked_now = 0

    def of(self, shares: Sequence[UnitShare]) -> float:
        """The common L2 norm of the settled gradients of `shares` as an update would take them:
        unscaled, and as far as they are clipped. Summed in double precision over the units and the
        ranks, of which all get the same bits; infinite or NaN if and only if a gradient is.
        """
        self._asked_now += 1
        total = sum(self._squared_norm(share.unit, share.present()) for share in shares)
        return math.sqrt(self._sum_over_shards([total], "of squared gradients")[0])

    def each(self, shares: Sequence[UnitShare]) -> list[float]:
        """The squared norms, as `of` computes them, of each of `shares` alone; on all ranks the
        same bits."""
        self._asked_now += 1
        mine = [self._squared_norm(share.unit, share.present()) for share in shares]
        exchange = self._units[0].exchange
        return mine if exchange is None else exchange.sum_by_rank(mine, "of squared gradients")

    def here(self, share: UnitShare) -> float:
        """This rank's part of the squared norm of `share`; other ranks are not asked."""
        return self._squared_norm(share.unit, share.present())

    def over_ranks(self, squares: float) -> float:
        """The sum of what `here` said on all ranks, which call this alike."""
        return self._sum_over_shards([squares], "of squared gradients")[0]

    def want_by_unit(self, unit: Unit, wanted: bool) -> None:
        """Whether `ahead` will be asked of `unit`, from now on."""
        (self._by_unit.add if wanted else self._by_unit.discard)(unit)

    def ahead(self, share: UnitShare) -> float | None:
        """What `each` will say of `share` if its gradients are all there; for who has not settled
        them. None where the other ranks have not told of theirs."""
        unit, present = share.unit, share.present()
        if unit.ranks.shards is None and unit.ranks.tensor is None:
            return self._squared_norm(unit, present)
        whole = present == unit.gradients.present() and unit.gradients.measured() is not None
        return self._ahead.get(unit) if whole else None

    def _squared_norm(self, unit: Unit, positions: Sequence[int]) -> float:
        alike: dict[float, list[int]] = {}  # parameters whose gradients have one factor
        for index in positions:
            alike.setdefault(unit.gradients.factor(index), []).append(index)
        return sum(factor**2 * self._squares(unit, same) for factor, same in alike.items())

    def _squares(self, unit: Unit, positions: Sequence[int]) -> float:
        gradients, everything = unit.gradients, positions == unit.gradients.present()
        found = gradients.measured() if everything else None
        if found is None:
            found = squared_gradient_norm(unit, self._store, self._kernels, positions)
            if everything:
                gradients.note_squares(found)
        return found

    def square_ahead(self, unit: Unit, all_came: bool) -> float | None:
        """What `of` will ask of `unit`: read on the thread that brings gradients from a device with
        memory of its own. Otherwise the step would wait until all of host memory was read. None
        where the last step asked nothing, or that would move bytes, or where not `all_came` that
        this rank waits for.

        With `want_by_unit` it is read in any case, and the ranks sum it up for `ahead`: all of
        them call this, each for its own part.
        """
        wanted = unit in self._by_unit
        squares = self._squares_now(unit) if all_came and (wanted or self._is_cheap(unit)) else None
        if wanted and unit.exchange is not None:
            factors = {unit.gradients.factor(index) for index in unit.gradients.present()}
            known = squares is not None and len(factors) == 1
            mine = factors.pop() ** 2 * squares if squares is not None and known else 0.0
            total, knowing, ranks = unit.exchange.add_by_rank([mine, float(known), 1.0])
            self._ahead.pop(unit, None)
            if knowing == ranks:
                self._ahead[unit] = total
        return squares

    def _is_cheap(self, unit: Unit) -> bool:
        gradient = unit.blocks[Kind.GRAD]
        staged_from = self._store.staging.staged_from(gradient, on_device=True)
        in_place = staged_from >= gradient.elements and not self._store.device.unified_memory
        return bool(self.asked) and in_place

    def _squares_now(self, unit: Unit) -> float | None:
        try:
            return squared_gradient_norm(unit, self._store, self._kernels, unit.gradients.present())
        except EngineClosedError:
            return None

    def first_nonfinite(self, shares: Sequence[UnitShare]) -> str:
        """The name of the first parameter with a settled gradient that is not finite; `ELSEWHERE`
        when all are."""
        names = [share.unit.names[index] for share in shares for index in share.positions]
        bad = [
            float(flag)
            for share in shares
            for flag in nonfinite_gradients(share.unit, share.positions)
        ]
        everywhere = self._sum_over_shards(bad, "of gradients that are not finite")
        return next((name for name, flag in zip(names, everywhere, strict=True) if flag), ELSEWHERE)

    def take_nonfinite(
        self, norm: float, shares: Sequence[UnitShare], number: int, raises: bool
    ) -> None:
        """The settled gradients of `shares`, for step `number`, have the norm `norm`, which is not
        finite: log whose fault that is, or raise `NonFiniteError`, before anything is changed."""
        name = self.first_nonfinite(shares)
        text = f"the gradient norm of step {number} is {norm}; the gradient of {name} is not finite"
        if raises:
            raise NonFiniteError(f"{text}, and error_if_nonfinite=True; nothing was changed", name)
        log.warning("%s", text)

    def _sum_over_shards(self, values: list[float], what: str) -> list[float]:
        """The sums of `values` over the ranks among which units and tensors are cut up; replicas
        would add the same again."""
        exchange = self._units[0].exchange
        return values if exchange is None else exchange.sum(values, what, everywhere=False)


def group_of(given: NormGroup) -> Group:
    """The process group that `given` names; raises `ConfigError` for anything else."""
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        return given.get_group()
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    raise ConfigError(
        f"norm_group={given!r} is neither a process group that this process belongs to nor a "
        "DeviceMesh of one dimension; give what divides the model into parts, for example "
        "mesh['pp']"
    )


def over_parts(norm: float, group: Group) -> float:
    """The L2 norm of a model of which every rank of `group` has a part, with `norm` here; on all
    ranks the same bits. All of them call it."""
    if group is None:
        return norm
    return math.sqrt(collectives.sum_by_rank([norm**2], [group])[0])


def clip_factor(norm: float, max_norm: float) -> float:
    """What brings gradients of the L2 norm `norm` to at most `max_norm`, as in
    `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)), 0 for an infinite norm, and
    NaN for NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def clip(shares: Sequence[UnitShare], factor: float) -> None:
    """Multiply the settled gradients of `shares` by `factor`."""
    apply_clips(shares, factor)
    for share in shares:
        if present := share.present():
            share.unit.gradients.scale(present, factor)


def apply_clips(shares: Sequence[UnitShare], factor: float) -> None:
    """The settled gradients of `shares` are about to be multiplied by `factor`: as they are clipped
    already, so they are. Powers of two round nothing and stay factors: a `GradScaler` divides by
    them."""
    for share in shares if factor != 1.0 else ():
        gradients = share.unit.gradients
        rounding = [i for i in share.present() if math.frexp(gradients.clip_of(i))[0] != 0.5]
        if rounding:
            gradients.apply_clips(rounding)
