"""The NVMe tier holds what was written, over any number of directories, in files that are ours
alone and leave with us."""

from __future__ import annotations

import errno
import fcntl
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
from infinity.bench.io import workspace
from infinity.cli import gc
from infinity.directories.directory import Directory
from infinity.directories.lock import LOCK_NAME
from infinity.durable.states import DurableStates
from infinity.errors import BudgetError, ConfigError, NvmeError, PathInUseError
from infinity.observe import Recorder
from infinity.tiers import extents
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.manifest import STATES_NAME, Member
from infinity.tiers.places import Places
from infinity.tiers.states_files import Extent, ExtentTransfer
from support.planted import PLANTED, Planted

PIECE = 2 * ALIGNMENT  # of a stripe, so that small tests use many
AVAILABLE, REASON = native.aio().io_uring_available()
KINDS = [
    pytest.param("posix"),
    pytest.param("io_uring", marks=pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")),
]
each_engine = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "STRIPE_BYTES", PIECE)


@contextmanager
def tier(
    root: Path,
    count: int,
    extents: list[int],
    kind: str = "posix",
    budget: int | None = None,
    shares: Any = "measured",
) -> Iterator[NvmeTier]:
    directories = [root / str(index) for index in range(count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    made = NvmeTier(Places(directories), kind, budget, Recorder(), shares)
    for nbytes in extents:
        made.extents.reserve(nbytes)
    made.open()
    try:
        yield made
    finally:
        made.close()


def content(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def read(made: NvmeTier, extent: Extent, begin: int, nbytes: int) -> torch.Tensor:
    target = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
    made.read(ExtentTransfer(extent, begin, nbytes, target.data_ptr(), "test")).wait()
    return target


def write(made: NvmeTier, extent: Extent, begin: int, data: torch.Tensor) -> None:
    made.write(ExtentTransfer(extent, begin, data.numel(), data.data_ptr(), "test")).wait()


OPERATIONS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 2),
        st.integers(0, 12 * ALIGNMENT),
        st.integers(1, 12 * ALIGNMENT),
    ),
    max_size=12,
)


@each_engine
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 12), min_size=3, max_size=3),
    OPERATIONS,
)
def test_reads_give_what_was_written(
    tmp_path_factory, small_stripes, kind, shares, blocks, operations
):
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
            assert torch.equal(
                read(made, extents[which], begin, nbytes), model[which][begin : begin + nbytes]
            )
        for extent, expected in zip(extents, model, strict=True):
            assert torch.equal(read(made, extent, 0, extent.nbytes), expected), (
                "and nothing was written beside"
            )


