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
"""The type of `norm_group`."""
ELSEWHERE = "a parameter of another rank of norm_group"
"""The name in messages if all gradients of this rank are finite, and another rank's is not."""


class GradientNorm:
    """Reads settled gradients for their norm, and to find gradients that are not finite. All ranks
    must make the same calls.

    Used by the thread that runs the model; `square_ahead` by the thread that brings gradients home.
    """

    def __init__(self, store: Store, units: Sequence[Unit], kernels: Kernels) -> None:
        self._store = store
        self._units = units
        self._kernels = kernels
        self.asked = 0
        """The number of reads of the gradients for their norm in the last step."""
        self._asked_now = 0
        self._by_unit: set[Unit] = set()
        # The result of `each` for units that ranks share, if no more gradients come.
        self._ahead: dict[Unit, float] = {}

    def end_step(self) -> None:
        """Later calls belong to the next step."""
        self.asked = self._asked_now
        self._asked_now = 0

    def of(self, shares: Sequence[UnitShare]) -> float:
        """The common L2 norm of the settled gradients of `shares` as an update would use them:
        unscaled, with their clip factors. Summed in double precision over the units and the ranks.
        All ranks get the same bits. Infinite or NaN if and only if a gradient is.
        """
        self._asked_now += 1
        total = sum(self._squared_norm(share.unit, share.present()) for share in shares)
        return math.sqrt(self._sum_over_shards([total], "of squared gradients")[0])

    def each(self, shares: Sequence[UnitShare]) -> list[float]:
        """The squared norm, as of `of`, of each of `shares`; the same bits on all ranks."""
        self._asked_now += 1
        mine = [self._squared_norm(share.unit, share.present()) for share in shares]
        exchange = self._units[0].exchange
        return mine if exchange is None else exchange.sum_by_rank(mine, "of squared gradients")

    def here(self, share: UnitShare) -> float:
        """This rank's part of the squared norm of `share`."""
        return self._squared_norm(share.unit, share.present())

    def over_ranks(self, squares: float) -> float:
        """The sum of the results of `here` over all ranks, which all call this."""
        return self._sum_over_shards([squares], "of squared gradients")[0]

    def want_by_unit(self, unit: Unit, wanted: bool) -> None:
        """Note whether `ahead` will be called for `unit`."""
        (self._by_unit.add if wanted else self._by_unit.discard)(unit)

    def ahead(self, share: UnitShare) -> float | None:
        """The future result of `each` for `share` if no more gradients come. Needs no settled
        gradients. None if the sums of other ranks are not known yet."""
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
        """The squared norm of `unit` for `of`, read on the thread that brings gradients from a
        discrete device. Otherwise the step would wait until all of host memory was read. None if
        the last step needed no norm, or the read would move bytes, or not `all_came` that this rank
        waits for.

        With `want_by_unit` it is read in any case, and the ranks sum it for `ahead`: all ranks call
        this, each for its own part.
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
        return (
            bool(self.asked) and not self._store.unified_memory and staged_from >= gradient.elements
        )

    def _squares_now(self, unit: Unit) -> float | None:
        try:
            return squared_gradient_norm(unit, self._store, self._kernels, unit.gradients.present())
        except EngineClosedError:
            return None

    def first_nonfinite(self, shares: Sequence[UnitShare]) -> str:
        """The name of the first parameter with a settled gradient that is not finite; `ELSEWHERE`
        if there is none on this rank."""
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
        finite. Log the name of the parameter, or raise `NonFiniteError` before anything is
        changed."""
        name = self.first_nonfinite(shares)
        text = f"the gradient norm of step {number} is {norm}; the gradient of {name} is not finite"
        if raises:
            raise NonFiniteError(f"{text}, and error_if_nonfinite=True; nothing was changed", name)
        log.warning("%s", text)

    def _sum_over_shards(self, values: list[float], what: str) -> list[float]:
        """The sums of `values` over the ranks that share units and tensors, without replicas, which
        have the same values."""
        exchange = self._units[0].exchange
        return values if exchange is None else exchange.sum(values, what, everywhere=False)


def group_of(given: NormGroup) -> Group:
    """The process group of `given`; raises `ConfigError` for any other value."""
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
    """The L2 norm of a model of which every rank of `group` has a part, this rank one with the norm
    `norm`; the same bits on all ranks. All of them call it."""
    if group is None:
        return norm
    return math.sqrt(collectives.sum_by_rank([norm**2], [group])[0])


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that brings gradients of the L2 norm `norm` to at most `max_norm`, as in
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
    """Multiply earlier clip factors into the settled gradients of `shares`, before they get
    `factor`. Powers of two round nothing and stay factors: a `GradScaler` divides by them."""
    for share in shares if factor != 1.0 else ():
        gradients = share.unit.gradients
        rounding = [i for i in share.present() if math.frexp(gradients.clip_of(i))[0] != 0.5]
        if rounding:
            gradients.apply_clips(rounding)
