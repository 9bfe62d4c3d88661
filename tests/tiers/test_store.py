"""The store: the right bytes at every moment, within the budgets, for every reader and every mix of
tiers."""

from __future__ import annotations

import math
import queue
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity import native
from infinity.device import ComputeDevice
from infinity.errors import BudgetError, EngineClosedError, NvmeError
from infinity.observe import Recorder
from infinity.placement.budget import CHUNK_ELEMENTS, STAGED_SETS, WIDEST_ELEMENT
from infinity.placement.spec import BlockSpec, Format, Kind
from infinity.tier import CPU, GPU, TIERS, TierName
from infinity.tiers.block import Block, CopyState
from infinity.tiers.drives import ALIGNMENT
from infinity.tiers.resident import CopyListeners
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.states_files import ExtentTransfer
from infinity.tiers.store import Store
from support.configs import config_of

AVAILABLE, REASON = native.aio().io_uring_available()
without_io_uring = pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")
each_engine = pytest.mark.parametrize(
    "kind", ["posix", pytest.param("io_uring", marks=without_io_uring)]
)
CHUNK_BYTES = CHUNK_ELEMENTS * WIDEST_ELEMENT
SLOT_ELEMENTS = ALIGNMENT // 2  # of a parameter block of 2-byte elements


def make_store(directory: Path, **values: Any) -> Store:
    known = {
        "nvme": [directory],
        "gpu_memory": "64KiB",
        "cpu_memory": 5 * CHUNK_BYTES,
        "cache": 0,
        "poison": True,
        "device": "cpu",
    }
    return Store(config_of(**(known | values)), ComputeDevice("cpu"), Recorder())


class Ahead:
    """What a test says of the uses to come, and may change."""

    def __init__(self) -> None:
        self.next_use: Callable[[int], float] = lambda unit: math.inf

    def listeners(self) -> CopyListeners:
        return CopyListeners(next_use=lambda unit: self.next_use(unit))


@pytest.fixture
def ahead() -> Ahead:
    return Ahead()


@contextmanager
def opened(
    store: Store, concurrent: int = 0, reserve: int = 0, ahead: Ahead | None = None
) -> Iterator[Store]:
    store.open(store.placement.layout(concurrent, reserve), (ahead or Ahead()).listeners())
    try:
        yield store
    finally:
        store.close()


def chunks(store: Store, block: Block) -> Sequence[int]:
    return store.staging.chunks(block)


def put(store: Store, block: Block, data: torch.Tensor) -> None:
    """Replace the whole content, as an update would."""
    if block.kind is Kind.PARAM:
        store.resident.begin_update(block)
    write_chunks(store, block, data)
    store.resident.end_update([block])


def write_chunks(store: Store, block: Block, data: torch.Tensor) -> None:
    for begin in chunks(store, block):
        (chunk,) = store.staging.check_out(ChunkRequest([block], begin))
        try:
            at = block.format.bytes_of(begin)
            chunk.tensor.copy_(data[at : at + chunk.tensor.numel()])
            chunk.commit()
        finally:
            chunk.release()


def get(store: Store, block: Block, updates: bool = False) -> torch.Tensor:
    """The whole content, as a checkpoint would read it, or an update."""
    parts = []
    for begin in chunks(store, block):
        request = ChunkRequest([block], begin, [block], updates=updates)
        (chunk,) = store.staging.check_out(request)
        try:
            chunk.wait()
            parts.append((chunk.tensor if chunk.source is None else chunk.source).clone())
        finally:
            chunk.release()
    return torch.cat(parts)


def fetched(store: Store, block: Block) -> torch.Tensor:
    """The content by way of the compute device."""
    store.resident.start(block)
    try:
        return store.resident.wait(block)[block.spec.at : block.spec.at + block.nbytes].clone()
    finally:
        store.resident.release(block)


