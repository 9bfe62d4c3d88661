"""Activations off the compute device: the same numbers, memory that is free meanwhile, and nothing
left behind on any path."""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.activations import saved_tensors
from infinity.device import ComputeDevice, Copy, Mark, copy_alone
from infinity.errors import BudgetError, EngineClosedError, NvmeError
from infinity.observe import Recorder
from infinity.placement.budget import WIDEST_ELEMENT, Staged, divide_with_activations
from infinity.tiers import extents as nvme_extents
from infinity.tiers import saved_drive
from infinity.tiers.activations import Activations
from infinity.tiers.drives import NvmeTier
from infinity.tiers.gaps import Gaps
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import Places
from infinity.tiers.saved_copies import AHEAD
from infinity.tiers.saved_storage import SavedStorage, StorageState
from infinity.tiers.states_files import ExtentTransfer, StatesFiles
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.machine import PAGE
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]


# Free ranges


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_gaps_give_each_byte_to_one_at_a_time(steps: list[tuple[bool, int]]) -> None:
    gaps, taken = Gaps(32), dict[int, int]()
    for takes, number in steps:
        used = {byte for start, nbytes in taken.items() for byte in range(start, start + nbytes)}
        if takes:
            fits = [
                start
                for start in range(33 - number)
                if used.isdisjoint(range(start, start + number))
            ]
            start = gaps.take(number)
            assert start == (fits[0] if fits else None), "the first range that is long enough"
            if start is not None:
                taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            gaps.give(start, taken.pop(start))
        assert gaps.free == 32 - sum(taken.values())
    if taken:
        start, nbytes = taken.popitem()
        gaps.give(start, nbytes)
        with pytest.raises(ValueError, match="free already"):
            gaps.give(start + nbytes - 1, 1)


# The tier alone


class Watched(Copy):
    """Like those of `discrete`, but it does not keep its source alive, which is for whoever asked
    for it."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, lost: list[str]) -> None:
        super().__init__()
        self.target: torch.Tensor | None = target
        self.lost, self.asked = lost, 0
        self.source, self.nbytes = StorageWeakRef(source.untyped_storage()), source.numel()
        self.offset = source.storage_offset()
        target.fill_(0xFF)

    def done(self) -> bool:
        self.asked += 1
        if self.asked == 3:
            self.wait()
        return self.asked >= 3

    def wait(self) -> None:
        if self.target is None:
            return
        self.asked, target, self.target = 4, self.target, None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.source.cdata)  # type: ignore[attr-defined]
        if storage is None:
            self.lost.append("the source of a copy was freed before its end")
        else:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            copy_alone(target, whole[self.offset : self.offset + self.nbytes])


class WatchedDevice(DiscreteDevice):
    """`lost` says what went wrong; `marked` is the number of the last mark."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.queue: list[Watched] = []
        self.marked = -1

    def mark(self) -> Mark:
        mark = super().mark()
        self.marked = mark.number
        return mark

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Mark | None
    ) -> Copy:
        if after is None or after.number != self.marked:
            self.lost.append(
                "a copy that may come before the model has made its source, or left its target"
            )
        self.queue.append(Watched(target, source, self.lost))
        for copy in self.queue[: -2 * AHEAD]:  # ends whether anybody looks or not
            copy.wait()
        del self.queue[: -2 * AHEAD]
        return self.queue[-1]


