"""Tensors that autograd saved for the backward, off the compute device: in host memory, and beyond
that on NVMe.

[Note: the last comes first]
The backward needs storages in reverse order, so the first saved storage is needed last. Host memory
holds the end of a forward, and the beginning of the forward continues to the drive. The oldest
storages go first, as soon as more than half of the memory is not written. So a request for a slot
finds a slot whose write has ended. On the way back each request looks ahead along the same order.
It reads the next storages from the drive into free slots, and copies the next slots to the device.
Every thread that saves has an order of its own (interleaved micro-batches are threads). The order
is only a guess: a fetch of another storage waits for that storage alone.

[Note: when memory of the device is free]
A copy to the host waits, on its own stream, for the producer of the bytes. The source is kept until
the copy has ended. Beyond the last `AHEAD` copies, the stream of the model waits for the copies.
The memory is then freed at once, in the order of that stream. So a host that runs far ahead of the
device does not hold all of a forward. No thread sleeps, and the stream waits only for slow copies.
A storage that is still on the device when it is fetched is not copied.

[Note: dropped at any moment]
Autograd drops tensors on any thread. So does the garbage collector, at any allocation, ours
included. So `drop` only notes the storage. The thread that has the lock, or gets it without
waiting, ends the storage, after all its transfers have landed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError, NvmeError
from infinity.observe import Meter, Recorder
from infinity.quantities import round_up
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.saved_copies import AHEAD, SavedCopies
from infinity.tiers.saved_drive import SavedDrive
from infinity.tiers.saved_memory import SavedMemory
from infinity.tiers.saved_storage import IN_SLOT, SavedStorage, Stacks, StorageState


class ActivationTraffic(NamedTuple):
    """Bytes of saved storages: offloaded from the compute device; kept there without room
    elsewhere; written to NVMe; and read."""

    offloaded: int = 0
    not_offloaded: int = 0
    written: int = 0
    read: int = 0


class ActivationCounts:
    """Counts the bytes of saved storages. `Activations` locks."""

    def __init__(self) -> None:
        self._traffic = ActivationTraffic()
        self._before = ActivationTraffic()
        self.last_step = ActivationTraffic()
        """The traffic of the last step."""
        self.live = 0
        """Bytes of the storages that are saved now."""
        self.peak = 0
        """The most bytes of storages that were saved at any time."""

    def refused(self, nbytes: int) -> None:
        """A storage stays on the device."""
        self._traffic = self._traffic._replace(not_offloaded=self._traffic.not_offloaded + nbytes)

    def saved(self, nbytes: int) -> None:
        """A storage leaves the device."""
        self._traffic = self._traffic._replace(offloaded=self._traffic.offloaded + nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def stepped(self, meter: Meter) -> None:
        """A step has ended; `meter` counts the NVMe traffic."""
        now = self._traffic._replace(written=meter.written, read=meter.read)
        before, self._before = self._before, now
        self.last_step = ActivationTraffic(
            *(new - old for new, old in zip(now, before, strict=True))
        )


class Activations:
    """The storages that autograd saved: slots in `memory` (uint8, host), and extents on `nvme`
    (None without a drive).

    Any thread may call it. One lock guards it and its parts. `save` and `fetch` are called on the
    thread whose stream uses the storage. `close` comes before `close` of `nvme`.
    """

    def __init__(
        self,
        device: ComputeDevice,
        memory: torch.Tensor,
        nvme: NvmeTier | None,
        recorder: Recorder,
        poison: bool = False,
        verifies: bool = False,
    ) -> None:
        """With `verifies`, reads from `nvme` are compared with the written bytes."""
        self._recorder = recorder
        self._lock = threading.Lock()
        self._closed = False
        self.memory = SavedMemory(memory, poison)
        """The slots."""
        self._drive = None if nvme is None else SavedDrive(nvme, self.memory, verifies)
        self._copies = SavedCopies(device)
        self.counts = ActivationCounts()
        """The traffic."""
        self._dropped: deque[SavedStorage] = deque()
        self._ending: list[SavedStorage] = []  # dropped, with a transfer in flight
        self._stacks = Stacks()

    def saves(self) -> bool:
        """Whether a storage is saved that a backward may still fetch. Waits for the transfers of
        storages that were dropped."""
        with self._locked():
            while self._ending:
                self._finish(self._ending.pop())
        return self.counts.live > 0

    # Saving

    def save(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Begin to move a storage away from the compute device. None without room: it stays.

        May wait for the drive. The caller releases the storage, and calls `drop` in the end.
        """
        nbytes = round_up(storage.nbytes(), ALIGNMENT)
        with self._locked():
            start = None if self._closed else self._make_room(nbytes)
            if start is None:
                self.counts.refused(storage.nbytes())
                return None
            slot, device = self.memory.slot(start, nbytes), self._copies.device
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            try:
                leaving = device.begin_download(slot[: source.numel()], source, device.mark())
            except BaseException:
                self.memory.give(start, nbytes)
                raise
            saved = SavedStorage(storage, source, leaving, start, slot)
            self.memory.hold_new(saved)
            self._copies.leaving.append(saved)
            self._stacks.push(saved)
            self.counts.saved(saved.nbytes)
            self._copies.land()
            self._write_ahead()
        return saved

    def save_again(self, saved: SavedStorage) -> None:
        """The same storage was saved once more. The backward now needs it first."""
        with self._locked():
            saved.saves += 1
            if saved.stack is not None:
                self._stacks.remove(saved)
                self._stacks.push(saved)

    # Room

    def _make_room(self, nbytes: int) -> int | None:
        """The start of a slot of `nbytes`, for which older storages continue to the drive. None
        without room."""
        start = self.memory.take(nbytes)
        if start is None and nbytes <= self.memory.capacity:
            for saved in list(self.memory.held) if self._drive is not None else ():
                if self._send_away(saved) and (start := self.memory.take(nbytes)) is not None:
                    break
        while start is None and self._ending:
            self._finish(self._ending.pop(0))
            start = self.memory.take(nbytes)
        return start

    def _send_away(self, saved: SavedStorage) -> bool:
        """Free the slot of `saved` once its bytes are on the drive; waits. False if the drive has
        no room."""
        self._copies.await_landing(saved)
        if saved.state is StorageState.READING and self._drive is not None:
            with suppress(NvmeError):
                self._drive.finish_reading(saved)
        if saved.state is StorageState.HELD and not self._write(saved):
            return False
        if saved.state is StorageState.WRITING and saved.ticket is not None:
            saved.ticket.promote()
            try:
                with self._recorder.span("wait nvme", "activations"):
                    saved.ticket.wait()
                saved.state, saved.ticket = StorageState.CLEAN, None
            except NvmeError:
                saved.state = StorageState.LOST
        self.memory.free(saved)
        if saved.state is StorageState.CLEAN:
            saved.to_away()
        return True

    def _write(self, saved: SavedStorage) -> bool:
        return self._drive is not None and self._drive.write(saved)

    def _write_ahead(self) -> None:
        """Start writing the oldest, while more than half of the memory is not written."""
        while self.memory.unwritten_bytes > self.memory.capacity // 2:
            saved = next(iter(self.memory.unwritten))
            if saved.state is StorageState.LEAVING or not self._write(saved):
                return

    # Bringing back

    def fetch(self, saved: SavedStorage) -> torch.UntypedStorage:
        """The content of `saved` on the compute device, for work that the caller queues from now
        on. May be called again.

        Raises `NvmeError` if it could not be written or read, `CorruptStateError` if the bytes
        differ from the written bytes, and `EngineClosedError` after `close`.
        """
        with self._locked():
            if saved.state is StorageState.ENDED:
                raise EngineClosedError(
                    "the engine was closed, and with it what a forward had saved for its "
                    "backward; call backward() before close()"
                )
            self._poll()
            storage = saved.alive()
            if storage is None:
                if saved.memory is None:
                    self._bring_to_slot(saved)
                    self._copies.upload(saved)
                elif saved in self._copies.ahead:
                    self._copies.ahead.remove(saved)
                storage = self._copies.use(saved)
            if saved.stack is not None:
                saved.stack.reach(saved)
            saved.asked += 1
            if saved.asked >= saved.saves:  # retain_graph may fetch again, much later
                saved.asked, saved.passed, saved.memory = 0, True, None
            self._look_ahead()
        return storage

    def _poll(self) -> None:
        self._copies.land()
        if self._drive is None:
            return
        for saved in [
            each for each in self._drive.reading if each.ticket is not None and each.ticket.done()
        ]:
            with suppress(NvmeError):  # a fetch reads it again, and raises
                self._drive.finish_reading(saved)

    def _bring_to_slot(self, saved: SavedStorage) -> None:
        self._copies.await_landing(saved)
        if saved.state is StorageState.LOST and saved.ticket is not None:
            saved.ticket.wait()  # raises the error of the write again
        if saved.state is StorageState.AWAY:
            self._read(saved, wanted=True)
        if saved.state is StorageState.READING and self._drive is not None:
            with self._recorder.span("wait nvme", "activations"):
                self._drive.finish_reading(saved)

    def _read(self, saved: SavedStorage, wanted: bool) -> bool:
        """AWAY -> READING. False without a free slot, unless the backward `wanted` it now."""
        if saved.extent is None or self._drive is None:
            raise RuntimeError("a saved storage is on no drive")
        nbytes = saved.extent.nbytes
        start = self._make_room(nbytes) if wanted else self.memory.take(nbytes)
        if start is None and not wanted:
            return False
        # Without a slot, all others are in host memory and the drive is full.
        self.memory.hold_again(saved, start, nbytes)
        self._drive.read(saved)
        return True

    def _look_ahead(self) -> None:
        if not self._stacks:
            return
        most = max(AHEAD, len(self._stacks))
        for stack in self._stacks if not self._copies.device.unified_memory else ():
            saved = stack.next
            for _ in range(most // len(self._stacks)):
                if saved is None:
                    break
                if saved.memory is None and saved.state in IN_SLOT and saved.origin.expired():
                    with suppress(torch.OutOfMemoryError):  # then its fetch copies it
                        self._copies.upload(saved)
                        self._copies.ahead.append(saved)
                saved = saved.below
        self._copies.keep_ahead(2 * most)
        drive = self._drive
        if drive is None:
            return
        going = True
        while going:
            going = False
            for stack in self._stacks:
                away = stack.next_away()
                going |= (
                    away is not None
                    and len(drive.reading) < most
                    and self._read(away, wanted=False)
                )

    # The end of one storage, and of all

    def drop(self, saved: SavedStorage) -> None:
        """`saved` is not fetched any more. Never waits."""
        self._dropped.append(saved)
        self._sweep()

    def _sweep(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._collect()
                yield
        finally:
            self._sweep()

    def _collect(self) -> None:
        while self._dropped:
            saved = self._dropped.popleft()
            if saved.state is not StorageState.ENDED:
                self._end(saved)
        for saved in [each for each in self._ending if not each.in_flight()]:
            self._ending.remove(saved)
            self._finish(saved)

    def _end(self, saved: SavedStorage) -> None:
        self._stacks.remove(saved)
        self.memory.forget_unwritten(saved)
        self._copies.forget(saved)
        if saved.state is StorageState.READING and self._drive is not None:
            self._drive.reading.remove(saved)
        self.memory.held.pop(saved, None)
        self.counts.live -= saved.nbytes
        saved.state = StorageState.ENDED
        self._ending.append(saved)

    def _finish(self, saved: SavedStorage) -> None:
        """Wait for the transfers in flight of a storage that has ended. Its places are freed even
        if a transfer fails."""
        try:
            saved.await_idle()
        finally:
            self.memory.free(saved)
            if self._drive is not None:
                self._drive.release(saved)

    def stepped(self) -> None:
        """A step has ended: `counts.last_step` is its traffic."""
        with self._locked():
            self.counts.stepped(Meter() if self._drive is None else self._drive.meter)

    def close(self) -> None:
        """Wait for all transfers and release the memory. May be called twice."""
        with self._lock, ExitStack() as ending:  # a failure does not stop the rest
            self._closed = True
            for stack in self._stacks:
                while stack.top is not None:
                    self._end(stack.top)
            self._dropped.clear()
            ending.callback(self.memory.drop)
            while self._ending:
                ending.callback(self._finish, self._ending.pop())