def content(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def filled(block: Block, value: int) -> torch.Tensor:
    return torch.full((block.nbytes,), value, dtype=torch.uint8)


def add_param(
    store: Store, unit: int, slots: int = 1, tier: TierName = "nvme", span: int = 0, at: int = 0
) -> Block:
    """A shard of `slots` times 4096 bytes that lies at `at` in a unit of `span` bytes; the whole
    unit when `span` is 0."""
    elements = slots * SLOT_ELEMENTS
    return store.add(
        BlockSpec(
            unit,
            Kind.PARAM,
            elements,
            Format("half", 1, 2),
            TIERS[tier],
            span or 2 * elements,
            at,
            f"param of u{unit}",
        )
    )


def add_state(
    store: Store, unit: int, kind: Kind, elements: int, tier: TierName = "nvme", itemsize: int = 4
) -> Block:
    form = Format("test", 1, itemsize)
    return store.add(
        BlockSpec(
            unit,
            kind,
            elements,
            form,
            TIERS[tier],
            elements * itemsize,
            0,
            f"{kind.value} of u{unit}",
        )
    )


# Any sequence of calls


class Machine(RuleBasedStateMachine):
    """Calls in any order against a plain dict of contents. Blocks of every kind and tier, whole and
    cut into shards."""

    engine = "posix"

    @initialize(
        copy_on_write=st.booleans(),
        cache=st.sampled_from(
            [0, 5 * ALIGNMENT, 4 * ALIGNMENT + 6 * CHUNK_ELEMENTS, 64 * ALIGNMENT]
        ),
        together=st.booleans(),
    )
    def set_up(self, copy_on_write: bool, cache: int, together: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        homes = 4 * ALIGNMENT + 2 * ALIGNMENT + 2 * ALIGNMENT
        self.copy_bytes = 14 * ALIGNMENT
        self.config = {
            "gpu_memory": homes + self.copy_bytes,
            "io_engine": self.engine,
            "copy_on_write": copy_on_write,
        }
        # Homes, and sets of three kinds.
        cpu_memory = (5 if cache == 0 else 1 + 3 * STAGED_SETS) * CHUNK_BYTES + cache
        self.config |= {
            "cache": cache,
            "cpu_memory": cpu_memory,
            "update": "auto" if together else "exact",
        }
        store = self.store = make_store(self.directory, **self.config)
        self.params = [
            add_param(store, 0, 4, "gpu"),  # never leaves
            add_param(store, 1, 2, "gpu", span=4 * ALIGNMENT, at=2 * ALIGNMENT),
            add_param(store, 2, 3, "cpu"),
            add_param(store, 3, 9, "nvme"),  # two chunks
            add_param(store, 4, 1, "nvme", span=3 * ALIGNMENT, at=ALIGNMENT),
            add_param(store, 5, 2, "nvme"),
        ]
        self.states = [
            add_state(store, 3, Kind.MASTER, 9 * SLOT_ELEMENTS, "nvme"),
            add_state(store, 2, Kind.EXP_AVG, 3 * SLOT_ELEMENTS, "cpu"),
            add_state(store, 1, Kind.EXP_AVG_SQ, SLOT_ELEMENTS, "gpu"),
            add_state(store, 5, Kind.GRAD, 2 * SLOT_ELEMENTS, "nvme", 2),
        ]
        self.uses: dict[int, float] = {}
        future = CopyListeners(next_use=lambda unit: self.uses.get(unit, math.inf))
        store.open(store.placement.layout(9 * ALIGNMENT), future)
        kept, on_nvme = store.cached()
        assert kept == on_nvme if cache > on_nvme else cache - 6 * CHUNK_ELEMENTS < kept <= cache
        self.contents = {block: filled(block, 0) for block in self.params + self.states}
        self.pins = dict.fromkeys(self.params, 0)
        # What `wait` gave for blocks that are still pinned.
        self.seen: dict[Block, torch.Tensor] = {}
        # While a block is updated `contents` has what is new, and `before` what home still has.
        self.before: dict[Block, torch.Tensor] = {}
        self.seed = 0
        for block in self.params:
            self.write(block)
        self.coming = {block: self.another(block) for block in self.params}

    def another(self, block: Block) -> torch.Tensor:
        self.seed += 1
        return content(block.nbytes, self.seed)

    def write(self, block: Block) -> None:
        self.contents[block] = self.another(block)
        put(self.store, block, self.contents[block])

    @rule(uses=st.lists(st.integers(0, 8), min_size=6, max_size=6))
    def expect(self, uses: list[int]) -> None:
        self.uses = dict(enumerate(map(float, uses)))

    @rule(which=st.integers(0, 5), beyond=st.integers(-1, 9))
    def prefetch(self, which: int, beyond: int) -> None:
        block = self.params[which]
        came = self.store.resident.prefetch(block, beyond)
        assert came == self.store.resident.has_copy(block)

    @rule(which=st.integers(0, 5))
    def start(self, which: int) -> None:
        self.pins[self.params[which]] += 1
        self.store.resident.start(self.params[which])

    def fits(self, block: Block) -> bool:
        """Whether a window for `block` is free of what may not move, from the definition."""
        if block.copy.lease is not None:
            return True
        arena = self.store._arenas.gpu
        fixed = [
            run
            for owner, run in arena._slots.runs.items()
            if not (isinstance(owner, Block) and not self.pins[owner])
        ]
        taken = {slot for run in fixed for slot in range(run.start, run.end)}
        length = block.spec.span // ALIGNMENT
        return any(
            taken.isdisjoint(range(s, s + length)) for s in range(arena._slots.count - length + 1)
        )

    def pinned(self) -> list[Block]:
        """The pinned blocks that no update still has to bring."""
        return [block for block, pins in self.pins.items() if pins and self.is_at_hand(block)]

    def is_at_hand(self, block: Block) -> bool:
        """Whether no update has to end before it can be used: its place has all that is new."""
        renewed = block.copy.renewed >= set(chunks(self.store, block))
        return block not in self.before or (renewed and not block.permanent)

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pinned()))
        if not self.fits(block):
            with pytest.raises(BudgetError, match=f"param of u{block.unit} does not fit"):
                self.store.resident.wait(block)
            return
        span = self.store.resident.wait(block)
        updating = block in self.before
        assert block.copy.state is (CopyState.UPDATING if updating else CopyState.READY)
        assert span.numel() == block.spec.span
        assert self.store.addresses.block_at(span.data_ptr() + block.spec.span - 1) == (
            block,
            block.spec.span - 1,
        )
        assert self.seen.setdefault(block, span).data_ptr() == span.data_ptr()

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block, pins in self.pins.items() if pins]))
        self.store.resident.release(block)
        self.pins[block] -= 1
        if not self.pins[block]:
            self.seen.pop(block, None)

    @rule(which=st.integers(0, 5), writes=st.booleans())
    def use(self, which: int, writes: bool) -> None:
        """From start to end; nothing is left of what somebody `writes` to a copy."""
        block = self.params[which]
        if self.pins[block] or not self.is_at_hand(block) or not self.fits(block):
            return
        self.store.resident.start(block)
        span = self.store.resident.wait(block)
        assert torch.equal(span[block.spec.at :][: block.nbytes], self.contents[block])
        if writes and not block.permanent:
            span.fill_(7)
            self.store.resident.discard(block)
        self.store.resident.release(block)

    @rule(which=st.integers(0, 5), keep=st.booleans())
    def begin_update(self, which: int, keep: bool) -> None:
        block = self.params[which]
        if self.pins[block]:
            with pytest.raises(RuntimeError, match="is in use and cannot be updated"):
                self.store.resident.begin_update(block, keep)
        elif block not in self.before:
            self.store.resident.begin_update(block, keep)
            self.before[block] = self.contents[block]
            self.contents[block] = self.coming[block]

    @rule(which=st.integers(0, 5), first=st.integers(0, 1))
    def renew(self, which: int, first: int) -> None:
        """During an update, or as a guess before it, which leaves what is in use as it is."""
        block = self.params[which]
        for begin in chunks(self.store, block)[first:]:
            renewed = renew_chunk(self.store, block, begin, self.coming[block])
            assert not renewed or block in self.before or not self.pins[block]

    @precondition(lambda self: self.before)
    @rule(data=st.data())
    def end_update(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.before, key=lambda b: b.unit)))
        write_chunks(self.store, block, self.contents[block])
        self.store.resident.end_update([block])
        del self.before[block]
        self.coming[block] = self.another(block)

    @rule(which=st.integers(0, 5))
    def read_for_an_update(self, which: int) -> None:
        """What may be read of the copy on the compute device is what home has."""
        block = self.params[which]
        old = get(self.store, block, updates=True)
        assert torch.equal(old, self.before.get(block, self.contents[block]))

    @rule(which=st.integers(0, 3))
    def update_state(self, which: int) -> None:
        self.write(self.states[which])

    @rule(which=st.integers(0, 3))
    def forget(self, which: int) -> None:
        self.store.forget(self.states[which])
        self.contents[self.states[which]] = filled(self.states[which], 0)

    @rule(which=st.integers(0, 9))
    def read(self, which: int) -> None:
        block = (self.params + self.states)[which]
        expected = self.before.get(block, self.contents[block])
        assert torch.equal(get(self.store, block), expected)

    @invariant()
    def what_is_pinned_stays_and_is_right(self) -> None:
        for block, span in self.seen.items():
            lease = block.copy.lease
            assert lease is not None and lease.tensor.data_ptr() == span.data_ptr()
            assert torch.equal(
                span[block.spec.at : block.spec.at + block.nbytes], self.contents[block]
            )

    @invariant()
    def within_the_budgets(self) -> None:
        for tier, peak in self.store.peaks().items():
            assert self.store.used()[tier] <= peak
            assert tier == "nvme" or peak <= getattr(self.store._config, f"{tier}_memory")
        assert self.store._arenas.staging.used == 0, (
            "every check-out has been given back (invariant I3)"
        )

    def teardown(self) -> None:
        try:
            for block in self.params:
                if block not in self.before and not any(self.pins.values()):
                    assert torch.equal(fetched(self.store, block), self.contents[block])
        finally:
            self.store.close()
            left = list(self.directory.iterdir())
            shutil.rmtree(self.directory)
        assert left == []


