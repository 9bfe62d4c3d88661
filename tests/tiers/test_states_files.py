"""No code writes to bytes of the states files that it was not given, or that a commit speaks of."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity import native
from infinity.directories import directory as directory_module
from infinity.directories.directory import Directory
from infinity.directories.lock import LOCK_NAME
from infinity.durable.home import ExtentState
from infinity.durable.states import DurableStates
from infinity.errors import BudgetError, ConfigError, NvmeError
from infinity.measure import speed
from infinity.observe import Recorder
from infinity.tiers import drives, extents
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import Places
from infinity.tiers.states_files import Claims, Extent, ExtentTransfer, StatesFiles
from infinity.tiers.stripes import Stripes
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe

MOST = 24  # pages
RANGES = st.tuples(st.integers(0, MOST), st.integers(1, 6))


@given(st.integers(0, MOST), st.lists(RANGES, max_size=6), st.integers(-2, MOST), st.integers(1, 9))
def test_a_range_may_be_written_that_was_given_and_is_not_kept(
    given_out: int, kept: list[tuple[int, int]], start: int, nbytes: int
) -> None:
    claims, taken = Claims(), set[int]()
    claims.give(given_out)
    alone = []
    for begin, length in kept:  # extents are apart, or the same
        if taken.isdisjoint(range(begin, begin + length)):
            taken |= set(range(begin, begin + length))
            alone += [Extent(begin, length)] * (1 + length % 2)
    claims.keep(alone)
    assert claims.kept_end == max(taken, default=-1) + 1
    asked = set(range(start, start + nbytes))
    if asked <= set(range(given_out)) - taken:
        claims.check(start, nbytes, "x")
    else:
        with pytest.raises(RuntimeError, match=r"^x may not be written to bytes .* was written$"):
            claims.check(start, nbytes, "x")
    claims.keep([])
    if asked <= set(range(given_out)):
        claims.check(start, nbytes, "x")


LEAST: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "durability": "step",
    "gpu_memory": "8MiB",
    "cpu_memory": "16MiB",
    "cache": 0,
    "precision": "bf16",
}


@contextmanager
def engine_in(
    folder: Path, resume: bool = False, seed: int = 0, frozen: str = "none", **options: Any
) -> Iterator[infinity.Engine]:
    folder.mkdir(exist_ok=True)
    model = transformer(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    infinity.wrap(model, config_of(nvme=folder, **LEAST | options), resume=resume)
    with infinity.engine(model) as engine:
        yield engine


def step(engine: infinity.Engine, number: int) -> None:
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2)
    engine.model(**text_batch(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    Probe(engine).come_to_rest()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = (folder / STATES_NAME).read_bytes()
    yield
    assert (folder / STATES_NAME).read_bytes()[: len(before)] == before


def writable(engine: infinity.Engine, blocks: Any = None) -> list[bool]:
    """Which extents of durable blocks may be written now: all that refuse leave every byte."""
    one, found = Probe(engine), list[bool]()
    data = torch.full((ALIGNMENT,), 7, dtype=torch.uint8)
    for block in one.store.state_blocks() if blocks is None else blocks:
        for extent in block.home.extents:
            try:
                one.nvme.write(
                    ExtentTransfer(extent, 0, ALIGNMENT, data.data_ptr(), "a stray write")
                ).wait()
            except RuntimeError as error:
                assert "which are committed states; nothing was written" in str(error)
                found.append(False)
            else:
                found.append(True)
    return found


def test_of_two_extents_the_committed_one_refuses_writes(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        step(engine, 0)
        Probe(engine).committer.rest()
        blocks = Probe(engine).store.state_blocks()
        assert writable(engine) == [
            block.home.states[at] is not ExtentState.COMMITTED
            for block in blocks
            for at in range(len(block.home.extents))
        ]
        engine.discard_committed()


def test_after_a_resume_nothing_reaches_what_was_committed(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        step(engine, 0)
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
    with engine_in(tmp_path, resume=True) as engine:
        assert False in writable(engine), "the others may be written"
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_load_replaces_what_is_frozen_in_its_only_place(tmp_path: Path) -> None:
    frozen = {"frozen": "blocks.0"}
    with engine_in(tmp_path / "other", seed=1, durability="off", **frozen) as engine:
        optimizer = infinity.AdamW(trained(engine))
        engine.save_checkpoint(tmp_path / "checkpoint", optimizer)
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
    with engine_in(tmp_path / "nvme", **frozen) as engine:
        optimizer = infinity.AdamW(trained(engine))
        engine.model(**text_batch(0)).loss.backward()
        optimizer.step()
        Probe(engine).committer.rest()
        alone = [b for b in Probe(engine).store.state_blocks() if len(b.home.extents) == 1]
        assert alone and not any(writable(engine, alone))
        optimizer.zero_grad()
        engine.load_checkpoint(tmp_path / "checkpoint", optimizer)
        assert not any(writable(engine, alone)), "the record after it keeps them again"
    with engine_in(tmp_path / "nvme", resume=True, **frozen) as engine:
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def trained(engine: infinity.Engine) -> list[torch.Tensor]:
    return [each for each in engine.model.parameters() if each.requires_grad]


def taken_over(folder: Path) -> NvmeTier:
    """A tier over states that were committed, as `wrap` has it before its restore."""
    durable = DurableStates(resume=True)
    made = NvmeTier(Places([folder], kept=durable), "posix", None, Recorder())
    made.find()
    durable.take(durable.left.records[0], "1" * 32)
    found = durable.found
    assert found is not None
    durable.describe(found.blocks)
    made.extents.reserve(found.nbytes)
    return made


def test_before_the_restore_no_byte_of_the_earlier_run_may_be_written(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        step(engine, 0)
    with unchanged(tmp_path):
        made = taken_over(tmp_path)
        try:
            assert made.measure() > 0
            made.open()
            beyond = made.extents.grow(ALIGNMENT)
            assert beyond is not None
            data = torch.zeros(ALIGNMENT, dtype=torch.uint8)
            for at in range(0, beyond.start, ALIGNMENT):
                with pytest.raises(RuntimeError, match="which are committed states"):
                    made.write(
                        ExtentTransfer(Extent(at, ALIGNMENT), 0, ALIGNMENT, data.data_ptr(), "x")
                    )
            made.write(ExtentTransfer(beyond, 0, ALIGNMENT, data.data_ptr(), "x")).wait()
            with pytest.raises(RuntimeError, match=r"which are more than the \d+ given out"):
                stray = Extent(beyond.start + ALIGNMENT, ALIGNMENT)
                made.write(ExtentTransfer(stray, 0, ALIGNMENT, data.data_ptr(), "x"))
        finally:
            made.close()


def test_committed_states_that_nothing_took_over_are_not_reclaimed(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        step(engine, 0)
    for act in (NvmeTier.measure, NvmeTier.open):
        made = NvmeTier(
            Places([tmp_path], kept=DurableStates(resume=True)), "posix", None, Recorder()
        )
        made.extents.reserve(ALIGNMENT)
        with (
            unchanged(tmp_path),
            pytest.raises(RuntimeError, match="has committed states, which nothing took over"),
        ):
            act(made)
    with engine_in(tmp_path, resume=True):
        pass


def test_a_file_is_not_cut_below_its_kept_bytes(tmp_path: Path) -> None:
    states = StatesFiles(Stripes(ALIGNMENT, [1.0, 1.0]))
    for name in "ab":
        with Directory(tmp_path) as place:
            file = native.file_at(place.create(name), str(tmp_path / name))
        file.allocate(4 * ALIGNMENT)
        states.add(file, native.make_engine("posix"))
    states.take_over(Stripes(ALIGNMENT, [1.0, 1.0]), 3 * ALIGNMENT)
    with pytest.raises(RuntimeError, match=r"committed states take 8192; nothing was cut"):
        states.shorten([ALIGNMENT, ALIGNMENT])
    assert states.sizes() == [4 * ALIGNMENT] * 2, "neither of them"
    with pytest.raises(RuntimeError, match="would lie elsewhere"):
        states.lay(Stripes(ALIGNMENT, [1.0, 3.0]))
    states.shorten([2 * ALIGNMENT, ALIGNMENT])
    assert states.sizes() == [2 * ALIGNMENT, ALIGNMENT]


# Measuring


class OtherSystem:
    """`os`, where files without a name fail with `code`."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *values: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(self._code, os.strerror(self._code))
        return os.open(path, flags, *values, **named)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB measure a drive, in stripes of a page."""
    monkeypatch.setattr(extents, "STRIPE_BYTES", ALIGNMENT)
    monkeypatch.setattr(speed, "PROBE_BYTES", 16 * ALIGNMENT)


def measured(folder: Path) -> float:
    made = NvmeTier(Places([folder]), "posix", None, Recorder())
    try:
        return made.measure()
    finally:
        assert {path.name for path in folder.iterdir()} <= {STATES_NAME, LOCK_NAME}
        made.close()
        assert not list(folder.iterdir())


@pytest.mark.parametrize("code", [0, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL])
def test_measuring_has_a_file_of_its_own_on_any_file_system(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    written = []
    measure = speed.measure

    def look(probes: Any) -> list[float]:
        written.append((tmp_path / STATES_NAME).stat().st_size)
        rates = measure(probes)
        written.append((tmp_path / STATES_NAME).stat().st_size)
        return rates

    monkeypatch.setattr(speed, "measure", look)
    if code:
        monkeypatch.setattr(directory_module, "os", OtherSystem(code))
    assert 0 < measured(tmp_path) < float("inf")
    assert written == [0, 0]


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, BudgetError), (errno.EACCES, ConfigError)]
)
def test_a_directory_that_takes_no_file_to_measure_with_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(directory_module, "os", OtherSystem(code))
    with pytest.raises(kind, match=f"^{tmp_path} takes no file to try its drive with"):
        measured(tmp_path)


def test_a_full_drive_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Any, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)

    monkeypatch.setattr(native.aio().File, "allocate", full)
    assert measured(tmp_path) == float("inf")
    assert f"{tmp_path}: no room to measure the drives" in caplog.text


def test_a_drive_that_fails_as_it_is_measured_leaves_no_file_open(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = drives.make_engine

    def make_engine(kind: str, **options: Any) -> Any:
        engine = make(kind, **options)
        engine.set_faults(fail_write_at=0)
        return engine

    monkeypatch.setattr(drives, "make_engine", make_engine)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(NvmeError, match=r"\(unnamed\)"):
        measured(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
