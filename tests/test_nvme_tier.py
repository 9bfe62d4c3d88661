"""The NVMe tier holds what was written, over any number of directories, in files that are ours alone and leave with us."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from infinity import native
from infinity.errors import BudgetError, ConfigError, NvmeError, PathInUseError
from infinity.observe import Recorder
from infinity.tiers import nvme
from infinity.tiers.nvme import ALIGNMENT, LOCK_NAME, STATES_NAME, Extent, NvmeTier

PIECE = 2 * ALIGNMENT  # of a stripe, so that small tests use many
AVAILABLE, REASON = native.aio().io_uring_available()
KINDS = [
    pytest.param("posix"),
    pytest.param("io_uring", marks=pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")),
]
each_engine = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "STRIPE_BYTES", PIECE)


@contextmanager
def tier(
    root: Path, count: int, extents: list[int], kind: str = "posix", budget: int | None = None, shares: Any = "measured"
) -> Iterator[NvmeTier]:
    directories = [root / str(index) for index in range(count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    made = NvmeTier(directories, kind, budget, Recorder(), shares)
    for nbytes in extents:
        made.reserve(nbytes)
    made.open()
    try:
        yield made
    finally:
        made.close()


def content(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(made: NvmeTier, extent: Extent, begin: int, nbytes: int) -> torch.Tensor:
    target = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
    made.read(extent, begin, nbytes, target.data_ptr(), "test").wait()
    return target


def write(made: NvmeTier, extent: Extent, begin: int, data: torch.Tensor) -> None:
    made.write(extent, begin, data.numel(), data.data_ptr(), "test").wait()


OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 12 * ALIGNMENT), st.integers(1, 12 * ALIGNMENT)), max_size=12
)


@each_engine
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.integers(1, 12), min_size=3, max_size=3), OPERATIONS)
def test_reads_give_what_was_written(tmp_path_factory, small_stripes, kind, shares, blocks, operations):
    sizes = [n * ALIGNMENT for n in blocks]
    with tier(tmp_path_factory.mktemp("nvme"), len(shares), sizes, kind, shares=shares) as made:
        starts = [sum(sizes[:index]) for index in range(3)]
        extents = [Extent(start, size) for start, size in zip(starts, sizes, strict=True)]
        model = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for seed, (writing, which, begin, nbytes) in enumerate(operations):
            begin %= sizes[which]
            nbytes = min(nbytes, sizes[which] - begin)
            if writing:
                data = content(nbytes, seed)
                write(made, extents[which], begin, data)
                model[which][begin : begin + nbytes] = data
            assert torch.equal(read(made, extents[which], begin, nbytes), model[which][begin : begin + nbytes])
        for extent, expected in zip(extents, model, strict=True):
            assert torch.equal(read(made, extent, 0, extent.nbytes), expected), "and nothing was written beside"


@each_engine
@pytest.mark.parametrize("count", [1, 2, 3])
def test_transfers_in_flight_together_do_not_mix(tmp_path, small_stripes, kind, count):
    with tier(tmp_path, count, [7 * PIECE] * 6, kind) as made:
        extents = [Extent(index * 7 * PIECE, 7 * PIECE) for index in range(6)]
        sources = [content(7 * PIECE, seed) for seed in range(6)]
        writes = [made.write(e, 0, e.nbytes, s.data_ptr(), "w") for e, s in zip(extents, sources, strict=True)]
        for transfer in writes:
            transfer.wait()
            assert transfer.done()
            transfer.wait()
        targets = [torch.zeros(7 * PIECE, dtype=torch.uint8) for _ in extents]
        reads = [made.read(e, 0, e.nbytes, t.data_ptr(), "r") for e, t in zip(extents, targets, strict=True)]
        for transfer in reversed(reads):
            transfer.wait()
        assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
        counters = made._recorder.counters()
        assert counters["nvme bytes read"] == counters["nvme bytes written"] == 42 * PIECE
        assert {span.lane for span in made._recorder.spans()} == {"nvme read", "nvme write"}
        assert len(made._recorder.spans()) == 12, "waiting twice is recorded once"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pieces_of_4_mib_go_round_the_directories(tmp_path, count):
    piece = nvme.STRIPE_BYTES
    assert piece == 4 << 20
    with tier(tmp_path, count, [ALIGNMENT, 2 * piece + ALIGNMENT]) as made:
        extent = Extent(ALIGNMENT, 2 * piece + ALIGNMENT)
        data = content(extent.nbytes, 0)
        write(made, extent, 0, data)
        assert torch.equal(read(made, extent, 0, extent.nbytes), data)
        flat = bytes(ALIGNMENT) + data.numpy().tobytes()
        for index in range(count):
            held = (tmp_path / str(index) / STATES_NAME).read_bytes()
            expected = b"".join(flat[at : at + piece] for at in range(index * piece, len(flat), count * piece))
            assert held == expected.ljust(len(held), b"\0")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_files_are_private_and_preallocated(tmp_path, small_stripes, count):
    before = os.umask(0)
    try:
        with tier(tmp_path, count, [5 * PIECE]):
            for index in range(count):
                expected = len(range(index, 5, count)) * PIECE
                for name in (STATES_NAME, LOCK_NAME):
                    assert stat.S_IMODE((tmp_path / str(index) / name).stat().st_mode) == 0o600
                status = (tmp_path / str(index) / STATES_NAME).stat()
                assert status.st_size == expected
                assert status.st_blocks * 512 >= expected, "the space is taken, so no later write can meet a full disk"
                assert (tmp_path / str(index) / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    finally:
        os.umask(before)
    assert [list((tmp_path / str(index)).iterdir()) for index in range(count)] == [[]] * count


def test_close_waits_for_what_is_in_flight_and_may_be_called_twice(tmp_path):
    with tier(tmp_path, 1, [1 << 20]) as made:
        data = content(1 << 20, 0)
        made.engines[0].set_faults(bytes_per_second=float(8 << 20))
        transfer = made.write(Extent(0, 1 << 20), 0, 1 << 20, data.data_ptr(), "late")
        made.close()
        transfer.wait()
        assert transfer.done()
        made.close()
    assert list((tmp_path / "0").iterdir()) == []


def test_nothing_is_touched_when_nothing_is_reserved(tmp_path):
    made = NvmeTier([tmp_path], "posix", None, Recorder())
    made.open()
    assert made.engines == [] and not list(tmp_path.iterdir())
    made.close()


@pytest.mark.parametrize(("begin", "nbytes"), [(-1, 4), (0, ALIGNMENT + 1), (ALIGNMENT, 1), (ALIGNMENT - 1, 2)])
def test_a_transfer_outside_of_its_extent_is_refused(tmp_path, begin, nbytes):
    with tier(tmp_path, 1, [ALIGNMENT, ALIGNMENT]) as made:
        for transfer in (made.read, made.write):
            with pytest.raises(ValueError, match="not in an extent of 4096"):
                transfer(Extent(0, ALIGNMENT), begin, nbytes, torch.zeros(2 * ALIGNMENT, dtype=torch.uint8).data_ptr(), "x")


@each_engine
def test_a_failed_transfer_says_what_where_and_why(tmp_path, kind):
    with tier(tmp_path, 2, [8 << 20], kind) as made:
        data = content(8 << 20, 0)
        extent = Extent(0, 8 << 20)
        made.engines[1].set_faults(fail_write_at=1, fail_errno=28)  # the second request of 1 MiB
        transfer = made.write(extent, 0, extent.nbytes, data.data_ptr(), "x")
        with pytest.raises(NvmeError) as caught:
            transfer.wait()
        error = caught.value
        assert (error.operation, error.errno, error.offset, error.asked) == ("write", 28, 0, 4 << 20)
        assert error.path == str(tmp_path / "1" / STATES_NAME) and error.done < error.asked
        assert error.done in (0, 1 << 20)
        assert error.path in str(error) and "No space left" in str(error)
        with pytest.raises(NvmeError):
            transfer.wait()
        made.engines[0].set_faults(fail_read_at=0)
        with pytest.raises(NvmeError, match="read of 4096 bytes at offset 8192 stopped after 0: Input/output error"):
            read(made, extent, 8192, 4096)
        assert read(made, extent, 8192, 4096).equal(data[8192:12288]), "the fault is over"


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_works(tmp_path, small_stripes):
    with (
        pytest.raises(BudgetError, match=f"the smallest nvme_memory that works is {3 * PIECE} "),
        tier(tmp_path, 2, [3 * PIECE], budget=3 * PIECE - 1),
    ):
        pass
    assert list((tmp_path / "0").iterdir()) == []
    with tier(tmp_path, 2, [3 * PIECE], budget=3 * PIECE):
        assert [(tmp_path / str(index) / STATES_NAME).stat().st_size for index in range(2)] == [2 * PIECE, PIECE]


def test_a_full_disk_is_a_budget_error_and_leaves_nothing(tmp_path):
    with pytest.raises(BudgetError, match="free, but the states on nvme need 1024 TiB there"), tier(tmp_path, 1, [1 << 50]):
        pass
    assert list((tmp_path / "0").iterdir()) == []


def test_close_does_all_it_can_whatever_fails(tmp_path, monkeypatch):
    made = NvmeTier([tmp_path / "a", tmp_path / "b"], "posix", None, Recorder())
    for name in "ab":
        (tmp_path / name).mkdir()
    made.reserve(16 << 20)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == tmp_path / "b" / STATES_NAME:
            raise PermissionError(f"no, not {path}")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    made.open()
    data = content(16 << 20, 0)
    made.engines[1].set_faults(bytes_per_second=float(64 << 20))
    transfer = made.write(Extent(0, 16 << 20), 0, 16 << 20, data.data_ptr(), "late")
    with pytest.raises(PermissionError, match="no, not"):
        made.close()
    transfer.wait()
    for engine in made.engines:
        with pytest.raises(ValueError, match="it is closed"):
            engine.counters()
    assert [path.name for name in "ab" for path in (tmp_path / name).iterdir()] == [STATES_NAME]
    monkeypatch.undo()
    made.close()
    for name in "ab":
        reserve_and_open(tmp_path / name).close()
        assert list((tmp_path / name).iterdir()) == [], "the locks were given back"


def test_directories_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for names, message in [
        (["here", "absent"], "absent does not exist; create it"),
        (["file"], "file is not a directory"),
        (["here", "link"], "must differ"),
    ]:
        made = NvmeTier([tmp_path / name for name in names], "posix", None, Recorder())
        made.reserve(ALIGNMENT)
        with pytest.raises(ConfigError, match=message):
            made.open()
        assert list((tmp_path / "here").iterdir()) == []


def test_when_one_directory_is_taken_the_others_are_given_back(tmp_path):
    with tier(tmp_path, 1, [ALIGNMENT]):
        (tmp_path / "free").mkdir()
        made = NvmeTier([tmp_path / "free", tmp_path / "0"], "posix", None, Recorder())
        made.reserve(ALIGNMENT)
        with pytest.raises(PathInUseError, match=f"in use by process {os.getpid()};"):
            made.open()
        assert list((tmp_path / "free").iterdir()) == []
        assert {path.name for path in (tmp_path / "0").iterdir()} == {STATES_NAME, LOCK_NAME}, "the holder lost nothing"


OTHER = """
import sys
from pathlib import Path
from infinity.observe import Recorder
from infinity.tiers.nvme import NvmeTier
import torch