@each_engine
@pytest.mark.parametrize("count", [1, 2, 3])
def test_transfers_in_flight_together_do_not_mix(tmp_path, small_stripes, kind, count):
    with tier(tmp_path, count, [7 * PIECE] * 6, kind) as made:
        extents = [Extent(index * 7 * PIECE, 7 * PIECE) for index in range(6)]
        sources = [content(7 * PIECE, seed) for seed in range(6)]
        writes = [
            made.write(ExtentTransfer(e, 0, e.nbytes, s.data_ptr(), "w"))
            for e, s in zip(extents, sources, strict=True)
        ]
        for transfer in writes:
            transfer.wait()
            assert transfer.done()
            transfer.wait()
        targets = [torch.zeros(7 * PIECE, dtype=torch.uint8) for _ in extents]
        reads = [
            made.read(ExtentTransfer(e, 0, e.nbytes, t.data_ptr(), "r"))
            for e, t in zip(extents, targets, strict=True)
        ]
        for transfer in reversed(reads):
            transfer.wait()
        assert all(
            torch.equal(source, target) for source, target in zip(sources, targets, strict=True)
        )
        counters = made._recorder.counters()
        assert counters["nvme bytes read"] == counters["nvme bytes written"] == 42 * PIECE
        assert {span.lane for span in made._recorder.spans()} == {"nvme read", "nvme write"}
        assert len(made._recorder.spans()) == 12, "waiting twice is recorded once"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pieces_of_4_mib_go_round_the_directories(tmp_path, count):
    piece = extents.STRIPE_BYTES
    assert piece == 4 << 20
    with tier(tmp_path, count, [ALIGNMENT, 2 * piece + ALIGNMENT]) as made:
        extent = Extent(ALIGNMENT, 2 * piece + ALIGNMENT)
        data = content(extent.nbytes, 0)
        write(made, extent, 0, data)
        assert torch.equal(read(made, extent, 0, extent.nbytes), data)
        flat = bytes(ALIGNMENT) + data.numpy().tobytes()
        for index in range(count):
            held = (tmp_path / str(index) / STATES_NAME).read_bytes()
            expected = b"".join(
                flat[at : at + piece] for at in range(index * piece, len(flat), count * piece)
            )
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
                assert status.st_blocks * 512 >= expected, (
                    "the space is taken, so no later write can meet a full disk"
                )
                assert (
                    (tmp_path / str(index) / LOCK_NAME).read_text().startswith(f"{os.getpid()}\n")
                )
    finally:
        os.umask(before)
    assert [list((tmp_path / str(index)).iterdir()) for index in range(count)] == [[]] * count


def test_close_waits_for_what_is_in_flight_and_may_be_called_twice(tmp_path):
    with tier(tmp_path, 1, [1 << 20]) as made:
        data = content(1 << 20, 0)
        made.engines[0].set_faults(bytes_per_second=float(8 << 20))
        transfer = made.write(
            ExtentTransfer(Extent(0, 1 << 20), 0, 1 << 20, data.data_ptr(), "late")
        )
        made.close()
        transfer.wait()
        assert transfer.done()
        made.close()
    assert list((tmp_path / "0").iterdir()) == []


def test_nothing_is_touched_when_nothing_is_reserved(tmp_path):
    made = NvmeTier(Places([tmp_path]), "posix", None, Recorder())
    made.open()
    assert made.engines == [] and not list(tmp_path.iterdir())
    made.close()


@pytest.mark.parametrize(
    ("begin", "nbytes"), [(-1, 4), (0, ALIGNMENT + 1), (ALIGNMENT, 1), (ALIGNMENT - 1, 2)]
)
def test_a_transfer_outside_of_its_extent_is_refused(tmp_path, begin, nbytes):
    with tier(tmp_path, 1, [ALIGNMENT, ALIGNMENT]) as made:
        place = torch.zeros(2 * ALIGNMENT, dtype=torch.uint8)
        for transfer in (made.read, made.write):
            with pytest.raises(ValueError, match="not in an extent of 4096"):
                transfer(ExtentTransfer(Extent(0, ALIGNMENT), begin, nbytes, place.data_ptr(), "x"))


@each_engine
def test_a_failed_transfer_says_what_where_and_why(tmp_path, kind):
    with tier(tmp_path, 2, [8 << 20], kind) as made:
        data = content(8 << 20, 0)
        extent = Extent(0, 8 << 20)
        made.engines[1].set_faults(fail_write_at=1, fail_errno=28)  # the second request of 1 MiB
        transfer = made.write(ExtentTransfer(extent, 0, extent.nbytes, data.data_ptr(), "x"))
        with pytest.raises(NvmeError) as caught:
            transfer.wait()
        error = caught.value
        assert (error.operation, error.errno, error.offset, error.asked) == (
            "write",
            28,
            0,
            4 << 20,
        )
        assert error.path == str(tmp_path / "1" / STATES_NAME) and error.done < error.asked
        assert error.done in (0, 1 << 20)
        assert error.path in str(error) and "No space left" in str(error)
        with pytest.raises(NvmeError):
            transfer.wait()
        made.engines[0].set_faults(fail_read_at=0)
        with pytest.raises(
            NvmeError, match="read of 4096 bytes at offset 8192 stopped after 0: Input/output error"
        ):
            read(made, extent, 8192, 4096)
        assert read(made, extent, 8192, 4096).equal(data[8192:12288]), "the fault is over"


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_works(tmp_path, small_stripes):
    with (
        pytest.raises(BudgetError, match=f"the smallest nvme_memory that works is {3 * PIECE}$"),
        tier(tmp_path, 2, [3 * PIECE], budget=3 * PIECE - 1),
    ):
        pass
    assert list((tmp_path / "0").iterdir()) == []
    with tier(tmp_path, 2, [3 * PIECE], budget=3 * PIECE):
        assert [(tmp_path / str(index) / STATES_NAME).stat().st_size for index in range(2)] == [
            2 * PIECE,
            PIECE,
        ]


