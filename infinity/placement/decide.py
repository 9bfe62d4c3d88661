"""Decides where every block lives and how the budgets are divided, once, before anything is
allocated.

The configuration leaves three decisions:

- the units that keep all states on the compute device (`infinity.placement.stay`)
- the parts of NVMe blocks that host memory caches (`infinity.placement.cache`)
- the units in host memory with shadow copies, so that their updates may begin before their step

All follow from sizes, the configuration, and rates that ranks agree on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.free_memory import Budgets
from infinity.placement.budget import (
    CHUNK_ELEMENTS,
    PAGE,
    WIDEST_ELEMENT,
    HostPlan,
    Staged,
    divide_with_activations,
)
from infinity.placement.cache import CacheRules, choose, fill
from infinity.placement.spec import BlockSpec, Kind, Placed, units_of
from infinity.placement.traffic import Moves, moves
from infinity.quantities import format_bytes, round_up
from infinity.tier import CPU, GPU, TIERS, Tier


class Machine(NamedTuple):
    """The facts of the compute device that decisions depend on."""

    unified_memory: bool
    """Whether the host works on the device's memory in place."""
    has_kernels: bool
    """Whether the device updates states in its own memory."""


class Rooms(NamedTuple):
    """Bytes to allocate: on the compute device, and in host memory for homes, cache and saved
    activations. `host` is the plan of the staging slots."""

    device: int
    homes: int
    cache: int
    saved: int
    host: HostPlan

    @property
    def slot(self) -> int:
        """Bytes of one staging slot."""
        return self.host.chunk_elements * WIDEST_ELEMENT


@dataclass(frozen=True)
class Layout:
    """The decision: the home of each block, and the bytes to allocate."""

    placement: Placement
    """The input of the decision, with every spec on its final tier."""
    blocks: tuple[Placed, ...]
    """In the order of the specs."""
    rooms: Rooms
    cuts: Mapping[int, Collection[int]]
    """By unit number: the elements that no chunk extends across."""
    reserve: int
    """Bytes of gradient buffers on the compute device."""
    most_reserve: int
    """Bytes of gradient buffers with an unlimited budget."""

    @property
    def copy_bytes(self) -> int:
        """Bytes on the compute device for copies of parameters."""
        homes = self.placement.home_bytes(GPU)
        return self.rooms.device - homes - round_up(self.reserve, PAGE)

    @property
    def left_bytes(self) -> int:
        """Bytes of `gpu_memory` that the engine does not allocate."""
        return max(self.placement.budgets.gpu - self.rooms.device, 0)

    @property
    def nvme_bytes(self) -> int:
        """Bytes that blocks take on the drives, with old content and spare extents."""
        return sum(block.reserved_bytes for block in self.blocks)

    def shortage(self, wanted: BlockSpec, pinned: Sequence[BlockSpec]) -> BudgetError:
        """The error for a copy of `wanted` that does not fit on the compute device beside
        `pinned`. It names a sufficient budget."""
        place = self.placement
        # n copies leave up to n + 1 gaps, and each may lack one byte. Room for all copies at once
        # needs no gaps.
        copies = sum(spec.span for spec in pinned) + (len(pinned) + 1) * wanted.span
        copies = min(copies, sum(spec.span for spec in place.travelling()))
        need = place.home_bytes(GPU) + round_up(self.most_reserve, PAGE) + copies
        return BudgetError(
            f"{wanted.name} does not fit into gpu_memory={format_bytes(place.budgets.gpu)} "
            "beside the units in use at the same time "
            f"({', '.join(spec.name for spec in pinned)}); gpu_memory={need} "
            f"({format_bytes(need)}) is enough for these{place.fixed()}"
        )