tier = NvmeTier([Path(sys.argv[1])], "posix", None, Recorder())
extent = tier.reserve(4096)
tier.open()
data = torch.full((4096,), 7, dtype=torch.uint8)
tier.write(extent, 0, 4096, data.data_ptr(), "x").wait()
print("ready", flush=True)
sys.stdin.readline()
tier.close()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path` until it reads a line."""
    environment = os.environ | {"PYTHONPATH": str(Path(infinity.__file__).parents[1])}
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def reserve_and_open(directory: Path) -> NvmeTier:
    made = NvmeTier([directory], "posix", None, Recorder())
    made.reserve(ALIGNMENT)
    made.open()
    return made


def test_another_process_is_refused_until_the_first_leaves(tmp_path, other):
    with pytest.raises(PathInUseError, match=f"in use by process {other.pid}; give each job its own directory"):
        reserve_and_open(tmp_path)
    assert (tmp_path / STATES_NAME).exists()
    other.communicate("\n", timeout=60)
    assert other.returncode == 0 and list(tmp_path.iterdir()) == []
    reserve_and_open(tmp_path).close()


def test_what_a_killed_process_left_is_reclaimed(tmp_path, other, caplog):
    other.send_signal(signal.SIGKILL)
    other.wait(timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == {STATES_NAME, LOCK_NAME}
    left = (tmp_path / STATES_NAME).stat().st_size
    with caplog.at_level(logging.WARNING, logger="infinity"):
        made = reserve_and_open(tmp_path)
    try:
        assert f"reclaimed {left >> 20} MiB that an earlier run left in {tmp_path}" in caplog.text
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        assert not read(made, Extent(0, ALIGNMENT), 0, ALIGNMENT).any(), "nobody reads what another run wrote"
    finally:
        made.close()
    assert list(tmp_path.iterdir()) == []