def test_a_full_disk_is_a_budget_error_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(BudgetError, match="free, but the states on nvme need 1024 TiB there"),
        tier(tmp_path, 1, [1 << 50]),
    ):
        pass
    assert list((tmp_path / "0").iterdir()) == []


def test_close_does_all_it_can_whatever_fails(tmp_path, monkeypatch):
    made = NvmeTier(Places([tmp_path / "a", tmp_path / "b"]), "posix", None, Recorder())
    for name in "ab":
        (tmp_path / name).mkdir()
    made.extents.reserve(16 << 20)
    remove = Directory.remove

    def refuse(directory: Directory, name: str) -> None:
        if directory.path / name == tmp_path / "b" / STATES_NAME:
            raise PermissionError(f"no, not {directory.path / name}")
        remove(directory, name)

    monkeypatch.setattr(Directory, "remove", refuse)
    made.open()
    data = content(16 << 20, 0)
    made.engines[1].set_faults(bytes_per_second=float(64 << 20))
    transfer = made.write(ExtentTransfer(Extent(0, 16 << 20), 0, 16 << 20, data.data_ptr(), "late"))
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
        made = NvmeTier(Places([tmp_path / name for name in names]), "posix", None, Recorder())
        made.extents.reserve(ALIGNMENT)
        with pytest.raises(ConfigError, match=message):
            made.open()
        assert list((tmp_path / "here").iterdir()) == []


def test_when_one_directory_is_taken_the_others_are_given_back(tmp_path):
    with tier(tmp_path, 1, [ALIGNMENT]):
        (tmp_path / "free").mkdir()
        made = NvmeTier(Places([tmp_path / "free", tmp_path / "0"]), "posix", None, Recorder())
        made.extents.reserve(ALIGNMENT)
        with pytest.raises(PathInUseError, match=f"in use by process {os.getpid()};"):
            made.open()
        assert list((tmp_path / "free").iterdir()) == []
        assert {path.name for path in (tmp_path / "0").iterdir()} == {STATES_NAME, LOCK_NAME}, (
            "the holder lost nothing"
        )


OTHER = """
import sys
from pathlib import Path
from infinity.observe import Recorder
from infinity.tiers.drives import NvmeTier
from infinity.tiers.places import Places
from infinity.tiers.states_files import ExtentTransfer
import torch

tier = NvmeTier(Places([Path(sys.argv[1])]), "posix", None, Recorder())
extent = tier.extents.reserve(4096)
tier.open()
data = torch.full((4096,), 7, dtype=torch.uint8)
tier.write(ExtentTransfer(extent, 0, 4096, data.data_ptr(), "x")).wait()
print("ready", flush=True)
sys.stdin.readline()
tier.close()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path` until it reads a line."""
    environment = os.environ | {"PYTHONPATH": str(Path(infinity.__file__).parents[1])}
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def reserve_and_open(directory: Path) -> NvmeTier:
    made = NvmeTier(Places([directory]), "posix", None, Recorder())
    made.extents.reserve(ALIGNMENT)
    made.open()
    return made


