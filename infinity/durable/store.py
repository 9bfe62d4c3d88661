"""A store whose states outlive the process: which versions of its blocks commits speak of.

`Store` moves bytes. The versions say which of them stay where they are, until a later commit or the
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
    """What was committed last: its record, and what `state_blocks` had then."""

    key: RecordKey
    versions: Sequence[Version]


class DurableStore(Store):
    """The store of an engine with durability. `find` and `agree` come before `open`.

    Commits speak of `state_blocks`. One thread commits; any thread may ask.
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
        """What the directories hold beyond the life of the store."""
        self._committed: LastCommit | None = None
        self._last_record = threading.Lock()  # the record of `_committed` is not given up
        self.has_spares = config.steps_per_commit > 1

    def steps_left(self, number: int) -> int:
        """How many steps lie between step `number` and the one that is committed next: 0 for that
        one itself."""
        return -number % self._config.steps_per_commit

    # Opening

    def find(self) -> LeftStates:
        """Before `open`: lock the directories, and look what an earlier run left there."""
        self.nvme.find()
        return self.states.left

    def agree(self, said: Mapping[int, Sequence[Any]], life: str) -> None:
        """After `find`: go on from the last record that all ranks have, or begin anew; either
        begins `life`, of all ranks. `said`: of each rank, as JSON has made them, what `find` gave,
        and `Ranks.member`. Raises what `common_step` raises, the same on every rank."""
        left = {rank: LeftStates.of(each) for rank, (each, *_) in said.items()}
        members = {rank: Member(*member) for rank, (_, member, *_) in said.items()}
        self.states.take(common_step(left, members), life)

    def _reserve_extents(self) -> None:
        super()._reserve_extents()
        self.states.describe([_stored(block) for block in self.state_blocks()])

    # What was taken over

    @property
    def taken_over(self) -> bytes | None:
        """The record of the earlier run whose states were taken over; None where the states
        are new. Raises `CheckpointError` where it cannot be read."""
        content = self.states.content
        try:
            return None if content is None else unpack_sums(content)[1]
        except ValueError as error:
            raise self.states.unreadable(error) from error

    def check_versions(self, versions: Sequence[Version]) -> None:
        """Raise `CheckpointError` where the states that were taken over cannot be at these
        versions, of `state_blocks`, or lack a checksum."""
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
        """The states that were taken over are at these versions, of `state_blocks`. All of them
        are read and checked. Raises `CorruptStateError`."""
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
        """Compare what the extents have with their checksums, `sums` of the blocks that were ever
        written, and bring what is cached. Returns how many bytes that were."""
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
        """Write what `state_blocks` lack on the drives for a commit to speak of them: what is
        cached, and what lies in a spare extent.

        For the thread that runs the model, when no update is under way, and all that was sealed is
        committed. After an error the engine cannot go on.
        """
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
        """`record` will be told of these versions of `state_blocks`: they are not overwritten."""
        with self._changed:
            for block, version in zip(self.state_blocks(), versions, strict=True):
                home_of(block).seal(version.extent)

    def record(self, key: RecordKey, versions: Sequence[Version], content: bytes) -> None:
        """Make `content` the last record, `key`: of what `state_blocks` have at these versions,
        all of which is written. Returns when it would survive a power cut; the one before stays
        until `commit`. For one thread."""
        self._keep(versions, *([] if self._committed is None else [self._committed.versions]))
        self.nvme.flush()
        if self.states.found is None:
            extents = self.nvme.extents
            self.states.begin(STRIPE_BYTES, extents.shares, extents.rooms)
        self.states.record(key, self._with_sums(versions, content))

    def commit(self, key: RecordKey, versions: Sequence[Version]) -> None:
        """All ranks have the last record, which was told this: what those before spoke of may be
        overwritten. For the thread of `record`."""
        with self._last_record:
            self.states.settle()
            with self._changed:
                for block, version in zip(self.state_blocks(), versions, strict=True):
                    home_of(block).commit(version.extent)
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
        self.nvme.extents.keep(
            extent
            for versions in commits
            for block, version in zip(self.state_blocks(), versions, strict=True)
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
        """`blocks` are written next outside of steps, in place where no commit speaks of them.
        Returns when that overwrites nothing that is pinned. Raises `EngineClosedError`."""
        homes = list(map(home_of, blocks))
        with self._changed:
            while any(home.is_rewrite_pinned for home in homes):
                self.latch.check()
                self._changed.wait()
            for home in homes:
                home.begin_rewrite()

    def _with_sums(self, versions: Sequence[Version], content: bytes) -> bytes:
        """`content`, behind the checksums of what blocks have at these versions."""
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