class Rig:
    """A tier of `pages` pages of host memory; `drive` pages on NVMe, None for as many as it takes,
    "no" for no drive."""

    def __init__(self, discrete: bool, pages: int, drive: int | str | None = None) -> None:
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(nvme_extents, "STRIPE_BYTES", 2 * PAGE)
        patch.setattr(saved_drive, "GROWTH_BYTES", 4 * PAGE)
        self.device = WatchedDevice() if discrete else ComputeDevice("cpu")
        self.stack.callback(self.device.close)
        self.nvme: NvmeTier | None = None
        if drive != "no":
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            budget = None if drive is None else int(drive) * PAGE + 2 * PAGE
            self.nvme = NvmeTier(Places([folder]), "posix", budget, Recorder())
            self.nvme.extents.reserve(2 * PAGE)
            self.nvme.open()
            self.stack.callback(self.nvme.close)
        self.tier = Activations(
            self.device, self.device.host_memory(pages * PAGE), self.nvme, Recorder(), poison=True
        )
        self.stack.callback(self.tier.close)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        assert getattr(self.device, "lost", []) == []

    def save(self, pages: float, seed: int = 0) -> SavedStorage:
        saved = self.tier.save(content(pages, seed).untyped_storage())
        assert saved is not None
        return saved

    def fetch(self, saved: SavedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.tier.fetch(saved)).clone()

    def fail(self, fails: bool) -> None:
        """Whether I/O on the drive fails from now on."""
        assert self.nvme is not None
        self.nvme.engines[0].set_faults(error_fraction=1.0 if fails else 0.0, errnos=[errno.EIO])

    def assert_empty(self) -> None:
        settle(self.tier)
        tier = self.tier
        assert tier.memory.used == tier.memory.unwritten_bytes == tier.counts.live == 0
        copies, drive = tier._copies, tier._drive
        assert not (tier._stacks or tier.memory.held or tier.memory.unwritten or tier._dropped)
        assert not (copies.leaving or copies.ahead)
        if self.nvme is not None:
            assert drive is not None and not drive.reading
            assert drive.free == self.nvme.extents.reserved - 2 * PAGE