def test_another_process_is_refused_until_the_first_leaves(tmp_path, other):
    with pytest.raises(
        PathInUseError, match=f"in use by process {other.pid}; give each job its own directory"
    ):
        reserve_and_open(tmp_path)
    assert (tmp_path / STATES_NAME).exists()
    other.communicate("\n")
    assert other.returncode == 0 and list(tmp_path.iterdir()) == []
    reserve_and_open(tmp_path).close()


def test_what_a_killed_process_left_is_reclaimed(tmp_path, other, caplog):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert {path.name for path in tmp_path.iterdir()} == {STATES_NAME, LOCK_NAME}
    left = (tmp_path / STATES_NAME).stat().st_size
    with caplog.at_level(logging.WARNING, logger="infinity"):
        made = reserve_and_open(tmp_path)
    try:
        assert f"reclaimed {left >> 20} MiB that an earlier run left in {tmp_path}" in caplog.text
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"{os.getpid()}\n")
        assert not read(made, Extent(0, ALIGNMENT), 0, ALIGNMENT).any(), (
            "nobody reads what another run wrote"
        )
    finally:
        made.close()
    assert list(tmp_path.iterdir()) == []


# What others put into a directory


@pytest.mark.parametrize("name", [STATES_NAME, LOCK_NAME])
@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("user", ["tier", "measure", "gc", "bench"])
def test_what_somebody_planted_is_refused_and_untouched(tmp_path, what, name, user):
    place = tmp_path / "nvme"
    place.mkdir()
    there = Planted(place / name, tmp_path / "precious", what)
    made = NvmeTier(Places([place]), "posix", None, Recorder())
    made.extents.reserve(ALIGNMENT)
    with pytest.raises(ConfigError) as caught:
        if user == "gc":
            gc.collect(place)
        elif user == "bench" and name == LOCK_NAME:
            with workspace.workspace([place], 1 << 20, 0):
                pass
        else:
            made.measure() if user == "measure" else made.open()
    assert str(caught.value) == there.refusal
    there.check()
    assert [path.name for path in place.iterdir()] == [name]


@pytest.mark.parametrize("moment", ["locked", "made"])
def test_a_directory_that_is_replaced_while_we_open_it_leads_nobody_elsewhere(
    tmp_path, monkeypatch, moment
):
    place, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    for path in (place, elsewhere):
        path.mkdir()
    for name in (STATES_NAME, LOCK_NAME):
        (elsewhere / name).write_bytes(b"mine")

    def replace():
        place.rename(tmp_path / "moved")
        place.symlink_to(elsewhere)

    real = Directory.create
    last = {"locked": LOCK_NAME, "made": STATES_NAME}[moment]

    def late(self, name, *arguments):
        if not place.is_symlink() and name == last:
            replace()
        return real(self, name, *arguments)

    monkeypatch.setattr(Directory, "create", late)
    made = NvmeTier(Places([place]), "posix", None, Recorder())
    extent = made.extents.reserve(ALIGNMENT)
    made.open()
    data = content(ALIGNMENT, 0)
    write(made, extent, 0, data)
    assert torch.equal(read(made, extent, 0, ALIGNMENT), data)
    assert {path.name for path in (tmp_path / "moved").iterdir()} == {STATES_NAME, LOCK_NAME}
    made.close()
    assert list((tmp_path / "moved").iterdir()) == []
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {
        STATES_NAME: b"mine",
        LOCK_NAME: b"mine",
    }


def test_the_directory_of_a_rank_is_not_reached_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "rank1").symlink_to(tmp_path / "elsewhere")
    made = NvmeTier(Places([tmp_path / "nvme"], own="rank1"), "posix", None, Recorder())
    made.extents.reserve(ALIGNMENT)
    with pytest.raises(ConfigError, match="rank1 is a link, which infinity never makes"):
        made.open()
    assert (
        list((tmp_path / "elsewhere").iterdir()) == []
        and (tmp_path / "nvme" / "rank1").is_symlink()
    )


