"""The slots of saved storages in host memory."""

from __future__ import annotations

import torch

from infinity.device import huge_pages
from infinity.tiers.arena import POISON
from infinity.tiers.gaps import Gaps
from infinity.tiers.saved_storage import SavedStorage


class SavedMemory:
    """Owns `memory` (uint8, host), and cuts slots for storages from it. `Activations` locks.

    With `poison`, the bytes of a slot become NaN when it is freed.
    """

    def __init__(self, memory: torch.Tensor, poison: bool) -> None:
        self._memory = memory
        self._poison = poison
        self.capacity = memory.numel()
        """Bytes of all slots."""
        self._gaps = Gaps(self.capacity)
        self.used_peak = 0
        """The most bytes in use at any time."""
        self.held: dict[SavedStorage, None] = {}
        """The storages with a slot, the oldest first."""
        self.unwritten: dict[SavedStorage, None] = {}
        """The storages in `held` whose write to the drive has not begun, the oldest first."""
        self.unwritten_bytes = 0
        """Bytes of the slots of `unwritten`."""

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.capacity - self._gaps.free

    def take(self, nbytes: int) -> int | None:
        """The start of a slot of `nbytes`; None without room."""
        start = self._gaps.take(nbytes)
        self.used_peak = max(self.used_peak, self.used)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Undo `take`."""
        self._gaps.give(start, nbytes)

    def slot(self, start: int, nbytes: int) -> torch.Tensor:
        """The slot that `take` gave."""
        return self._memory[start : start + nbytes]

    def hold_new(self, saved: SavedStorage) -> None:
        """`saved` is on its way to its slot."""
        self.held[saved] = self.unwritten[saved] = None
        self.unwritten_bytes += _slot_bytes(saved)

    def hold_again(self, saved: SavedStorage, start: int | None, nbytes: int) -> None:
        """Give `saved` the slot at `start`. If `start` is None, give it memory of its own, which
        lasts until `free`."""
        saved.slot = huge_pages(nbytes) if start is None else self.slot(start, nbytes)
        saved.start = start
        if start is not None:
            self.held[saved] = None

    def forget_unwritten(self, saved: SavedStorage) -> None:
        """The slot of `saved` needs no write any more."""
        if saved in self.unwritten:
            del self.unwritten[saved]
            self.unwritten_bytes -= _slot_bytes(saved)

    def free(self, saved: SavedStorage) -> None:
        """Free the slot of `saved`, once no copy to the device reads it."""
        if saved.slot is None:
            return
        if saved.coming is not None:
            saved.coming.wait()
        if self._poison:
            saved.slot.numpy().fill(POISON)
        if saved.start is not None:
            self._gaps.give(saved.start, saved.slot.numel())
        self.held.pop(saved, None)
        saved.slot = saved.start = None

    def drop(self) -> None:
        """Release the memory."""
        self._memory = self._memory.new_empty(0)


def _slot_bytes(saved: SavedStorage) -> int:
    return 0 if saved.slot is None else saved.slot.numel()
