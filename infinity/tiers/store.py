"""The memory manager: the only place where bytes change tier (invariant I2).

[Note: two kinds of access]
The model needs a unit's parameters whole, on the compute device, ahead of use: `prefetch`, `start`, `wait`, `release` keep clean
copies of parameter blocks in the compute arena, evicted by Belady's rule. The optimizer needs every block of a unit in
pieces, on the host, and writes them back: `check_out` hands out one chunk of each block. A block at home in host memory is
handed out in place, and so is the part of a block on NVMe that stays there (`infinity.placement.cache`); the rest passes through
staging slots. Chunks do not cross the border between the two. Both see placement only as time, never in the values (I8).

[Note: the place of a copy outlives an update]
The copy of a parameter block that is on the compute device when the step comes is what the update reads, if it reads the
parameter at all, and the new content goes to NVMe and into the same place. A place that the next forward takes while the
update is still to come is filled the same way. So a parameter moves once for a forward, once for its backward and once for
its update, and none of these twice. An update that begins before its step puts what it makes there, too, once backward has left
the unit; who uses the unit before the step is fixed, or takes the update back, fetches the old content again (`take_back`).

[Note: what a place may be filled after]
On a stream device the model's work is queued, and long after `release` a kernel may still read the copy. So each `release` marks
where the model's stream is (`Block.used`), and what is copied into the place, for this block or for the one that gets the place
next, comes after that mark, and waits for nothing that is queued later. A copy is queued behind the mark; a drive that writes to
the device itself (`Config.gpu_direct`) is asked to when the mark has been reached.

[Note: nobody starves]
Staging slots are taken all at once for a chunk or not at all, and only by threads that can give back what they hold, so
there is always one that can go on. In the compute arena a demand fetch may evict every unpinned copy; a prefetch only those
that are needed later than what it brings.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from infinity.config import Config, Tier
from infinity.device import ComputeDevice, Copy, Mark, zero_alone
from infinity.errors import BudgetError, ConfigError, EngineClosedError
from infinity.observe import Meter, Recorder
from infinity.placement.budget import CHUNK_ELEMENTS
from infinity.placement.decide import Layout, Machine, Placement
from infinity.placement.spec import BlockSpec, Kind
from infinity.tiers.access import Checkout, Fetch, Mover, Pending, Placing
from infinity.tiers.activations import Activations
from infinity.tiers.arena import Arena, Lease
from infinity.tiers.block import Block, BlockState
from infinity.tiers.chunks import Chunks
from infinity.tiers.drives import ALIGNMENT, NvmeTier, Transfer
from infinity.tiers.latch import Latch

log = logging.getLogger("infinity")

FILLING = 4
"""Chunks on their way to a compute device that the drive cannot reach: one is copied, the others are read."""


class Store:
    """Owns every block, the arenas and the NVMe tier. Declare blocks with `add`, then `open`; `close` ends everything.

    Any thread may call it; states change under one lock. The budgets hold from `open` on: all memory is allocated there.
    """

    def __init__(self, config: Config, device: ComputeDevice, recorder: Recorder, own: str = "") -> None:
        """What is on NVMe lies in directories called `own` below those of `config`, if that has letters."""
        self._config, self._device, self._recorder = config, device, recorder
        self._nvme = NvmeTier(config.nvme, config.io_engine, config.nvme_memory, recorder, config.nvme_shares, own)
        self._changed = threading.Condition()
        self._blocks: list[Block] = []
        self.layout: Layout
        """What was decided about all blocks; set by `open`."""
        self._arenas: dict[str, Arena] = {}
        self._mover: Mover | None = None
        self.activations: Activations | None = None
        """What autograd saves, off the compute device; set by `open`, where the configuration wants that."""
        self._left: Mark | None = None  # the last use of a place on the compute device by whoever lost it
        self.latch = Latch(self._changed, device)
        """Whether the store can go on."""
        self._tokens = itertools.count()
        self.meter = Meter()
        """NVMe traffic of all that has no meter of its own."""
        self.chunk_elements = CHUNK_ELEMENTS
        """The most elements of a chunk; fixed by `open`."""
        self._chunks = Chunks(CHUNK_ELEMENTS, {})
        self.staged_sets = 0
        """How many chunks of a unit, with all its kinds, staging holds at once; fixed by `open`."""
        self.copy_slots = 0
        """Slots of 4096 bytes on the compute device for copies of parameters; fixed by `open`."""
        self.next_use: Callable[[int], float] = lambda unit: math.inf
        """How far away the next use of a unit's parameters is; set by whoever knows the trace."""
        self.on_place: Callable[[], None] = lambda: None
        """Called when a copy is on the compute device, or the place of one whose block is UPDATING; set by whoever updates."""

    # Declaration and budgets

    def measure_drives(self) -> float:
        """Before `open`: bytes per second of all drives together, half read and half written; infinite where nothing is there."""
        return self._nvme.measure() if any(block.tier == "nvme" for block in self._blocks) else math.inf

    def add(self, spec: BlockSpec) -> Block:
        """Declare a block; its bytes are a multiple of 4096."""
        block = Block(spec)
        self._blocks.append(block)
        return block

    @property
    def placement(self) -> Placement:
        """What was declared so far, to be asked before `open` what would fit."""
        machine = Machine(self._device.shares_host, self._device.has_kernels)
        return Placement(self._config, machine, tuple(block.spec for block in self._blocks))

    def open(self, layout: Layout) -> None:
        """Allocate everything, as `layout` says, which is about the blocks that were declared."""
        budget, rooms = self._config, layout.rooms
        self.layout = layout
        self.chunk_elements, self.staged_sets = rooms.host.chunk_elements, rooms.host.staged_sets
        self._chunks = Chunks(self.chunk_elements, layout.cuts)
        for block, placed in zip(self._blocks, layout.blocks, strict=True):
            block.placed = placed
            if block.moved_bytes:
                block.extents = tuple(self._nvme.reserve(block.moved_bytes) for _ in range(placed.copies))
        if budget.activations == "nvme":
            self._nvme.reserve(ALIGNMENT)  # so that there is a file, which grows
        self._nvme.open()
        try:
            poison, host = budget.poison, self._device.host_memory
            self._arenas["gpu"] = Arena("gpu", self._device.compute_memory(rooms.device), ALIGNMENT, poison)
            self._arenas["cpu"] = Arena("cpu", host(rooms.homes + rooms.cache), ALIGNMENT, poison)
            self._arenas["staging"] = Arena("staging", host(rooms.host.slots * rooms.slot), rooms.slot, poison)
            if layout.placement.moves_activations():
                memory, drive = host(rooms.saved), self._nvme if budget.activations == "nvme" else None
                self.activations = Activations(self._device, memory, drive, self._recorder, poison)
                self._nvme.register(memory)
        except BaseException:
            self.close()
            raise
        self._nvme.register(self._arenas["staging"].memory)
        if self._device.shares_host:  # reads land in it
            self._nvme.register(self._arenas["gpu"].memory)
        self._attach()
        self._settle_in(rooms.cache)
        self._device.settle()  # zeros and poison, and what was there before: copies would overtake them
        self.copy_slots = self._arenas["gpu"].free_slots - self._arenas["gpu"].slots_for(layout.reserve)
        self._mover = Mover(lambda error: self.fail(error, "a fetch"))

    def _settle_in(self, cache_bytes: int) -> None:
        """Every block that is at home in memory, or in part in the cache, gets its place there, of zeros."""
        for block in self._blocks:
            if block.tier != "nvme":
                block.homes = tuple(self.reserve(block.tier, block.spec.home_bytes) for _ in range(block.placed.copies))
                for home in block.homes:
                    home.tensor.zero_()
            if block.permanent:
                block.lease, block.state = block.home, BlockState.RESIDENT
        start, cache = 0, self.reserve("cpu", cache_bytes).tensor.zero_() if cache_bytes else None
        for block in self._blocks:
            if block.kept and cache is not None:
                block.cached = cache[start : start + block.placed.kept_bytes]
                start += block.placed.kept_bytes

    def _attach(self) -> None:
        """Let the drives write parameters into the compute arena themselves, if that is wanted and works, and say which it is."""
        wanted, problem = self._config.gpu_direct, "the compute device is the CPU"
        if wanted == "off" or not any(b.moved_bytes for b in self._blocks if b.kind is Kind.PARAM and not b.permanent):
            return
        if not self._device.shares_host:
            try:
                self._nvme.attach(self._arenas["gpu"].memory)
                log.info("parameters on nvme are read straight into the memory of the GPU (GPUDirect Storage)")
                return
            except RuntimeError as error:
                problem = str(error)
                log.info("parameters on nvme pass host memory on their way to the GPU: %s", problem)
        if wanted == "on":
            self.close()
            raise ConfigError(f"gpu_direct='on', but no drive can write to the compute device: {problem}; use gpu_direct='auto'")

    def reserve(self, tier: Tier, nbytes: int) -> Lease:
        """A lease for as long as the store lives, for a home or a buffer; part of what `open` was told."""
        lease = self._arenas[tier].lease(next(self._tokens), nbytes)
        if lease is None:
            raise RuntimeError(f"{nbytes} bytes were not set aside on {tier} (invariant I10)")
        return lease

    # Clean copies of parameter blocks on the compute device

    def has_copy(self, block: Block) -> bool:
        """Whether a copy is on the compute device, or on its way, or has its place there already."""
        with self._changed:
            return block.lease is not None

    def is_resident(self, block: Block) -> bool:
        """Whether the content of `block` is on the compute device."""
        with self._changed:
            return block.state is BlockState.RESIDENT

    def prefetch(self, block: Block, beyond: float) -> bool:
        """Start bringing `block` to the compute device if that evicts only what is needed later than `beyond`.

        Returns at once, unless what it evicts is itself still on its way; False when there is no room. While the optimizer
        updates the block, its place is kept and the fetch starts when the update ends.
        """
        return self._bring(block, beyond)

    def start(self, block: Block) -> None:
        """Pin `block` on the compute device and start bringing it there, if there is room at once; paired with a `release`."""
        self.check_usable()
        with self._changed:
            self.latch.check()
            block.pins += 1
        try:
            self._bring(block, beyond=-1)
        except BaseException:
            self.release(block)
            raise

    def wait(self, block: Block) -> torch.Tensor:
        """The span of a pinned `block` on the compute device (uint8), whole and up to date; waits for updates, I/O and room.

        Raises `BudgetError` when the units in use leave no room, `NvmeError` when reading fails, `EngineClosedError` after a
        failed update.
        """
        while True:
            with self._changed:
                if block.state is BlockState.RESIDENT and block.lease is not None:
                    return block.lease.tensor
                fetch = block.fetch
                self.latch.check()
                if fetch is None and block.state is BlockState.UPDATING and block.lease is not None:
                    if not self._missing(block) and not block.copying:  # the update is there, and being written
                        return block.lease.tensor
                    self._changed.wait()
                    continue
            if fetch is not None:
                try:
                    fetch.finish()
                except BaseException:
                    with self._changed:
                        if block.state is BlockState.HOME:  # told to the caller: the place is not kept for a retry
                            self._end_lease(block, block.to_home)
                            self._changed.notify_all()
                    raise
            elif not self._bring(block, beyond=-1):
                raise self._no_room(block)

    def place(self, block: Block) -> None:
        """Give a pinned `block` its place, for who waits for it elsewhere; raises `BudgetError` like `wait`."""
        if not self._bring(block, beyond=-1):
            raise self._no_room(block)

    def gather(self, block: Block, pending: Pending) -> None:
        """`pending` will fill the rest of the span, when the content of `block`, which has its place, is there."""
        with self._changed:
            block.gathering = pending

    def release(self, block: Block) -> None:
        """Unpin: the copy stays until something needed sooner takes its place."""
        with self._changed:
            block.pins -= 1
            block.used = self._device.mark()

    def discard(self, block: Block) -> None:
        """Somebody wrote to the copy of `block`, so it is not clean: the next use fetches the content again, to the same place.

        Where the compute device is the home of `block`, the copy is the content, and stays.
        """
        with self._changed:
            if block.state is BlockState.RESIDENT and not block.permanent:
                block.to_outdated()
                self._changed.notify_all()

    def block_at(self, address: int) -> tuple[Block, int] | None:
        """The block whose compute copy holds `address`, and the byte offset in its span; None outside of all copies."""
        arena = self._arenas.get("gpu")
        if arena is None:  # closed by another thread than the one that saves for a backward, which may go on asking
            return None
        offset = address - arena.memory.data_ptr()
        if not 0 <= offset < arena.memory.numel():
            return None
        with self._changed:
            owner = arena.owner_at(offset)
            if isinstance(owner, Block) and owner.lease is not None:
                return owner, offset - owner.lease.offset
            home = next((b for b in self._blocks if b.permanent and b.home and b.home.holds(offset)), None)
            return None if home is None or home.home is None else (home, offset - home.home.offset)

    def _no_room(self, block: Block) -> BudgetError:
        pinned = [b.spec for b in self._blocks if b.pins and b.lease is not None and not b.permanent]
        return self.layout.shortage(block.spec, pinned)

    def _bring(self, block: Block, beyond: float) -> bool:
        """Lease the best window of the compute arena for `block` and start filling it, unless it has one; False without room.

        What is evicted follows from the uses alone, never from what happens to have landed: the ranks of a group, which
        gather a unit when they fetch it, must choose alike (invariant I6), and the planner states the reads of this choice.
        So a copy that is still on its way is not spared but waited for.
        """
        self.take_back(block)
        while True:
            with self._changed:
                self.latch.check_open()
                pending = None
                if block.lease is None:
                    found = self._arenas["gpu"].find(block.spec.span, self._next_use_of, beyond)
                    if found is None:
                        return False
                    victims = [owner for owner in found[1] if isinstance(owner, Block)]
                    if any(victim.copying for victim in victims):
                        self.latch.check()
                        self._changed.wait()
                        continue
                    pending = next((victim.pending for victim in victims if victim.pending is not None), None)
                    if pending is None:
                        for victim in victims:
                            self._end_lease(victim, victim.give_up_lease)
                        block.lease, block.used = self._arenas["gpu"].lease(block, block.spec.span, found[0]), self._left
                if pending is None and block.state is BlockState.HOME:
                    self._start(block)
                placed = pending is None and block.state is BlockState.UPDATING
            if placed:
                self.on_place()
            if pending is None:
                return True
            pending.settle()
            self.check()

    def _end_lease(self, block: Block, end: Callable[[], None]) -> None:
        """`end` ends the lease of `block`: whoever gets its place may fill it after what the model, or poison, did there."""
        end()
        used = self._device.mark() if self._config.poison else block.used
        if used is not None:
            self._left = used if self._left is None else max(self._left, used, key=lambda mark: mark.number)

    def _next_use_of(self, owner: Hashable) -> float | None:
        """How far away the next use of a copy is; None for what may not be evicted."""
        return self.next_use(owner.unit) if isinstance(owner, Block) and not owner.pins else None

    def _start(self, block: Block) -> None:
        """Begin filling what the lease of `block` lacks (under the lock); NVMe reads are submitted here and now."""
        if block.lease is None or self._mover is None:
            raise RuntimeError(f"{block.name} has no lease to be fetched into")
        target = block.lease.tensor[block.spec.at : block.spec.at + block.nbytes]
        fills = [self._filling(block, target, begin, end) for begin, end in self._missing(block)]
        fetch = Fetch(functools.partial(_finish, fills), lambda fetch, arrived: self._land(block, fetch, arrived))
        block.to_fetching(fetch)
        self._mover.post(fetch)

    def _missing(self, block: Block) -> list[tuple[int, int]]:
        """Runs of elements [begin, end) that the lease of `block` lacks; each is in host memory or on NVMe as a whole."""
        return self._chunks.runs(block.placed, without=block.renewed)

    def _filling(self, block: Block, target: torch.Tensor, begin: int, end: int) -> Callable[[], None]:
        """Start bringing elements [begin, end) of `block` into `target`, its place; the result blocks until they are there."""
        at, nbytes = block.format.bytes_of(begin), block.format.bytes_of(end - begin)
        part, memory = target[at : at + nbytes], self._memory_of(block, begin)
        if memory is not None:
            return functools.partial(self._device.upload, part, memory[at : at + nbytes], block.used)
        if not self._device.shares_host and not (self._nvme.direct and block.written):
            return functools.partial(self._fill_through_staging, block, part, begin, end)
        at -= block.placed.kept_bytes
        if self._nvme.direct:
            return functools.partial(self._fill_directly, block, at, part, block.used)
        return self._nvme.read(block.extents[block.version], at, nbytes, part.data_ptr(), block.name, self.meter).wait

    def _memory_of(self, block: Block, begin: int) -> torch.Tensor | None:
        """The memory, uint8 from the first element on, that is the home of element `begin`; None on NVMe."""
        if block.home is not None:
            return block.memory
        return block.cached if begin < block.kept else None

    def _fill_directly(self, block: Block, at: int, part: torch.Tensor, used: Mark | None) -> None:
        """The drive knows no streams: who finishes the fetch first waits until the model has left the place."""
        self._device.reach(used)
        extent = block.extents[block.version]
        self._nvme.read(extent, at, part.numel(), part.data_ptr(), block.name, self.meter, direct=True).wait()

    def _fill_through_staging(self, block: Block, part: torch.Tensor, begin: int, end: int) -> None:
        """While one chunk is copied the next ones are read, as far as there are slots that nobody else holds."""
        coming = deque(first for first in self.chunks(block) if begin <= first < end)
        reading: deque[Checkout] = deque()
        at = 0
        try:
            while coming or reading:
                while coming and len(reading) < FILLING:
                    chunks = self._stage([(block, True)], coming[0], None, False, wait=not reading)
                    if chunks is None:
                        break
                    coming.popleft()
                    reading += chunks
                reading[0].wait()
                content = reading[0].tensor
                self._device.upload(part[at : at + content.numel()], content, block.used)
                at += content.numel()
                reading.popleft().release()
        finally:
            with ExitStack() as stack:
                for chunk in reading:
                    stack.callback(chunk.release)

    def _land(self, block: Block, fetch: Fetch, arrived: bool) -> None:
        try:
            with self._changed:
                if block.fetch is fetch:
                    if arrived:
                        block.to_resident()
                    else:
                        block.to_failed()
                    self._changed.notify_all()
            self.on_place()
        except BaseException as error:  # the fetch is over all the same: whoever waits for it must be told
            self.fail(error, f"bringing {block.name}")
            raise

    # Chunks of blocks on the host

    def chunks(self, block: Block, near: bool = False) -> Sequence[int]:
        """The first element of every chunk of `block`, after `open`; they are the same for all blocks of a unit. With `near`, for
        who has kernels for memory of the compute device, a block that is at home there is one chunk."""
        if near and self.is_near(block):
            return (0,)
        return self._chunks.starts(block.placed)

    def _bytes_of_chunk(self, block: Block, begin: int, near: bool = False) -> tuple[int, int]:
        """The first byte of the chunk of `block` from element `begin` on, and how many bytes it has."""
        return (0, block.nbytes) if near and self.is_near(block) else self._chunks.bytes_of(block.placed, begin)

    def in_memory_until(self, block: Block, near: bool = False) -> int:
        """The first element of which a chunk is a copy in a staging slot; chunks before it are a part of the home itself. With
        `near`, for who has kernels for memory of the compute device."""
        if block.tier == "nvme":
            return block.kept
        if block.tier == "gpu" and not self._device.shares_host:
            return block.elements if near and self.is_near(block) else 0
        return block.elements

    @property
    def is_far(self) -> bool:
        """Whether the compute device has memory of its own."""
        return not self._device.shares_host

    def is_near(self, block: Block) -> bool:
        """Whether `block` is at home on a compute device with memory of its own, and there are kernels for that."""
        return block.tier == "gpu" and not self._device.shares_host and self._device.has_kernels

    def updating(self, block: Block) -> AbstractContextManager[Copy]:
        """For an update of a `near` unit whose parameters are `block`: what is queued inside comes after what the model does with
        them, and has ended when the result has."""
        return self._device.updating(block.used)

    def needs_staging(self, block: Block) -> bool:
        """Whether a chunk of `block` may be a copy in a staging slot."""
        return self.in_memory_until(block) < block.elements

    def check_out(
        self,
        wants: Sequence[tuple[Block, bool]],
        begin: int,
        meter: Meter | None = None,
        update: bool = False,
        near: bool = False,
        spare: int = 0,
    ) -> list[Checkout]:
        """The chunk from element `begin` on of every block in `wants`, with its content where the flag says so.

        Waits for staging slots; only for threads that hold no check-out. `meter` counts what it moves. With `update` the chunk
        will be rewritten, and what lies on the compute device is copied from there and not read from NVMe: for who knows that
        nobody wrote to it. With `near`, what is at home on a compute device that has kernels stays there, in one chunk.
        With `spare` one more comes last, of so many bytes of nobody's.
        """
        chunks = self._stage(wants, begin, meter, update, wait=True, near=near, spare=spare)
        if chunks is None:
            raise RuntimeError("a check-out that waits came back without its chunks")
        return chunks

    def try_check_out(
        self,
        wants: Sequence[tuple[Block, bool]],
        begin: int,
        meter: Meter | None = None,
        update: bool = False,
        near: bool = False,
    ) -> list[Checkout] | None:
        """Like `check_out`, but None when there are not enough free staging slots for all of `wants`."""
        return self._stage(wants, begin, meter, update, wait=False, near=near)

    def bring_home(
        self, block: Block, content: torch.Tensor, add: bool
    ) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        """Parts of `block`, and beside them those of `content` (uint8, of its size, on the compute device), for the caller to put
        the second into the first, or with `add` to add it; parts that hold `content` already are left out. To be iterated to its
        end, or closed.
        """
        far = not self._device.shares_host and block.tier != "gpu"
        if block.memory is not None and not (far and add):
            if far:
                self._device.download(block.memory, content, self._device.mark())
            else:
                yield block.memory, content
            return
        for begin in self.chunks(block):
            at, nbytes = self._chunks.bytes_of(block.placed, begin)
            part = content[at : at + nbytes]
            chunks = self.check_out([(block, add)], begin, spare=part.numel() if far and add else 0)
            with ExitStack() as stack:
                for chunk in chunks:
                    stack.callback(chunk.release)
                chunks[0].wait()
                if far:
                    self._device.download(chunks[-1].tensor, part, self._device.mark())
                if add or not far:
                    yield chunks[0].tensor, chunks[-1].tensor if far else part
                chunks[0].commit()

    def _stage(
        self,
        wants: Sequence[tuple[Block, bool]],
        begin: int,
        meter: Meter | None,
        update: bool,
        wait: bool,
        near: bool = False,
        spare: int = 0,
    ) -> list[Checkout] | None:
        self.check_usable()
        staged = [begin >= self.in_memory_until(block, near) for block, _ in wants] + [True] * (spare > 0)
        with self._changed:
            self.latch.check_open()
            staging = self._arenas["staging"]
            while staging.free_slots < sum(staged):
                if not wait:
                    return None
                self._changed.wait()
                self.latch.check_open()
                self.latch.check()
            slots = [staging.lease(next(self._tokens), staging.slot_bytes) if s else None for s in staged]
        chunks: list[Checkout] = []
        try:
            for (block, load), slot in zip(wants, slots[: len(wants)], strict=True):
                chunks.append(self._chunk(block, load, begin, slot, meter or self.meter, update, near))
            if spare and slots[-1] is not None:
                chunks.append(Checkout(slots[-1].tensor[:spare], end=functools.partial(self._end_slot, slots[-1])))
        except BaseException:
            for chunk in chunks:
                chunk.release()
            for slot in slots[len(chunks) :]:
                if slot is not None:
                    self._end_slot(slot)
            raise
        return chunks

    def _chunk(
        self, block: Block, load: bool, begin: int, slot: Lease | None, meter: Meter, update: bool, near: bool
    ) -> Checkout:
        at, nbytes = self._bytes_of_chunk(block, begin, near)
        if slot is None:
            memory = self._memory_of(block, begin)
            if memory is None:
                raise RuntimeError(f"{block.name} has no home in memory")
            if len(block.homes) < 2 or (load and not update):
                return Checkout(memory[at : at + nbytes])
            new = block.homes[block.target].tensor[at : at + nbytes]
            return Checkout(new, source=memory[at : at + nbytes] if load else None)
        tensor, name = slot.tensor[:nbytes], block.name
        arrive: Transfer | Copy | Callable[[], object] | None = None
        if block.memory is not None:  # at home on a device that the host cannot address
            home = block.memory[at : at + nbytes]
            if load:
                arrive = self._device.begin_download(tensor, home)
            write: Callable[[bool], Transfer | Copy] = functools.partial(self._write_home, home, tensor, block.used)
        else:
            place = at - block.placed.kept_bytes
            if load and update and self._copy_back(block, begin, tensor):
                arrive = None
            elif load and block.written:
                arrive = self._nvme.read(block.extents[block.version], place, nbytes, slot.address, name, meter)
            elif load:
                arrive = functools.partial(zero_alone, tensor)
            write = functools.partial(self._nvme.write, block.extents[block.target], place, nbytes, slot.address, name, meter)
        return Checkout(tensor, arrive, write, functools.partial(self._end_slot, slot))

    def _copy_back(self, block: Block, begin: int, tensor: torch.Tensor) -> bool:
        """Fill `tensor` with the current bytes of the chunk of `block` from `begin` on if they are on the compute device."""
        with self._changed:
            there = (block.outdated or block.state is BlockState.RESIDENT) and begin not in block.renewed
            if block.lease is None or not there:
                return False
            block.copying += 1
            source = block.lease.tensor[block.spec.at + block.format.bytes_of(begin) :][: tensor.numel()]
        try:
            self._device.download(tensor, source)
        finally:
            self._copied(block)
        return True

    def renew(self, block: Block, begin: int, content: torch.Tensor) -> Placing | None:
        """`content` is what an update made of a chunk of `block`: start putting it where the block has a place already. None
        where it has none; else `content` must stay as it is until the result has ended.

        So it is there for the next forward without being read. Before `begin_update` that is a guess, and the place is free for
        it only while nobody uses the block; see `take_back`.
        """
        with self._changed:
            unused = not block.pins and (block.gathering is None or block.gathering.ended())
            free = block.state is BlockState.UPDATING or (block.state is BlockState.RESIDENT and unused)
            if not free or block.lease is None or block.permanent:
                return None
            block.copying += 1
            block.renewed.add(begin)
            target = block.lease.tensor[block.spec.at + block.format.bytes_of(begin) :][: content.numel()]
        try:
            copy = self._device.begin_upload(target, content, block.used)
        except BaseException:
            self._copied(block)
            raise
        return Placing(copy, functools.partial(self._copied, block))

    def take_back(self, block: Block) -> None:
        """The copy of `block` is not to be what `renew` made of it before an update began: whoever uses it next fetches it."""
        with self._changed:
            while block.state is BlockState.RESIDENT and block.renewed:
                if not block.copying:
                    block.to_outdated()
                else:
                    self.latch.check()
                    self._changed.wait()

    def _copied(self, block: Block) -> None:
        with self._changed:
            block.copying -= 1
            self._changed.notify_all()

    def _write_home(self, home: torch.Tensor, tensor: torch.Tensor, used: Mark | None, background: bool) -> Copy:
        return self._device.begin_upload(home, tensor, used)

    def _end_slot(self, slot: Lease) -> None:
        with self._changed:
            slot.release()
            self._changed.notify_all()

    # Updates

    def begin_update(self, block: Block, keep: bool = False) -> None:
        """Announce new content: whoever fetches `block` waits until `end_update`. With `keep` a copy stays, to be renewed."""
        while True:
            self.settle(block)
            with self._changed:
                if block.pending is None:
                    if block.pins:
                        raise RuntimeError(f"{block.name} is in use and cannot be updated (invariant I7)")
                    if keep:
                        block.to_updating(keep)
                    else:
                        self._end_lease(block, functools.partial(block.to_updating, keep))
                    return

    def settle(self, block: Block) -> None:
        """Block until nothing is on its way to the place of `block`."""
        while True:
            with self._changed:
                pending = block.pending
            if pending is None:
                return
            pending.settle()
            self.check()

    def is_updating(self, block: Block) -> bool:
        """Whether an update of `block` is under way."""
        with self._changed:
            return block.state is BlockState.UPDATING

    def end_update(self, blocks: Sequence[Block]) -> None:
        """All chunks of `blocks` are committed and released: from now on they read as what was written."""
        with self._changed:
            for block in blocks:
                block.version = block.target
                block.written = True
                if block.state is BlockState.UPDATING:
                    if block.permanent:
                        block.to_resident()
                    elif block.lease is None:
                        block.to_home()
                    elif self._missing(block):
                        self._start(block)
                    else:
                        block.to_resident()
            self._changed.notify_all()

    def forget(self, block: Block) -> None:
        """Make `block` read as zeros again, without I/O."""
        with self._changed:
            block.written = False
            for home in block.homes:
                home.tensor.zero_()
            if block.cached is not None:
                block.cached.zero_()
            self._device.settle()

    def fail(self, error: BaseException, what: str = "an update") -> EngineClosedError:
        """`what` failed: whoever waits for it, now or later, gets `EngineClosedError` from `error`; returned is one like it."""
        return self.latch.fail(error, what)

    def check(self) -> None:
        """Raise `EngineClosedError` when something failed or the store was closed."""
        self.latch.check()

    def check_usable(self) -> None:
        """Raise where nothing can be brought: in a forked child, and while a graph is captured (see `Latch.check_usable`)."""
        self.latch.check_usable()

    # Accounting and the end

    def cached(self) -> tuple[int, int]:
        """Bytes of the blocks on NVMe that are kept in host memory, and bytes of all of those blocks."""
        on_nvme = [b for b in self._blocks if b.tier == "nvme"]
        return sum(b.placed.kept_bytes for b in on_nvme), sum(b.nbytes for b in on_nvme)

    def used(self) -> dict[str, int]:
        """Bytes in use now, per tier."""
        arena = self._arenas
        with self._changed:
            self.latch.check_open()
            saved = self.activations.used if self.activations is not None else 0
            host = arena["cpu"].used + arena["staging"].used + saved
            return {"gpu": arena["gpu"].used, "cpu": host, "nvme": self._nvme.reserved}

    def peaks(self) -> dict[str, int]:
        """The most bytes in use at any time since `open`, per tier."""
        arena = self._arenas
        with self._changed:
            self.latch.check_open()
            saved = self.activations.used_peak if self.activations is not None else 0
            host = arena["cpu"].peak + arena["staging"].peak + saved
            return {"gpu": arena["gpu"].peak, "cpu": host, "nvme": self._nvme.reserved}

    @property
    def gpu_direct(self) -> bool:
        """Whether drives write parameters straight into the memory of the compute device."""
        return bool(self._nvme.direct)

    @property
    def io(self) -> Any:
        """The native I/O engine of the first directory, for counters and fault injection; None when nothing is on NVMe."""
        return self._nvme.engines[0] if self._nvme.engines else None

    @property
    def ios(self) -> tuple[Any, ...]:
        """The native I/O engines of all directories, in their order."""
        return tuple(self._nvme.engines)

    def close(self) -> None:
        """End every thread and I/O, remove the NVMe files, give the memory back. May be called twice."""
        self.latch.close()
        with ExitStack() as stack:  # each of these happens, whatever the others meet; the last one first
            stack.callback(self._blocks.clear)
            stack.callback(self._chunks.forget)
            for block in self._blocks:
                stack.callback(block.drop)
            stack.callback(self._arenas.clear)
            stack.callback(self._device.close)
            stack.callback(self._nvme.close)
            if self.activations is not None:
                stack.callback(self.activations.close)
            mover, self._mover = self._mover, None
            if mover is not None:
                stack.callback(mover.close)


def _finish(fills: Sequence[Callable[[], object]]) -> None:
    """Wait for all of them, whatever they raise."""
    with ExitStack() as stack:
        for fill in fills:
            stack.callback(fill)