class MachineUring(Machine):
    engine = "io_uring"


TestPosix = Machine.TestCase
TestUring = without_io_uring(MachineUring.TestCase)
TestPosix.settings = TestUring.settings = settings(
    max_examples=15, stateful_step_count=50, deadline=None
)


# Room


@pytest.fixture
def slow(tmp_path: Path, ahead: Ahead) -> Iterator[tuple[Store, list[Block]]]:
    """A compute arena of 4 slots, and 6 blocks of one slot on a slow drive; block i holds the bytes
    i + 1."""
    store = make_store(tmp_path, gpu_memory=4 * ALIGNMENT, io_engine="posix")
    blocks = [add_param(store, unit) for unit in range(6)]
    with opened(store, concurrent=ALIGNMENT, ahead=ahead):
        for block in blocks:
            put(store, block, filled(block, block.unit + 1))
        store.nvme.engines[0].set_faults(bytes_per_second=float(64 * ALIGNMENT))
        yield store, blocks


def test_a_demand_is_met_while_prefetches_fill_the_arena(slow, ahead):
    store, blocks = slow
    ahead.next_use = lambda unit: 0
    assert [store.resident.prefetch(block, 0) for block in blocks] == [True] * 4 + [False] * 2
    assert any(block.copy.state is CopyState.LOADING for block in blocks)
    assert torch.equal(fetched(store, blocks[5]), filled(blocks[5], 6))
    for block in blocks:
        assert torch.equal(fetched(store, block), filled(block, block.unit + 1))


