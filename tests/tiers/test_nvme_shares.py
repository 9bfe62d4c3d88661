"""Several directories share the states by the speed of their drives and as far as they have room,
and not a byte is lost."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity import native
from infinity.directories.directory import Directory
from infinity.errors import BudgetError, NvmeError
from infinity.measure import speed
from infinity.observe import Recorder
from infinity.placement.calibrate import levelled
from infinity.tiers import drives, extents, states_files
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import UNNAMED, Places
from infinity.tiers.states_files import Extent, ExtentTransfer
from infinity.tiers.stripes import LONGEST_PATTERN, NEAR_ENOUGH, Stripes, pattern_of
from support.budgets import ROOMY
from support.configs import config_of
from support.machine import IO_ENGINES
from support.models import text_batch, transformer
from support.probe import Probe

MIB = 1 << 20
STRIPE = 4 * ALIGNMENT
PROBE = 64 * STRIPE  # 1 MiB
each_engine = pytest.mark.parametrize("kind", IO_ENGINES)


# Arithmetic

SHARES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)
UNIT = 3  # bytes of a stripe


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[float], list[int] | None, int]:
    """Shares, rooms, and a number of stripes that fits."""
    shares = draw(SHARES)
    if draw(st.booleans()):
        return shares, None, draw(st.integers(0, 150))
    rooms = draw(
        st.lists(st.integers(0, 40), min_size=len(shares), max_size=len(shares)).filter(any)
    )
    return shares, rooms, draw(st.integers(0, sum(rooms)))


@given(layouts())
def test_every_byte_has_a_place_of_its_own_and_no_place_is_left_over(
    layout: tuple[list[float], list[int] | None, int],
) -> None:
    shares, rooms, count = layout
    stripes = Stripes(UNIT, shares, rooms)
    held: list[list[tuple[int, int]]] = [[] for _ in shares]
    for number in range(count):
        (piece,) = stripes.pieces(number * UNIT, UNIT)
        assert piece.nbytes == UNIT
        held[piece.file].append((piece.offset, piece.nbytes))
        assert [len(places) * UNIT for places in held] == stripes.lengths(number + 1)
    for file, places in enumerate(held):
        assert places == [(number * UNIT, UNIT) for number in range(len(places))]
        assert rooms is None or len(places) <= rooms[file]


@given(layouts(), st.data())
def test_a_range_is_cut_into_pieces_that_cover_it_in_order(
    layout: tuple[list[float], list[int] | None, int], data: st.DataObject
) -> None:
    shares, rooms, count = layout
    stripes = Stripes(UNIT, shares, rooms)
    begin = data.draw(st.integers(0, count * UNIT))
    end = data.draw(st.integers(begin, count * UNIT))
    pieces = list(stripes.pieces(begin, end - begin))
    one_by_one = [piece for position in range(begin, end) for piece in stripes.pieces(position, 1)]
    assert [(p.file, p.offset + at, 1) for p in pieces for at in range(p.nbytes)] == one_by_one
    for before, after in itertools.pairwise(pieces):
        assert (after.file, after.offset) != (before.file, before.offset + before.nbytes), (
            "these would be one request"
        )


@given(SHARES)
def test_the_pattern_is_short_and_serves_every_drive_by_its_share(shares: list[float]) -> None:
    order = pattern_of(shares)
    counts = [order.count(file) for file in range(len(shares))]
    assert min(counts) >= 1 and len(order) <= LONGEST_PATTERN
    slowest = (
        max(count / share for count, share in zip(counts, shares, strict=True))
        * sum(shares)
        / len(order)
    )
    # Else the slowest drive would do best without any.
    if min(shares) * LONGEST_PATTERN >= sum(shares):
        assert slowest <= 1 + len(shares) / LONGEST_PATTERN + 1e-9
    for length in range(len(order)):
        for file, count in enumerate(counts):
            assert (
                abs(order[:length].count(file) - length * count / len(order))
                < max(len(shares) - 1, 1) + 1e-9
            ), "evenly spread"


def test_the_patterns_of_some_shares() -> None:
    assert pattern_of([7.0, 7.0, 7.0]) == [0, 1, 2]
    assert pattern_of([6.0, 3.0]) == [0, 1, 0]
    assert pattern_of([1.0, 3.0]) == [1, 0, 1, 1]
    assert pattern_of([1.0, NEAR_ENOUGH * 1.04]) == [0, 1], "near enough, and shorter is better"
    assert pattern_of([1.0, 1e-320]).count(0) == LONGEST_PATTERN - 1
    assert pattern_of([1.0] * 40) == list(range(40))


def test_a_file_without_room_drops_out_and_the_others_go_on() -> None:
    stripes = Stripes(UNIT, [3.0, 1.0, 1.0], [4, 100, 0])
    assert stripes.lengths(10) == [4 * UNIT, 6 * UNIT, 0]
    assert stripes.lengths(5) == [4 * UNIT, 1 * UNIT, 0]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.0, 1.2], [1.1, 1.1]),
        ([1.3, 1.0], [1.3, 1.0]),
        ([7.0, 3.0, 6.0, 0.0], [6.5, 3.0, 6.5, 0.0]),
        ([1.0, 1.2, 1.4], [1.1, 1.1, 1.4]),
    ],
)
def test_speeds_that_noise_could_explain_are_equal(
    speeds: list[float], expected: list[float]
) -> None:
    assert levelled(speeds) == pytest.approx(expected)


class Drive:
    """Stands for an engine and a file: whoever waits for a request of some seconds finds the clock
    that much later."""

    path = "drive"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.moved: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
        monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def submit(file: Drive, offset: int, address: int, nbytes: int) -> Any:
            file.moved[operation].append((offset, nbytes))
            return SimpleNamespace(wait=lambda: self.wait(self.seconds[operation], nbytes))

        return submit

    def wait(self, seconds: float, nbytes: int) -> tuple[int, int, int]:
        self.now += seconds
        return 0, nbytes, nbytes


def test_the_speed_that_counts_is_that_of_half_reading_and_half_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Drive(monkeypatch, write=0.003, read=0.001)
    assert speed.measure([speed.Probe(drive, drive, 32 * MIB)]) == [
        pytest.approx(64 * MIB / (16 * 0.003 + 16 * 0.001))
    ]
    assert (
        drive.moved["read"]
        == drive.moved["write"]
        == [(at, 2 * MIB) for at in range(0, 32 * MIB, 2 * MIB)]
    )


def test_the_first_failure_of_a_drive_is_raised_when_all_requests_are_done() -> None:
    begun: list[int] = []
    done: set[int] = set()

    def submit(file: object, offset: int, address: int, nbytes: int) -> Any:
        def wait() -> None:
            done.add(offset)
            raise NvmeError("write", "drive", offset, errno.EIO, nbytes, 0)

        begun.append(offset)
        return SimpleNamespace(wait=wait)

    with pytest.raises(NvmeError, match="at offset 0 stopped after 0"):
        speed.measure([speed.Probe(SimpleNamespace(write=submit), "file", 32 * MIB)])
    assert begun == [at * 2 * MIB for at in range(4)] and done == {*begun}


def test_a_slow_drive_is_not_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, write=0.06, read=0.15)
    rate = speed.measure([speed.Probe(drive, drive, 64 * MIB)])
    begun = {way: len(moved) for way, moved in drive.moved.items()}
    assert begun == {"write": 4 + 4, "read": 4 + 2}, (
        "four in flight, and one for each that was done in 0.2 seconds"
    )
    assert set(drive.moved["read"]) <= set(drive.moved["write"]), (
        "what was never written costs nothing to read"
    )
    assert rate == [pytest.approx(2 / (0.06 / (2 * MIB) + 0.15 / (2 * MIB)))]


# The tier


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ("measured", 7e9),
        ("equal", 2e9),
        ((2.0, 1.0), 3e9),
        ((12.0, 1.0), 6.5e9),
        ((1e3, 1.0), 6.006e9),
    ],
)
def test_drives_give_together_what_their_shares_let_them(
    shares: Any, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "infinity-states.bin").write_bytes(bytes(5000))  # of a run that was killed
    monkeypatch.setattr(
        speed,
        "measure",
        lambda probes: [6e9, 1e9] if all(p.nbytes == 64 * MIB for p in probes) else [],
    )
    tier = NvmeTier(Places(folders), "posix", None, Recorder(), shares)
    try:
        assert tier.measure() == pytest.approx(expected)
        assert [(folder / "infinity-states.bin").stat().st_size for folder in folders] == [0, 0]
        with pytest.raises(infinity.PathInUseError):
            NvmeTier(Places(folders[:1]), "posix", None, Recorder()).measure()
    finally:
        tier.close()
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of 16 KiB, and what is written to measure a drive so much smaller."""
    monkeypatch.setattr(extents, "STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(speed, "PROBE_BYTES", PROBE)
    monkeypatch.setattr(speed, "_REQUEST_BYTES", PROBE // 16)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`faulty(number, **faults)`: the drive of directory `number` has these faults from the
    beginning."""
    faults: dict[int, dict[str, Any]] = {}
    made = itertools.count()

    def make_engine(kind: str, **options: Any) -> Any:
        engine = native.make_engine(kind, **options)
        engine.set_faults(**faults.get(next(made), {}))
        return engine

    monkeypatch.setattr(drives, "make_engine", make_engine)
    return lambda number, **values: faults.update({number: values})


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Path, int]], None]:
    """`rooms({directory: bytes})`: the file system of a directory has so much room, whatever it
    says is free."""
    limits: dict[Path, int] = {}

    real = native._named_file().allocate

    def allocate(self: Any, nbytes: int) -> None:
        limit = limits.get(Path(self.path).parent, nbytes)
        real(self, min(nbytes, limit))  # as file systems do, it takes what there is
        if nbytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    monkeypatch.setattr(native._named_file(), "allocate", allocate)
    return limits.update


@contextmanager
def opened(
    directories: list[Path], nbytes: int, kind: str = "posix", shares: Any = "measured"
) -> Iterator[NvmeTier]:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    made = NvmeTier(Places(directories), kind, None, Recorder(), shares)
    made.extents.reserve(nbytes)
    made.open()
    try:
        yield made
    finally:
        made.close()
        assert [
            path
            for directory in directories
            for path in directory.iterdir()
            if path.name != "lost+found"
        ] == []


def sizes(directories: list[Path]) -> list[int]:
    return [(directory / STATES_NAME).stat().st_size for directory in directories]


def check_content(made: NvmeTier, nbytes: int) -> None:
    """All bytes arrive, written as one and read in pieces of odd lengths, and nothing else was
    moved."""
    before = [io.counters() for io in made.engines]
    extent, memory = Extent(0, nbytes), torch.zeros(2 * nbytes + ALIGNMENT, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % ALIGNMENT :]
    source, target = memory[:nbytes], memory[nbytes : 2 * nbytes]
    source.random_(generator=torch.Generator().manual_seed(nbytes))
    made.write(ExtentTransfer(extent, 0, nbytes, source.data_ptr(), "x")).wait()
    for begin in range(0, nbytes, 7 * ALIGNMENT):
        length = min(7 * ALIGNMENT, nbytes - begin)
        made.read(ExtentTransfer(extent, begin, length, target[begin:].data_ptr(), "x")).wait()
    assert torch.equal(source, target)
    for key in ("bytes_read", "bytes_written"):
        moved = [
            io.counters()[key] - earlier[key]
            for io, earlier in zip(made.engines, before, strict=True)
        ]
        assert sum(moved) == nbytes
        assert moved == sizes(made.places.paths)


@each_engine
def test_each_directory_holds_its_share_behind_an_engine_of_its_own(
    tmp_path: Path, small: None, kind: str
) -> None:
    directories = [tmp_path / name for name in "abc"]
    with opened(directories, 60 * STRIPE, kind, shares=(3, 1, 2)) as made:
        assert sizes(directories) == [30 * STRIPE, 10 * STRIPE, 20 * STRIPE]
        check_content(made, 60 * STRIPE)


@each_engine
def test_all_engines_know_registered_memory(tmp_path: Path, small: None, kind: str) -> None:
    with opened([tmp_path / "a", tmp_path / "b"], 8 * STRIPE, kind) as made:
        memory = torch.zeros(8 * STRIPE + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :][: 8 * STRIPE]
        made.register(memory)
        made.write(
            ExtentTransfer(Extent(0, 8 * STRIPE), 0, 8 * STRIPE, memory.data_ptr(), "x")
        ).wait()
        assert all(
            (io.counters()["fixed_requests"] > 0) == (kind == "io_uring") for io in made.engines
        )


@each_engine
def test_a_slow_drive_gets_less(
    tmp_path: Path,
    small: None,
    faulty: Callable[..., None],
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directories = [tmp_path / name for name in "abc"]
    # In a fifth of a second it moves a fifth of what the others may.
    faulty(1, bytes_per_second=1.0 * MIB)
    with caplog.at_level(logging.INFO, "infinity"), opened(directories, 200 * STRIPE, kind) as made:
        first, slow, last = sizes(directories)
        assert first + slow + last == 200 * STRIPE
        assert 0 < slow < min(first, last)
        assert not any(
            (directory / STATES_NAME).read_bytes().strip(b"\0") for directory in directories
        ), "nothing is left of it"
        for message, facts in (
            ("measured, half reading and half writing: ", [f"{at} " for at in directories]),
            ("the states on nvme take ", [f" in {at}" for at in directories]),
        ):
            (line,) = (
                record.getMessage()
                for record in caplog.records
                if record.getMessage().startswith(message)
            )
            assert all(fact in line for fact in facts)
        probed = made.engines[0].counters()
        assert 0 < probed["bytes_written"] <= PROBE >= probed["bytes_read"] > 0
        probed = made.engines[1].counters()
        assert 0 < probed["bytes_written"] < PROBE > probed["bytes_read"] > 0
        made.engines[1].set_faults()
        check_content(made, 200 * STRIPE)


@pytest.mark.parametrize(
    ("count", "stripes", "shares"),
    [(1, 1000, "measured"), (2, 127, "measured"), (2, 1000, "equal"), (2, 1000, (5.0, 5.0))],
)
def test_nothing_is_measured_where_it_decides_nothing(
    tmp_path: Path, small: None, count: int, stripes: int, shares: Any
) -> None:
    directories = [tmp_path / str(number) for number in range(count)]
    with opened(directories, stripes * STRIPE, shares=shares) as made:
        assert [
            (io.counters()["bytes_read"], io.counters()["bytes_written"]) for io in made.engines
        ] == [(0, 0)] * count
        assert sizes(directories) == [
            len(range(number, stripes, count)) * STRIPE for number in range(count)
        ]


@pytest.mark.parametrize("fault", ["fail_write_at", "fail_read_at"])
def test_a_drive_that_fails_when_it_is_measured_is_named(
    tmp_path: Path, small: None, faulty: Callable[..., None], fault: str
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    faulty(1, **{fault: 2})
    operation = fault.split("_")[1]
    text = (
        f"{operation} of .* at offset {2 * PROBE // 16} stopped after 0: Input/output "
        f"error: '{re.escape(str(directories[1] / UNNAMED))}'"
    )
    with pytest.raises(NvmeError, match=text), opened(directories, 4 * PROBE):
        pass
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_without_room_for_its_share_a_directory_takes_what_it_has_room_for(
    tmp_path: Path,
    small: None,
    rooms: Callable[[dict[Path, int]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directories = [tmp_path / name for name in "abc"]
    rooms({directories[0]: 37 * STRIPE + ALIGNMENT, directories[2]: 45 * STRIPE})
    with opened(directories, 120 * STRIPE, shares=(3, 1, 2)) as made:  # of 60, 20 and 40
        assert sizes(directories) == [37 * STRIPE, 38 * STRIPE, 45 * STRIPE]
        assert (
            f"{directories[0]} has room for 592 KiB of its share of 960 KiB of the states"
            in caplog.text
        )
        check_content(made, 120 * STRIPE)


def test_a_file_is_no_longer_than_its_stripes_when_another_drops_out(
    tmp_path: Path, small: None, rooms: Callable[[dict[Path, int]], None]
) -> None:
    """Of 200 stripes the second has 56 beside the third, and 50 without it, for then another
    pattern is near enough."""
    directories = [tmp_path / name for name in "abc"]
    rooms({directories[2]: 0})
    with opened(directories, 200 * STRIPE, shares=(30, 12, 1)) as made:
        assert sizes(directories) == [150 * STRIPE, 50 * STRIPE, 0]
        check_content(made, 200 * STRIPE)


def test_space_that_is_not_enough_is_given_back(
    tmp_path: Path, small: None, rooms: Callable[[dict[Path, int]], None]
) -> None:
    path = tmp_path / STATES_NAME
    with Directory(tmp_path) as directory:
        file = native.file_at(directory.create(STATES_NAME), str(path))
    file.allocate(2 * STRIPE)
    rooms({tmp_path: 5 * STRIPE + ALIGNMENT})
    assert not states_files.extend(file, 9 * STRIPE)
    assert path.stat().st_size == 2 * STRIPE, "another may be on the same drive"
    assert states_files.fill(file, 9 * STRIPE, STRIPE) == 5
    assert path.stat().st_size == 5 * STRIPE


def test_directories_are_filled_to_the_last_stripe_before_they_are_refused(
    tmp_path: Path, small: None, rooms: Callable[[dict[Path, int]], None]
) -> None:
    directories = [tmp_path / name for name in "ab"]
    rooms({directories[0]: 37 * STRIPE, directories[1]: 23 * STRIPE})
    with opened(directories, 60 * STRIPE) as made:
        assert sizes(directories) == [37 * STRIPE, 23 * STRIPE]
        check_content(made, 60 * STRIPE)
    text = (
        f"^{directories[0]} and {directories[1]} together have 960 KiB free, but the states on "
        "nvme need 976 KiB there; free 16 KiB, add another directory, or set "
        "Tuning\\(copy_on_write=False\\) "
    )
    with pytest.raises(BudgetError, match=text), opened(directories, 60 * STRIPE + ALIGNMENT):
        pass
    with (
        pytest.raises(BudgetError, match="free, but the states on nvme need 1024 TiB there"),
        opened(directories, 1 << 50),
    ):
        pass


def test_a_directory_that_cannot_be_measured_for_want_of_room_holds_what_it_can(
    tmp_path: Path, small: None, rooms: Callable[[dict[Path, int]], None]
) -> None:
    directories = [tmp_path / name for name in "abc"]
    rooms({directories[0]: 5 * STRIPE, directories[1]: ALIGNMENT})
    with opened(directories, 3 * PROBE) as made:
        assert sizes(directories) == [5 * STRIPE, 0, 3 * PROBE - 5 * STRIPE]
        check_content(made, 3 * PROBE)


# The engine


def test_a_step_moves_what_is_planned_over_several_drives(
    tmp_path: Path, small: None, one_thread: None
) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    config = config_of(nvme=paths, nvme_shares=(2, 5, 1), precision="bf16", update="exact", **ROOMY)
    model = infinity.wrap(transformer(width=48, depth=5), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in range(6):
            if number == 4:
                Probe(engine).come_to_rest()
                before = [io.counters() for io in engine.ios]
            model(**text_batch(number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        Probe(engine).come_to_rest()
        moved = [
            {key: io.counters()[key] - was[key] for key in ("bytes_read", "bytes_written")}
            for io, was in zip(engine.ios, before, strict=True)
        ]
        plan = engine.plan()
        assert sum(one["bytes_read"] for one in moved) == 2 * plan.read
        assert sum(one["bytes_written"] for one in moved) == 2 * plan.update_written
        assert moved[1]["bytes_written"] > moved[0]["bytes_written"] > moved[2]["bytes_written"] > 0
        assert sum(sizes(paths)) == -(-engine.memory()["nvme"] // STRIPE) * STRIPE


# Drives


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disks(bytes)`: the file system of a loop device of that size."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make loop devices")
    missing = [name for name in ("losetup", "mkfs.ext4", "mount") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"this machine has no {' and no '.join(missing)}")

    def call(*command: object) -> str:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this machine makes no drives: {done.stderr.strip()}")
        return done.stdout.strip()

    with ExitStack() as stack:

        def make(nbytes: int) -> Path:
            image = tmp_path / f"{nbytes}.img"
            with image.open("wb") as file:
                file.truncate(nbytes)
            device = call("losetup", "--find", "--show", image)
            stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
            call("mkfs.ext4", "-q", "-m", "0", device)
            target = tmp_path / f"{nbytes}"
            target.mkdir()
            call("mount", device, target)
            stack.callback(subprocess.run, ["umount", target], check=True)
            return target

        yield make


@pytest.mark.root
@each_engine
def test_two_drives_share_by_speed_and_by_room(
    disks: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    faulty: Callable[..., None],
    kind: str,
) -> None:
    """A fast drive of 64 MiB and a slow one of 192 MiB: first what the fast one's share has room
    for, then what has not."""
    monkeypatch.setattr(extents, "STRIPE_BYTES", MIB)
    monkeypatch.setattr(speed, "PROBE_BYTES", 4 * MIB)
    fast, slow = disks(64 * MIB), disks(192 * MIB)
    assert fast.stat().st_dev != slow.stat().st_dev
    faulty(1, bytes_per_second=4.0 * MIB)
    with opened([fast, slow], 40 * MIB, kind) as made:
        assert sum(sizes([fast, slow])) == 40 * MIB
        assert 0 < sizes([fast, slow])[1] < 20 * MIB
        made.engines[1].set_faults()
        check_content(made, 40 * MIB)
    with opened([fast, slow], 160 * MIB, kind, shares=(3, 1)) as made:
        held = sizes([fast, slow])
        assert sum(held) == 160 * MIB
        assert 40 * MIB < held[0] < 64 * MIB, "all that its file system does not take for itself"
        check_content(made, 160 * MIB)
    text = (
        rf"^{fast} and {slow} together have \d+ MiB free, but the states on nvme need "
        r"300 MiB there; free \d+ MiB, "
    )
    with pytest.raises(BudgetError, match=text), opened([fast, slow], 300 * MIB, kind):
        pass
