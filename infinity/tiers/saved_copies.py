"""The copies of saved storages between the compute device and their slots."""

from __future__ import annotations

import itertools
from collections import deque

import torch

from infinity.device import ComputeDevice
from infinity.tiers.saved_storage import SavedStorage, StorageState

AHEAD = 4
"""Copies to the host whose source is kept. Also the most reads, and the most copies to the device,
before the backward needs them: one for each thread at least."""


class SavedCopies:
    """The copies of saved storages that leave the compute device, and the copies that come back
    before the backward needs them. `Activations` locks."""

    def __init__(self, device: ComputeDevice) -> None:
        self.device = device
        """The compute device."""
        self.leaving: deque[SavedStorage] = deque()
        """The storages on their way to host memory, in order."""
        self.ahead: deque[SavedStorage] = deque()
        """The storages with a copy on the device that the backward has not asked for."""

    def land(self) -> None:
        """Note which copies to the host have ended. See [Note: when memory of the device is free]
        of `infinity.tiers.activations`."""
        while self.leaving and (copy := self.leaving[0].leaving) is not None and copy.done():
            self._landed(self.leaving.popleft())
        for saved in itertools.islice(self.leaving, max(0, len(self.leaving) - AHEAD)):
            if saved.source is not None and saved.leaving is not None:
                self.device.join(saved.leaving, saved.source)
                saved.source = None

    def _landed(self, saved: SavedStorage) -> None:
        saved.source = saved.leaving = None
        if saved.state is StorageState.LEAVING:
            saved.state = StorageState.HELD

    def await_landing(self, saved: SavedStorage) -> None:
        """Return when `saved` is in its slot, if it was on its way there."""
        if saved.leaving is not None:
            saved.leaving.wait()
            self.leaving.remove(saved)
            self._landed(saved)

    def upload(self, saved: SavedStorage) -> None:
        """Start copying the slot of `saved` to the device."""
        if saved.slot is None:
            raise RuntimeError("a saved storage that is to be copied has no slot")
        saved.memory = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device.torch)
        saved.coming = self.device.begin_upload(
            saved.memory, saved.slot[: saved.nbytes], self.device.mark()
        )

    def use(self, saved: SavedStorage) -> torch.UntypedStorage:
        """The storage of the copy on the device, for work that the caller queues from now on."""
        if saved.memory is None or saved.coming is None:
            raise RuntimeError("a saved storage has no copy where it was just put")
        self.device.join(saved.coming, saved.memory)
        return saved.memory.untyped_storage()

    def keep_ahead(self, most: int) -> None:
        """Drop the oldest of the copies in `ahead` beyond `most`."""
        while len(self.ahead) > most:
            saved = self.ahead.popleft()
            if saved.memory is not None and saved.coming is not None:
                self.device.join(saved.coming, saved.memory)
                saved.memory = None

    def forget(self, saved: SavedStorage) -> None:
        """`saved` has ended. Its copies may still be in flight."""
        if saved.leaving is not None:
            self.leaving.remove(saved)
        if saved in self.ahead:
            self.ahead.remove(saved)