def test_the_name_of_a_ranks_directory_survives_a_power_cut(tmp_path, monkeypatch):
    """It is flushed before anything in it counts as committed."""
    flushed = []
    monkeypatch.setattr(Directory, "sync", lambda directory: flushed.append(directory.path))
    for durable in (None, DurableStates(resume=False, member=Member(1, 2))):
        made = NvmeTier(Places([tmp_path], own="rank1", kept=durable), "posix", None, Recorder())
        made.find()
        made.close()
    assert flushed == [tmp_path]


def test_a_child_of_a_killed_run_keeps_neither_its_lock_nor_its_space(tmp_path):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            made = NvmeTier(Places([tmp_path]), "posix", None, Recorder())
            made.extents.reserve(8 << 20)
            made.open()
            child = os.fork()  # a DataLoader's worker
            if child:
                os.write(theirs, f"{child}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        child = int(pipe.readline())
    try:
        held = Path(f"/proc/{child}/fd")
        states = [
            path
            for path in held.iterdir()
            if path.exists() and path.resolve() == tmp_path / STATES_NAME
        ]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reserve_and_open(tmp_path).close()
        assert states and all(path.stat().st_blocks == 0 for path in states), (
            "the child has the file open, and it is empty"
        )
    finally:
        os.kill(child, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


# File systems that cannot do all


@pytest.fixture
def no_fallocate(monkeypatch):
    def refuse(self, nbytes):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), "/proc/self/fd/7")

    monkeypatch.setattr(native.aio().File, "allocate", refuse)


def test_a_file_system_that_cannot_reserve_space_works_with_a_warning(
    tmp_path, no_fallocate, caplog
):
    with tier(tmp_path, 2, [8 << 20]) as made:
        assert [(tmp_path / str(index) / STATES_NAME).stat().st_size for index in range(2)] == [
            4 << 20
        ] * 2
        data = content(8 << 20, 0)
        write(made, Extent(0, 8 << 20), 0, data)
        assert torch.equal(read(made, Extent(0, 8 << 20), 0, 8 << 20), data)
        assert made.extents.grow(8 << 20) is not None
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        (
            f"the file system of {tmp_path / str(index) / STATES_NAME} cannot reserve space: "
            "keep enough of it free"
        )
        for index in range(2)
    ]


def test_without_reservation_what_cannot_fit_is_refused_all_the_same(tmp_path, no_fallocate):
    with (
        pytest.raises(BudgetError, match="free, but the states on nvme need 1024 TiB there"),
        tier(tmp_path, 1, [1 << 50]),
    ):
        pass
    assert list((tmp_path / "0").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_works(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    made = reserve_and_open(tmp_path)
    with pytest.raises(PathInUseError, match=f"in use by process {os.getpid()};"):
        reserve_and_open(tmp_path)
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_file_names_it_as_the_user_knows_it(tmp_path, monkeypatch):
    allocate = native.aio().File.allocate
    monkeypatch.setattr(native.aio().File, "allocate", lambda file, _: allocate(file, 1 << 63))
    with pytest.raises(OSError, match="Invalid argument") as caught:
        reserve_and_open(tmp_path)
    assert caught.value.filename == str(tmp_path / STATES_NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_utf8_works(tmp_path):
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    made = reserve_and_open(place)
    data = content(ALIGNMENT, 0)
    write(made, Extent(0, ALIGNMENT), 0, data)
    made.engines[0].set_faults(fail_read_at=0)
    with pytest.raises(NvmeError) as caught:
        read(made, Extent(0, ALIGNMENT), 0, ALIGNMENT)
    assert caught.value.path == str(place / STATES_NAME)
    with pytest.raises(PathInUseError, match="in use by process"):
        reserve_and_open(place)
    made.close()
    assert list(place.iterdir()) == []