@dataclass(frozen=True)
class Placement:
    """The blocks to place, with budgets and machine. An immutable value: a decision returns another
    `Placement`, or a `Layout`."""

    config: Config
    budgets: Budgets
    machine: Machine
    specs: tuple[BlockSpec, ...]
    gpu_cache_bytes: int = 0
    """Bytes of states that `infinity.placement.stay` moved to the compute device."""

    # The compute device

    def with_resident(self, resident: Sequence[BlockSpec]) -> Placement:
        """This placement with the blocks `resident` on the compute device."""
        moved = set(resident)
        specs = tuple(spec.on(GPU) if spec in moved else spec for spec in self.specs)
        nbytes = self.gpu_cache_bytes + sum(spec.nbytes for spec in resident)
        return dataclasses.replace(self, specs=specs, gpu_cache_bytes=nbytes)

    def with_first(self, nbytes: int) -> Placement:
        """This placement with the first trainable units that fit into `nbytes` on the compute
        device."""
        return self.with_resident(those_that_fit(self.trainable_units(), nbytes))

    def trainable_units(self) -> list[list[BlockSpec]]:
        """The trainable blocks that are not on the compute device, by unit."""
        units = units_of(spec for spec in self.specs if not spec.frozen and not spec.tier.is_device)
        return [list(unit.values()) for unit in units.values()]

    @property
    def may_choose(self) -> bool:
        """Whether the engine may move trainable units to the compute device."""
        can_update = (
            not self.config.inference
            and self.machine.has_kernels
            and self.config.algorithm != "other"
            and not self._shadowed_kinds
            and self.config.durability == "off"
        )
        return self.config.tuning.gpu_cache == "auto" and can_update

    def fixed(self) -> str:
        """A text for an error that suggests another `gpu_memory`: the `gpu_cache` that keeps as
        much on the compute device as now. "" if `gpu_cache` is no choice of the engine."""
        chooses = self.may_choose or (
            self.config.inference and self.config.tuning.gpu_cache == "auto"
        )
        return f", with Tuning(gpu_cache={self.gpu_cache_bytes})" if chooses else ""

    def moved(self, passing: int, concurrent: int) -> Moves | None:
        """The work of a step if the compute device has `passing` bytes for travelling parameters.

        None if the budgets do not allow it, or if there is no room to prefetch.
        """
        spans = sum(spec.span for spec in self.travelling())
        if spans and passing < max(concurrent, min(spans, 2 * concurrent)):
            return None
        resident = min(1.0, passing / max(spans, 1))
        try:
            homes = self.home_bytes(CPU)
            plan, _ = self._divide_host(self.budgets.cpu - homes, homes)
        except BudgetError:  # if no choice works, `layout` raises
            return None
        cached = self._choose(plan.cache, resident)
        return moves(self.specs, resident, cached, self._written_through)

    def travelling(self) -> list[BlockSpec]:
        """The parameter blocks that need a copy on the compute device for each use."""
        return [spec for spec in self.specs if spec.kind is Kind.PARAM and not spec.permanent]

    def fits(self, concurrent: int, reserve: int) -> bool:
        """Whether the compute device has enough memory for `layout` with these arguments."""
        return (
            self.home_bytes(GPU) + (concurrent if self.travelling() else 0) + reserve
            <= self.budgets.gpu
        )

    # Homes

    def home_bytes(self, tier: Tier) -> int:
        """Bytes of all homes on `tier`, a tier in memory. Omits shadow copies, which `layout` adds
        if there is room."""
        return sum(
            round_up(spec.home_bytes, PAGE) * self._copies(spec)
            for spec in self.specs
            if spec.tier == tier
        )

    @property
    def _shadowed_kinds(self) -> set[Kind]:
        """Kinds with two homes and no cache. A delayed update writes new parameters while the old
        parameters are in use."""
        delays = self.config.tuning.update == "delayed" and not self.config.inference
        return {Kind.PARAM} if delays else set()

    @property
    def _written_through(self) -> float:
        """The share of steps that also write cached elements to NVMe."""
        return 1 / self.config.steps_per_commit if self.config.steps_per_commit else 0.0

    def _steps_per_commit(self, spec: BlockSpec) -> int:
        """One of so many steps also writes the cached elements of `spec` to NVMe, for a commit; 0
        if none does."""
        of_commits = spec.tier.is_drive and spec.kind is not Kind.GRAD and not spec.in_files
        return self.config.steps_per_commit if of_commits else 0

    def _copies(self, spec: BlockSpec) -> int:
        """The number of homes in memory, or extents on NVMe, of a block. Gradients have one: after
        a failed step they are useless."""
        on_nvme = self.config.tuning.copy_on_write and spec.kind is not Kind.GRAD
        shadowed = on_nvme if spec.tier.is_drive else spec.kind in self._shadowed_kinds
        return 2 if shadowed and not spec.frozen else 1

    # All budgets

    def layout(self, concurrent: int, reserve: int = 0, most_reserve: int = 0) -> Layout:
        """Check the budgets (I10), and decide the cache, the shadow copies and all sizes. Raises
        `BudgetError`, with the smallest budget that works.

        Beside the homes on the compute device, `concurrent` bytes of gathered units and `reserve`
        bytes of gradient buffers must fit at once. With an unlimited budget the gradient buffers
        would take `most_reserve` bytes. With `recompute="auto"` and a stated `gpu_memory`, half of
        the bytes beyond the units in use and the next units stay free for activations.
        """
        home, travelling = self.home_bytes(GPU), self.travelling()
        tuning = self.config.tuning
        least = (concurrent if travelling else 0) + reserve
        if not self.fits(concurrent, reserve):
            asked = tuning.gpu_cache not in ("auto", 0)
            way_out = ", or set a smaller gpu_cache" if asked else ""
            raise BudgetError(
                f"gpu_memory={format_bytes(self.budgets.gpu)} is too small: states at home there "
                f"take {format_bytes(home)}, the units in use at once and the next one "
                f"{format_bytes(least)} (infinity.tile(model, max_bytes=...) before wrap makes "
                f"units smaller); the smallest gpu_memory that works is {home + least} "
                f"({format_bytes(home + least)}){way_out}"
            )
        useful = sum(spec.span for spec in travelling) + reserve
        device = min(self.budgets.gpu // PAGE * PAGE, home + max(useful, least))
        if self._chooses_treatments:
            needed = home + max(least, reserve + min(useful - reserve, 2 * concurrent))
            left = max(self.budgets.gpu - needed, 0)
            device = min(device, (needed + left // 2) // PAGE * PAGE)
        homes = self.home_bytes(CPU)
        plan, saved = self._divide_host(self.budgets.cpu - homes, homes)
        free = (
            self.budgets.cpu
            - homes
            - plan.slots * plan.chunk_elements * WIDEST_ELEMENT
            - plan.cache
            - saved
        )
        shadowed = self._shadowed(free + (saved // 2 if tuning.activation_memory == "auto" else 0))
        more = home_bytes_of(shadowed)
        cached = self._choose(
            plan.cache, resident=min(1.0, (device - home - reserve) / max(useful - reserve, 1))
        )
        blocks = self._place(set(shadowed), cached)
        cache = sum(block.cached_bytes for block in blocks)
        rooms = Rooms(
            device, homes + more, cache, saved - round_up(max(more - free, 0), PAGE), plan
        )
        cuts: dict[int, set[int]] = {}
        for spec, elements in cached.items():
            cuts.setdefault(spec.unit, set()).add(elements)
        return Layout(self, blocks, rooms, cuts, reserve, max(reserve, most_reserve))

    def _place(
        self, shadowed: Collection[BlockSpec], cached: Mapping[BlockSpec, int]
    ) -> tuple[Placed, ...]:
        return tuple(
            Placed(
                spec,
                copies=2 if spec in shadowed else self._copies(spec),
                cached_elements=cached.get(spec, 0),
                steps_per_commit=self._steps_per_commit(spec),
            )
            for spec in self.specs
        )

    def least(self, concurrent: int, reserve: int) -> Budgets:
        """The smallest budgets that `layout` accepts with these arguments."""
        wanted = self.config.tuning.gpu_cache
        place = self if wanted == "auto" or self.config.inference else self.with_first(wanted)
        gpu = place.home_bytes(GPU) + (concurrent if place.travelling() else 0) + reserve
        staged, saved = place._staged()
        fixed_saved = 0 if saved == "auto" else saved
        return Budgets(gpu, place.home_bytes(CPU) + fixed_saved + staged.least)

    def _staged(self) -> tuple[Staged, int | Literal["auto"]]:
        """The need for staging, and the configured bytes for saved activations."""
        on_nvme = [spec for spec in self.specs if self._may_be_cached(spec)]
        others = {
            spec.kind
            for spec in self.specs
            if not self._may_be_cached(spec)
            and not spec.tier.is_addressed(self.machine.unified_memory)
        }
        # A slot for values that are added to gradients.
        spare = not self.machine.unified_memory and not self.config.inference
        kinds = others | {spec.kind for spec in on_nvme}
        longest = max((spec.elements for spec in self.specs), default=0)
        elements = sum(spec.elements for spec in self.specs if spec.kind is Kind.PARAM)
        all_of_it = sum(spec.nbytes for spec in on_nvme)
        staged = Staged(
            len(kinds) + spare,
            len(others) + spare,
            self._granule,
            longest,
            elements,
            all_of_it,
            drives=max(len(self.config.nvme), 1),
        )
        return staged, self.config.tuning.activation_memory if self.moves_activations() else 0

    def _divide_host(self, available: int, home: int) -> tuple[HostPlan, int]:
        """The plan for the `available` bytes that the `home` bytes of states leave, and the bytes
        for saved activations. Raises `BudgetError` if `available` is too small."""
        staged, wanted = self._staged()
        fixed = 0 if wanted == "auto" else wanted
        least = home + fixed + staged.least
        if available < least - home:
            also = f", saved activations {format_bytes(fixed)} (activation_memory)" if fixed else ""
            raise BudgetError(
                f"cpu_memory={format_bytes(self.budgets.cpu)} is too small: states at home "
                f"in host memory take {format_bytes(home)}{also} and staging at least "
                f"{format_bytes(staged.least)}; the smallest cpu_memory that works is {least} "
                f"({format_bytes(least)}){self._way_out_of_memory(home)}"
            )
        cache = None if self.config.tuning.cache == "auto" else self.config.tuning.cache
        return divide_with_activations(available, staged, cache, wanted)

    def _way_out_of_memory(self, home: int) -> str:
        """The settings that move the `home` bytes of states in host memory to the drives. "" if
        there are no drives or no states."""
        states = ("parameters", "gradients", "optimizer")
        here = [each for each in states if TIERS[getattr(self.config, each)].is_host]
        if not home or not self.config.nvme or self.config.inference or not here:
            return ""
        return f""", or set {" and ".join(f'{each}="nvme"' for each in here)}"""

    @property
    def _granule(self) -> int:
        """A chunk is a multiple of this many elements, so that every format has whole groups."""
        return max((CHUNK_ELEMENTS, *(spec.format.elements for spec in self.specs)))

    def moves_activations(self) -> bool:
        """Whether saved activations leave the compute device. If the CPU is the compute device,
        they are in host memory already."""
        tier = GPU if self.config.inference else TIERS[self.config.activations]
        return tier.is_drive or (tier.is_host and not self.machine.unified_memory)

    @property
    def _chooses_treatments(self) -> bool:
        """Whether saved activations get a part of `gpu_memory`."""
        config = self.config
        stated = config.gpu_memory != "auto"
        return config.recompute == "auto" and stated and not config.inference

    def _may_be_cached(self, spec: BlockSpec) -> bool:
        """Whether host memory may keep a part of this NVMe block."""
        return spec.tier.is_drive and spec.kind not in self._shadowed_kinds

    def _choose(self, cache_bytes: int, resident: float) -> dict[BlockSpec, int]:
        """The number of elements of each NVMe block to keep in `cache_bytes` of host memory. The
        share `resident` of the travelling parameters fits on the compute device."""
        tuning = self.config.tuning
        speculative = tuning.copy_on_write and tuning.update in ("auto", "speculative")
        rules = CacheRules(
            self._granule, speculative, resident, self._written_through, self._shadowed_kinds
        )
        return choose(self.specs, cache_bytes, rules)

    def _shadowed(self, room: int) -> list[BlockSpec]:
        """The blocks in host memory that get shadow copies in `room` bytes. Whole units, the last
        of the model first, because their gradients come first. Empty if an update rewrites a block
        on NVMe, because a cache uses the memory better."""
        speculative = self.config.tuning.update == "speculative" or (
            self.config.tuning.update == "auto" and not self.machine.unified_memory
        )
        rewritten = [spec for spec in self.specs if spec.kind is not Kind.GRAD and not spec.frozen]
        if (
            not speculative
            or not self.config.tuning.copy_on_write
            or any(spec.tier.is_drive for spec in rewritten)
        ):
            return []
        units = [list(unit.values()) for unit in units_of(reversed(rewritten)).values()]
        return those_that_fit(
            [unit for unit in units if all(spec.tier.is_host for spec in unit)], room
        )


def those_that_fit(units: Sequence[Sequence[BlockSpec]], room: int) -> list[BlockSpec]:
    """The blocks of the units that fit into `room` bytes: greedy first fit, in order."""
    return [
        spec for number in fill(room, list(map(home_bytes_of, units))) for spec in units[number]
    ]


def home_bytes_of(specs: Sequence[BlockSpec]) -> int:
    """Bytes of one home in memory for each of `specs`, in whole pages."""
    return sum(round_up(spec.home_bytes, PAGE) for spec in specs)
