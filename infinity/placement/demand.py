"""What a model asks of the memory of one rank, and the questions that `wrap` asks about it, in
their order.

Values only, so `infinity plan` asks the same questions about a model that nobody has built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from infinity.config import Config, Tier
from infinity.free_memory import Available, Budgets
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Layout, Machine, Placement
from infinity.placement.spec import BF16, FP32, INT8, MOMENTS, SPLIT, BlockSpec, Format, Kind

_MOMENT_FORMATS = {"fp32": FP32, "bf16": BF16, "int8": INT8}
_FULL = Format("float32", 1, 4)


@dataclass(frozen=True)
class UnitShape:
    """Unit number `index`: `numel` elements in `format` with padding, in `shards` equal parts, of
    which this rank has number `rank`. If it is `in_files`, files of the user are its home."""

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
        """What gradients are kept and accumulated in."""
        return _FULL if config.tuning.gradient_precision == "fp32" else self.format

    def reduces_late(self, config: Config) -> bool:
        """Whether gradients stay whole until they are settled, as with stage 1."""
        return self.shards > 1 and config.stage == 1

    def blocks(self, config: Config) -> list[BlockSpec]:
        """What this rank keeps of the unit: parameters, and for a trainable unit gradients, master
        and moments."""
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
        self, kind: Kind, form: Format, tier: Tier, span: int = 0, whole: bool = False
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
            tier,
            span or nbytes,
            at,
            name,
            whole,
            frozen,
            self.in_files,
        )


@dataclass(frozen=True)
class Demand:
    """What there is to place, what is in use at once, and what gradients pass through."""

    placement: Placement
    nestings: Collection[frozenset[int]]
    """For every module: the units in use in its forward, those of the modules around it among
    them."""
    buffer: int
    """Bytes of a gradient buffer on the compute device; 0 where gradients need none."""
    exchanges: bool
    """Whether gradients go home beside the model, so that a second buffer is of use."""

    def within(self, budgets: Budgets) -> Demand:
        """The same with other budgets."""
        return replace(self, placement=replace(self.placement, budgets=budgets))

    def least(self) -> Budgets:
        """The smallest budgets that work."""
        return self.placement.least(self._concurrent(self.placement), self._reserve)

    def needs_rates(self) -> bool:
        """Whether `decide` has to know how fast the machine is."""
        return self.placement.needs_rates(self._concurrent(self.placement), self._reserve)

    def resident(self, rates: Rates | None) -> Placement:
        """The placement with the units that stay on the compute device, chosen by `rates`."""
        if self.placement.config.inference:
            return self.placement.with_kept(self._concurrent)
        concurrent = self._concurrent(self.placement)
        return self.placement.with_gpu_cache(concurrent, self._reserve, rates)

    def layout(self, placement: Placement) -> tuple[Layout, int]:
        """Where every block is at home, and the number of gradient buffers; raises `BudgetError`.

        A second buffer is collected into while the first one is reduced; a budget that has no room
        for it works without.
        """
        concurrent = self._concurrent(placement)
        buffers = 2 if self.exchanges and placement.fits(concurrent, 2 * self.buffer) else 1
        return placement.layout(concurrent, buffers * self.buffer, self._reserve), buffers

    @property
    def _reserve(self) -> int:
        return (1 + self.exchanges) * self.buffer

    def _concurrent(self, placement: Placement) -> int:
        """Bytes of the compute device that the forward of any module may need at once beside the
        units that never leave, in this worst case:

        the units of the module and of the hooked modules around it are in use, each in the worst
        place, and the largest one has to come in beside them. With k runs in use the free space has
        k + 1 parts, so k more of the largest make one part fit.
        """
        spans = {spec.unit: spec.span for spec in placement.travelling()}
        largest = max(spans.values(), default=0)
        most = 0
        for nesting in self.nestings:
            inside = [spans[unit] for unit in nesting if unit in spans]
            most = max(most, sum(inside) + largest * max(1, len(inside) - 1))
        return most


def in_one_pool(config: Config, available: Available) -> Config:
    """`config` as it is carried out with `available`.

    Where a GPU computes in host memory (`free_memory`, [Note: one pool]), parameters at home in
    host memory are used in place: their home is the part of it that `gpu_memory` counts. A copy
    beside it would take the same memory once more. A stated `gpu_memory` stays a bound on copies.
    A delayed update needs the copies, which hold the old parameters.
    """
    is_shared = available.gpu is not None and available.is_one_pool
    needs_copies = config.gpu_memory != "auto" or config.tuning.update == "delayed"
    if not is_shared or config.parameters != "cpu" or needs_copies:
        return config
    return config.model_copy(update={"parameters": "gpu"})


def demand_of(
    units: Sequence[UnitShape],
    nestings: Collection[frozenset[int]],
    config: Config,
    machine: Machine,
    exchanges: bool,
) -> Demand:
    """What `units` ask of one rank, with no budgets yet."""
    specs = tuple(spec for unit in units for spec in unit.blocks(config))
    placement = Placement(config, Budgets(0, 0), machine, specs)
    return Demand(placement, nestings, buffer_bytes(units, config, exchanges), exchanges)


def buffer_bytes(units: Iterable[UnitShape], config: Config, exchanges: bool) -> int:
    """Bytes of the buffer that gradients of the largest of `units` pass through; 0 where they need
    none. With stage 1 they are collected at home where that is the compute device."""
    trained = [unit for unit in units if unit.trainable]
    if not (exchanges or config.gradients == "nvme"):
        return 0
    return max(
        (
            unit.gradient_format(config).bytes_of(unit.numel)
            for unit in trained
            if not (unit.reduces_late(config) and config.gradients == "gpu")
        ),
        default=0,
    )
