"""Chunks of blocks on the host: checked out, changed, committed, released.

The optimizer needs every block of a unit in pieces, on the host, and writes them back. A chunk at
home in host memory is checked out in place. So is a chunk of the cached part of a block on NVMe
(`infinity.placement.cache`). Other chunks pass through staging slots. A chunk lies on one side of
the border between the two.

[Note: no request starves]
A request takes all its slots at once or none. Only a thread that can release its slots takes any.
So one thread can always continue.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from infinity.device import ComputeDevice, Copy, Mark, zero_alone
from infinity.nvme.ticket import Ticket
from infinity.observe import Meter
from infinity.tiers.access import Checkout
from infinity.tiers.arena import Arena, Lease
from infinity.tiers.block import Block, CopyState
from infinity.tiers.block_io import BlockIo, begin_of
from infinity.tiers.chunks import Chunks
from infinity.tiers.latch import Latch

IN_TURN = 4
"""Requests that `Staging.in_turn` has under way: half of them end, the other half begin."""


@dataclass(frozen=True)
class ChunkRequest:
    """The chunk from element `begin` on of every block in `blocks`."""

    blocks: Sequence[Block]
    begin: int
    load: Collection[Block] = ()
    """The blocks whose content is wanted. The bytes of other chunks are undefined."""
    updates: bool = False
    """Whether an update will rewrite the chunks. Content on the compute device is then copied from
    there, not read from NVMe. The caller knows that the copy there is clean."""
    on_device: bool = False
    """Whether the caller has kernels for memory of the compute device. A block that is at home
    there is then one chunk, in place."""
    spare: int = 0
    """If not 0, the last chunk is scratch memory of this many bytes, which belongs to no block."""
    meter: Meter | None = None
    """Counts the bytes that move; None for the meter of the store."""
    left: int = 0
    """How many steps lie between the step of an update and the next committed step."""


class Staging:
    """Checks chunks out and back in. Any thread may call it."""

    def __init__(
        self,
        device: ComputeDevice,
        io: BlockIo,
        arena: Arena,
        chunks: Chunks,
        latch: Latch,
    ) -> None:
        self._device = device
        self._io = io
        self._arena = arena
        self._chunks = chunks
        self._latch = latch
        self._changed = latch.changed
        self._tokens = itertools.count()

    # Chunks that pass through slots

    def chunks(self, block: Block, on_device: bool = False) -> Sequence[int]:
        """The first element of every chunk of `block`; the same for all blocks of a unit."""
        if on_device and self.is_gpu_resident(block):
            return (0,)
        return self._chunks.starts(block.placed)

    def _bytes_of(self, block: Block, request: ChunkRequest) -> tuple[int, int]:
        """The first byte of the wanted chunk of `block`, and its length in bytes."""
        if request.on_device and self.is_gpu_resident(block):
            return 0, block.nbytes
        return self._chunks.bytes_of(block.placed, request.begin)

    def staged_from(self, block: Block, on_device: bool = False) -> int:
        """The first element whose chunk is a copy in a slot. Chunks before it are parts of the home
        itself."""
        if block.tier.is_drive:
            return block.cached_elements
        if not block.tier.is_addressed(self._device.unified_memory):
            return block.elements if on_device and self.is_gpu_resident(block) else 0
        return block.elements

    def is_gpu_resident(self, block: Block) -> bool:
        """Whether `block` is at home on a compute device with memory and kernels of its own."""
        is_apart = block.tier.is_device and not self._device.unified_memory
        return is_apart and self._device.has_kernels

    def is_needed(self, block: Block) -> bool:
        """Whether a chunk of `block` may be a copy in a slot."""
        return self.staged_from(block) < block.elements

    # Check-outs

    def check_out(self, request: ChunkRequest) -> list[Checkout]:
        """The chunks of `request`; waits for slots. Only for threads that hold no check-out."""
        chunks = self._stage(request, wait=True)
        if chunks is None:
            raise RuntimeError("a check-out that waits came back without its chunks")
        return chunks

    def try_check_out(self, request: ChunkRequest) -> list[Checkout] | None:
        """Like `check_out`, but None without enough free slots for all chunks."""
        return self._stage(request, wait=False)

    def in_turn(
        self,
        requests: Iterable[ChunkRequest],
        begin: Callable[[ChunkRequest, list[Checkout]], None] = lambda request, chunks: None,
    ) -> Generator[list[Checkout], None, None]:
        """Yields the chunks of each request in order, when their content has arrived. Releases
        them when the transfers that the caller started with them have ended. `begin(request,
        chunks)` may start transfers that the content needs.

        Reads ahead and writes behind, within free slots. The caller iterates to the end, or closes
        the generator. For threads that hold no check-out.
        """
        coming = deque(requests)
        arriving: deque[list[Checkout]] = deque()
        leaving: deque[list[Checkout]] = deque()

        def end_first() -> None:
            with ExitStack() as stack:
                for chunk in leaving.popleft():
                    stack.callback(chunk.release)

        try:
            while coming or arriving:
                while coming and len(arriving) + len(leaving) < IN_TURN:
                    holds = arriving or leaving
                    chunks = self.try_check_out(coming[0]) if holds else self.check_out(coming[0])
                    if chunks is None:
                        break
                    arriving.append(chunks)
                    begin(coming.popleft(), chunks)
                if arriving:
                    for chunk in arriving[0]:
                        chunk.wait()
                    yield arriving[0]
                    leaving.append(arriving.popleft())
                while leaving and (
                    not arriving
                    or len(leaving) > IN_TURN // 2
                    or all(chunk.committed() for chunk in leaving[0])
                ):
                    end_first()
        finally:
            leaving += arriving
            with ExitStack() as stack:
                for _ in range(len(leaving)):
                    stack.callback(end_first)

    def begin_home(self, block: Block, content: torch.Tensor) -> Copy | None:
        """Start copying `content` to the home of `block`, if the home is host memory as a whole;
        else None. `content` (uint8) has the size of the home, on a compute device that the host
        cannot address. The copy comes after the work that the caller has queued."""
        memory = block.home.whole
        if memory is None or block.tier.is_device or self._device.unified_memory:
            return None
        return self._device.begin_download(memory, content, self._device.mark())

    def bring_home(
        self, block: Block, content: torch.Tensor, add: bool
    ) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        """Yields parts of `block`, each with its part of `content`. `content` (uint8) has the size
        of a home of `block`, on the compute device. The caller copies the second part to the first,
        or with `add` adds it. Omits parts that hold `content` already. The caller iterates to the
        end, or closes the generator.
        """
        discrete = not self._device.unified_memory and not block.tier.is_device
        whole = None if add else self.begin_home(block, content)
        if whole is not None:
            whole.wait()
            return
        if block.home.whole is not None and not discrete:
            yield block.home.whole, content
            return
        if block.home.whole is not None:
            yield from self._beside(block.home.whole, content)
            return
        places = {at: self._chunks.bytes_of(block.placed, at) for at in self.chunks(block)}
        parts = {at: content[first:][:nbytes] for at, (first, nbytes) in places.items()}

        def send(request: ChunkRequest, chunks: list[Checkout]) -> None:
            if discrete:
                target, source = chunks[-1].tensor, parts[request.begin]
                chunks[-1].expect(self._device.begin_download(target, source, self._device.mark()))

        load = [block] if add else ()
        requests = [
            ChunkRequest([block], at, load, spare=nbytes if discrete and add else 0)
            for at, (_, nbytes) in places.items()
        ]
        with closing(self.in_turn(requests, send)) as turns:
            for chunks, part in zip(turns, parts.values(), strict=True):
                if add or not discrete:
                    yield chunks[0].tensor, chunks[-1].tensor if discrete else part
                chunks[0].commit()

    def _beside(
        self, home: torch.Tensor, content: torch.Tensor
    ) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        """Yields parts of `home` (uint8, host memory), each with a copy in a slot of its part of
        `content` (uint8, on the compute device)."""
        size = self._arena.slot_bytes
        parts = list(zip(home.split(size), content.split(size), strict=True))

        def send(request: ChunkRequest, chunks: list[Checkout]) -> None:
            target, (_, source) = chunks[0].tensor, parts[request.begin]
            chunks[0].expect(self._device.begin_download(target, source, self._device.mark()))

        requests = [ChunkRequest([], at, spare=part.numel()) for at, (part, _) in enumerate(parts)]
        with closing(self.in_turn(requests, send)) as turns:
            for chunks, (part, _) in zip(turns, parts, strict=True):
                yield part, chunks[0].tensor

    def _stage(self, request: ChunkRequest, wait: bool) -> list[Checkout] | None:
        slots = self._take_slots(request, wait)
        if slots is None:
            return None
        chunks: list[Checkout] = []
        try:
            for block, slot in zip(request.blocks, slots[: len(request.blocks)], strict=True):
                if slot is None:
                    chunks.append(self._in_place(block, request))
                else:
                    chunks.append(self._in_slot(block, request, slot))
            if request.spare and slots[-1] is not None:
                end = functools.partial(self._end_slot, slots[-1])
                chunks.append(Checkout(slots[-1].tensor[: request.spare], end=end))
        except BaseException:
            for chunk in chunks:
                chunk.release()
            for slot in slots[len(chunks) :]:
                if slot is not None:
                    self._end_slot(slot)
            raise
        return chunks

    def _take_slots(self, request: ChunkRequest, wait: bool) -> list[Lease | None] | None:
        """A slot for each chunk, and for the spare chunk; None for a chunk in place. All slots, or
        None."""
        self._latch.check_usable()
        begin, on_device = request.begin, request.on_device
        staged = [begin >= self.staged_from(block, on_device) for block in request.blocks]
        staged += [True] * (request.spare > 0)
        arena = self._arena
        with self._changed:
            self._latch.check_open()
            while arena.free_slots < sum(staged):
                if not wait:
                    return None
                self._changed.wait()
                self._latch.check_open()
                self._latch.check()
            return [
                arena.lease(next(self._tokens), arena.slot_bytes) if s else None for s in staged
            ]

    def _in_place(self, block: Block, request: ChunkRequest) -> Checkout:
        """The chunk as a part of the home itself."""
        at, nbytes = self._bytes_of(block, request)
        home, load = block.home, block in request.load
        memory = home.memory_of(request.begin)
        if memory is None:
            raise RuntimeError(f"{block.name} has no home in memory")
        if home.writes_through(request.left):
            tensor = memory[at : at + nbytes]
            return Checkout(tensor, write=self._write_to_drive(block, at, tensor, request))
        if len(home.buffers) < 2 or (load and not request.updates):
            return Checkout(memory[at : at + nbytes])
        new = home.buffers[home.target()].tensor[at : at + nbytes]
        return Checkout(new, source=memory[at : at + nbytes] if load else None)

    def _in_slot(self, block: Block, request: ChunkRequest, slot: Lease) -> Checkout:
        """The chunk as a copy in `slot`, on its way."""
        at, nbytes = self._bytes_of(block, request)
        home, load = block.home, block in request.load
        shift = 0
        if home.original is not None:  # whole pages then go straight to the slot
            shift = home.original.shift(at - begin_of(block, home.original), nbytes)
            shift = shift if shift + nbytes <= slot.tensor.numel() else 0
        tensor = slot.tensor[shift : shift + nbytes]
        arrive: Ticket | Copy | Callable[[], object] | None = None
        write: Callable[[bool], Ticket | Copy]
        if home.memory is not None:  # at home on a device that the host cannot address
            there = home.memory[at : at + nbytes]
            if load:
                arrive = self._device.begin_download(tensor, there)
            write = functools.partial(self._write_home, there, tensor, block.copy.used)
        else:
            if load and request.updates:
                arrive = self._copy_back(block, request.begin, tensor)
            if not load or arrive is not None:
                pass
            elif home.written:
                arrive = self._io.read(block, at, nbytes, tensor.data_ptr(), request.meter)
            else:
                arrive = functools.partial(zero_alone, tensor)
            write = self._write_to_drive(block, at, tensor, request)
        return Checkout(tensor, arrive, write, functools.partial(self._end_slot, slot))

    def _copy_back(self, block: Block, begin: int, tensor: torch.Tensor) -> Copy | None:
        """Start copying the chunk of `block` from element `begin` on to `tensor`, if its content is
        on the compute device; else None."""
        copy, at = block.copy, block.spec.at + block.format.bytes_of(begin)
        with self._changed:
            there = copy.holds_old or copy.state is CopyState.READY
            if copy.lease is None or not there or begin in copy.renewed:
                return None
            copy.copying += 1
            source = copy.lease.tensor[at : at + tensor.numel()]
            after = copy.arriving
        leaving = None
        try:
            leaving = self._device.begin_download(tensor, source, after)
        finally:
            with self._changed:
                copy.copying -= 1
                copy.leaving = leaving or copy.leaving
                self._changed.notify_all()
        return leaving

    def _write_to_drive(
        self, block: Block, at: int, tensor: torch.Tensor, request: ChunkRequest
    ) -> Callable[[bool], Ticket]:
        target = block.home.extents[block.home.target(request.left)]
        return functools.partial(self._io.write, block, target, at, tensor, request.meter)

    def _write_home(
        self, home: torch.Tensor, tensor: torch.Tensor, used: Mark | None, _background: bool
    ) -> Copy:
        return self._device.begin_upload(home, tensor, used)

    def _end_slot(self, slot: Lease) -> None:
        with self._changed:
            slot.release()
            self._changed.notify_all()
