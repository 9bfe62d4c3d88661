"""Where every block is at home, and how the budgets are divided: decided once, before anything is allocated.

Three things are decided beside what the configuration says. Units all of whose states stay on the compute device (`keep_near`);
what of the blocks on NVMe stays in host memory (`infinity.tiers.cache`); and which units in host memory have second homes, so
that their updates may begin before their step. All of it follows from sizes and the configuration alone, so ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infinity.config import Config, Tier
from infinity.device import ComputeDevice
from infinity.errors import BudgetError
from infinity.tiers.block import Block, Kind
from infinity.tiers.budget import CHUNK_ELEMENTS, PAGE, WIDEST_ELEMENT, HostPlan, Staged, divide_with_activations
from infinity.tiers.cache import choose, fill
from infinity.units import format_bytes, round_up


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

    def keep_near(self, concurrent: int, reserve: int) -> None:
        """Choose the units all of whose states are at home on the compute device, as `Config.gpu_cache` says, if `concurrent` and
        `reserve` bytes there are for others."""
        units: dict[int, list[Block]] = {}
        for block in self._blocks:
            if not block.frozen and block.tier != "gpu":
                units.setdefault(block.unit, []).append(block)
        for block in _those_that_fit(list(units.values()), self._room_near(concurrent, reserve)):
            block.tier = "gpu"
            self.near_bytes += block.nbytes

    def _room_near(self, concurrent: int, reserve: int) -> int:
        wanted, memory = self._config.gpu_cache, self._config.gpu_memory
        if wanted != "auto":
            return wanted
        if not self._device.has_kernels or self._twice:
            return 0
        # With bf16 and all on NVMe a unit that stays saves 26 bytes of traffic for its 14, and a copy 2 for its 2. But the others
        # have to come ahead of use.
        passing = min(sum(block.span for block in self.travelling()), max(2 * concurrent, memory // 4))
        return memory - self.home_bytes("gpu") - reserve - passing

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
        early = self._config.copy_on_write and self._config.update in ("auto", "speculative")
        for block, kept in choose(self._blocks, cache_bytes, self.granule, early, resident, never=self._twice).items():
            block.kept = kept
            self.cuts.setdefault(block.unit, set()).add(kept)

    def _double(self, room: int) -> int:
        """Give units in host memory second homes in `room` bytes of it: first those that come last in the model, whose gradients
        come first. What is on NVMe is better cached instead. Returns what that takes, in bytes."""
        early = self._config.update == "speculative" or (self._config.update == "auto" and not self._device.shares_host)
        rewritten = [b for b in self._blocks if b.kind is not Kind.GRAD and not b.frozen]
        if not early or not self._config.copy_on_write or any(b.tier == "nvme" for b in rewritten):
            return 0
        units: dict[int, list[Block]] = {}
        for block in reversed(rewritten):
            units.setdefault(block.unit, []).append(block)
        self._doubled.update(_those_that_fit([unit for unit in units.values() if all(b.tier == "cpu" for b in unit)], room))
        return sum(round_up(b.home_bytes, PAGE) for b in self._doubled)


def _those_that_fit(units: Sequence[Sequence[Block]], room: int) -> list[Block]:
    """The blocks of the first of `units` that fit into `room` bytes, and of those after them that still do."""
    sizes = [sum(round_up(block.home_bytes, PAGE) for block in blocks) for blocks in units]
    return [block for number in fill(room, sizes) for block in units[number]]
