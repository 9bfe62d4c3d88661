"""A store whose states outlive the process. It knows the versions of blocks in commits.

`Store` moves bytes. Versions tell which bytes must not be overwritten until a later commit or the
end of a snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.durable.home import SPARE, DurableHome, Version, home_of
from infinity.durable.pins import PinnedStates
from infinity.durable.states import DurableStates, LeftStates, RecordKey, common_step
from infinity.observe import Recorder
from infinity.quantities import format_bytes
from infinity.tiers.block import Block
from infinity.tiers.block_io import Sums, pack_sums, unpack_sums
from infinity.tiers.extents import STRIPE_BYTES
from infinity.tiers.manifest import Member, StoredBlock
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.states_files import Extent
from infinity.tiers.store import Store

log = logging.getLogger("infinity")


class LastCommit(NamedTuple):
    """The record of the last commit, and the versions of `state_blocks` in it."""

    key: RecordKey
    versions: Sequence[Version]


class DurableStore(Store):
    """The store of an engine with durability. `find` and `agree` come before `open`.

    Commits refer to `state_blocks`. One thread commits; any thread may ask.
    """

    is_durable = True
    _home = DurableHome

    def __init__(
        self,
        config: Config,
        device: ComputeDevice,
        recorder: Recorder,
        own: str,
        states: DurableStates,
    ) -> None:
        """See `Store`."""
        super().__init__(config, device, recorder, own, states)
        self.states = states
        """The files in the directories that outlive the store."""
        self._committed: LastCommit | None = None
        self._last_record = threading.Lock()  # held: the record of `_committed` stays
        self.has_spares = config.steps_per_commit > 1

    def steps_left(self, number: int) -> int:
        """The number of steps from step `number` to the next committed step; 0 for a committed
        step."""
        return -number % self._config.steps_per_commit

    # Opening

    def find(self) -> LeftStates:
        """Before `open`: lock the directories, and find the states of an earlier run."""
        self.nvme.find()
        return self.states.left

    def agree(self, said: Mapping[int, Sequence[Any]], life: str) -> None:
        """After `find`: continue from the last record that all ranks have, or begin a run. Either
        begins `life`, of all ranks. `said` has for each rank the result of `find` and
        `Ranks.member`, from JSON. Raises the errors of `common_step`, the same on every rank."""
        left = {rank: LeftStates.of(each) for rank, (each, *_) in said.items()}
        members = {rank: Member(*member) for rank, (_, member, *_) in said.items()}
        self.states.take(common_step(left, members), life)

    def _reserve_extents(self) -> None:
        super()._reserve_extents()
        self.states.describe([_stored(block) for block in self.state_blocks()])

    # Adopted states

    @property
    def taken_over(self) -> bytes | None:
        """The record of the adopted states; None if the states are new. Raises `CheckpointError` if
        it cannot be read."""
        content = self.states.content
        try:
            return None if content is None else unpack_sums(content)[1]
        except ValueError as error:
            raise self.states.unreadable(error) from error

    def check_versions(self, versions: Sequence[Version]) -> None:
        """Raise `CheckpointError` if the adopted states cannot be at these versions, of
        `state_blocks`, or lack a checksum."""
        if self.states.content is None:
            raise RuntimeError("nothing was taken over")
        blocks = self.state_blocks()
        if len(versions) != len(blocks):
            error = ValueError(f"it has {len(versions)} blocks, and there are {len(blocks)}")
            raise self.states.unreadable(error)
        at = list(zip(blocks, versions, strict=True))
        for block, version in at:
            if version.extent >= len(block.home.extents):
                raise self.states.unreadable(
                    ValueError(f"{block.name} has no place {version.extent}")
                )
        wanted = [
            self._io.sums(block, block.home.extents[version.extent]).shape
            for block, version in at
            if version.is_written
        ]
        if [each.shape for each in unpack_sums(self.states.content)[0]] != wanted:
            raise self.states.unreadable(ValueError("its checksums are not those of its blocks"))

    def restore(self, versions: Sequence[Version]) -> None:
        """Adopt the states at these versions, of `state_blocks`. Reads and checks all of them.
        Raises `CorruptStateError`."""
        if self.states.content is None:
            raise RuntimeError("nothing was taken over")
        for block, version in zip(self.state_blocks(), versions, strict=True):
            home_of(block).resume(version)
        sums, _ = unpack_sums(self.states.content)
        self._committed = LastCommit(self.states.taken, versions)
        self._keep(versions)
        start = time.perf_counter()
        nbytes = self._check(sums)
        seconds = time.perf_counter() - start
        log.info("checked %s of committed states in %.1f s", format_bytes(nbytes), seconds)
        self.states.keep()
        self.nvme.extents.shorten()

    def _check(self, sums: Sequence[Sums]) -> int:
        """Compare extents with the checksums `sums` of the blocks that were ever written, and read
        the cached bytes into memory. Returns the number of bytes read."""
        blocks = [block for block in self.state_blocks() if block.home.written]
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

    # Commits

    def make_whole(self) -> None:
        """Write the bytes of `state_blocks` that a commit needs in a whole extent: cached bytes,
        and content in a spare extent.

        Called by the thread that runs the model, when no update is under way and all sealed steps
        are committed. After an error the engine cannot continue.
        """
        self.sleeper.end()  # an engine that sleeps is being closed
        lacking = [block for block in self.state_blocks() if not home_of(block).is_whole]
        try:
            requests = []
            for block in lacking:
                in_place = home_of(block).may_rewrite
                if not in_place and not block.home.is_free():
                    raise RuntimeError(f"a commit still needs what {block.name} has to replace")
                self.begin_rewrite([block])
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
        """`record` will be called with these versions of `state_blocks`. Do not overwrite them."""
        with self._changed:
            for block, version in zip(self.state_blocks(), versions, strict=True):
                home_of(block).seal(version.extent)

    def record(self, key: RecordKey, versions: Sequence[Version], content: bytes) -> None:
        """Make `content` the last record, with this `key`, of `state_blocks` at these versions,
        which are written. Returns when it would survive a power cut. The record before stays until
        `commit`. Called by one thread."""
        self._keep(versions, *([] if self._committed is None else [self._committed.versions]))
        self.nvme.flush()
        if self.states.found is None:
            extents = self.nvme.extents
            self.states.begin(STRIPE_BYTES, extents.shares, extents.rooms)
        self.states.record(key, self._with_sums(versions, content))

    def commit(self, key: RecordKey, versions: Sequence[Version]) -> None:
        """All ranks have the last record, which was made with these arguments. The states of
        earlier records may be overwritten. Called by the thread of `record`."""
        with self._last_record:
            self.states.settle()
            with self._changed:
                for block, version in zip(self.state_blocks(), versions, strict=True):
                    home_of(block).commit(version.extent)
                self._committed = LastCommit(key, versions)
                self._keep(versions)
                self._changed.notify_all()

    def release(self, blocks: Sequence[Block]) -> None:
        """`blocks`, which have one place, may be rewritten there, because the last record, which is
        committed, refuses to be resumed. The next record keeps them again."""
        if self._committed is not None:
            self._keep(self._committed.versions, without=blocks)

    def _keep(self, *commits: Sequence[Version], without: Collection[Block] = ()) -> None:
        """Keep writes off the states of these commits, which may be needed."""
        self.nvme.extents.keep(
            extent
            for versions in commits
            for block, version in zip(self.state_blocks(), versions, strict=True)
            if block not in without
            and isinstance(extent := block.home.extents[version.extent], Extent)
        )

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut, and that `pin` pins; None while there is
        none."""
        return None if self._committed is None else self._committed.key.step

    def pin(self) -> PinnedStates:
        """Keep the states of the last commit from change until they are released. One caller at a
        time. Raises `CheckpointError` if its record cannot be read."""
        with self._last_record:
            self.latch.check()
            if self._committed is None:
                raise RuntimeError("nothing was committed")
            key, versions = self._committed
            _, content = unpack_sums(self.states.read(key))
            pinned = dict(zip(self.state_blocks(), versions, strict=True))
            with self._changed:
                return PinnedStates(
                    key.step, content, pinned, self._originals, self._io, self._changed
                )

    def begin_rewrite(self, blocks: Sequence[Block]) -> None:
        """`blocks` are written next outside of steps, in place if no commit refers to them. Returns
        when that overwrites no pinned bytes. Raises `EngineClosedError`."""
        homes = list(map(home_of, blocks))
        with self._changed:
            while any(home.is_rewrite_pinned for home in homes):
                self.latch.check()
                self._changed.wait()
            for home in homes:
                home.begin_rewrite()

    def _with_sums(self, versions: Sequence[Version], content: bytes) -> bytes:
        """`content` after the checksums of the blocks at these versions."""
        blocks = zip(self.state_blocks(), versions, strict=True)
        sums = [
            self._io.sums(block, block.home.extents[version.extent])
            for block, version in blocks
            if version.is_written
        ]
        return pack_sums(sums) + content


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
