"""The extents of saved storages on NVMe."""

from __future__ import annotations

import functools
import logging

from infinity import native
from infinity.errors import CorruptStateError, NvmeError
from infinity.observe import Meter
from infinity.tiers.drives import NvmeTier
from infinity.tiers.gaps import Gaps
from infinity.tiers.saved_memory import SavedMemory
from infinity.tiers.saved_storage import SavedStorage, StorageState
from infinity.tiers.states_files import Extent, ExtentTransfer

log = logging.getLogger("infinity")

GROWTH_BYTES = 64 << 20
"""The smallest growth of the space on the drive."""


class SavedDrive:
    """Owns the extents of saved storages on `nvme`, and moves storages between `memory` and them.
    `Activations` locks.

    Extents are reserved when they are first needed, until `nvme` is closed. With `verifies`, reads
    are compared with the written bytes.
    """

    def __init__(self, nvme: NvmeTier, memory: SavedMemory, verifies: bool) -> None:
        self._nvme = nvme
        self._memory = memory
        self._verifies = verifies
        self._gaps = Gaps()
        self.is_full = False
        """Whether the drive had no room for an extent."""
        self.reading: list[SavedStorage] = []
        """The storages that are READING."""
        self.meter = Meter()
        """The traffic."""

    @property
    def free(self) -> int:
        """Bytes of extents that no storage uses."""
        return self._gaps.free

    def write(self, saved: SavedStorage) -> bool:
        """HELD -> WRITING: start writing. False if the drive has no room."""
        if saved.slot is None:
            return False
        nbytes = saved.slot.numel()
        if saved.extent is None and (start := self._take(nbytes)) is not None:
            saved.extent = Extent(start, nbytes)
        if saved.extent is None:
            return False
        address = saved.slot.data_ptr()
        if self._verifies:
            saved.checksum = native.aio().crc32c(address, nbytes)
        saved.ticket = self._nvme.write(
            ExtentTransfer(
                saved.extent, 0, nbytes, address, "activations", self.meter, background=True
            )
        )
        self._memory.forget_unwritten(saved)
        saved.state = StorageState.WRITING
        return True

    def _take(self, nbytes: int) -> int | None:
        start = self._gaps.take(nbytes)
        if start is None and not self.is_full:
            grown = self._nvme.extents.grow(max(nbytes, GROWTH_BYTES))
            grown = grown or self._nvme.extents.grow(nbytes)
            if grown is None:
                self.is_full = True
                log.warning(
                    "NVMe has no room for more saved activations; what host memory cannot "
                    "hold stays on the device"
                )
                return None
            self._gaps.give(grown.start, grown.nbytes)
            start = self._gaps.take(nbytes)
        return start

    def read(self, saved: SavedStorage) -> None:
        """AWAY -> READING: start reading into the slot of `saved`."""
        if saved.extent is None or saved.slot is None:
            raise RuntimeError("a saved storage has no extent or no slot")
        nbytes, address = saved.extent.nbytes, saved.slot.data_ptr()
        saved.ticket = self._nvme.read(
            ExtentTransfer(saved.extent, 0, nbytes, address, "activations", self.meter)
        )
        if self._verifies:
            saved.ticket.check = functools.partial(self._check, saved)
        saved.state = StorageState.READING
        self.reading.append(saved)

    def _check(self, saved: SavedStorage) -> None:
        """Raise `CorruptStateError` if the bytes differ from the written bytes."""
        if saved.slot is None or saved.extent is None:
            raise RuntimeError("a saved storage has no extent or no slot")
        found = native.aio().crc32c(saved.slot.data_ptr(), saved.extent.nbytes)
        if found != saved.checksum:
            where = self._nvme.where(saved.extent, 0)
            raise CorruptStateError("what autograd saved", "activation", *where)

    def finish_reading(self, saved: SavedStorage) -> None:
        """READING -> CLEAN, once the read has ended. If the read failed -> AWAY, without a slot,
        and the error is raised."""
        if saved.ticket is None:
            raise RuntimeError("nothing is being read")
        try:
            saved.ticket.wait()
        except (NvmeError, CorruptStateError):
            self._memory.free(saved)
            saved.to_away()
            raise
        else:
            saved.state = StorageState.CLEAN
        finally:
            if saved.state is not StorageState.READING:
                saved.ticket = None
                self.reading.remove(saved)

    def release(self, saved: SavedStorage) -> None:
        """Free the extent of `saved`, if it has one."""
        if saved.extent is not None:
            self._gaps.give(*saved.extent)
            saved.extent = None
