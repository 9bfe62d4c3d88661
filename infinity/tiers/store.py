"""The memory manager: bytes of states change tier nowhere else (invariant I2).

The store opens its parts in order, hands them out, and closes them in reverse:

    layout    where every block is at home (`infinity.placement`)
    resident  copies of parameters on the compute device, for the model
    staging   chunks of blocks on the host, for the optimizer and readers of states
    latch     whether all this can go on

Each `Block` has a spec, a home (`tiers/home`) and a device copy (`tiers/block`). Placement is seen
as time only, never in the values (I8).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from infinity.config import Config, Tier
from infinity.device import ComputeDevice
from infinity.errors import BudgetError, ConfigError
from infinity.free_memory import Budgets
from infinity.observe import Meter, Recorder
from infinity.placement.decide import Layout, Machine, Placement
from infinity.placement.spec import BlockSpec, Kind
from infinity.quantities import format_bytes
from infinity.tiers.activations import Activations
from infinity.tiers.arena import Arena, Lease
from infinity.tiers.block import Block
from infinity.tiers.block_io import BlockIo, Sums, pack_sums, unpack_sums
from infinity.tiers.chunks import Chunks
from infinity.tiers.drives import ALIGNMENT, STRIPE_BYTES, NvmeTier
from infinity.tiers.durable import (
    NO_RECORD,
    DurableStates,
    KeptRecord,
    LeftStates,
    RecordKey,
)
from infinity.tiers.home import SPARE, Version
from infinity.tiers.latch import Latch
from infinity.tiers.manifest import ONE_RANK, Member, StoredBlock
from infinity.tiers.originals import FileExtent, StoredBytes
from infinity.tiers.pins import PinnedStates
from infinity.tiers.resident import NOBODY, CopyListeners, Loader, Residency
from infinity.tiers.staging import ChunkRequest, Staging
from infinity.tiers.states_files import Extent

log = logging.getLogger("infinity")


class LastCommit(NamedTuple):
    """What was committed last: its record, and what `durable_blocks` had then."""

    key: RecordKey
    versions: Sequence[Version]


class Store:
    """Owns every block, the arenas and the NVMe tier. Declare blocks with `add`, then `open`;
    `close` ends everything.

    Any thread may call it; states change under one lock. The budgets hold from `open` on: all
    memory is allocated there.
    """

    layout: Layout
    """What was decided about all blocks; set by `open`, as what is below."""
    resident: Residency
    """The copies of parameters on the compute device."""
    staging: Staging
    """The chunks of blocks on the host."""
    copy_slots: int
    """Slots of 4096 bytes on the compute device for copies of parameters."""

    def __init__(
        self,
        config: Config,
        device: ComputeDevice,
        recorder: Recorder,
        own: str = "",
        resume: bool = False,
        member: Member = ONE_RANK,
    ) -> None:
        """What is on NVMe lies in directories called `own` below those of `config`, if that has
        letters. With `resume` states that an earlier run committed there are taken over, as far as
        they are those of `member`."""
        self._config = config
        self.patience = config.tuning.collective_timeout
        """Seconds that a rank waits for others."""
        self._device = device
        self._recorder = recorder
        self._durable = DurableStates(resume, member) if config.durability != "off" else None
        self._committed: LastCommit | None = None
        self._last_record = threading.Lock()  # the record of `_committed` is not given up
        self._nvme = NvmeTier(
            config.nvme,
            config.tuning.io_engine,
            config.tuning.nvme_memory,
            recorder,
            config.tuning.nvme_shares,
            own,
            self._durable,
        )
        self._changed = threading.Condition()
        self.budgets = Budgets(
            *(
                each if isinstance(each, int) else 0
                for each in (config.gpu_memory, config.cpu_memory)
            )
        )
        """What may be taken of each memory. What the configuration leaves open is 0 here, until
        somebody says it."""
        self._blocks: list[Block] = []
        self._originals: dict[Block, FileExtent] = {}
        self._arenas: dict[str, Arena] = {}
        # What `close` does, the last first, each whatever the others meet.
        self._closing = ExitStack()
        self._closing.callback(self._drop_memory)
        self._closing.callback(device.close)
        self._closing.callback(self._nvme.close)
        self.latch = Latch(self._changed, device)
        """Whether the store can go on."""
        self.activations: Activations | None = None
        """What autograd saves, off the compute device; set by `open`, where the configuration wants
        that."""
        self.meter = Meter()
        """NVMe traffic of all that has no meter of its own."""
        self._verifies = config.tuning.verify == "always"
        self._io = BlockIo(self._nvme, self.meter, self._durable is not None, self._verifies)

    # Declaration

    def add(self, spec: BlockSpec, original: FileExtent | None = None) -> Block:
        """Declare a block; its bytes are a multiple of 4096. The content of one that is `in_files`
        lies in `original`."""
        block = Block(spec)
        self._blocks.append(block)
        if original is not None:
            self._originals[block] = original
        return block

    @property
    def placement(self) -> Placement:
        """What was declared so far, to be asked before `open` what would fit."""
        machine = Machine(self._device.unified_memory, self._device.has_kernels)
        return Placement(
            self._config, self.budgets, machine, tuple(block.spec for block in self._blocks)
        )

    def measure_drives(self) -> float:
        """Before `open`: bytes per second of all drives together, half read and half written;
        infinite where nothing is there."""
        return (
            self._nvme.measure()
            if self._config.activations == "nvme" or any(b.tier == "nvme" for b in self._blocks)
            else math.inf
        )

    # Opening

    def open(self, layout: Layout, listeners: CopyListeners = NOBODY) -> None:
        """Allocate everything, as `layout` says, which is about the blocks that were declared."""
        self.layout = layout
        rooms = layout.rooms
        try:
            self._open_drives()
            self._allocate()
            self._lease_homes(rooms.cache)
            # Zeros and poison, and what was there before: copies would overtake them.
            self._device.await_stream()
            gpu, chunks = self._arenas["gpu"], Chunks(rooms.host.chunk_elements, layout.cuts)
            self.copy_slots = layout.copy_bytes // ALIGNMENT
            parts = self._device, self._io
            self.staging = Staging(
                *parts, self._arenas["staging"], chunks, self.latch, self._changed
            )
            loader = Loader(*parts, self.staging, chunks)
            latch, lock = self.latch, self._changed
            self.resident = Residency(
                self._device, gpu, self._blocks, layout, loader, latch, lock, listeners
            )
            self._closing.callback(self.resident.close)
        except BaseException:
            self.close()
            raise

    def _open_drives(self) -> None:
        """Reserve the places of all blocks on NVMe, and make the files.

        Those that commits speak of come first, and do not depend on budgets: a later run with other
        ones finds them there.
        """
        for block, placed in zip(self._blocks, self.layout.blocks, strict=True):
            block.home.placed = placed
        durable = self.durable_blocks()
        others = [block for block in self._blocks if block not in set(durable)]
        for block in (*durable, *others):
            placed = block.placed
            if not placed.extent_bytes:
                continue
            if block in self._originals:
                block.home.extents = (self._originals[block].after(placed.cached_bytes),)
            else:
                places = (self._nvme.reserve(placed.extent_bytes) for _ in range(placed.copies))
                block.home.extents = tuple(places)
        for block in durable:
            if block.placed.has_spare:
                spare = self._nvme.reserve(block.placed.moved_bytes, spare=True)
                block.home.extents = (*block.home.extents, spare)
        grows = self.layout.placement.config.activations == "nvme" or self._originals
        if grows and self._config.nvme:
            self._nvme.reserve(ALIGNMENT)  # so that there is a file, which grows
        if self._durable is not None:
            self._durable.describe([_stored(block) for block in self.durable_blocks()])
        self._nvme.originals.open(
            each.file for original in self._originals.values() for each in original.slices
        )
        self._nvme.open()

    def _allocate(self) -> None:
        """Make the arenas, and let the drives know what they read and write."""
        rooms = self.layout.rooms
        host = self._device.host_memory
        poison = self._config.tuning.poison
        gpu = Arena("gpu", self._device.compute_memory(rooms.device), ALIGNMENT, poison)
        self._arenas["gpu"] = gpu
        self._arenas["cpu"] = Arena("cpu", host(rooms.homes + rooms.cache), ALIGNMENT, poison)
        staging = Arena("staging", host(rooms.host.slots * rooms.slot), rooms.slot, poison)
        self._arenas["staging"] = staging
        if self.layout.placement.moves_activations():
            memory = host(rooms.saved)
            drive = self._nvme if self._config.activations == "nvme" else None
            self.activations = Activations(
                self._device, memory, drive, self._recorder, poison, self._verifies
            )
            self._closing.callback(self.activations.close)
            self._nvme.register(memory)
        self._nvme.register(staging.memory)
        if self._device.unified_memory:  # reads land in it
            self._nvme.register(gpu.memory)
        self._attach(gpu)

    def _attach(self, gpu: Arena) -> None:
        """Let the drives write parameters into the compute arena themselves, if that is wanted and
        works, and say which it is."""
        wanted, problem = self._config.tuning.gpu_direct, "the compute device is the CPU"
        if wanted == "off" or not any(
            b.moved_bytes for b in self._blocks if b.kind is Kind.PARAM and not b.permanent
        ):
            return
        if not self._device.unified_memory:
            try:
                self._nvme.attach(gpu.memory)
                log.info(
                    "parameters on nvme are read straight into the memory of the GPU "
                    "(GPUDirect Storage)"
                )
                return
            except RuntimeError as error:
                problem = str(error)
                log.info("parameters on nvme pass host memory on their way to the GPU: %s", problem)
        if wanted == "on":
            raise ConfigError(
                "gpu_direct='on', but no drive can write to the compute device: "
                f"{problem}; use gpu_direct='auto'"
            )

    def _lease_homes(self, cache_bytes: int) -> None:
        """Give every block that is at home in memory, or in part in the cache, its place there, of
        zeros."""
        for block in self._blocks:
            if block.tier != "nvme":
                nbytes, copies = block.spec.home_bytes, block.placed.copies
                block.home.buffers = tuple(self.reserve(block.tier, nbytes) for _ in range(copies))
                for buffer in block.home.buffers:
                    buffer.tensor.zero_()
            if block.permanent and block.home.buffer is not None:
                block.copy.be_home(block.home.buffer)
        start, cache = 0, self.reserve("cpu", cache_bytes).tensor.zero_() if cache_bytes else None
        for block in self._blocks:
            if block.cached_elements and cache is not None:
                block.home.cached = cache[start : start + block.placed.cached_bytes]
                start += block.placed.cached_bytes

    # States that outlive the process

    @property
    def is_durable(self) -> bool:
        """Whether the states outlive the process."""
        return self._durable is not None

    @property
    def has_spares(self) -> bool:
        """Whether there are steps that are not committed, and spare extents for them."""
        return self.steps_per_commit > 1

    @property
    def steps_per_commit(self) -> int:
        """Every how many steps one is committed; 0 where none is."""
        return self._config.steps_per_commit

    def steps_left(self, number: int) -> int:
        """How many steps lie between step `number` and the one that is committed next: 0 for that
        one itself, and where none is."""
        return -number % max(self.steps_per_commit, 1)

    def durable_blocks(self) -> list[Block]:
        """Those that commits speak of, in the order of declaration."""
        return [
            block
            for block in self._blocks
            if block.tier == "nvme" and block.kind is not Kind.GRAD and not block.spec.in_files
        ]

    def find(self) -> LeftStates:
        """Before `open`: lock the directories, and look what an earlier run left there."""
        durable = self.durable
        self._nvme.find()
        return durable.left

    def take(self, record: KeptRecord | None, life: str) -> None:
        """After `find`: go on from `record`, which all ranks have, or begin anew; either begins
        `life`, of all ranks."""
        if self._durable is not None:
            self._durable.take(record, life)

    @property
    def taken_record(self) -> RecordKey:
        """The record that was taken over; `NO_RECORD` where the states are new."""
        return NO_RECORD if self._durable is None else self._durable.taken

    @property
    def taken_over(self) -> bytes | None:
        """The record of the earlier run whose states were taken over; None where the states
        are new. Raises `CheckpointError` where it cannot be read."""
        content = None if self._durable is None else self._durable.content
        try:
            return None if content is None else unpack_sums(content)[1]
        except ValueError as error:
            raise self.durable.unreadable(error) from error

    @property
    def durable(self) -> DurableStates:
        """What is kept of the states that outlive the process."""
        if self._durable is None:
            raise RuntimeError("durability is off")
        return self._durable

    def check_versions(self, versions: Sequence[Version]) -> None:
        """Raise `CheckpointError` where the states that were taken over cannot be at these
        versions, of `durable_blocks`, or lack a checksum."""
        if self._durable is None or self._durable.content is None:
            raise RuntimeError("nothing was taken over")
        blocks = self.durable_blocks()
        if len(versions) != len(blocks):
            error = ValueError(f"it has {len(versions)} blocks, and there are {len(blocks)}")
            raise self.durable.unreadable(error)
        at = list(zip(blocks, versions, strict=True))
        for block, version in at:
            if version.extent >= len(block.home.extents):
                raise self.durable.unreadable(
                    ValueError(f"{block.name} has no place {version.extent}")
                )
        wanted = [
            self._io.sums(block, block.home.extents[version.extent]).shape
            for block, version in at
            if version.is_written
        ]
        if [each.shape for each in unpack_sums(self._durable.content)[0]] != wanted:
            raise self.durable.unreadable(ValueError("its checksums are not those of its blocks"))

    def restore(self, versions: Sequence[Version]) -> None:
        """The states that were taken over are at these versions, of `durable_blocks`. All of them
        are read and checked. Raises `CorruptStateError`."""
        if self._durable is None or self._durable.content is None:
            raise RuntimeError("nothing was taken over")
        for block, version in zip(self.durable_blocks(), versions, strict=True):
            block.home.version, block.home.written = version
            block.home.durable = version.extent
            block.home.seal(version.extent)
        sums, _ = unpack_sums(self._durable.content)
        self._committed = LastCommit(self._durable.taken, versions)
        self._keep(versions)
        start = time.perf_counter()
        nbytes = self._check(sums)
        seconds = time.perf_counter() - start
        log.info("checked %s of committed states in %.1f s", format_bytes(nbytes), seconds)
        self._durable.keep()
        self._nvme.shorten()

    def _check(self, sums: Sequence[Sums]) -> int:
        """Compare what the extents have with their checksums, `sums` of the blocks that were ever
        written, and bring what is cached. Returns how many bytes that were."""
        blocks = [block for block in self.durable_blocks() if block.home.written]
        for block, found in zip(blocks, sums, strict=True):
            self._io.sums(block, block.home.extents[block.home.version])[:] = found
        with self._io.verifying():
            cached = [(block, block.home.cached) for block in blocks]
            for ticket in [
                self._io.read(block, 0, memory.numel(), memory.data_ptr())
                for block, memory in cached
                if memory is not None
            ]:
                ticket.wait()
            requests = (
                ChunkRequest([block], begin, load=[block])
                for block in blocks
                for begin in self.staging.chunks(block)
                if begin >= block.cached_elements
            )
            for _ in self.staging.in_turn(requests):
                pass  # it was checked as it came
        return sum(block.nbytes for block in blocks)

    def make_whole(self) -> None:
        """Write what `durable_blocks` lack on the drives for a commit to speak of them: what is
        cached, and what lies in a spare extent.

        For the thread that runs the model, when no update is under way, and all that was sealed is
        committed. After an error the engine cannot go on.
        """
        lacking = [block for block in self.durable_blocks() if not block.home.is_whole]
        try:
            requests = []
            for block in lacking:
                with self._changed:
                    in_place = block.home.rewrite()
                    if not block.home.is_free():
                        raise RuntimeError(f"a commit still needs what {block.name} has to replace")
                self.await_unpinned([block])
                requests += [
                    ChunkRequest([block], begin, load=[block])
                    for begin in self.staging.chunks(block)
                    if begin < block.cached_elements or not in_place
                ]
            with closing(self.staging.in_turn(requests)) as turns:
                for (chunk,) in turns:
                    chunk.commit()
        except BaseException as error:
            self.latch.fail(error)
            raise
        self.resident.end_update(lacking)

    def seal(self, versions: Sequence[Version]) -> None:
        """`record` will be told of these versions of `durable_blocks`: they are not overwritten."""
        with self._changed:
            for block, version in zip(self.durable_blocks(), versions, strict=True):
                block.home.seal(version.extent)

    def record(self, key: RecordKey, versions: Sequence[Version], content: bytes) -> None:
        """Make `content` the last record, `key`: of what `durable_blocks` have at these versions,
        all of which is written. Returns when it would survive a power cut; the one before stays
        until `commit`. For one thread."""
        if self._durable is None:
            raise RuntimeError("durability is off")
        self._keep(versions, *([] if self._committed is None else [self._committed.versions]))
        self._nvme.flush()
        if self._durable.found is None:
            self._durable.begin(STRIPE_BYTES, self._nvme.shares, self._nvme.rooms)
        self._durable.record(key, self._with_sums(versions, content))

    def commit(self, key: RecordKey, versions: Sequence[Version]) -> None:
        """All ranks have the last record, which was told this: what those before spoke of may be
        overwritten. For the thread of `record`."""
        if self._durable is None:
            raise RuntimeError("durability is off")
        with self._last_record:
            self._durable.settle()
            with self._changed:
                for block, version in zip(self.durable_blocks(), versions, strict=True):
                    block.home.durable = version.extent
                self._committed = LastCommit(key, versions)
                self._keep(versions)
                self._changed.notify_all()

    def release(self, blocks: Sequence[Block]) -> None:
        """`blocks`, which have one place, may be rewritten there: the last record, which is
        committed, says that nobody goes on from it. The next record keeps them again."""
        if self._committed is not None:
            self._keep(self._committed.versions, without=blocks)

    def _keep(self, *commits: Sequence[Version], without: Collection[Block] = ()) -> None:
        """These are the commits whose states may be needed: no write reaches them."""
        self._nvme.keep(
            extent
            for versions in commits
            for block, version in zip(self.durable_blocks(), versions, strict=True)
            if block not in without
            and isinstance(extent := block.home.extents[version.extent], Extent)
        )

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut, which `pin` could speak of; None while
        there is none."""
        return None if self._committed is None else self._committed.key.step

    def pin(self) -> PinnedStates:
        """Keep all that the last commit speaks of as it is, until it is given back. For one caller
        at a time. Raises `CheckpointError` where its record cannot be read."""
        with self._last_record:
            self.latch.check()
            if self._committed is None or self._durable is None:
                raise RuntimeError("nothing was committed")
            key, versions = self._committed
            _, content = unpack_sums(self._durable.read(key))
            pinned = dict(zip(self.durable_blocks(), versions, strict=True))
            with self._changed:
                return PinnedStates(
                    key.step, content, pinned, self._originals, self._io, self._changed
                )

    def await_unpinned(self, blocks: Sequence[Block]) -> None:
        """Block until what is written next to `blocks` overwrites nothing that is pinned. Raises
        `EngineClosedError`."""
        with self._changed:
            while any(block.home.is_pinned() for block in blocks):
                self.latch.check()
                self._changed.wait()

    def discard_committed(self) -> None:
        """`close` leaves nothing of what was committed."""
        if self._durable is not None:
            self._durable.discard()

    def _with_sums(self, versions: Sequence[Version], content: bytes) -> bytes:
        """`content`, behind the checksums of what blocks have at these versions."""
        blocks = zip(self.durable_blocks(), versions, strict=True)
        sums = [
            self._io.sums(block, block.home.extents[version.extent])
            for block, version in blocks
            if version.is_written
        ]
        return pack_sums(sums) + content

    def reserve(self, tier: Tier, nbytes: int) -> Lease:
        """A lease for as long as the store lives, for a home or a buffer; part of what `open` was
        told."""
        lease = self._arenas[tier].lease(object(), nbytes)
        if lease is None:
            raise RuntimeError(f"{nbytes} bytes were not set aside on {tier}")
        return lease

    # While it is open

    def begin_thread(self) -> None:
        """The calling thread is the engine's, and may use the compute device from now on."""
        self._device.begin_thread()

    @property
    def chunk_elements(self) -> int:
        """The most elements of a chunk."""
        return self.layout.rooms.host.chunk_elements

    @property
    def staged_sets(self) -> int:
        """How many chunks of a unit, with all its kinds, staging holds at once."""
        return self.layout.rooms.host.staged_sets

    @property
    def unified_memory(self) -> bool:
        """Whether the host works on the memory of the compute device where it is."""
        return self._device.unified_memory

    def fill_from_files(self, block: Block) -> None:
        """Give `block`, which is `in_files`, its content: what is cached of it is read, and the
        rest stays where it is."""
        cached = block.home.cached
        if cached is not None:
            where = (0, cached.numel(), cached.data_ptr(), block.name, self.meter)
            self._nvme.read(self._originals[block], *where).wait()
        block.home.written = True

    def mapped(self, place: StoredBytes, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a file of the user that is the home of a block; see `Originals.mapped`."""
        return self._nvme.originals.mapped(place, dtype)

    def make_writable(self, block: Block) -> None:
        """Give `block`, all of which is about to be rewritten, a place of ours if its home is in
        files of the user. Raises `BudgetError` where NVMe has no room for it."""
        if block.original is None or len(block.home.extents) > 1:
            return
        extent = self._nvme.grow(block.placed.extent_bytes)
        if extent is None:
            raise BudgetError(
                f"{block.name} is at home in files of the user, which are only read, and the nvme "
                f"directories have no room for its {format_bytes(block.placed.extent_bytes)} with "
                "other values; free some, or raise nvme_memory"
            )
        with self._changed:
            block.home.extents = (*block.home.extents, extent)
        log.info("%s gets other values than its file has, and moves to nvme", block.name)

    def in_files(self) -> int:
        """Bytes that are read from files of the user."""
        return sum(block.moved_bytes for block in self._blocks if block.original is not None)

    def forget(self, block: Block) -> None:
        """Make `block` read as zeros again, without I/O."""
        with self._changed:
            block.home.forget()
            self._device.await_stream()

    def cached(self) -> tuple[int, int]:
        """Bytes of the blocks on NVMe that are cached in host memory, and bytes of all of those
        blocks."""
        on_nvme = [b for b in self._blocks if b.tier == "nvme"]
        return sum(b.placed.cached_bytes for b in on_nvme), sum(b.nbytes for b in on_nvme)

    def written_through(self) -> int:
        """Bytes of what is cached that each step that is committed writes all the same."""
        placed = (b.placed for b in self._blocks if b.placed.write_through and not b.spec.frozen)
        return sum(each.cached_bytes for each in placed)

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
        """The native I/O engine of the first directory, for counters and fault injection; None when
        nothing is on NVMe."""
        return self._nvme.engines[0] if self._nvme.engines else None

    @property
    def ios(self) -> tuple[Any, ...]:
        """The native I/O engines of all directories, in their order."""
        return tuple(self._nvme.engines)

    # The end

    def close(self) -> None:
        """End every thread and I/O, remove the NVMe files, give the memory back. May be called
        twice."""
        self.latch.close()
        self._closing.close()

    def _drop_memory(self) -> None:
        for block in self._blocks:
            block.drop()
        for arena in self._arenas.values():
            arena.drop()
        self._originals.clear()
        self._arenas.clear()
        self._blocks.clear()


def _stored(block: Block) -> StoredBlock:
    whole = block.home.extents[:SPARE]
    starts = tuple(extent.start for extent in whole if isinstance(extent, Extent))
    spec = block.spec
    return StoredBlock(
        name=spec.name,
        kind=spec.kind.value,
        format=spec.format.name,
        elements=spec.elements,
        nbytes=spec.nbytes,
        extents=starts,
    )
