"""What autograd saved for the backward, off the compute device until it is needed: in host memory,
and beyond that on NVMe.

[Note: the last comes first]
The backward asks for what was saved in reverse order, so what was saved first is needed last. So
host memory holds the end of a forward, and its beginning continues to the drive. The oldest go
first, as soon as more than half of the memory is not written. So a request for a slot finds one
whose write has ended. On the way back each request looks ahead along the same order. It reads the
next few from the drive into free slots, and copies the next few in slots to the device. Every
thread that saves has an order of its own (interleaved micro-batches are threads of their own). The
order is only a guess: a request for something else gets that, and waits for nothing but it.

[Note: when memory of the device is free]
A copy to the host waits, on its own stream, for the producer of the bytes. Their memory is kept
until the copy has ended. Beyond the last `AHEAD` copies, the stream of the model waits for the
copies. The memory is then freed at once, in the order of that stream. So a host that runs far ahead
of the device does not hold all of a forward. No thread sleeps, and where copies keep up nothing
waits. A storage that is still on the device when it is asked for is not copied.

[Note: dropped at any moment]
Autograd drops tensors on any thread. So does the garbage collector, at any allocation, ours
included. So `drop` only notes it. The thread that has the lock, or gets it without waiting, ends
it, after anything in flight has landed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch

from infinity import native
from infinity.device import ComputeDevice, huge_pages
from infinity.errors import CorruptStateError, EngineClosedError, NvmeError
from infinity.observe import Meter, Recorder
from infinity.quantities import round_up
from infinity.tiers.arena import POISON
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.gaps import Gaps
from infinity.tiers.saved_storage import IN_SLOT, SavedStorage, Stack, StorageState
from infinity.tiers.states_files import Extent

log = logging.getLogger("infinity")

AHEAD = 4
"""Copies to the host whose source is kept, and on the way back reads, and copies to the device,
that nobody has asked for yet. With several threads that save, one for each at least."""
GROWTH_BYTES = 64 << 20
"""What the place on the drive grows by, at least."""


class ActivationTraffic(NamedTuple):
    """Bytes of saved storages: offloaded from the compute device; not offloaded for want of room;
    written to NVMe; and read."""

    offloaded: int = 0
    not_offloaded: int = 0
    written: int = 0
    read: int = 0


class Activations:
    """Owns the slots in `memory` (uint8, host), and the extents on `nvme` (None: there is no
    drive), of saved storages.

    Any thread may call it; it has one lock. `save` and `fetch` are called on the thread whose
    stream uses the storage. Space on NVMe is reserved when it is first needed, for good. `close`
    ends it, before `nvme`.
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
        """With `verifies` what comes back from `nvme` is compared with what was written."""
        self._device = device
        self._memory = memory
        self._nvme = nvme
        self._recorder = recorder
        self._poison = poison
        self._verifies = verifies
        self._lock = threading.Lock()
        self._closed = False
        self._capacity = memory.numel()
        self._slots, self._extents = Gaps(self._capacity), Gaps()
        self._full = False  # the drive
        self._dropped: deque[SavedStorage] = deque()
        self._ending: list[SavedStorage] = []  # dropped, with something in flight
        self._stacks: dict[int, Stack] = {}  # by thread
        self._ranks = itertools.count()
        self._leaving: deque[SavedStorage] = deque()
        self._in_memory: dict[SavedStorage, None] = {}  # who has a slot, the oldest first
        self._unwritten: dict[SavedStorage, None] = {}  # LEAVING or HELD, the oldest first
        self._unwritten_bytes = 0
        self._reading: list[SavedStorage] = []
        self._ahead: deque[SavedStorage] = deque()  # copied to the device, and not asked for
        self._traffic = ActivationTraffic()
        self._before = ActivationTraffic()
        self.last_step = ActivationTraffic()
        self._live = 0
        self.peak = 0
        """The most bytes of storages that were saved here at any time."""
        self.used_peak = 0
        """The most bytes of host memory in use at any time."""
        self.meter = Meter()
        """Its NVMe traffic."""

    @property
    def used(self) -> int:
        """Bytes of host memory in use."""
        return self._capacity - self._slots.free

    # Saving

    def save(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Begin to move a storage of the compute device away; None where it has to stay, for there
        is no room.

        May wait for the drive. The caller lets go of the storage, and calls `drop` in the end.
        """
        nbytes = round_up(storage.nbytes(), ALIGNMENT)
        with self._locked():
            start = None if self._closed else self._make_room(nbytes)
            if start is None:
                self._traffic = self._traffic._replace(
                    not_offloaded=self._traffic.not_offloaded + storage.nbytes()
                )
                return None
            slot = self._memory[start : start + nbytes]
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            try:
                leaving = self._device.begin_download(
                    slot[: source.numel()], source, self._device.mark()
                )
            except BaseException:
                self._slots.give(start, nbytes)
                raise
            saved = SavedStorage(storage, source, leaving, start, slot)
            self._in_memory[saved] = self._unwritten[saved] = None
            self._unwritten_bytes += nbytes
            self._leaving.append(saved)
            self._stack().push(saved, next(self._ranks))
            self._traffic = self._traffic._replace(offloaded=self._traffic.offloaded + saved.nbytes)
            self._live += saved.nbytes
            self.peak = max(self.peak, self._live)
            self._land()
            self._write_ahead()
        return saved

    def save_again(self, saved: SavedStorage) -> None:
        """The same storage was saved once more, and is now the first that the backward will ask
        for."""
        with self._locked():
            saved.saves += 1
            if saved.stack is not None:
                self._unstack(saved)
                self._stack().push(saved, next(self._ranks))

    def _stack(self) -> Stack:
        return self._stacks.setdefault(threading.get_ident(), Stack())

    def _unstack(self, saved: SavedStorage) -> None:
        stack = saved.stack
        if stack is not None:
            stack.remove(saved)
            if stack.top is None:
                self._stacks = {
                    thread: other for thread, other in self._stacks.items() if other is not stack
                }

    def _land(self) -> None:
        """See [Note: when memory of the device is free]."""
        while self._leaving and (copy := self._leaving[0].leaving) is not None and copy.done():
            self._landed(self._leaving.popleft())
        for saved in itertools.islice(self._leaving, max(0, len(self._leaving) - AHEAD)):
            if saved.source is not None and saved.leaving is not None:
                self._device.join(saved.leaving, saved.source)
                saved.source = None

    def _landed(self, saved: SavedStorage) -> None:
        saved.source = saved.leaving = None
        if saved.state is StorageState.LEAVING:
            saved.state = StorageState.HELD

    def _await_landing(self, saved: SavedStorage) -> None:
        if saved.leaving is not None:
            saved.leaving.wait()
            self._leaving.remove(saved)
            self._landed(saved)

    # Room

    def _make_room(self, nbytes: int) -> int | None:
        """A slot of `nbytes`, for which older storages go on to the drive; None where there is none
        to be had."""
        start = self._take_slot(nbytes)
        if start is None and nbytes <= self._capacity:
            for saved in list(self._in_memory) if self._nvme is not None else ():
                if self._send_away(saved) and (start := self._take_slot(nbytes)) is not None:
                    break
        while start is None and self._ending:
            self._finish(self._ending.pop(0))
            start = self._take_slot(nbytes)
        return start

    def _take_slot(self, nbytes: int) -> int | None:
        start = self._slots.take(nbytes)
        self.used_peak = max(self.used_peak, self.used)
        return start

    def _send_away(self, saved: SavedStorage) -> bool:
        """Give the slot of `saved` to others when the drive has what is in it; waits. False where
        the drive has no room."""
        self._await_landing(saved)
        if saved.state is StorageState.READING:
            with suppress(NvmeError):
                self._finish_reading(saved)
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
        self._free_slot(saved)
        if saved.state is StorageState.CLEAN:
            saved.state = StorageState.AWAY
            if saved.stack is not None:
                saved.stack.went_away(saved)
        return True

    def _free_slot(self, saved: SavedStorage) -> None:
        if saved.slot is None:
            return
        if saved.coming is not None:
            saved.coming.wait()
        if self._poison:
            saved.slot.numpy().fill(POISON)
        if saved.start is not None:
            self._slots.give(saved.start, saved.slot.numel())
        self._in_memory.pop(saved, None)
        saved.slot = saved.start = None

    def _write_ahead(self) -> None:
        """Start writing the oldest, while more than half of the memory is not written."""
        while self._nvme is not None and self._unwritten_bytes > self._capacity // 2:
            saved = next(iter(self._unwritten))
            if saved.state is StorageState.LEAVING or not self._write(saved):
                return

    def _write(self, saved: SavedStorage) -> bool:
        """Start writing what is HELD; False where the drive has no room."""
        if self._nvme is None or saved.slot is None:
            return False
        nbytes = saved.slot.numel()
        if saved.extent is None and (start := self._take_extent(nbytes)) is not None:
            saved.extent = Extent(start, nbytes)
        if saved.extent is None:
            return False
        address = saved.slot.data_ptr()
        if self._verifies:
            saved.checksum = native.aio().crc32c(address, nbytes)
        saved.ticket = self._nvme.write(
            saved.extent, 0, nbytes, address, "activations", self.meter, background=True
        )
        self._forget_unwritten(saved)
        saved.state = StorageState.WRITING
        return True

    def _forget_unwritten(self, saved: SavedStorage) -> None:
        if saved in self._unwritten:
            del self._unwritten[saved]
            self._unwritten_bytes -= round_up(saved.nbytes, ALIGNMENT)

    def _take_extent(self, nbytes: int) -> int | None:
        start = self._extents.take(nbytes)
        if start is None and not self._full and self._nvme is not None:
            grown = self._nvme.extents.grow(max(nbytes, GROWTH_BYTES))
            grown = grown or self._nvme.extents.grow(nbytes)
            if grown is None:
                self._full = True
                log.warning(
                    "NVMe has no room for more saved activations; what host memory cannot "
                    "hold stays on the device"
                )
                return None
            self._extents.give(grown.start, grown.nbytes)
            start = self._extents.take(nbytes)
        return start

    # Bringing back

    def fetch(self, saved: SavedStorage) -> torch.UntypedStorage:
        """The content of `saved` on the compute device, for what the caller queues from now on; may
        be called again.

        Raises `NvmeError` where it could not be written or read, `CorruptStateError` where it came
        back changed, and `EngineClosedError` after `close`.
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
                    self._upload(saved)
                elif saved in self._ahead:
                    self._ahead.remove(saved)
                if saved.memory is None or saved.coming is None:
                    raise RuntimeError("a saved storage has no copy where it was just put")
                self._device.join(saved.coming, saved.memory)
                storage = saved.memory.untyped_storage()
            if saved.stack is not None:
                saved.stack.reach(saved)
            saved.asked += 1
            if saved.asked >= saved.saves:  # with retain_graph they may ask again, much later
                saved.asked, saved.passed, saved.memory = 0, True, None
            self._look_ahead()
        return storage

    def _poll(self) -> None:
        self._land()
        for saved in [
            each for each in self._reading if each.ticket is not None and each.ticket.done()
        ]:
            with suppress(NvmeError):  # who asks for it reads it again, and is told
                self._finish_reading(saved)

    def _bring_to_slot(self, saved: SavedStorage) -> None:
        self._await_landing(saved)
        if saved.state is StorageState.LOST and saved.ticket is not None:
            saved.ticket.wait()  # raises again why
        if saved.state is StorageState.AWAY:
            self._read(saved, wanted=True)
        if saved.state is StorageState.READING:
            with self._recorder.span("wait nvme", "activations"):
                self._finish_reading(saved)

    def _read(self, saved: SavedStorage, wanted: bool) -> bool:
        """Start reading what is AWAY; False where there is no free slot, and nobody wants it
        now."""
        if saved.extent is None or self._nvme is None:
            raise RuntimeError("a saved storage is on no drive")
        nbytes = saved.extent.nbytes
        start = self._make_room(nbytes) if wanted else self._take_slot(nbytes)
        if start is None and not wanted:
            return False
        # All others are in host memory, and the drive is full: memory of its own then, for a
        # moment.
        saved.slot = huge_pages(nbytes) if start is None else self._memory[start : start + nbytes]
        saved.start = start
        if start is not None:
            self._in_memory[saved] = None
        address = saved.slot.data_ptr()
        saved.ticket = self._nvme.read(saved.extent, 0, nbytes, address, "activations", self.meter)
        if self._verifies:
            saved.ticket.check = functools.partial(self._check, saved)
        saved.state = StorageState.READING
        self._reading.append(saved)
        return True

    def _check(self, saved: SavedStorage) -> None:
        """Raise `CorruptStateError` where what was read is not what was written."""
        if saved.slot is None or saved.extent is None or self._nvme is None:
            raise RuntimeError("a saved storage is on no drive")
        found = native.aio().crc32c(saved.slot.data_ptr(), saved.extent.nbytes)
        if found != saved.checksum:
            where = self._nvme.where(saved.extent, 0)
            raise CorruptStateError("what autograd saved", "activation", *where)

    def _finish_reading(self, saved: SavedStorage) -> None:
        if saved.ticket is None:
            raise RuntimeError("nothing is being read")
        try:
            saved.ticket.wait()
        except (NvmeError, CorruptStateError):
            self._free_slot(saved)
            saved.state = StorageState.AWAY
            if saved.stack is not None:
                saved.stack.went_away(saved)
            raise
        else:
            saved.state = StorageState.CLEAN
        finally:
            if saved.state is not StorageState.READING:
                saved.ticket = None
                self._reading.remove(saved)

    def _upload(self, saved: SavedStorage) -> None:
        """Start copying what is in a slot to the compute device."""
        if saved.slot is None:
            raise RuntimeError("a saved storage that is to be copied has no slot")
        saved.memory = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device.torch)
        saved.coming = self._device.begin_upload(
            saved.memory, saved.slot[: saved.nbytes], self._device.mark()
        )

    def _look_ahead(self) -> None:
        if not self._stacks:
            return
        most = max(AHEAD, len(self._stacks))
        for stack in self._stacks.values() if not self._device.unified_memory else ():
            saved = stack.next
            for _ in range(most // len(self._stacks)):
                if saved is None:
                    break
                if saved.memory is None and saved.state in IN_SLOT and saved.origin.expired():
                    with suppress(torch.OutOfMemoryError):  # then it comes when it is asked for
                        self._upload(saved)
                        self._ahead.append(saved)
                saved = saved.below
        while len(self._ahead) > 2 * most:
            self._let_go(self._ahead.popleft())
        going = self._nvme is not None
        while going:
            going = False
            for stack in self._stacks.values():
                away = stack.next_away()
                going |= (
                    away is not None
                    and len(self._reading) < most
                    and self._read(away, wanted=False)
                )

    def _let_go(self, saved: SavedStorage) -> None:
        """Give the copy on the device up, which nobody asked for."""
        if saved.memory is not None and saved.coming is not None:
            self._device.join(saved.coming, saved.memory)
            saved.memory = None

    # The end of one, and of all

    def drop(self, saved: SavedStorage) -> None:
        """Nobody will ask for `saved` any more. Never waits."""
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
        self._unstack(saved)
        self._forget_unwritten(saved)
        if saved.leaving is not None:
            self._leaving.remove(saved)
        if saved.state is StorageState.READING:
            self._reading.remove(saved)
        if saved in self._ahead:
            self._ahead.remove(saved)
        self._in_memory.pop(saved, None)
        self._live -= saved.nbytes
        saved.state = StorageState.ENDED
        self._ending.append(saved)

    def _finish(self, saved: SavedStorage) -> None:
        """Wait for what is in flight of one that has ended; its places go back even when that
        fails."""
        try:
            saved.await_idle()
        finally:
            self._release(saved)

    def _release(self, saved: SavedStorage) -> None:
        self._free_slot(saved)
        if saved.extent is not None:
            self._extents.give(*saved.extent)
            saved.extent = None

    def stepped(self) -> None:
        """A step has ended: `last_step` is what moved since the one before."""
        with self._locked():
            now = self._traffic._replace(written=self.meter.written, read=self.meter.read)
            before, self._before = self._before, now
            self.last_step = ActivationTraffic(
                *(new - old for new, old in zip(now, before, strict=True))
            )

    def close(self) -> None:
        """Wait for what is in flight and give all of it up. May be called twice."""
        with self._lock, ExitStack() as ending:  # each of these happens, whatever the others meet
            self._closed = True
            for stack in list(self._stacks.values()):
                while stack.top is not None:
                    self._end(stack.top)
            self._dropped.clear()
            ending.callback(setattr, self, "_memory", torch.empty(0, dtype=torch.uint8))
            while self._ending:
                ending.callback(self._finish, self._ending.pop())