def content(pages: float, seed: int) -> torch.Tensor:
    return torch.randint(
        0,
        256,
        (int(pages * PAGE),),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


SIZES = st.sampled_from([0.3, 1, 1.5, 2, 3, 7])


class Machine(RuleBasedStateMachine):
    """Storages that are saved, asked for and dropped in any order, on drives that fail and that are
    full."""

    storages: Bundle[Any] = Bundle("storages")

    @initialize(
        discrete=st.booleans(),
        pages=st.integers(0, 7),
        drive=st.sampled_from([None, None, "no", 0, 5]),
    )
    def open(self, discrete: bool, pages: int, drive: int | str | None) -> None:
        self.rig, self.pages, self.failed = Rig(discrete, pages, drive), pages, False
        self.live: dict[SavedStorage, tuple[float, int]] = {}
        self.seeds = 0

    @rule(target=storages, sizes=st.lists(SIZES, min_size=1, max_size=4), keep=st.booleans())
    def save(self, sizes: list[float], keep: bool) -> Any:
        return multiple(*[self.save_one(pages, keep) for pages in sizes])

    def save_one(self, pages: float, keep: bool) -> Any:
        self.seeds += 1
        tensor = content(pages, self.seeds)
        saved = self.rig.tier.save(tensor.untyped_storage())
        if saved is None:
            assert self.rig.nvme is None or self.rig.tier._drive.is_full or pages > self.pages, (
                "only for want of room"
            )
            # In the bundle all the same: what finds room on a small drive depends on time.
            return None, tensor
        self.live[saved] = pages, self.seeds
        return saved, tensor if keep else None

    @rule(storage=storages)
    def save_again(self, storage: Any) -> None:
        if storage[0] is not None:
            self.rig.tier.save_again(storage[0])

    @rule(storage=storages)
    def fetch(self, storage: Any) -> None:
        saved, _ = storage
        if saved is None:
            return
        try:
            found = self.rig.fetch(saved)
        except NvmeError:
            assert self.failed
        else:
            assert torch.equal(found, content(*self.live[saved]))

    @rule(storage=consumes(storages))
    def drop(self, storage: Any) -> None:
        if self.live.pop(storage[0], None) is not None:
            self.rig.tier.drop(storage[0])

    @rule(fails=st.sampled_from([False, False, True]))
    def fail(self, fails: bool) -> None:
        if self.rig.nvme is not None:
            self.rig.fail(fails)
            self.failed |= fails

    @invariant()
    def no_two_share_a_place(self) -> None:
        if not hasattr(self, "rig"):
            return
        tier = self.rig.tier
        everything = [*self.live, *tier._ending]
        for ranges in (
            [
                (s.start, s.start + s.slot.numel())
                for s in everything
                if s.slot is not None and s.start is not None
            ],
            [
                (s.extent.start, s.extent.start + s.extent.nbytes)
                for s in everything
                if s.extent is not None
            ],
        ):
            ranges.sort()
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
        assert tier.memory.used == sum(
            s.slot.numel() for s in everything if s.slot is not None and s.start is not None
        )
        assert len(tier._copies.ahead) <= 2 * max(AHEAD, len(tier._stacks))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        with self.rig:
            for saved in self.live:
                self.rig.tier.drop(saved)
            self.rig.assert_empty()


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


class TestMachine(Machine.TestCase):  # type: ignore[name-defined,misc]
    pass


def test_the_end_of_a_forward_stays_in_memory_and_its_beginning_moves_once() -> None:
    """Of 32 pages 8 fit in memory: the last 8 are never read. Half of them were never written."""
    with Rig(discrete=False, pages=8) as rig:
        saved = [rig.save(1, seed) for seed in range(32)]
        assert [each.state for each in saved[:24]] == [StorageState.AWAY] * 24
        for seed in reversed(range(32)):
            assert torch.equal(rig.fetch(saved[seed]), content(1, seed))
            rig.tier.drop(saved.pop())
        rig.tier.stepped()
        assert rig.tier.counts.last_step == (32 * PAGE, 0, 28 * PAGE, 24 * PAGE)
        rig.assert_empty()


@pytest.mark.parametrize("discrete", [False, True])
def test_what_is_likely_to_be_asked_for_next_comes_ahead(discrete: bool) -> None:
    with Rig(discrete, pages=8) as rig:
        saved = [rig.save(1, seed) for seed in range(32)]
        for seed in range(31, 25, -1):
            rig.fetch(saved[seed])
            rig.tier.drop(saved.pop())
        coming = [
            each
            for each in saved
            if each.state in (StorageState.READING, StorageState.CLEAN) and each.rank < 24
        ]
        assert coming and max(each.rank for each in coming) == 23, (
            "slots that are free are read into"
        )
        copied = {each.rank for each in saved if each.memory is not None}
        assert copied - {22, 23} == ({24, 25} if discrete else set()), (
            "and what is in slots; 22 and 23 may still be being read"
        )


def test_each_thread_that_saves_has_an_order_of_its_own() -> None:
    with Rig(discrete=True, pages=16, drive="no") as rig:
        saved: list[SavedStorage] = []
        in_turns([lambda n=n: saved.append(rig.save(1, n)) for n in range(3)] * 4)
        for each in rig.tier._copies.leaving:
            each.leaving.wait()  # type: ignore[union-attr]
        rig.fetch(saved[9])
        assert [saved.index(each) for each in rig.tier._copies.ahead] == [6, 10, 11], (
            "the next of this thread, the tops of the others"
        )
        for each in saved:
            rig.tier.drop(each)


def in_turns(works: list[Callable[[], object]]) -> None:
    """Run `works` one after the other, on three threads that take turns."""
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        for number, work in enumerate(works):
            pools[number % 3].submit(work).result(60)


def test_memory_of_the_device_is_free_after_a_few_more_have_left() -> None:
    """The copies have not ended, for nobody has looked; and what is still there is not copied
    back."""
    with Rig(discrete=True, pages=32, drive="no") as rig:
        saved = [rig.save(1, seed) for seed in range(3 * AHEAD)]
        alive = [not each.origin.expired() for each in saved]
        assert not any(alive[:-AHEAD]) and alive[-1]
        uploads: list[torch.Tensor] = []
        rig.device.on_upload = lambda target, after: uploads.append(target)  # type: ignore[attr-defined]
        storage = rig.tier.fetch(saved[-1])
        assert storage.data_ptr() == saved[-1].address
        assert all(target.data_ptr() != saved[-1].address for target in uploads)
        for each in saved:
            rig.tier.drop(each)


def test_what_is_dropped_on_its_way_keeps_its_place_until_it_is_there() -> None:
    with Rig(discrete=True, pages=2, drive="no") as rig:
        rig.tier.drop(rig.save(1, 0))
        gc.collect()
        assert rig.tier.memory.used == PAGE
        assert isinstance(rig.device, WatchedDevice)
        rig.device.queue[0].wait()
        rig.assert_empty()


def test_a_copy_is_given_up_when_all_that_saved_it_have_had_it() -> None:
    with Rig(discrete=True, pages=8, drive="no") as rig:
        saved = rig.save(1, 0)
        for seed in range(1, 3 * AHEAD // 2):
            rig.save(1, seed)
        rig.tier.save_again(saved)
        first, second = rig.tier.fetch(saved), rig.tier.fetch(saved)
        assert first.data_ptr() == second.data_ptr(), "one copy for both"
        held = StorageWeakRef(first)
        del first, second
        assert held.expired()
        assert torch.equal(rig.fetch(saved), content(1, 0)), "with retain_graph they come again"


def test_a_drive_that_is_full_keeps_them_on_the_device_and_memory_that_is_full_too() -> None:
    with Rig(discrete=False, pages=4, drive=4) as rig:
        tensors = [content(1, seed) for seed in range(10)]
        saved = [rig.tier.save(tensor.untyped_storage()) for tensor in tensors]
        assert [each is None for each in saved] == [False] * 8 + [True] * 2
        rig.tier.stepped()
        assert rig.tier.counts.last_step.not_offloaded == 2 * PAGE
        del tensors
        # In the order in which nobody has room for them.
        for seed, each in enumerate(filter(None, saved)):
            assert torch.equal(rig.fetch(each), content(1, seed))


def test_the_drive_grows_without_moving_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_extents, "STRIPE_BYTES", 2 * PAGE)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    nvme = NvmeTier(Places(folders), "posix", 64 * PAGE, Recorder(), shares=[3, 1, 2])
    nvme.extents.reserve(7 * PAGE)
    nvme.open()
    try:
        memory, extents = torch.empty(0), []
        extend = StatesFiles.extend
        monkeypatch.setattr(
            StatesFiles,
            "extend",
            lambda files, number, n: (number != 1 or n <= 6 * PAGE) and extend(files, number, n),
        )
        memory = ComputeDevice("cpu").host_memory(5 * PAGE)
        for number in range(12):
            extent = nvme.extents.grow(5 * PAGE)
            if extent is None:
                break
            memory.copy_(content(5, number))
            nvme.write(ExtentTransfer(extent, 0, extent.nbytes, memory.data_ptr(), "")).wait()
            extents.append(extent)
        assert len(extents) == 11, "62 of 64 pages"
        assert [end for _, end in [(e.start, e.start + e.nbytes) for e in extents]] == [
            12 * PAGE + 5 * PAGE * n for n in range(11)
        ]
        for number, extent in enumerate(extents):
            nvme.read(ExtentTransfer(extent, 0, extent.nbytes, memory.data_ptr(), "")).wait()
            assert torch.equal(memory, content(5, number)), number
        sizes = [(folder / STATES_NAME).stat().st_size for folder in folders]
        assert sizes[1] <= 6 * PAGE
        answers = iter([True])
        monkeypatch.setattr(
            StatesFiles, "extend", lambda *values: next(answers, False) and extend(*values)
        )
        nvme.extents._budget = None
        assert nvme.extents.grow(5 * PAGE) is None
        assert [(folder / STATES_NAME).stat().st_size for folder in folders] == sizes, (
            "what there is no room for leaves nothing"
        )
    finally:
        nvme.close()


# The engine

LEAST: dict[str, Any] = {
    "parameters": "cpu",
    "optimizer": "cpu",
    "gpu_memory": "16MiB",
    "gpu_cache": 0,
    "cpu_memory": "16MiB",
    "poison": True,
}
PLACES: dict[str, tuple[bool, dict[str, Any]]] = {
    "host memory": (True, {"activations": "cpu"}),
    "some of host memory": (True, {"activations": "cpu", "activation_memory": "24KiB"}),
    "no host memory": (True, {"activations": "cpu", "activation_memory": 0}),
    "the host itself": (False, {"activations": "cpu"}),
    "nvme": (False, {"activations": "nvme", "activation_memory": "24KiB"}),
    "nvme, from a device": (True, {"activations": "nvme", "activation_memory": "24KiB"}),
    "nvme with all states": (
        True,
        {"activations": "nvme", "parameters": "nvme", "optimizer": "nvme", "cache": 0},
    ),
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 512)


@contextmanager
def wrapped(model: nn.Module, discrete: bool = False, **config: Any) -> Iterator[infinity.Engine]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if discrete:
            patch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
        with infinity.engine(
            infinity.wrap(model, config_of(**LEAST | {"nvme": folder, "device": "cpu"} | config))
        ) as engine:
            yield engine


def tier_of(engine: infinity.Engine) -> Activations:
    tier = Probe(engine).activations
    assert tier is not None
    return tier


def assert_nothing_is_held(engine: infinity.Engine) -> None:
    gc.collect()
    Probe(engine).end_interrupted()  # as the next forward does, for a backward that was cut off
    tier = Probe(engine).activations
    if tier is not None:
        settle(tier)
        assert tier.memory.used == tier.counts.live == 0 and not tier._stacks and not tier._ending


def settle(tier: Activations) -> None:
    """What is in flight ends by itself, and whoever comes next sees it."""
    with tier._locked():
        for each in tier._ending:
            each.await_idle()
    with tier._locked():
        pass


def plainly(model: nn.Module) -> nn.Module:
    return model


def checkpointed(reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        vars(model)["run_block"] = lambda number, block, x: checkpoint(
            block, x, use_reentrant=reentrant
        )
        return model

    return change


def twice(model: nn.Module) -> nn.Module:
    vars(model)["run_block"] = lambda number, block, x: block(model.blocks[0](x))  # type: ignore[index, operator]
    return model


WAYS = {
    "plain": plainly,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "used twice": twice,
}


def train(
    engine: infinity.Engine, order: str = "", accumulation: int = 2, steps: int = 3
) -> list[torch.Tensor]:
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
    found: list[torch.Tensor] = []
    for step in range(steps):
        batches = [text_batch(accumulation * step + number) for number in range(accumulation)]
        if order:
            found += infinity.accumulate(engine.model, batches, order=order)  # type: ignore[arg-type]
        else:
            for batch in batches:
                loss = engine.model(**batch).loss
                (loss / accumulation).backward()
                found.append(loss.detach())
                del loss
        found += [
            gradient
            for p in engine.model.parameters()
            if (gradient := engine.gradient(p)) is not None
        ]
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    assert_nothing_is_held(engine)
    return [*found, *engine.state_dict().values()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert not [
        number
        for number, pair in enumerate(zip(found, expected, strict=True))
        if not torch.equal(*pair)
    ]


@functools.cache
def on_the_device(way: str) -> list[torch.Tensor]:
    """What `train` computes where activations stay on the compute device."""
    with wrapped(WAYS[way](transformer())) as engine:
        return train(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_those_of_activations_on_the_device(place: str, way: str) -> None:
    discrete, config = PLACES[place]
    expected = on_the_device(way)
    with wrapped(WAYS[way](transformer()), discrete, **config) as engine:
        assert_same(train(engine), expected)
        report = engine.report()
        moves = place not in ("no host memory", "the host itself")
        assert (report.activations_offloaded > 0) == moves
        assert (report.activations_not_offloaded > 0) == (
            place in ("some of host memory", "no host memory")
        )
        assert (report.activations_written > 0) == (
            config.get("activation_memory") == "24KiB" and config["activations"] == "nvme"
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["host memory", "nvme", "nvme, from a device"])
def test_numbers_are_the_same_where_micro_batches_run_together(place: str, reentrant: bool) -> None:
    discrete, config = PLACES[place]
    build = checkpointed(reentrant)
    with wrapped(build(transformer(dropout=0.1))) as engine:
        torch.manual_seed(5)
        expected = train(engine, "horizontal", accumulation=4)
        assert engine.report().activations_peak == 0
    with wrapped(build(transformer(dropout=0.1)), discrete, **config) as engine:
        torch.manual_seed(5)
        assert_same(train(engine, "vertical", accumulation=4), expected)
        assert engine.report().activations_peak > 2 * 16384, "a micro-batch alone saves 16384 bytes"


def test_each_storage_moves_once_and_no_parameter_nor_buffer_moves() -> None:
    """With checkpointing: what goes into the 4 blocks, the norm and the head, and what the loss
    saves of 64 logits per token."""
    with wrapped(checkpointed(False)(transformer()), activations="nvme") as engine:
        train(engine, accumulation=1)
        hidden = 2 * 8 * 32 * 4
        assert (
            engine.report().activations_offloaded
            == engine.report().activations_peak
            == 4 * hidden + 2 * hidden + 2 * hidden
        )


def test_a_fused_projection_and_the_input_of_three_layers_move_once() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(4))
            self.register_buffer("table", torch.randn(16, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)  # saves x
            # Y three times, and the table, which is a buffer.
            z = self.a(y) * self.table + self.b(y) + self.c(y)
            left, right = z.chunk(2, dim=1)
            return (left * right).sum()  # z twice

    torch.manual_seed(0)
    with wrapped(Fused(), activations="nvme") as engine:
        engine.model(torch.randn(16, 64)).backward()
        tier_of(engine).stepped()
        assert tier_of(engine).counts.last_step.offloaded == 3 * 16 * 64 * 4


@pytest.mark.parametrize(
    "config", [{}, {"activations": "nvme", "activation_memory": "8KiB"}], ids=["gpu", "nvme"]
)
def test_what_was_changed_and_saved_again_is_what_it_was_then(config: dict[str, Any]) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x) + 1  # neither of which saves y
            unused = y * y
            with torch.no_grad():
                y += 1
            return unused, (y * y).sum()

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain, x = Changes(), torch.randn(16, 32)
    plain(x)[1].backward()
    torch.manual_seed(0)
    with wrapped(Changes(), **config) as engine:
        unused, loss = engine.model(x)
        loss.backward()
        found = [
            gradient
            for p in engine.model.parameters()
            if (gradient := engine.gradient(p)) is not None
        ]
        assert_same(found, gradients(plain))
        del unused


def test_what_was_saved_is_gone_from_the_device() -> None:
    hidden: list[StorageWeakRef] = []

    def watch(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden.append(StorageWeakRef(x.untyped_storage()))
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

    def alive(**config: Any) -> int:
        hidden.clear()
        model = transformer()
        vars(model)["run_block"] = watch
        with wrapped(model, **config) as engine:
            loss = engine.model(**text_batch(0)).loss
            found = sum(not each.expired() for each in hidden)
            loss.backward()
        return found

    assert alive() == 4
    assert alive(activations="nvme", activation_memory="8KiB") == 0
    assert alive(discrete=True, activations="cpu") < 4


def test_a_loss_that_is_dropped_frees_what_its_forward_saved() -> None:
    seen: list[StorageWeakRef] = []
    for config in ({}, {"activations": "nvme", "activation_memory": "24KiB"}):
        model = transformer()
        model.head.register_forward_hook(
            lambda module, args, output: seen.append(StorageWeakRef(args[0].untyped_storage()))
        )
        with wrapped(model, **config) as engine:
            for number in range(3):
                outputs = engine.model(**text_batch(number))
                del outputs
                assert seen[-1].expired()
            assert_nothing_is_held(engine)


def test_without_gradients_nothing_is_moved() -> None:
    with wrapped(transformer(), activations="nvme") as engine, torch.no_grad():
        engine.model(**text_batch(0))
        assert tier_of(engine).counts.peak == 0


@pytest.mark.parametrize("place", ["host memory", "nvme"])
def test_a_backward_may_come_again_and_be_recorded_itself(place: str) -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).tanh()).sigmoid().sum()

    def gradients(discrete: bool, **config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Smooth(), torch.randn(16, 32, requires_grad=True)
        with wrapped(model, discrete, **config) as engine:
            loss = engine.model(x)
            first = torch.autograd.grad(loss, x, retain_graph=True)[0]
            again = torch.autograd.grad(loss, x, create_graph=True)[0]
            assert torch.equal(first, again)
            again.square().sum().backward()
            assert x.grad is not None
            found = [first, x.grad.clone(), *(engine.gradient(p) for p in model.parameters())]
            del loss, again
            assert_nothing_is_held(engine)
        return [each for each in found if each is not None]

    assert_same(gradients(PLACES[place][0], **PLACES[place][1]), gradients(False))


@pytest.mark.parametrize("config", [{}, {"activations": "nvme"}], ids=["gpu", "nvme"])
def test_what_was_changed_after_it_was_saved_is_refused_as_by_plain_pytorch(
    config: dict[str, Any],
) -> None:
    class Edits(nn.Module):
        def __init__(self, edited: bool) -> None:
            super().__init__()
            self.linear, self.edited = nn.Linear(64, 64), edited

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()  # which saves what it returns
            if self.edited:
                y.mul_(2)
            z = y * y
            y[0].detach().add_(1 if self.edited else 0)
            return z.sum()

    x = torch.randn(16, 64)
    text = (
        r"modified by an inplace operation: \[torch.FloatTensor \[16, 64\]\].* is at "
        r"version 2; expected version"
    )
    with pytest.raises(RuntimeError, match=text):
        Edits(True)(x).backward()
    with wrapped(Edits(True), **config) as engine, pytest.raises(RuntimeError, match=text):
        engine.model(x).backward()
    with (
        wrapped(Edits(False), **config) as engine,
        pytest.raises(RuntimeError, match="is at version 1; expected version 0"),
    ):
        engine.model(x).backward()


class Fails(nn.Module):
    """Identity whose forward, or whose backward, raises."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ArithmeticError("on purpose")
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", ["host memory", "nvme", "nvme, from a device"])
def test_nothing_is_left_behind_by_an_error(place: str, where: str) -> None:
    discrete, config = PLACES[place]
    model, fails = transformer(), Fails(where)
    vars(model)["run_block"] = lambda number, block, x: fails(block(x)) if number == 2 else block(x)
    with wrapped(model, discrete, **config) as engine:
        with pytest.raises(ArithmeticError):
            engine.model(**text_batch(0)).loss.backward()
        sys.last_value = None  # type: ignore[assignment]
        assert_nothing_is_held(engine)
        fails.where = ""
        with wrapped(transformer()) as other:
            expected = train(other)
        engine.zero_grad()
        assert_same(train(engine), expected)


@pytest.mark.parametrize("place", ["nvme", "nvme, from a device"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_drive_that_fails_is_told_to_the_backward_and_training_goes_on(
    place: str, phase: str
) -> None:
    discrete, config = PLACES[place]
    with wrapped(transformer()) as other:
        expected = train(other)
    with wrapped(transformer(), discrete, **config) as engine:

        def fail() -> None:
            engine.io.set_faults(error_fraction=1.0, errnos=[errno.EIO])

        if phase == "forward":
            fail()
        loss = engine.model(**text_batch(0)).loss
        if phase == "backward":
            fail()
        with pytest.raises(NvmeError, match="for activations"):
            loss.backward()
        del loss
        engine.io.set_faults()
        assert_nothing_is_held(engine)
        engine.zero_grad()
        assert_same(train(engine), expected)


@pytest.mark.parametrize("place", ["host memory", "nvme"])
def test_a_closed_engine_says_what_became_of_a_forward(place: str) -> None:
    discrete, config = PLACES[place]
    model = transformer()
    with wrapped(model, discrete, **config) as engine:
        loss = engine.model(**text_batch(0)).loss
        tier = tier_of(engine)
    with pytest.raises(
        EngineClosedError,
        match=r"what a forward had saved for its backward; call backward\(\) before close\(\)",
    ):
        loss.backward()
    del loss
    assert tier.memory.used == 0


def test_an_engine_that_is_collected_takes_its_activations_along() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(
            **LEAST, nvme=folder, device="cpu", activations="nvme", activation_memory="24KiB"
        )
        model = infinity.wrap(transformer(), config)
        engine = weakref.ref(infinity.engine(model))
        loss = model(**text_batch(0)).loss
        del model
        gc.collect()
        del loss
        gc.collect()
        assert engine() is None
        assert not list(Path(folder).iterdir())


def test_after_the_first_step_no_more_space_is_taken() -> None:
    with wrapped(transformer(), activations="nvme", activation_memory="24KiB") as engine:
        optimizer, reserved = infinity.AdamW(engine.model.parameters()), []
        for step in range(4):
            engine.model(**text_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
            reserved.append((engine.memory()["nvme"], Probe(engine).store.peaks()["cpu"]))
        assert reserved[1:] == reserved[:1] * 3


# Budgets


def test_memory_for_activations_is_part_of_cpu_memory() -> None:
    for config in ({"activations": "nvme"}, {"activations": "cpu", "discrete": True}):
        with wrapped(transformer(), **config, activation_memory="3MiB") as engine:
            assert tier_of(engine).memory.capacity == 3 << 20
        text = (
            r"saved activations 20 MiB \(activation_memory\) and staging .*; the "
            r"smallest cpu_memory that works is (\d+) "
        )
        with pytest.raises(BudgetError, match=text) as refusal:
            stack = ExitStack()
            stack.enter_context(wrapped(transformer(), **config, activation_memory="20MiB"))
        least = int(re.search(text, str(refusal.value))[1])  # type: ignore[index]
        with wrapped(transformer(), **config, activation_memory="20MiB", cpu_memory=least):
            pass
        with pytest.raises(BudgetError):
            stack.enter_context(
                wrapped(transformer(), **config, activation_memory="20MiB", cpu_memory=least - 1)
            )


@given(
    available=st.integers(0, 1 << 30),
    kinds=st.integers(0, 5),
    cache=st.none() | st.integers(0, 1 << 28),
    on_nvme=st.integers(0, 1 << 28),
    fixed=st.none() | st.integers(0, 1 << 28),
)
def test_host_memory_is_divided_and_not_exceeded(
    available: int, kinds: int, cache: int | None, on_nvme: int, fixed: int | None
) -> None:
    staged = Staged(kinds, min(kinds, 1), 1 << 14, 1 << 20, 1 << 24, on_nvme)
    least = staged.least + (fixed or 0)
    available += least
    plan, saved = divide_with_activations(
        available, staged, cache, "auto" if fixed is None else fixed
    )
    total = plan.cache + plan.slots * plan.chunk_elements * WIDEST_ELEMENT + saved
    assert total <= available and plan.staged_sets >= (1 if kinds and plan.cache < on_nvme else 0)
    if fixed is None:
        assert saved % PAGE == 0 and available - total < PAGE, "nothing is left over"
        assert saved >= min(available // 2, available - staged.least) // PAGE * PAGE
    else:
        assert saved == fixed


def test_a_limit_on_nvme_holds_for_activations_too() -> None:
    with wrapped(
        transformer(), activations="nvme", activation_memory="24KiB", nvme_memory="4MiB"
    ) as engine:
        optimizer = infinity.AdamW(engine.model.parameters())
        engine.model(**text_batch(0, rows=256, length=32)).loss.backward()
        optimizer.step()
        engine.drain()
        assert engine.memory()["nvme"] <= 4 << 20
        assert engine.report().activations_not_offloaded > 0