def test_a_demand_is_met_while_places_are_kept_for_blocks_that_are_updated(slow):
    store, blocks = slow
    for block in blocks[:4]:
        store.resident.begin_update(block)
        assert store.resident.prefetch(block, 0)
    assert torch.equal(fetched(store, blocks[4]), filled(blocks[4], 5))
    for block in blocks[:4]:
        write_chunks(store, block, filled(block, 50 + block.unit))
    store.resident.end_update(blocks[:4])
    for block in blocks[:4]:
        assert torch.equal(fetched(store, block), filled(block, 50 + block.unit))


def test_a_place_kept_for_a_block_that_is_updated_is_filled_when_the_update_ends(slow):
    store, blocks = slow
    store.resident.begin_update(blocks[0])
    assert store.resident.prefetch(blocks[0], 0) and blocks[0].copy.state is CopyState.UPDATING
    write_chunks(store, blocks[0], filled(blocks[0], 77))
    store.resident.end_update([blocks[0]])
    assert blocks[0].copy.state in (CopyState.LOADING, CopyState.READY)
    assert torch.equal(fetched(store, blocks[0]), filled(blocks[0], 77))


def test_a_prefetch_evicts_only_what_is_needed_later(slow, ahead):
    store, blocks = slow
    for block in blocks[:4]:
        fetched(store, block)
    ahead.next_use = {0: 3.0, 1: 9.0, 2: 9.0, 3: 5.0, 4: 5.0, 5: 0.0}.__getitem__
    store.resident.start(blocks[1])
    assert store.resident.prefetch(blocks[4], 5.0), "what is needed at 9 and is not in use"
    assert [store.resident.has_copy(block) for block in blocks] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert not store.resident.prefetch(blocks[2], 9.0)
    store.resident.release(blocks[1])
    assert store.resident.prefetch(blocks[5], 5.0)
    assert [store.resident.has_copy(block) for block in blocks] == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]


def placements(
    seconds_per_block: float, directory: Path, accesses: Sequence[tuple[str, int, float]]
) -> list[dict[int, int]]:
    """Where each unit's copy lies after every access, on a drive of the given speed."""
    directory.mkdir()
    store = make_store(directory, gpu_memory=6 * ALIGNMENT, io_engine="posix")
    blocks = [add_param(store, unit, 1 + unit % 3) for unit in range(6)]
    found = []
    ahead = Ahead()
    with opened(store, concurrent=3 * ALIGNMENT, ahead=ahead):
        for block in blocks:
            put(store, block, filled(block, block.unit))
        if seconds_per_block:
            store.nvme.engines[0].set_faults(bytes_per_second=ALIGNMENT / seconds_per_block)
        for what, unit, number in accesses:
            block = blocks[unit]
            ahead.next_use = lambda other, number=number: (other * 7 + number * 5) % 11
            if what == "fetch":
                assert torch.equal(fetched(store, block), filled(block, unit))
            else:
                store.resident.prefetch(block, number % 4)
            found.append({b.unit: b.copy.lease.offset for b in blocks if b.copy.lease is not None})
    return found


