"""Where every block is at home, and how the budgets are divided: decided once, before anything is allocated.

Three things are decided beside what the configuration says. Units all of whose states stay on the compute device (`keep_near`);
what of the blocks on NVMe stays in host memory (`infinity.tiers.cache`); and which units in host memory have second homes, so
that their updates may begin before their step. All of it follows from sizes, the configuration, and rates that ranks agree on.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from infinity.config import Config, Tier
from infinity.device import ComputeDevice
from infinity.errors import BudgetError
from infinity.tiers.block import Block, Kind
from infinity.tiers.budget import CHUNK_ELEMENTS, PAGE, WIDEST_ELEMENT, HostPlan, Staged, divide_with_activations
from infinity.tiers.cache import choose, fill
from infinity.tiers.moves import Moves, Rates, moves, units_of
from infinity.units import format_bytes, round_up

log = logging.getLogger("infinity")

MOST_CANDIDATES = 32
"""Of numbers of units that may stay on the compute device: so many are weighed, where a model has more units."""


class Rooms(NamedTuple):
    """Bytes to allocate: on the compute device; in host memory for homes, for the cache, and for saved activations; and the plan
    of what passes."""

    device: int
    homes: int
    cache: int
    saved: int
    host: HostPlan

    @property
    def slot(self) -> int:
        """Bytes of one staging slot."""
        return self.host.chunk_elements * WIDEST_ELEMENT


class Placement:
    """Decides for `blocks`, all of which are known before the first question but the list itself."""

    def __init__(self, config: Config, device: ComputeDevice, blocks: Sequence[Block]) -> None:
        self._config, self._device, self._blocks = config, device, blocks
        # A delayed update writes new parameters while the old ones are in use: they have two places each, not one in the cache.
        self._twice = {Kind.PARAM} if config.update == "delayed" else set()
        self._doubled: set[Block] = set()  # those in host memory that updates rewrite beside their old content
        self.cuts: dict[int, set[int]] = {}
        """By unit: the elements that chunks do not extend across."""
        self.near_bytes = 0
        """Bytes of states that `keep_near` chose to be on the compute device."""

    # The compute device

    def weighs(self, concurrent: int, reserve: int) -> bool:
        """Whether `keep_near` has to know rates: it may choose how many units stay, and not all of them can."""
        some_fit = any(_home_bytes(unit) <= self._room(reserve) for unit in self._units())
        return self._may_choose() and some_fit and not self._all_fit(concurrent, reserve)

    def keep_near(self, concurrent: int, reserve: int, rates: Rates | None = None) -> None:
        """Choose the units all of whose states are at home on the compute device, as `Config.gpu_cache` says, if `concurrent` and
        `reserve` bytes there are for others. With "auto" so many that a step takes least time by `rates`; none without these,
        unless all can stay."""
        units, wanted = self._units(), self._config.gpu_cache
        if wanted != "auto":
            near = _those_that_fit(units, wanted)
        elif not self._may_choose():
            near = []
        elif self._all_fit(concurrent, reserve):
            near = [block for blocks in units for block in blocks]
        else:
            near = self._fastest(units, concurrent, reserve, rates) if rates is not None else []
        for block in near:
            block.tier = "gpu"
            self.near_bytes += block.nbytes

    def _units(self) -> list[list[Block]]:
        """The blocks that may move to the compute device, by unit: not what is frozen, which no update renews."""
        units = units_of(block for block in self._blocks if not block.frozen and block.tier != "gpu")
        return [list(unit.values()) for unit in units.values()]

    def _room(self, reserve: int) -> int:
        return max(self._config.gpu_memory - self.home_bytes("gpu") - reserve, 0)

    def _may_choose(self) -> bool:
        can_update = self._device.has_kernels and self._config.algorithm != "other" and not self._twice
        return self._config.gpu_cache == "auto" and can_update

    def fixed(self) -> str:
        """What to say beside another `gpu_memory`, so that as much stays on the compute device as now; "" where that is fixed."""
        return f", with gpu_cache={self.near_bytes}" if self._may_choose() else ""

    def _all_fit(self, concurrent: int, reserve: int) -> bool:
        with self._near([block for blocks in self._units() for block in blocks]):
            return self.fits(concurrent, reserve)

    def _fastest(self, units: Sequence[Sequence[Block]], concurrent: int, reserve: int, rates: Rates) -> list[Block]:
        """The first of `units`, so many that what has most to do in a step has least.

        Example, of a GPU with 50 GB/s each way beside a CPU that updates 6e9 parameters per second, per GB and step in bf16:
        states of 71 million parameters that stay save 12 ms of the CPU, 6 of the way up and 3 of the way down; copies of 500
        million parameters save 20 ms of the way up, and nothing else. So it depends on which of them is the longest.
        """
        room = self._room(reserve)
        ends = [end for end in itertools.accumulate(map(_home_bytes, units)) if end <= room]
        longest = math.inf
        chosen: list[Block] = []
        for size in [0, *ends[:: max(1, -(-len(ends) // MOST_CANDIDATES))], room]:
            near = _those_that_fit(units, size)
            moved = self._moves(near, room - _home_bytes(near), concurrent)
            if moved is not None and max(moved.seconds(rates)) < longest:
                longest, chosen = max(moved.seconds(rates)), near
        log.info(
            "%s of states stay on the compute device: measured were %.1f GB/s to it, %.1f from it%s, and %.2f billion updates of "
            "parameters per second on the CPU",
            format_bytes(_home_bytes(chosen)), rates.upload / 1e9, rates.download / 1e9,
            f", {rates.nvme / 1e9:.1f} of the drives" if rates.nvme < math.inf else "", rates.updates / 1e9,
        )  # fmt: skip
        return chosen

    def _moves(self, near: Sequence[Block], passing: int, concurrent: int) -> Moves | None:
        """What a step moves where `near` are at home on the compute device, which has `passing` bytes for parameters that come
        and go; None where that cannot be, or leaves them no room to come ahead of use."""
        with self._near(near):
            spans = sum(block.span for block in self.travelling())
            if spans and passing < max(concurrent, min(spans, 2 * concurrent)):
                return None
            resident = min(1.0, passing / max(spans, 1))
            try:
                homes = self.home_bytes("cpu")
                plan, _ = self._divide_host(self._config.cpu_memory - homes, homes)
            except BudgetError:  # if nothing can be, `divide` says so
                return None
            return moves(self._blocks, resident, self._choose(plan.cache, resident))

    @contextmanager
    def _near(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Inside, `blocks` are at home on the compute device."""
        before = [block.tier for block in blocks]
        for block in blocks:
            block.tier = "gpu"
        try:
            yield
        finally:
            for block, tier in zip(blocks, before, strict=True):
                block.tier = tier

    def travelling(self) -> list[Block]:
        """Parameters that come to the compute device for each use."""
        return [b for b in self._blocks if b.kind is Kind.PARAM and not b.permanent]

    def fits(self, concurrent: int, reserve: int) -> bool:
        """Whether `divide` would find enough memory on the compute device."""
        return self.home_bytes("gpu") + (concurrent if self.travelling() else 0) + reserve <= self._config.gpu_memory

    # Homes

    def home_bytes(self, tier: Tier) -> int:
        """Bytes of all homes on a tier that is memory."""
        return sum(round_up(b.home_bytes, PAGE) * self.homes_of(b) for b in self._blocks if b.tier == tier)

    def homes_of(self, block: Block) -> int:
        """How many homes a block in memory has."""
        return 2 if (block.kind in self._twice or block in self._doubled) and not block.frozen else 1

    def copies_of(self, block: Block) -> int:
        """How many extents a block on NVMe has. What a failed step leaves of its gradients is of no use: one."""
        return 2 if self._config.copy_on_write and block.kind is not Kind.GRAD and not block.frozen else 1

    # All budgets

    def divide(self, concurrent: int, reserve: int) -> Rooms:
        """Check the budgets (I10) and decide what is left to decide; raises `BudgetError` before anything has changed.

        `concurrent` bytes of gathered units must fit on the compute device at once, and `reserve` bytes for gradient buffers,
        beside what is at home there.
        """
        budget, home, travelling = self._config, self.home_bytes("gpu"), self.travelling()
        least = (concurrent if travelling else 0) + reserve
        if not self.fits(concurrent, reserve):
            raise BudgetError(
                f"gpu_memory={format_bytes(budget.gpu_memory)} is too small: states at home there take "
                f"{format_bytes(home)}, the units in use at once and the next one {format_bytes(least)}; the smallest "
                f"gpu_memory that works is {home + least} ({format_bytes(home + least)})"
                f"{', or set a smaller gpu_cache' if budget.gpu_cache not in ('auto', 0) else ''} (invariant I10)"
            )
        useful = sum(b.span for b in travelling) + reserve
        device = min(budget.gpu_memory // PAGE * PAGE, home + max(useful, least))
        homes = self.home_bytes("cpu")
        plan, saved = self._divide_host(budget.cpu_memory - homes, homes)
        free = budget.cpu_memory - homes - plan.slots * plan.chunk_elements * WIDEST_ELEMENT - plan.cache - saved
        doubled = self._double(free + (saved // 2 if budget.activation_memory == "auto" else 0))
        self._keep(plan.cache, resident=min(1.0, (device - home - reserve) / max(useful - reserve, 1)))
        cache = sum(b.kept_bytes for b in self._blocks if b.tier == "nvme")
        return Rooms(device, homes + doubled, cache, saved - round_up(max(doubled - free, 0), PAGE), plan)

    def _divide_host(self, available: int, home: int) -> tuple[HostPlan, int]:
        """The plan for `available` bytes beside the `home` bytes of states, and the bytes for saved activations; raises
        `BudgetError` when there is none."""
        on_nvme = [b for b in self._blocks if self._may_keep(b)]
        others = {b.kind for b in self._blocks if not self._may_keep(b) and not self._is_addressed(b)}
        spare = not self._device.shares_host  # for what has to be added to gradients
        kinds, longest = others | {b.kind for b in on_nvme}, max((b.elements for b in self._blocks), default=0)
        elements = sum(b.elements for b in self._blocks if b.kind is Kind.PARAM)
        all_of_it = sum(b.nbytes for b in on_nvme)
        staged = Staged(len(kinds) + spare, len(others) + spare, self.granule, longest, elements, all_of_it)
        wanted = self._config.activation_memory if self.moves_activations() else 0
        fixed = 0 if wanted == "auto" else wanted
        least = home + fixed + staged.least
        if available < least - home:
            also = f", saved activations {format_bytes(fixed)} (activation_memory)" if fixed else ""
            raise BudgetError(
                f"cpu_memory={format_bytes(self._config.cpu_memory)} is too small: states at home in host memory take "
                f"{format_bytes(home)}{also} and staging at least {format_bytes(staged.least)}; the smallest cpu_memory that "
                f"works is {least} ({format_bytes(least)}) (invariant I10)"
            )
        cache = None if self._config.cache == "auto" else self._config.cache
        return divide_with_activations(available, staged, cache, wanted)

    @property
    def granule(self) -> int:
        """A chunk is a multiple of this many elements, so that it is whole in every format."""
        return max((CHUNK_ELEMENTS, *(b.format.elements for b in self._blocks)))

    def moves_activations(self) -> bool:
        """Whether what autograd saves goes anywhere: memory of the CPU is host memory already."""
        where = self._config.activations
        return where == "nvme" or (where == "cpu" and not self._device.shares_host)

    def _may_keep(self, block: Block) -> bool:
        """Whether a part of `block` may stay in host memory although it is at home on NVMe."""
        return block.tier == "nvme" and block.kind not in self._twice

    def _is_addressed(self, block: Block) -> bool:
        """Whether the host works on `block` where it is."""
        return block.tier == "cpu" or (block.tier == "gpu" and self._device.shares_host)

    def _keep(self, cache_bytes: int, resident: float) -> None:
        """Decide what of the blocks on NVMe is at home in host memory; `resident` of the parameters fit on the compute device."""
        for block, kept in self._choose(cache_bytes, resident).items():
            block.kept = kept
            self.cuts.setdefault(block.unit, set()).add(kept)

    def _choose(self, cache_bytes: int, resident: float) -> dict[Block, int]:
        early = self._config.copy_on_write and self._config.update in ("auto", "speculative")
        return choose(self._blocks, cache_bytes, self.granule, early, resident, never=self._twice)

    def _double(self, room: int) -> int:
        """Give units in host memory second homes in `room` bytes of it: first those that come last in the model, whose gradients
        come first. What is on NVMe is better cached instead. Returns what that takes, in bytes."""
        early = self._config.update == "speculative" or (self._config.update == "auto" and not self._device.shares_host)
        rewritten = [b for b in self._blocks if b.kind is not Kind.GRAD and not b.frozen]
        if not early or not self._config.copy_on_write or any(b.tier == "nvme" for b in rewritten):
            return 0
        units = [list(unit.values()) for unit in units_of(reversed(rewritten)).values()]
        self._doubled.update(_those_that_fit([unit for unit in units if all(b.tier == "cpu" for b in unit)], room))
        return _home_bytes(list(self._doubled))


def _those_that_fit(units: Sequence[Sequence[Block]], room: int) -> list[Block]:
    """The blocks of the first of `units` that fit into `room` bytes, and of those after them that still do."""
    return [block for number in fill(room, list(map(_home_bytes, units))) for block in units[number]]


def _home_bytes(blocks: Sequence[Block]) -> int:
    """Bytes of one home in memory for each of `blocks`."""
    return sum(round_up(block.home_bytes, PAGE) for block in blocks)
