"""The memory that a model needs on one rank, and the questions that `wrap` asks about it, in their
order.

Values only, so `infinity plan` asks the same questions about a model that is not built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from infinity.config import Config
from infinity.free_memory import Available, Budgets
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Layout, Machine, Placement
from infinity.placement.spec import BF16, FP32, INT8, MOMENTS, SPLIT, BlockSpec, Format, Kind
from infinity.placement.stay import needs_rates, with_gpu_cache, with_kept
from infinity.tier import TIERS, TierName

_MOMENT_FORMATS = {"fp32": FP32, "bf16": BF16, "int8": INT8}
_FULL = Format("float32", 1, 4)


@dataclass(frozen=True)
class UnitShape:
    """Unit number `index`: `numel` elements in `format`, with padding. It has `shards` equal parts,
    and this rank has part number `rank`. If `in_files`, files of the user are its home."""

    index: int
    name: str
    numel: int
    shards: int
    rank: int
    format: Format
    trainable: bool
    in_files: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        return self.format.bytes_of(self.numel)

    def gradient_format(self, config: Config) -> Format:
        """The format that gradients are kept and accumulated in."""
        return _FULL if config.tuning.gradient_precision == "fp32" else self.format

    def reduces_late(self, config: Config) -> bool:
        """Whether every rank keeps whole gradients until the step reduces them (stage 1)."""
        return self.shards > 1 and config.stage == 1

    def blocks(self, config: Config) -> list[BlockSpec]:
        """The blocks of this rank: parameters, and for a trainable unit gradients, masters and
        moments."""
        whole = self.shards > 1 and config.stage < 3  # parameters stay gathered then
        found = [self._block(Kind.PARAM, self.format, config.parameters, self.nbytes, whole)]
        if not self.trainable:
            return found
        form, late = self.gradient_format(config), self.reduces_late(config)
        span = form.bytes_of(self.numel) if late else 0
        found.append(self._block(Kind.GRAD, form, config.gradients, span, late))
        if self.format != _FULL:
            split = config.tuning.split_master and self.format.name == "bfloat16"
            found.append(self._block(Kind.MASTER, SPLIT if split else FP32, config.optimizer))
        moment = _MOMENT_FORMATS[config.moment_precision]
        kinds = MOMENTS[config.algorithm]
        return [*found, *(self._block(kind, moment, config.optimizer) for kind in kinds)]

    def _block(
        self, kind: Kind, form: Format, tier: TierName, span: int = 0, whole: bool = False
    ) -> BlockSpec:
        elements = self.numel // self.shards
        nbytes = form.bytes_of(elements)
        name = f"{kind.value} of {self.name}"
        at, frozen = self.rank * nbytes if span else 0, not self.trainable
        return BlockSpec(
            self.index,
            kind,
            elements,
            form,
            TIERS[tier],
            span or nbytes,
            at,
            name,
            whole,
            frozen,
            self.in_files,
        )


@dataclass(frozen=True)
class Demand:
    """The memory that a model needs: blocks to place, units in use at once, and gradient
    buffers."""

    placement: Placement
    nestings: Collection[frozenset[int]]
    """For every module: the numbers of the units in use during its forward, including the units of
    the modules around it."""
    buffer: int
    """Bytes of a gradient buffer on the compute device; 0 if gradients need none."""
    exchanges: bool
    """Whether gradients move home while the model computes, so that a second buffer helps."""

    def within(self, budgets: Budgets) -> Demand:
        """This demand with `budgets`."""
        return replace(self, placement=replace(self.placement, budgets=budgets))

    def least(self) -> Budgets:
        """The smallest budgets that work."""
        return self.placement.least(self._concurrent(self.placement), self._reserve)

    def needs_rates(self) -> bool:
        """Whether `resident` needs measured rates."""
        return needs_rates(self.placement, self._concurrent(self.placement), self._reserve)

    def resident(self, rates: Rates | None) -> Placement:
        """The placement after the choice of the units that stay on the compute device, by
        `rates`."""
        if self.placement.config.inference:
            return with_kept(self.placement, self._concurrent)
        concurrent = self._concurrent(self.placement)
        return with_gpu_cache(self.placement, concurrent, self._reserve, rates)

    def layout(self, placement: Placement) -> tuple[Layout, int]:
        """The layout of `placement`, and the number of gradient buffers, 1 or 2. Raises
        `BudgetError`.

        A second buffer collects gradients while the first is reduced. It is left out if the budget
        has no room for it.
        """
        concurrent = self._concurrent(placement)
        buffers = 2 if self.exchanges and placement.fits(concurrent, 2 * self.buffer) else 1
        return placement.layout(concurrent, buffers * self.buffer, self._reserve), buffers

    @property
    def _reserve(self) -> int:
        return (1 + self.exchanges) * self.buffer

    def _concurrent(self, placement: Placement) -> int:
        """The most bytes that the forward of a module may need at once on the compute device for
        travelling units.

        In the worst case the last unit of a nesting arrives while its other k units are in use,
        each in the worst place. They split the free space into k + 1 parts, so k more of the
        largest unit make one part fit. A single unit in use leaves room for the next.
        """
        spans = {spec.unit: spec.span for spec in placement.travelling()}
        largest = max(spans.values(), default=0)
        most = 0
        for nesting in self.nestings:
            inside = [spans[unit] for unit in nesting if unit in spans]
            most = max(most, sum(inside) + largest * max(1, len(inside) - 1))
        return most


def in_one_pool(config: Config, available: Available) -> Config:
    """Return `config`, with parameters on "gpu" instead of "cpu" if the GPU computes in host memory
    (`free_memory`, [Note: one pool]).

    The GPU then uses parameters in place, and `gpu_memory` counts them. A copy would take the same
    memory once more. Two settings keep the copies: a stated `gpu_memory`, which stays their bound,
    and delayed updates, because the copies hold the old parameters.
    """
    is_shared = available.gpu is not None and available.is_one_pool
    needs_copies = config.gpu_memory != "auto" or config.tuning.update == "delayed"
    if not is_shared or not TIERS[config.parameters].is_host or needs_copies:
        return config
    return config.model_copy(update={"parameters": "gpu"})


def demand_of(
    units: Sequence[UnitShape],
    nestings: Collection[frozenset[int]],
    config: Config,
    machine: Machine,
    exchanges: bool,
) -> Demand:
    """The demand of `units` on one rank, with budgets of 0."""
    specs = tuple(spec for unit in units for spec in unit.blocks(config))
    placement = Placement(config, Budgets(0, 0), machine, specs)
    return Demand(placement, nestings, buffer_bytes(units, config, exchanges), exchanges)


def buffer_bytes(units: Iterable[UnitShape], config: Config, exchanges: bool) -> int:
    """Bytes of the gradient buffer for the largest of `units`; 0 if they need none. Stage 1 with
    gradients on "gpu" needs none, because gradients collect in their home."""
    trained = [unit for unit in units if unit.trainable]
    if not (exchanges or TIERS[config.gradients].is_drive):
        return 0
    return max(
        (
            unit.gradient_format(config).bytes_of(unit.numel)
            for unit in trained
            if not (unit.reduces_late(config) and TIERS[config.gradients].is_device)
        ),
        default=0,
    )