def test_where_copies_lie_does_not_depend_on_how_fast_the_drive_is(tmp_path):
    # Ranks gather a unit when they fetch it: if the speed of a rank's drive decided what it evicts,
    # they would disagree.
    chance = random.Random(0)
    accesses = [
        (
            chance.choice(["fetch", "prefetch", "prefetch"]),
            chance.randrange(6),
            chance.randrange(11),
        )
        for _ in range(120)
    ]
    assert placements(0.002, tmp_path / "slow", accesses) == placements(
        0, tmp_path / "fast", accesses
    )


def test_a_block_that_cannot_fit_beside_what_is_in_use_is_refused_with_a_budget_that_works(
    tmp_path,
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def use_three(directory: Path, gpu_memory: int) -> None:
        store = make_store(directory, gpu_memory=gpu_memory)
        blocks = [add_param(store, unit, 2) for unit in range(3)]
        with opened(store, concurrent=2 * ALIGNMENT):
            for block in blocks:
                store.resident.start(block)
                store.resident.wait(block)

    with pytest.raises(
        BudgetError, match=r"param of u2 does not fit .*\(param of u0, param of u1\)"
    ) as caught:
        use_three(tmp_path / "a", 5 * ALIGNMENT)
    enough = int(str(caught.value).split("gpu_memory=")[-1].split()[0])
    use_three(tmp_path / "b", enough)


# Staging


def staged(directory: Path, sets: int, count: int = 3) -> tuple[Store, list[Block]]:
    """`count` blocks of two chunks each, of different kinds, and staging for `sets` chunks of all
    of them."""
    kinds = [Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ][:count]
    store = make_store(directory, cpu_memory=sets * count * CHUNK_BYTES)
    return store, [add_state(store, 0, kind, CHUNK_ELEMENTS + SLOT_ELEMENTS) for kind in kinds]


def test_check_outs_are_all_or_nothing(tmp_path):
    store, blocks = staged(tmp_path, 2)
    with opened(store):
        two = ChunkRequest(blocks[:2], 0, blocks[:2])
        first = store.staging.try_check_out(ChunkRequest(blocks, 0, blocks))
        second = store.staging.try_check_out(two)
        assert first is not None and second is not None
        arena = store._arenas.staging
        assert arena.free_slots == 1
        assert store.staging.try_check_out(two) is None
        assert arena.free_slots == 1, "a check-out that fails holds nothing"
        last = store.staging.try_check_out(ChunkRequest(blocks[:1], 0, blocks[:1]))
        assert (
            last is not None
            and store.staging.try_check_out(ChunkRequest(blocks[:1], 0, blocks[:1])) is None
        )
        for chunk in (*first, *second, *last):
            chunk.release()
            chunk.release()
        assert arena.used == 0 and arena.peak == 6 * CHUNK_BYTES


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    """Run all at once; the first failure is raised here, and so is a thread that does not end."""
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.put(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not failures.empty():
        raise failures.get()


@each_engine
def test_everybody_ends_when_many_want_the_only_slots(tmp_path, kind):
    store, blocks = staged(tmp_path, 1)
    rounds = 10
    with opened(store):
        turn = threading.Lock()

        def whole_chunk() -> None:
            for _ in range(rounds):
                with turn:  # two updates of one block at a time are not allowed
                    for begin in (0, CHUNK_ELEMENTS):
                        outs = store.staging.check_out(ChunkRequest(blocks, begin, blocks))
                        for out in outs:
                            out.wait()
                            out.tensor.add_(1)
                            out.commit()
                        for out in outs:
                            out.release()
                    store.resident.end_update(blocks)

        def single() -> None:
            for _ in range(rounds):
                store.staging.check_out(ChunkRequest([blocks[0]], 0))[0].release()

        in_threads([whole_chunk, whole_chunk, single, single])
        for block in blocks:
            assert torch.equal(get(store, block), filled(block, 2 * rounds))


# Versions


@each_engine
@pytest.mark.parametrize("copy_on_write", [True, False])
def test_a_reader_sees_whole_versions_while_another_thread_updates(
    tmp_path, ahead, kind, copy_on_write
):
    store = make_store(
        tmp_path, gpu_memory=24 * ALIGNMENT, io_engine=kind, copy_on_write=copy_on_write
    )
    blocks = [add_param(store, unit, slots) for unit, slots in enumerate([9, 3, 9, 1])] + [
        add_param(store, 4, 10, "cpu")
    ]
    jobs: queue.SimpleQueue[tuple[Block, int] | None] = queue.SimpleQueue()
    chance = random.Random(1)

    def update() -> None:
        try:
            while (job := jobs.get()) is not None:
                block, version = job
                for begin in reversed(chunks(store, block)):
                    (chunk,) = store.staging.check_out(ChunkRequest([block], begin, [block]))
                    try:
                        chunk.wait()
                        assert (chunk.tensor == version - 1).all(), (
                            "an update starts from the version before"
                        )
                        chunk.tensor.fill_(version)
                        chunk.commit()
                    finally:
                        chunk.release()
                store.resident.end_update([block])
        except BaseException as error:
            store.latch.fail(error)
            raise

    def fetch() -> None:
        try:
            versions = dict.fromkeys(blocks, 0)
            for _ in range(400):
                block = chance.choice(blocks)
                now = chance.randrange(7)
                ahead.next_use = lambda unit, now=now: (unit * 3 + now) % 7
                if chance.random() < 0.5 and block.copy.state is not CopyState.UPDATING:
                    store.resident.begin_update(block)
                    versions[block] += 1
                    jobs.put((block, versions[block]))
                elif chance.random() < 0.5:
                    store.resident.prefetch(block, now)
                else:
                    assert torch.equal(fetched(store, block), filled(block, versions[block]))
        finally:
            jobs.put(None)

    with opened(store, concurrent=10 * ALIGNMENT, ahead=ahead):
        for block in blocks:
            put(store, block, filled(block, 0))
        in_threads([update, fetch])


def test_during_an_update_the_old_version_stays_on_the_drive(tmp_path):
    store = make_store(tmp_path)
    block = add_state(store, 0, Kind.MASTER, CHUNK_ELEMENTS + SLOT_ELEMENTS)
    param = add_param(store, 0, 9)

    def on_drive(which: Block, version: int) -> torch.Tensor:
        target = torch.empty(which.nbytes, dtype=torch.uint8)
        store.nvme.read(
            ExtentTransfer(which.home.extents[version], 0, which.nbytes, target.data_ptr(), "check")
        ).wait()
        return target

    with opened(store, concurrent=param.spec.span):
        for which in (block, param):
            put(store, which, filled(which, 1))
            put(store, which, filled(which, 2))
            old, new = which.home.version, which.home.target()
            assert old != new
            if which is param:
                store.resident.begin_update(param)
            for begin in chunks(store, which):
                (chunk,) = store.staging.check_out(ChunkRequest([which], begin, [which]))
                chunk.wait()
                assert (chunk.tensor == 2).all()
                chunk.tensor.fill_(3)
                chunk.commit()
                chunk.release()
                assert torch.equal(on_drive(which, old), filled(which, 2)), (
                    "a kill now loses nothing (invariant I9)"
                )
            assert (which.home.version, which.home.target()) == (old, new)
            store.resident.end_update([which])
            assert which.home.version == new
            assert torch.equal(on_drive(which, new), filled(which, 3))
            assert torch.equal(get(store, which), filled(which, 3))


def param_of_two_chunks(store: Store) -> Block:
    elements = 2 * CHUNK_ELEMENTS
    return store.add(
        BlockSpec(
            0,
            Kind.PARAM,
            elements,
            Format("byte", 1, 1),
            TIERS["nvme"],
            span=elements,
            at=0,
            name="weight",
        )
    )


def renew(store: Store, block: Block, data: torch.Tensor) -> list[bool]:
    starts = chunks(store, block)
    return [renew_chunk(store, block, begin, data) for begin in starts]


def renew_chunk(store: Store, block: Block, begin: int, data: torch.Tensor) -> bool:
    end = next((start for start in chunks(store, block) if start > begin), block.elements)
    part = data[block.format.bytes_of(begin) : block.format.bytes_of(end)]
    placing = store.resident.renew(block, begin, part)
    if placing is not None:
        placing.wait()
    return placing is not None


def test_what_an_update_made_is_used_before_it_is_written(tmp_path):
    store = make_store(tmp_path)
    block = param_of_two_chunks(store)
    with opened(store, concurrent=block.spec.span):
        old, new = content(block.nbytes, 1), content(block.nbytes, 2)
        put(store, block, old)
        assert torch.equal(fetched(store, block), old)
        store.resident.begin_update(block, keep=True)
        assert renew_chunk(store, block, 0, new)
        store.resident.start(block)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.resident.wait, block)
            assert renew_chunk(store, block, CHUNK_ELEMENTS, new)
            assert torch.equal(waiting.result(), new)
        assert block.copy.state is CopyState.UPDATING
        store.resident.release(block)
        write_chunks(store, block, new)
        read = store.meter.read
        store.resident.end_update([block])
        assert torch.equal(fetched(store, block), new)
        assert store.meter.read == read


def test_a_write_to_what_an_update_made_does_not_outlive_the_update(tmp_path):
    store = make_store(tmp_path)
    block = param_of_two_chunks(store)
    with opened(store, concurrent=block.spec.span):
        old, new = content(block.nbytes, 1), content(block.nbytes, 2)
        put(store, block, old)
        assert torch.equal(fetched(store, block), old)
        store.resident.begin_update(block, keep=True)
        assert renew(store, block, new) == [True, True]
        store.resident.start(block)
        store.resident.wait(block).fill_(7)
        store.resident.discard(block)
        store.resident.release(block)
        write_chunks(store, block, new)
        store.resident.end_update([block])
        assert torch.equal(fetched(store, block), new)


def test_a_guess_lies_in_the_place_of_the_copy_until_somebody_uses_it(tmp_path):
    store = make_store(tmp_path)
    block = param_of_two_chunks(store)
    with opened(store, concurrent=block.spec.span):
        old, new = content(block.nbytes, 1), content(block.nbytes, 2)
        put(store, block, old)
        store.resident.start(block)
        store.resident.wait(block)
        assert renew(store, block, new) == [False, False]  # somebody reads it
        store.resident.release(block)

        assert renew(store, block, new) == [True, True]
        assert torch.equal(get(store, block), old)
        # Which may be a copy of what lies on the compute device.
        (chunk,) = store.staging.check_out(ChunkRequest([block], 0, [block], updates=True))
        chunk.wait()
        assert torch.equal(chunk.tensor, old[:CHUNK_ELEMENTS])
        chunk.release()
        assert torch.equal(fetched(store, block), old)

        assert renew(store, block, new) == [True, True]
        store.resident.rollback(block)
        assert store.resident.has_copy(block) and not store.resident.is_ready(block)
        assert torch.equal(fetched(store, block), old)

        assert renew_chunk(store, block, 0, new)
        store.resident.begin_update(block, keep=True)
        assert renew_chunk(store, block, CHUNK_ELEMENTS, new)
        write_chunks(store, block, new)
        read = store.meter.read
        store.resident.end_update([block])
        assert torch.equal(fetched(store, block), new)
        assert store.meter.read == read


@pytest.mark.timeout(60)
def test_a_chunk_that_was_copied_from_a_place_does_not_keep_the_place(tmp_path):
    """An update may hold its chunk until the model has gone on, which may need the place."""
    store = make_store(tmp_path)
    first, second = (add_param(store, unit, slots=16) for unit in range(2))
    with opened(store, concurrent=first.spec.span):
        old, other = content(first.nbytes, 1), content(second.nbytes, 2)
        put(store, first, old)
        put(store, second, other)
        assert torch.equal(fetched(store, first), old)
        (chunk,) = store.staging.check_out(ChunkRequest([first], 0, [first], updates=True))
        assert torch.equal(fetched(store, second), other)
        assert not store.resident.has_copy(first)
        chunk.wait()
        assert torch.equal(chunk.tensor, old[: chunk.tensor.numel()])
        chunk.release()


def test_without_copy_on_write_a_block_takes_its_space_once(tmp_path):
    (tmp_path / "twice").mkdir()
    (tmp_path / "once").mkdir()
    sizes = {}
    for name, copy_on_write in (("twice", True), ("once", False)):
        store = make_store(tmp_path / name, copy_on_write=copy_on_write)
        block = add_state(store, 0, Kind.MASTER, CHUNK_ELEMENTS)
        with opened(store):
            put(store, block, filled(block, 1))
            put(store, block, filled(block, 2))
            assert torch.equal(get(store, block), filled(block, 2))
            sizes[name] = store.used()["nvme"]
    assert sizes == {"twice": 2 * CHUNK_BYTES, "once": CHUNK_BYTES}


def test_a_block_that_was_never_written_reads_as_zeros_without_io(tmp_path):
    store = make_store(tmp_path)
    block = add_state(store, 0, Kind.EXP_AVG, CHUNK_ELEMENTS)
    param = add_param(store, 0)
    with opened(store, concurrent=param.spec.span):
        store._arenas.staging.memory.fill_(9)
        assert torch.equal(get(store, block), filled(block, 0))
        assert torch.equal(get(store, param), filled(param, 0))
        assert store.nvme.engines[0].counters()["bytes_read"] == 0
        put(store, block, filled(block, 5))
        assert torch.equal(get(store, block), filled(block, 5))
        before = store.nvme.engines[0].counters()["bytes_read"]
        assert before == block.nbytes
        store.forget(block)
        assert torch.equal(get(store, block), filled(block, 0))
        assert store.nvme.engines[0].counters()["bytes_read"] == before


# Failures


@each_engine
def test_a_failed_fetch_meets_whoever_needs_it_and_the_next_one_works(tmp_path, kind):
    store = make_store(tmp_path, io_engine=kind)
    block = add_param(store, 0)
    with opened(store, concurrent=block.spec.span):
        put(store, block, filled(block, 1))
        for _ in range(5):
            store.nvme.engines[0].set_faults(fail_read_at=0, fail_errno=5)
            store.resident.prefetch(block, 0)
            store.resident.start(block)
            try:
                store.resident.wait(block)
            except NvmeError as error:
                assert error.errno == 5 and error.path == str(tmp_path / "infinity-states.bin")
            store.resident.release(block)
            assert torch.equal(fetched(store, block), filled(block, 1))
            store.resident.begin_update(block)
            write_chunks(store, block, filled(block, 1))
            store.resident.end_update([block])


def test_a_fetch_that_keeps_failing_is_an_error_and_pins_nothing(tmp_path):
    store = make_store(tmp_path, io_engine="posix")
    block = add_param(store, 0)
    with opened(store, concurrent=block.spec.span):
        put(store, block, filled(block, 1))
        tail = Path(tmp_path / "infinity-states.bin")
        with tail.open("r+b") as file:
            file.truncate(0)
        with pytest.raises(NvmeError, match="the file ends before the asked bytes") as caught:
            fetched(store, block)
        assert (caught.value.errno, caught.value.asked) == (0, block.nbytes)
        assert block.copy.pins == 0 and block.copy.lease is None and store.used()["gpu"] == 0


def test_a_failed_write_is_an_error_and_the_slot_goes_back(tmp_path):
    store, (block,) = staged(tmp_path, 1, count=1)
    with opened(store):
        put(store, block, filled(block, 1))
        store.nvme.engines[0].set_faults(fail_write_at=0, fail_errno=28)
        with pytest.raises(NvmeError, match="No space left"):
            put(store, block, filled(block, 2))
        assert store._arenas.staging.used == 0
        assert torch.equal(get(store, block), filled(block, 1)), (
            "and the version before is what it was"
        )


def test_after_a_failed_update_nobody_waits_for_ever(tmp_path):
    store = make_store(tmp_path)
    block = add_param(store, 0)
    with opened(store, concurrent=block.spec.span):
        store.resident.begin_update(block)
        waiting = threading.Event()

        def wait() -> None:
            store.resident.start(block)
            waiting.set()
            with pytest.raises(EngineClosedError, match="the drive is gone") as caught:
                store.resident.wait(block)
            assert isinstance(caught.value.__cause__, OSError)

        def fail() -> None:
            assert waiting.wait()
            store.latch.fail(OSError("the drive is gone"))
            store.latch.fail(OSError("a later one"))

        in_threads([wait, fail])
        with pytest.raises(EngineClosedError, match="the drive is gone"):
            store.latch.check()
        with pytest.raises(EngineClosedError):
            fetched(store, block)


# Budgets


@pytest.mark.parametrize("memory", ["gpu_memory", "cpu_memory"])
def test_a_budget_that_cannot_work_is_refused_with_the_smallest_that_does(tmp_path, memory):
    def attempt(budget: int) -> None:
        store = make_store(tmp_path, **({"gpu_memory": "1MiB"} | {memory: budget}))
        blocks = [
            add_param(store, 0, 3, "gpu"),
            add_param(store, 1, 9),
            add_param(store, 2, 5, "cpu"),
        ]
        blocks += [
            add_state(store, 1, kind, 9 * SLOT_ELEMENTS) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        ]
        with opened(store, concurrent=14 * ALIGNMENT, reserve=9 * ALIGNMENT):
            store.reserve(GPU, 9 * ALIGNMENT)
            for block in blocks:
                put(store, block, content(block.nbytes, block.unit))
            for block in blocks:
                assert torch.equal(get(store, block), content(block.nbytes, block.unit))
            for block in blocks[1:3]:
                store.resident.start(block)
                store.resident.wait(block)
            assert store.peaks()[memory[:3]] <= budget

    with pytest.raises(BudgetError, match=f"{memory}=.* is too small.*the smallest") as caught:
        attempt(ALIGNMENT)
    least = int(str(caught.value).split("that works is ")[1].split()[0])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BudgetError, match=f"that works is {least} "):
        attempt(least - 1)
    attempt(least)


def test_more_than_was_set_aside_cannot_be_reserved(tmp_path):
    store = make_store(tmp_path)
    add_param(store, 0)
    with opened(store, concurrent=ALIGNMENT, reserve=ALIGNMENT):
        store.reserve(GPU, ALIGNMENT)
        with pytest.raises(RuntimeError, match="were not set aside on"):
            store.reserve(CPU, 1)


def test_close_may_be_called_twice_and_while_fetches_are_under_way(slow, tmp_path):
    store, blocks = slow
    for block in blocks:
        store.resident.prefetch(block, 0)
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert not any(
        thread.name == "infinity-mover" and thread.is_alive() for thread in threading.enumerate()
    )
