"""Copies of blocks on the compute device: how they are fetched, evicted and renewed.

The model needs a unit's parameters whole, on the compute device, ahead of use. A copy is clean, so
evicting it moves no byte.

[Note: eviction]
Only `Residency._acquire` evicts, for a block that needs a place. Its numbered steps are the whole
recipe. `SlotMap.place` chooses the window. A demand fetch (`start`, `wait`, `place`) may evict
every copy that is not pinned. A prefetch may only evict copies that are needed later than its own
block.

The choice follows from the uses alone, never from the fetches that have landed. The ranks of a
group gather a unit when they fetch it, so they must choose alike (invariant I6). The planner also
predicts the reads of this choice. So a copy that is still on its way may be chosen, and the thread
waits for it.

[Note: the place of a copy outlives an update]
A parameter block may have a copy on the compute device when the step comes. The update reads the
parameter there, if it reads it at all. The new content goes to NVMe and into the same place. A
place that the next forward takes while the update is still to come is filled the same way. So a
parameter moves once for a forward, once for its backward and once for its update, and none of these
twice. An update that begins before its step also puts new content there, once backward has left the
unit. A use of the unit before the step is fixed drops that content (`rollback`), as does an update
that is undone. The next use fetches the old content again.

The drive reads the new content from a staging slot, never from the place, on the CPU too. The model
uses the place while the write is under way. Bytes that the model's code writes there must not reach
the home: the write is refused, and a fetch undoes it (`discard`).

[Note: when a place may be filled]
A stream device queues the model's work. Long after `release` a kernel may still read the copy. So
each `release` marks where the model's stream is (`DeviceCopy.used`). A copy into the place, for
this block or for the next one there, comes after that mark. It waits for nothing that is queued
later. A copy is queued behind the mark. A read of a drive that writes to the device itself
(`Tuning.gpu_direct`) is submitted when the mark has been reached.

[Note: waiting for a copy]
Only the stream that reads the place waits, and no thread of the host. A block whose home is host
memory is READY as soon as its copies are queued, and `wait` lets the caller's stream come
after the last copy (`DeviceCopy.arriving`). All copies to the device share a stream, so the last
one is the last to end, and a place that changes hands needs no wait either. The host waits in three
cases: for a read of a drive; before a home is rewritten that a copy still reads (`await_idle`); and
before a drive writes to the device past all streams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import NamedTuple

import torch

from infinity.device import ComputeDevice, Copy, Mark
from infinity.placement.decide import Layout
from infinity.tiers.access import Fetch, Mover, Pending, PlaceCopy
from infinity.tiers.arena import Arena, Lease
from infinity.tiers.block import Block, CopyState, DeviceCopy
from infinity.tiers.block_io import BlockIo
from infinity.tiers.chunks import Chunks
from infinity.tiers.latch import Latch
from infinity.tiers.slots import Clock
from infinity.tiers.staging import ChunkRequest, Staging


class Loader:
    """Brings the content of a block from its home to its place on the compute device."""

    def __init__(
        self,
        device: ComputeDevice,
        io: BlockIo,
        staging: Staging,
        chunks: Chunks,
    ) -> None:
        self.device = device
        """The compute device."""
        self._io = io
        self._staging = staging
        self._chunks = chunks

    def missing(self, block: Block) -> list[tuple[int, int]]:
        """Runs of elements [begin, end) that the place of `block` lacks."""
        return self._chunks.runs(block.placed, without=block.copy.renewed)

    def begin(self, block: Block) -> Callable[[], None] | None:
        """Start filling the missing parts of the place of `block`. The result blocks until they
        have arrived; None if all of them are queued copies. Raises `RuntimeError` without a lease.
        """
        if block.copy.lease is None:
            raise RuntimeError(f"{block.name} has no lease to be fetched into")
        target = block.copy.lease.tensor[block.spec.at : block.spec.at + block.nbytes]
        begun = [self._fill(block, target, begin, end) for begin, end in self.missing(block)]
        fills = [fill for fill in begun if fill is not None]
        return functools.partial(_finish, fills) if fills else None

    def _fill(
        self, block: Block, target: torch.Tensor, begin: int, end: int
    ) -> Callable[[], None] | None:
        """Start bringing elements [begin, end) of `block`, which are in host memory or on NVMe as a
        whole; the result blocks until they are in `target`. None if the copy is queued."""
        at, nbytes = block.format.bytes_of(begin), block.format.bytes_of(end - begin)
        part, memory, used = target[at : at + nbytes], block.home.memory_of(begin), block.copy.used
        if memory is not None:
            source = memory[at : at + nbytes]
            if self.device.unified_memory:
                return functools.partial(self.device.upload, part, source)
            block.copy.arriving = self.device.begin_upload(part, source, used)
            return None
        # cuFile moves whole pages, and tensors lie anywhere in files of the user.
        direct = self._io.direct and block.home.original is None
        if not self.device.unified_memory and not (direct and block.written):
            return functools.partial(self._fill_through_staging, block, part, begin, end)
        if direct:
            return functools.partial(self._fill_directly, block, at, part, used)
        return self._io.read(block, at, nbytes, part.data_ptr()).wait

    def _fill_directly(self, block: Block, at: int, part: torch.Tensor, used: Mark | None) -> None:
        """Wait until no kernel uses the place and all copies have ended, because a drive is not
        ordered by streams. Then read."""
        self.device.reach(used)
        self.device.await_copies()
        self._io.read(block, at, part.numel(), part.data_ptr(), direct=True).wait()

    def _fill_through_staging(self, block: Block, part: torch.Tensor, begin: int, end: int) -> None:
        """Read the next chunks while earlier chunks are copied to the device."""
        chunks = [first for first in self._staging.chunks(block) if begin <= first < end]
        requests = [ChunkRequest([block], first, load=[block]) for first in chunks]
        at = 0
        with closing(self._staging.in_turn(requests)) as turns:
            for (chunk,) in turns:
                target = part[at : at + chunk.tensor.numel()]
                chunk.hold(self.device.begin_upload(target, chunk.tensor, block.copy.used))
                at += target.numel()


class CopyListeners(NamedTuple):
    """Callbacks of the copies, given at construction. By default no unit is used again."""

    next_use: Callable[[int], float] = lambda unit: math.inf
    """How far away the next use of a unit's parameters is; asked under the store's lock."""
    placed: Callable[[int], None] = lambda unit: None
    """Called with the unit when its copies are queued, when its fetch ends, or when an UPDATING
    block gets a place."""
    clock: Callable[[], Clock | None] = lambda: None
    """The time at which `next_use` is called, or None if unknown; see `SlotMap.place`."""


NOBODY = CopyListeners()


class Residency:
    """The copies in the compute arena of `blocks`, in the order of their declaration. Any thread
    may call it.

    One class, because fetch, eviction and update change the state of the same copy under one lock.
    """

    def __init__(
        self,
        arena: Arena,
        blocks: Sequence[Block],
        layout: Layout,
        loader: Loader,
        latch: Latch,
        listeners: CopyListeners,
    ) -> None:
        self._device = loader.device
        self._arena = arena
        self._blocks = blocks
        self._layout = layout
        self._loader = loader
        self._latch = latch
        self._changed = latch.changed
        self._listeners = listeners
        self._left: Mark | None = None  # the last use of a place by a copy that lost it
        self._pinned: set[Block] = set()
        self.lost = 0
        """How many copies have lost their place so far, except those that a `prefetch` evicted."""
        self._mover = Mover(self._device.begin_thread, lambda error: latch.fail(error, "a fetch"))

    # Questions

    def has_copy(self, block: Block) -> bool:
        """Whether a copy is on the compute device, or on its way, or has its place there
        already."""
        with self._changed:
            return block.copy.lease is not None

    def is_ready(self, block: Block) -> bool:
        """Whether the content of `block` is on the compute device."""
        with self._changed:
            return block.copy.state is CopyState.READY

    def is_updating(self, block: Block) -> bool:
        """Whether an update of `block` is under way."""
        with self._changed:
            return block.copy.state is CopyState.UPDATING

    def pinned(self) -> frozenset[int]:
        """The units that are in use."""
        with self._changed:
            return frozenset(block.unit for block in self._pinned)

    # Uses

    def prefetch(self, block: Block, beyond: float) -> bool:
        """Start fetching `block` if that evicts only copies that are needed later than `beyond`.

        Returns at once, unless a copy that it evicts is still on its way. False if there is no
        room. While the optimizer updates the block, its place is kept and the fetch starts when the
        update ends.
        """
        return self._acquire(block, beyond)

    def start(self, block: Block) -> None:
        """Pin `block` and start bringing it, if there is room at once; paired with a `release`."""
        self._latch.check_usable()
        with self._changed:
            self._latch.check()
            block.copy.pins += 1
            self._pinned.add(block)
        try:
            self._acquire(block, beyond=-1)
        except BaseException:
            self.release(block)
            raise

    def wait(self, block: Block) -> torch.Tensor:
        """The span of a pinned `block` on the compute device (uint8), whole and up to date; waits
        for updates, I/O and room.

        Raises `BudgetError` when the units in use leave no room, `NvmeError` when reading fails,
        `EngineClosedError` after a failed update.
        """
        copy = block.copy
        while True:
            with self._changed:
                if copy.state is CopyState.READY and copy.lease is not None:
                    return self._follow(copy.lease, copy)
                fetch = copy.fetch
                self._latch.check()
                if fetch is None and copy.state is CopyState.UPDATING and copy.lease is not None:
                    if not self._loader.missing(block) and not copy.posting:
                        return self._follow(copy.lease, copy)  # the update is there, or queued
                    self._changed.wait()
                    continue
            if fetch is not None:
                try:
                    fetch.finish()
                except BaseException:
                    with self._changed:  # told to the caller: the place is not kept for a retry
                        if copy.state is CopyState.RESERVED:
                            copy.to_absent()
                            self._leave(block)
                            self._changed.notify_all()
                    raise
            else:
                self.place(block)

    def _follow(self, lease: Lease, copy: DeviceCopy) -> torch.Tensor:
        """The tensor of the lease, ready for work that the caller's stream gets from now on."""
        if copy.arriving is not None:
            self._device.follow_copy(copy.arriving)
        return lease.tensor

    def place(self, block: Block) -> None:
        """Give a pinned `block` its place, without waiting for its content.

        Raises `BudgetError` like `wait`.
        """
        if not self._acquire(block, beyond=-1):
            others = (other for other in self._blocks if other.copy.pins and not other.permanent)
            pinned = [other.spec for other in others if other.copy.lease is not None]
            raise self._layout.shortage(block.spec, pinned)

    def gather(self, block: Block, pending: Pending) -> None:
        """`pending` will fill the rest of the span, when the content of `block`, which has its
        place, is there."""
        with self._changed:
            block.copy.gathering = pending

    def release(self, block: Block) -> None:
        """Unpin: the copy stays until something needed sooner takes its place."""
        with self._changed:
            block.copy.pins -= 1
            if not block.copy.pins:
                self._pinned.discard(block)
            block.copy.used = self._device.mark()

    def discard(self, block: Block) -> None:
        """The copy of `block` was written to, so it is not clean: the next use fetches the content
        again, to the same place. An update under way is written first, and then fetched.

        If the compute device is the home of `block`, the copy is the content, and stays.
        """
        with self._changed:
            there = block.copy.state in (CopyState.READY, CopyState.UPDATING)
            if there and not block.permanent:
                block.copy.to_outdated()
                self._changed.notify_all()

    # Places

    def _acquire(self, block: Block, beyond: float) -> bool:
        """Give `block` a place in the arena and start filling it, unless it has one already.

        False without room. `beyond`: only copies used later may be evicted; -1 for a demand fetch.
        """
        self.rollback(block)
        copy = block.copy
        while True:
            with self._changed:
                self._latch.check_open()
                pending = None
                if copy.lease is None:
                    # 1. Choose the window whose soonest next use is farthest away. A pinned copy is
                    #    in none, and without a window there is no room.
                    clock = self._listeners.clock()
                    found = self._arena.find(block.spec.span, self._next_use_of, beyond, clock)
                    if found is None:
                        return False
                    start, owners = found
                    victims = [owner for owner in owners if isinstance(owner, Block)]
                    # 2. An update copies from or to a victim: wait for that, then choose again.
                    if any(victim.copy.copying for victim in victims):
                        self._latch.check()
                        self._changed.wait()
                        continue
                    # 3. A victim is on its way, being gathered, or read: wait for that below.
                    waits = (_pending(victim.copy) for victim in victims)
                    pending = next((one for one in waits if one is not None), None)
                    if pending is None:
                        # 4. Evict the victims. They are clean, so nothing is written.
                        for victim in victims:
                            victim.copy.evict()
                            self._leave(victim, counts=beyond < 0)
                        # 5. Lease the window, to be filled after its last use.
                        lease = self._arena.lease(block, block.spec.span, start)
                        if lease is None:
                            raise RuntimeError(f"the window for {block.name} is not free")
                        copy.reserve(lease, self._left)
                # 6. Start filling. An UPDATING block is filled by its update.
                queued = False
                if pending is None and copy.state is CopyState.RESERVED:
                    queued = self._load(block)
                placed = queued or (pending is None and copy.state is CopyState.UPDATING)
            # 7. An update may wait for this place.
            if placed:
                self._listeners.placed(block.unit)
            if pending is None:
                return True
            pending.await_end()
            self._latch.check()

    def _next_use_of(self, owner: Hashable) -> float | None:
        """How far away the next use of a copy is; None for what may not be evicted."""
        if not isinstance(owner, Block) or owner.copy.pins:
            return None
        return self._listeners.next_use(owner.unit)

    def _leave(self, block: Block, counts: bool = True) -> None:
        """`block` has lost its place: the next copy there is filled after the last use by the model
        or poison. `counts`: see `lost`."""
        self.lost += counts
        used = self._device.mark() if self._arena.poison else block.copy.used
        if used is not None:
            first = self._left is None
            self._left = used if first else max(self._left, used, key=lambda mark: mark.number)

    def _load(self, block: Block) -> bool:
        """Begin filling what the place of `block` lacks (under the lock); True where all of it is
        queued, and nothing is to be waited for."""
        work = self._loader.begin(block)
        if work is None:
            block.copy.to_ready()
            self._changed.notify_all()
            return True
        fetch = Fetch(work, lambda fetch, arrived: self._land(block, fetch, arrived))
        block.copy.to_loading(fetch)
        self._mover.post(fetch)
        return False

    def _land(self, block: Block, fetch: Fetch, arrived: bool) -> None:
        try:
            with self._changed:
                if block.copy.fetch is fetch:
                    if arrived:
                        block.copy.to_ready()
                    else:
                        block.copy.to_failed()
                    self._changed.notify_all()
            self._listeners.placed(block.unit)
        except BaseException as error:  # the fetch is over all the same: tell the waiting threads
            self._latch.fail(error, f"bringing {block.name}")
            raise

    # Updates

    def begin_update(self, block: Block, keep: bool = False) -> None:
        """Announce new content: uses of `block` wait until `end_update`.

        With `keep` a copy stays, to be renewed.
        """
        while True:
            self.await_idle(block)
            with self._changed:
                if block.copy.pending is None:
                    if block.copy.pins:
                        raise RuntimeError(f"{block.name} is in use and cannot be updated")
                    block.copy.to_updating(keep)
                    block.home.updates += 1
                    if not keep:
                        self._leave(block)
                    return

    def await_idle(self, block: Block) -> None:
        """Block until nothing is on its way to the place of `block` or from it, nor reads its
        home."""
        while True:
            with self._changed:
                pending, arriving = _pending(block.copy), block.copy.arriving
            if pending is None:
                if arriving is not None:
                    arriving.wait()
                return
            pending.await_end()
            self._latch.check()

    def updating(self, block: Block) -> AbstractContextManager[Copy]:
        """For an update, by kernels of the compute device, of a unit that is at home there and
        whose parameters are `block`.

        Work that is queued inside runs after the model's use of them. It has ended when the
        result has ended.
        """
        return self._device.updating(block.copy.used)

    def renew(self, block: Block, begin: int, content: torch.Tensor) -> PlaceCopy | None:
        """`content` is what an update made of a chunk of `block`: start putting it where the block
        has a place already. None where it has none; else `content` must stay as it is until the
        result has ended.

        So it is there for the next forward without being read. Before `begin_update` that is a
        guess, and is made only if no caller uses the block; see `rollback`.
        """
        copy, at = block.copy, block.spec.at + block.format.bytes_of(begin)
        with self._changed:
            unused = not copy.pins and (copy.gathering is None or copy.gathering.ended())
            free = copy.state is CopyState.UPDATING or (copy.state is CopyState.READY and unused)
            if not free or copy.lease is None or block.permanent:
                return None
            copy.copying += 1
            copy.posting += 1
            copy.renewed.add(begin)
            target = copy.lease.tensor[at : at + content.numel()]
        upload = None
        try:
            upload = self._device.begin_upload(target, content, copy.used)
            return PlaceCopy(upload, functools.partial(self._copied, block))
        finally:
            with self._changed:
                copy.posting -= 1
                if upload is None:
                    copy.copying -= 1
                else:
                    copy.arriving = upload
                self._changed.notify_all()

    def _copied(self, block: Block) -> None:
        with self._changed:
            block.copy.copying -= 1
            self._changed.notify_all()

    def rollback(self, block: Block) -> None:
        """Drop the chunks that `renew` put into the copy of `block` before an update began. The
        next use fetches the block."""
        copy = block.copy
        with self._changed:
            while copy.state is CopyState.READY and copy.renewed:
                if not copy.copying:
                    copy.to_outdated()
                else:
                    self._latch.check()
                    self._changed.wait()

    def end_update(self, blocks: Sequence[Block], left: int = 0) -> None:
        """All chunks of `blocks` are committed and released: from now on they read as the new
        content. `left`: see `Home`."""
        queued: list[Block] = []
        with self._changed:
            for block in blocks:
                block.home.flip(left)
                copy = block.copy
                if copy.state is not CopyState.UPDATING:
                    continue
                if block.permanent:
                    copy.to_ready()
                elif copy.lease is None:
                    copy.to_absent()
                elif self._loader.missing(block):
                    queued += [block] * self._load(block)
                else:
                    copy.to_ready()
            self._changed.notify_all()
        for block in queued:
            self._listeners.placed(block.unit)

    def empty(self) -> None:
        """Evict every copy, once nothing is on its way to it or from it. Blocks that are at home on
        the compute device stay. No caller uses a block, and no update is under way."""
        for block in self._blocks:
            if block.permanent:
                continue
            self.rollback(block)
            self.await_idle(block)
            with self._changed:
                if block.copy.lease is not None:
                    block.copy.evict()
                    self._leave(block)

    def close(self) -> None:
        """End the thread that finishes fetches, and return when no copy uses a place any more."""
        self._mover.close()
        self._device.await_copies()


class _Leaving(NamedTuple):
    """A copy from a lease, as something that has to end before the lease may."""

    copy: Copy

    def await_end(self) -> None:
        self.copy.wait()


def _pending(copy: DeviceCopy) -> Pending | Fetch | _Leaving | None:
    """The operation that has to end before the lease of `copy` ends; None if there is none."""
    if copy.pending is not None:
        return copy.pending
    leaving = copy.leaving
    return None if leaving is None or leaving.done() else _Leaving(leaving)


def _finish(fills: Sequence[Callable[[], object]]) -> None:
    """Wait for all of them, whatever they raise."""
    with ExitStack() as stack:
        for fill in fills:
            stack.callback(fill)
