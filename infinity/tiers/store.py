"""The memory manager: bytes of states change tier nowhere else (invariant I2).

The store opens its parts in order, hands them out, and closes them in reverse:

    layout    where every block is at home (`infinity.placement`)
    sleeper   gives the memory back between steps, and takes it again
    resident  copies of parameters on the compute device, for the model
    staging   chunks of blocks on the host, for the optimizer and readers of states
    latch     whether the store can continue

Each `Block` has a spec, a home (`tiers/home`) and a device copy (`tiers/block`). Placement changes
time, never values (I8).
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import ExitStack

from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.errors import BudgetError, ConfigError
from infinity.free_memory import Budgets
from infinity.observe import Meter, Recorder
from infinity.placement.decide import Layout, Machine, Placement
from infinity.placement.spec import BlockSpec, Kind
from infinity.quantities import format_bytes
from infinity.tier import CPU, GPU, NVME, TIERS, Tier
from infinity.tiers.activations import Activations
from infinity.tiers.addresses import Addresses
from infinity.tiers.arena import Arena, Arenas, Lease
from infinity.tiers.block import Block
from infinity.tiers.block_io import BlockIo
from infinity.tiers.chunks import Chunks
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.home import Home
from infinity.tiers.latch import Latch
from infinity.tiers.originals import FileExtent
from infinity.tiers.places import KeptStates, Places
from infinity.tiers.resident import NOBODY, CopyListeners, Loader, Residency
from infinity.tiers.sleep import Sleep
from infinity.tiers.staging import Staging
from infinity.tiers.states_files import ExtentTransfer

log = logging.getLogger("infinity")


class Store:
    """Owns every block, the arenas and the NVMe tier. Declare blocks with `add`, then `open`;
    `close` ends everything.

    Any thread may call it; states change under one lock. The budgets hold from `open` on: all
    memory is allocated there.

    One class, because blocks, arenas and drives open together and close together.
    """

    layout: Layout
    """The decision about all blocks. `open` sets it and the next four attributes."""
    resident: Residency
    """The copies of parameters on the compute device."""
    staging: Staging
    """The chunks of blocks on the host."""
    addresses: Addresses
    """The blocks at addresses on the compute device."""
    sleeper: Sleep
    """Gives the memory back between steps, and takes it again."""
    _arenas: Arenas
    is_durable = False
    """Whether the states outlive the process (`infinity.durable.store`)."""
    has_spares = False
    """Whether there are steps that are not committed, and spare extents for them."""
    _home: type[Home] = Home

    def __init__(
        self,
        config: Config,
        device: ComputeDevice,
        recorder: Recorder,
        own: str = "",
        kept: KeptStates | None = None,
    ) -> None:
        """With `own`, the NVMe files lie in directories of that name below the directories of
        `config`. With `kept`, they may outlive the store."""
        self._config = config
        self.patience = config.tuning.collective_timeout
        """Seconds that a rank waits for others."""
        self.device = device
        """The compute device."""
        self._recorder = recorder
        self.nvme = NvmeTier(
            Places(config.nvme, own, kept),
            config.tuning.io_engine,
            config.tuning.nvme_memory,
            recorder,
            config.tuning.nvme_shares,
        )
        """The drives."""
        self._changed = threading.Condition()
        self.budgets = Budgets(
            *(
                each if isinstance(each, int) else 0
                for each in (config.gpu_memory, config.cpu_memory)
            )
        )
        """The bytes of each memory that the store may take. A budget that the configuration leaves
        open is 0 until the build sets it."""
        self._blocks: list[Block] = []
        self._originals: dict[Block, FileExtent] = {}
        # `close` undoes these in reverse order, even after failures: the memory last.
        self._closing = ExitStack()
        self._memory = self._closing.enter_context(ExitStack())
        self._memory.callback(self._drop_blocks)
        self._closing.callback(device.close)
        self._closing.callback(self.nvme.close)
        self.latch = Latch(self._changed, device)
        """Whether the store can continue."""
        self.activations: Activations | None = None
        """Saved tensors off the compute device; set by `open` if the configuration moves them."""
        self.meter = Meter()
        """NVMe traffic of transfers without a meter of their own."""
        self._verifies = config.tuning.verify == "always"
        self._io = BlockIo(self.nvme, self.meter, kept is not None, self._verifies)

    # Declaration

    def add(self, spec: BlockSpec, original: FileExtent | None = None) -> Block:
        """Declare a block; its bytes are a multiple of 4096. `original` has the content of a block
        that is `in_files`."""
        block = Block(spec, self._home)
        self._blocks.append(block)
        if original is not None:
            self._originals[block] = original
        return block

    @property
    def placement(self) -> Placement:
        """The blocks that were declared so far, with budgets, before `open`."""
        machine = Machine(self.device.unified_memory, self.device.has_kernels)
        return Placement(
            self._config, self.budgets, machine, tuple(block.spec for block in self._blocks)
        )

    def measure_drives(self) -> float:
        """Before `open`: bytes per second of all drives together, half read and half written;
        infinite if no tier in use is on drives."""
        return (
            self.nvme.measure()
            if TIERS[self._config.activations].is_drive
            or any(b.tier.is_drive for b in self._blocks)
            else math.inf
        )

    # Opening

    def open(self, layout: Layout, listeners: CopyListeners = NOBODY) -> None:
        """Allocate everything for `layout`, the layout of the declared blocks."""
        self.layout = layout
        rooms = layout.rooms
        try:
            self._reserve_extents()
            self._open_drives()
            self._allocate()
            self._lease_homes(rooms.cache)
            # Copies would overtake the zeros and the poison.
            self.device.await_stream()
            chunks = Chunks(rooms.host.chunk_elements, layout.cuts)
            parts, gpu = (self.device, self._io), self._arenas.gpu
            self.staging = Staging(*parts, self._arenas.staging, chunks, self.latch)
            loader = Loader(*parts, self.staging, chunks)
            self.resident = Residency(gpu, self._blocks, layout, loader, self.latch, listeners)
            self._closing.callback(self.resident.close)
            self.addresses = Addresses(gpu, self._blocks, self._changed)
            self.sleeper = Sleep(
                self._arenas, self._blocks, self.device, self.nvme, self.resident, self.latch
            )
            self._closing.callback(self.sleeper.close)
        except BaseException:
            self.close()
            raise

    def _reserve_extents(self) -> None:
        """Reserve the places of all blocks on NVMe.

        Blocks that commits may include come first. Their places do not depend on budgets, so a
        later run with other budgets finds them.
        """
        for block, placed in zip(self._blocks, self.layout.blocks, strict=True):
            block.home.placed = placed
        states = self.state_blocks()
        others = [block for block in self._blocks if block not in set(states)]
        for block in (*states, *others):
            placed = block.placed
            if not placed.extent_bytes:
                continue
            if block in self._originals:
                block.home.extents = (self._originals[block].after(placed.cached_bytes),)
            else:
                places = (
                    self.nvme.extents.reserve(placed.extent_bytes) for _ in range(placed.copies)
                )
                block.home.extents = tuple(places)
        for block in states:
            if block.placed.has_spare:
                spare = self.nvme.extents.reserve(block.placed.moved_bytes, spare=True)
                block.home.extents = (*block.home.extents, spare)
        grows = TIERS[self._config.activations].is_drive or self._originals
        if grows and self._config.nvme:
            self.nvme.extents.reserve(ALIGNMENT)  # a file that can grow

    def _open_drives(self) -> None:
        """Open the files."""
        self.nvme.originals.open(
            each.file for original in self._originals.values() for each in original.slices
        )
        self.nvme.open()

    def _allocate(self) -> None:
        """Allocate the memory, and register it with the drives."""
        rooms = self.layout.rooms
        poison = self._config.tuning.poison
        self._arenas = Arenas(self.device, rooms, poison, self._memory)
        if self.layout.placement.moves_activations():
            memory = self.device.host_memory(rooms.saved)
            drive = self.nvme if TIERS[self._config.activations].is_drive else None
            self.activations = Activations(
                self.device, memory, drive, self._recorder, poison, self._verifies
            )
            self._closing.callback(self.activations.close)
            self.nvme.register(memory)
        self.nvme.register(self._arenas.staging.memory)
        if self.device.unified_memory:  # reads land in it
            self.nvme.register(self._arenas.gpu.memory)
        self._attach(self._arenas.gpu)

    def _attach(self, gpu: Arena) -> None:
        """Let the drives write parameters to the compute arena, if that is wanted and works. Logs
        the outcome. Raises `ConfigError` if `gpu_direct` is "on" and no drive can."""
        wanted, problem = self._config.tuning.gpu_direct, "the compute device is the CPU"
        if wanted == "off" or not any(
            b.moved_bytes for b in self._blocks if b.kind is Kind.PARAM and not b.permanent
        ):
            return
        if not self.device.unified_memory:
            try:
                self.nvme.attach(gpu.memory)
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
        """Give every block with a home or a cached part in memory its place there, with zeros."""
        for block in self._blocks:
            if not block.tier.is_drive:
                nbytes, copies = block.spec.home_bytes, block.placed.copies
                block.home.buffers = tuple(self.reserve(block.tier, nbytes) for _ in range(copies))
                for buffer in block.home.buffers:
                    buffer.tensor.zero_()
            if block.permanent and block.home.buffer is not None:
                block.copy.be_home(block.home.buffer)
        start, cache = 0, self.reserve(CPU, cache_bytes).tensor.zero_() if cache_bytes else None
        for block in self._blocks:
            if block.cached_elements and cache is not None:
                block.home.cached = cache[start : start + block.placed.cached_bytes]
                start += block.placed.cached_bytes

    def state_blocks(self) -> list[Block]:
        """The blocks on NVMe with parameters and states, in the order of declaration. Omits blocks
        in files of the user."""
        return [
            block
            for block in self._blocks
            if block.tier.is_drive and block.kind is not Kind.GRAD and not block.spec.in_files
        ]

    def steps_left(self, number: int) -> int:
        """How many steps lie between step `number` and the next committed step. 0 for a committed
        step, and if no step is committed."""
        return 0

    def reserve(self, tier: Tier, nbytes: int) -> Lease:
        """A lease for a home or a buffer, for the life of the store. See `Arenas.reserve`."""
        return self._arenas.reserve(tier, nbytes)

    # While it is open

    def fill_from_files(self, block: Block) -> None:
        """Give `block`, which is `in_files`, its content: read its cached part. The rest stays in
        the files."""
        cached = block.home.cached
        if cached is not None:
            where = (0, cached.numel(), cached.data_ptr(), block.name, self.meter)
            self.nvme.read(ExtentTransfer(self._originals[block], *where)).wait()
        block.home.written = True

    def make_writable(self, block: Block) -> None:
        """Give `block` an extent if its home is files of the user, because all of it is about to be
        rewritten. Raises `BudgetError` if NVMe has no room."""
        if block.original is None or len(block.home.extents) > 1:
            return
        extent = self.nvme.extents.grow(block.placed.extent_bytes)
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
        """Make `block` read as zeros again, without I/O. Raises `EngineClosedError` while the store
        sleeps."""
        self.latch.check_awake()
        with self._changed:
            block.home.forget()
            self.device.await_stream()

    def cached(self) -> tuple[int, int]:
        """Bytes of the blocks on NVMe that are cached in host memory, and bytes of all blocks on
        NVMe."""
        on_nvme = [b for b in self._blocks if b.tier.is_drive]
        return sum(b.placed.cached_bytes for b in on_nvme), sum(b.nbytes for b in on_nvme)

    def written_through(self) -> int:
        """Cached bytes that each committed step also writes to NVMe."""
        placed = (b.placed for b in self._blocks if b.placed.write_through and not b.spec.frozen)
        return sum(each.cached_bytes for each in placed)

    def used(self) -> dict[str, int]:
        """Bytes in use now, per tier. While the store sleeps, its file counts as NVMe."""
        with self._changed:
            self.latch.check_open()
            if self.latch.asleep:
                reserved = self.nvme.extents.reserved
                return {GPU.name: 0, CPU.name: 0, NVME.name: reserved + self.sleeper.nbytes}
            saved = self.activations.memory.used if self.activations is not None else 0
            host = self._arenas.cpu.used + self._arenas.staging.used + saved
            device, nvme = self._arenas.gpu.used, self.nvme.extents.reserved
            return {GPU.name: device, CPU.name: host, NVME.name: nvme}

    def peaks(self) -> dict[str, int]:
        """The most bytes in use at any time since `open`, per tier."""
        with self._changed:
            self.latch.check_open()
            saved = self.activations.memory.used_peak if self.activations is not None else 0
            host = self._arenas.cpu.peak + self._arenas.staging.peak + saved
            device, nvme = self._arenas.gpu.peak, self.nvme.extents.reserved
            return {GPU.name: device, CPU.name: host, NVME.name: nvme}

    # The end

    def close(self) -> None:
        """End every thread and I/O, remove the NVMe files, and release the memory. May be called
        twice."""
        self.latch.close()
        self._closing.close()

    def _drop_blocks(self) -> None:
        for block in self._blocks:
            block.drop()
        self._originals.clear()
        self._blocks.clear()
