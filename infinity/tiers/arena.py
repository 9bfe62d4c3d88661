"""Arenas are memory allocated once and cut into equal slots. A lease is the scoped right to a run
of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import ExitStack

import torch

from infinity.device import ComputeDevice
from infinity.placement.budget import PAGE
from infinity.placement.decide import Rooms
from infinity.quantities import round_up
from infinity.tier import Tier
from infinity.tiers.slots import Clock, SlotMap

# Every float type reads this byte as NaN, so a use after the end of a lease shows at once.
POISON = 0xFF


class Lease:
    """The right to `tensor`, a uint8 view of `nbytes` bytes of an arena, until `release`. A lease
    ends exactly once (invariant I3)."""

    def __init__(self, arena: Arena, owner: Hashable, offset: int, nbytes: int) -> None:
        self._arena, self._owner = arena, owner
        self.offset, self.nbytes = offset, nbytes
        self.tensor = arena.memory[offset : offset + nbytes]
        self._active = True

    def holds(self, offset: int) -> bool:
        """Whether byte `offset` of the arena is in this lease."""
        return self.offset <= offset < self.offset + self.nbytes

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._active:
            self._active = False
            self._arena.end(self._owner, self)


class Arena:
    """Equal slots of `slot_bytes` over `memory` (uint8). Not thread-safe: the store locks.

    `used` and `peak` are bytes of slots. With `poison`, the bytes of a lease become NaN when it
    ends.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int, poison: bool = False) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.poison = poison
        self._slots: SlotMap[Hashable] = SlotMap(memory.numel() // slot_bytes)
        self.used = self.peak = 0
        if poison:
            memory.fill_(POISON)

    def slots_for(self, nbytes: int) -> int:
        """How many slots `nbytes` take."""
        return round_up(nbytes, self.slot_bytes) // self.slot_bytes

    @property
    def free_slots(self) -> int:
        """How many slots are in no lease."""
        return self._slots.count - self._slots.used

    def find(
        self,
        nbytes: int,
        next_use: Callable[[Hashable], float | None],
        beyond: float = -math.inf,
        clock: Clock | None = None,
    ) -> tuple[int, tuple[Hashable, ...]] | None:
        """The start slot of the best window for `nbytes` and the owners to evict from it (see
        `SlotMap.place`), or None."""
        return self._slots.place(self.slots_for(nbytes), next_use, beyond, clock)

    def lease(self, owner: Hashable, nbytes: int, start: int | None = None) -> Lease | None:
        """Lease a run of slots for `nbytes`: at slot `start`, or the first free run. None if there
        is no free run. Raises `ValueError` if the slots at `start` are not free."""
        length = self.slots_for(nbytes)
        if start is None:
            found = self._slots.place(length, lambda _: None)
            if found is None:
                return None
            start = found.start
        self._slots.take(owner, start, length)
        self.used += length * self.slot_bytes
        self.peak = max(self.peak, self.used)
        return Lease(self, owner, start * self.slot_bytes, nbytes)

    def owner_at(self, offset: int) -> Hashable | None:
        """The owner of the slot at byte `offset`; None if it is free."""
        return self._slots.owner_at(offset // self.slot_bytes)

    def start_at(self, offset: int) -> int | None:
        """The offset of the lease that contains byte `offset`; None if there is none."""
        owner = self.owner_at(offset)
        return None if owner is None else self._slots.runs[owner].start * self.slot_bytes

    def end(self, owner: Hashable, lease: Lease) -> None:
        """Called by the lease when it ends."""
        self.used -= self._slots.runs[owner].length * self.slot_bytes
        self._slots.give_back(owner)
        if self.poison:
            lease.tensor.fill_(POISON)

    def drop(self) -> None:
        """Release the memory. No lease is possible afterward."""
        self.memory = self.memory.new_empty(0)


class Arenas:
    """The memory of a store, allocated at once: `gpu` on the compute device, `cpu` in host memory
    for homes and cache, and `staging` in host memory."""

    def __init__(
        self, device: ComputeDevice, rooms: Rooms, poison: bool, closing: ExitStack
    ) -> None:
        """`closing` releases the memory, also that of the first arenas if a later one fails."""
        host = device.host_memory
        self.gpu = Arena(device.compute_memory(rooms.device), PAGE, poison)
        closing.callback(self.gpu.drop)
        self.cpu = Arena(host(rooms.homes + rooms.cache), PAGE, poison)
        closing.callback(self.cpu.drop)
        self.staging = Arena(host(rooms.host.slots * rooms.slot), rooms.slot, poison)
        closing.callback(self.staging.drop)

    def poison(self) -> None:
        """Fill memory whose content is lost with NaN, if leases do so at their end."""
        for arena in (self.gpu, self.cpu, self.staging):
            if arena.poison:
                arena.memory.fill_(POISON)

    def reserve(self, tier: Tier, nbytes: int) -> Lease:
        """A lease on `tier`, a tier in memory, that never ends. Raises `RuntimeError` without
        room."""
        lease = (self.gpu if tier.is_device else self.cpu).lease(object(), nbytes)
        if lease is None:
            raise RuntimeError(f"{nbytes} bytes were not set aside on {tier}")
        return lease
