"""Whether a model fits a machine, and the bytes that it takes of each memory.

The homes of states come from `placement/demand`, as in `wrap`. Activations, which no budget covers,
are estimated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from infinity.config import Config
from infinity.free_memory import Budgets, Choice, choose, most_of_device
from infinity.modules.division import first_fitting
from infinity.placement.activations import ActivationBytes, DecoderShape, activation_bytes
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Layout, Machine
from infinity.placement.demand import Demand, demand_of, in_one_pool
from infinity.plan.hardware import Hardware
from infinity.plan.model import PlannedModel
from infinity.quantities import format_bytes, round_up
from infinity.tier import CPU, TIERS

STRIPE_BYTES = 4 << 20
"""The size of the states file is a multiple of this."""


@dataclass(frozen=True)
class Training:
    """A step of a rank: `accumulate` micro-batches of `batch` windows of `length` tokens."""

    length: int = 2048
    batch: int = 1
    accumulate: int = 1
    recomputes: bool = True

    @property
    def windows(self) -> int:
        """Tokens of one micro-batch."""
        return self.length * self.batch

    @property
    def tokens(self) -> int:
        """Tokens of a rank in one step."""
        return self.windows * self.accumulate


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank. `layout` is the decision of `wrap`."""

    layout: Layout
    choice: Choice
    buffers: int
    """Gradient buffers on the compute device."""
    activations: ActivationBytes
    without: ActivationBytes
    """The activations if nothing were recomputed."""
    statistics: int = 0
    """The statistics of quantized weights, which no budget covers."""

    @property
    def auto(self) -> tuple[int, int, int] | None:
        """With `recompute="auto"`, which decides by seconds that a plan does not know: the bytes
        that blocks save if all are recomputed, the bytes if none is, and the room for them on the
        compute device. The engine keeps an amount between the first two, below the third if
        possible."""
        if self.layout.placement.config.recompute != "auto":
            return None
        least = self.activations.saved + self.activations.working
        room = self.layout.left_bytes + self.choice.for_activations
        return least, self.without.saved, room

    @property
    def allocated(self) -> dict[str, int]:
        """Bytes that the engine allocates on each tier."""
        rooms = self.layout.rooms
        host = rooms.homes + rooms.cache + rooms.saved + rooms.host.slots * rooms.slot
        stripes = round_up(self.layout.nvme_bytes, STRIPE_BYTES)
        return {"gpu": rooms.device, "cpu": host, "nvme": stripes}

    @property
    def states(self) -> dict[str, dict[str, int]]:
        """Bytes of homes by kind of state and by tier, with every copy of a block."""
        found: dict[str, dict[str, int]] = {}
        for block in self.layout.blocks:
            tiers = found.setdefault(block.spec.kind.value, dict.fromkeys(TIERS, 0))
            tier, in_memory = block.spec.tier, block.spec.home_bytes * block.copies
            tiers[tier.name] += block.reserved_bytes if tier.is_drive else in_memory
            tiers[CPU.name] += block.cached_bytes
        return found

    @property
    def offloaded(self) -> tuple[int, int]:
        """Bytes of activations that leave the compute device, and the part of them that continues
        to the drives."""
        if not self.layout.placement.moves_activations():
            return 0, 0
        to_drives = TIERS[self.layout.placement.config.activations].is_drive
        room, saved = self.layout.rooms.saved, self.activations.saved
        return (saved, max(saved - room, 0)) if to_drives else (min(saved, room), 0)

    @property
    def on_device(self) -> int:
        """Bytes of activations, and of statistics of quantized weights, that the compute device
        must hold besides the engine."""
        parts = self.activations
        kept = parts.saved - self.offloaded[0]
        return kept + parts.working + parts.logits + self.statistics


def asked(model: PlannedModel, config: Config, hardware: Hardware) -> Demand:
    """The demand of `model` on one rank, without budgets."""
    return _asked(*_case(model, config, hardware))[0]


def _case(
    model: PlannedModel, config: Config, hardware: Hardware
) -> tuple[PlannedModel, Config, int, bool]:
    return model, in_one_pool(config, hardware.available), hardware.ranks, hardware.unified


@lru_cache(maxsize=256)
def _asked(
    model: PlannedModel, config: Config, ranks: int, unified: bool
) -> tuple[Demand, Budgets]:
    """The demand, and the least budgets for it. Advice asks the same for many sizes of memory."""
    shards = ranks if config.stage > 0 else 1
    shapes = [unit.sharded(index, shards) for index, unit in enumerate(model.units)]
    machine = Machine(unified_memory=unified, has_kernels=not unified)
    demand = demand_of(shapes, model.nestings, config, machine, ranks > 1 or not unified)
    return demand, demand.least()


def fitting(model: PlannedModel, config: Config, hardware: Hardware) -> PlannedModel:
    """`model` in the units that `wrap` would make on `hardware`. Raises like `memory_plan`."""
    room = most_of_device(config.gpu_memory, config.cpu_memory, hardware.available)
    return first_fitting(
        model.divisions, lambda each: _asked(*_case(each, config, hardware))[1].gpu, room
    )


def memory_plan(
    model: PlannedModel, training: Training, config: Config, hardware: Hardware, rates: Rates
) -> MemoryPlan:
    """The decision of `wrap` for `model`, in its present units, on `hardware`, whose rank has
    `rates`.

    Raises `BudgetError` and `ConfigError` with the texts of `wrap`.
    """
    demand, least = _asked(*_case(model, config, hardware))
    choice = choose(config.gpu_memory, config.cpu_memory, hardware.available, least)
    demand = demand.within(choice.budgets)
    placement = demand.resident(rates if demand.needs_rates() else None)
    layout, buffers = demand.layout(placement)
    width = max((unit.format.nbytes for unit in model.units), default=2)
    decoder = DecoderShape(model.shape.layers, model.hidden, model.vocabulary, width)
    saved, without = (
        activation_bytes(decoder, training.windows, recomputes)
        for recomputes in (training.recomputes, False)
    )
    return MemoryPlan(layout, choice, buffers, saved, without, model.statistics)


def shortages(plan: MemoryPlan, hardware: Hardware) -> list[str]:
    """The memory that the machine lacks, besides budgets, which `wrap` checks. A sentence each."""
    found = []
    device, host, _ = (plan.allocated[tier] for tier in TIERS)
    ranks = hardware.gpus
    activations = plan.on_device
    if hardware.gpu_memory is not None and not hardware.one_pool:
        have, need = hardware.gpu_memory, device + activations
        if need > have:
            found.append(
                f"activations take about {format_bytes(activations)} of a GPU beside "
                f"{format_bytes(device)} of the engine, and it has {format_bytes(have)}"
            )
        need = host * ranks
    else:
        need = device + host + activations
    if need > hardware.host_memory:
        parts = "the engine and activations" if hardware.one_pool else "the engine"
        found.append(
            f"{parts} would take {format_bytes(need)} of host memory, and a node has "
            f"{format_bytes(hardware.host_memory)}"
        )
    need = drive_bytes(plan, hardware)
    if need > hardware.capacity:
        found.append(
            f"the states on nvme need {format_bytes(need)} on the drives of a node, which have "
            f"{format_bytes(hardware.capacity)}"
        )
    return found


def drive_bytes(plan: MemoryPlan, hardware: Hardware) -> int:
    """Bytes that all ranks of a node take of its drives."""
    rank = plan.allocated["nvme"] + round_up(plan.offloaded[1], STRIPE_BYTES)
    return rank * hardware.gpus


def totals(states: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The sum over kinds of state, by tier."""
    return {tier: sum(each[tier] for each in states.values()) for tier in TIERS}
