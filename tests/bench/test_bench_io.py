"""`infinity bench io`: its arithmetic, what it refuses, what it leaves behind, and what it writes
for others to read."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import infinity
from infinity import native
from infinity.bench.io import benchmark, fio, patterns, wear, workspace
from infinity.bench.io.block import config_block
from infinity.bench.io.plan import MODES, Plan
from infinity.bench.io.preflight import DirectoryFacts, Link, examine
from infinity.bench.io.results import sustained_facts
from infinity.bench.io.rig import Drive, Measured, Rig, percentile
from infinity.bench.io.search import AS_GOOD, DEPTHS, REQUEST_BYTES, THREADS, Setting, Space, search
from infinity.bench.io.verdict import Evidence, lasting, verdict
from infinity.cli import gc
from infinity.cli.main import app
from infinity.device import HostMemory
from infinity.directories.lock import LOCK_NAME, lock_directory
from infinity.errors import ConfigError, NvmeError, PathInUseError
from infinity.interrupt import interrupted_by_signals
from infinity.placement.calibrate import levelled
from infinity.placement.spec import Kind
from infinity.tiers.extents import STRIPE_BYTES
from infinity.tiers.stripes import Stripes
from support.children import CHILD
from support.machine import IO_ENGINES

MIB = 1 << 20
SMALL = [
    "--size",
    "16MiB",
    "--reserve",
    "0",
    "--search-seconds",
    "0.1",
    "--rounds",
    "2",
    "--round-seconds",
    "0.02",
]


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", "io", *map(str, arguments)])


def refusal(*arguments: object, code: int = 1) -> str:
    """The one sentence on stderr of a command that refuses at once."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return str(result.stderr).removeprefix("infinity: ").rstrip("\n")


# The search, on devices that are a table


def spaces_of(engines: int) -> list[Space]:
    both = [
        Space("io_uring", REQUEST_BYTES, DEPTHS, 96 * MIB),
        Space("posix", REQUEST_BYTES, THREADS, 96 * MIB),
    ]
    return both[:engines]


def all_settings(spaces: list[Space]) -> list[Setting]:
    places = itertools.product(range(len(REQUEST_BYTES)), range(len(DEPTHS)))
    return [
        setting for place in places for space in spaces if (setting := space.at(*place)) is not None
    ]


class FakeDevice:
    """A device that is a pure function of the setting, with noise by seed; counts what is asked of
    it."""

    def __init__(
        self,
        speed: Callable[[Setting], float],
        noise: float = 0.0,
        seed: int = 0,
        calls: float = math.inf,
    ) -> None:
        self.speed, self.noise, self.random, self.left = speed, noise, random.Random(seed), calls
        self.asked: list[Setting] = []

    def __call__(self, setting: Setting) -> float | None:
        if self.left <= 0:
            return None
        self.left -= 1
        self.asked.append(setting)
        return self.speed(setting) * (1 + self.noise * self.random.uniform(-1, 1))


peaks = st.tuples(st.integers(0, len(REQUEST_BYTES) - 1), st.integers(0, len(DEPTHS) - 1))


@settings(deadline=None)
@given(
    peak=peaks,
    slopes=st.tuples(*[st.floats(1.06, 3.0)] * 4),
    engines=st.integers(1, 2),
    factor=st.floats(0.3, 3.0),
)
def test_the_search_finds_the_peak_of_any_single_hill(
    peak: tuple[int, int], slopes: Any, engines: int, factor: float
) -> None:
    def speed(setting: Setting) -> float:
        request, width = REQUEST_BYTES.index(setting.request_bytes), setting.depth.bit_length() - 1
        value = 1000.0 if setting.engine == "io_uring" else 1000.0 * factor
        for at, top, rise, fall in ((request, peak[0], *slopes[:2]), (width, peak[1], *slopes[2:])):
            value /= rise ** max(top - at, 0) * fall ** max(at - top, 0)
        return value

    # Without the memory's limit, which would cut a corner off the hill.
    spaces = [
        Space(space.engine, space.requests, space.widths, 1 << 40) for space in spaces_of(engines)
    ]
    device = FakeDevice(speed)
    found = search(spaces, device, 200)
    assert found.score >= (1 - AS_GOOD) * max(map(speed, all_settings(spaces)))
    assert len(device.asked) < 60  # of 84 settings; with the finals


@settings(deadline=None)
@given(
    table=st.lists(st.floats(0.01, 10), min_size=200, max_size=200),
    trials=st.integers(1, 40),
    noise=st.sampled_from([0.0, 0.3]),
    engines=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_the_search_is_a_function_of_its_measurements(
    table: list[float], trials: int, noise: float, engines: int, seed: int
) -> None:
    spaces = spaces_of(engines)
    speeds = dict(zip(all_settings(spaces), table, strict=False))
    device = FakeDevice(speeds.__getitem__, noise, seed)
    found = search(spaces, device, trials)
    assert found == search(spaces, FakeDevice(speeds.__getitem__, noise, seed), trials)
    assert 1 <= len(device.asked) <= trials
    assert set(device.asked) <= set(speeds)  # nothing that needs more memory than there is
    assert sum(map(len, found.scores.values())) == len(device.asked)
    once = [setting for setting, scores in found.scores.items() if len(scores) == 1]
    assert max(map(len, found.scores.values())) <= 3
    assert found.score == statistics.median(found.scores[found.best])
    finalists = [statistics.median(scores) for scores in found.scores.values() if len(scores) > 1]
    if len(finalists) > 1 and len(once) + len(finalists) == len(found.scores):
        assert found.score >= (1 - AS_GOOD) * max(finalists)


def test_of_equally_fast_settings_the_one_with_the_least_in_flight_wins() -> None:
    def flat_from_eight(setting: Setting) -> float:
        return min(setting.in_flight_bytes, 8 * MIB) / MIB

    assert search(spaces_of(1), FakeDevice(flat_from_eight), 60).best.in_flight_bytes == 8 * MIB
    both = FakeDevice(
        lambda setting: flat_from_eight(setting) * (1.03 if setting.engine == "posix" else 1)
    )
    assert search(spaces_of(2), both, 60).best.engine == "io_uring"  # as fast, and needs no threads
    # The best of each is in the finals.
    assert {setting.engine for setting in both.asked[-3:]} == {"io_uring", "posix"}
    rising = search(spaces_of(1), FakeDevice(lambda setting: float(setting.in_flight_bytes)), 60)
    assert rising.best.in_flight_bytes == 64 * MIB  # the widest within the memory


def test_the_search_ends_with_what_it_has_when_the_time_is_up() -> None:
    device = FakeDevice(lambda setting: float(setting.depth), calls=3)
    found = search(spaces_of(2), device, 40)
    assert len(device.asked) == 3
    assert found.best in device.asked
    with pytest.raises(ValueError, match="before its first measurement"):
        search(spaces_of(1), FakeDevice(lambda setting: 1.0, calls=0), 40)


# Arithmetic


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=50),
    st.sampled_from([1.0, 50.0, 90.0, 99.0, 99.9, 100.0]),
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    values.sort()
    found = percentile(values, percent)
    enough = [
        value
        for value in values
        if sum(other <= value for other in values) * 100 >= percent * len(values) - 1e-6
    ]
    assert found == min(enough)


def test_percentiles_of_a_thousand() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert [percentile(values, percent) for percent in (50, 99, 99.9, 100)] == [500, 990, 999, 1000]
    with pytest.raises(ValueError, match="needs a value"):
        percentile([], 50)


@settings(deadline=None)
@given(
    blocks=st.integers(1, 60),
    model=st.integers(1, 10**10),
    chunk=st.integers(1, 8),
    paths=st.integers(1, 3),
)
def test_a_training_step_moves_its_bytes_and_stays_in_its_space(
    blocks: int, model: int, chunk: int, paths: int
) -> None:
    elements = blocks * patterns.CHUNK_ELEMENTS
    stages = list(patterns.training_step(elements, model, chunk * patterns.CHUNK_ELEMENTS))
    reads = [piece for stage in stages for piece in stage.reads]
    writes = [piece for stage in stages for piece in stage.writes]
    assert sum(nbytes for _, nbytes in reads) == patterns.BYTES_READ * elements
    assert sum(nbytes for _, nbytes in writes) == patterns.BYTES_WRITTEN * elements
    spans = sorted(writes)
    assert all(
        begin + nbytes <= following for (begin, nbytes), (following, _) in itertools.pairwise(spans)
    )
    assert all(
        at >= 0 and at + nbytes <= patterns.STATE_BYTES * elements for at, nbytes in reads + writes
    )
    assert all(at % 4096 == 0 and nbytes % 4096 == 0 for at, nbytes in reads + writes)
    assert max(stage.nbytes for stage in stages) <= chunk * patterns.CHUNK_ELEMENTS * 12
    # What backward reads is what the update wrote, and the update reads none of it.
    written = {(at, at + nbytes) for at, nbytes in writes}
    for stage in stages:
        for at, nbytes in stage.reads:
            covering = sum(max(min(end, at + nbytes) - max(begin, at), 0) for begin, end in written)
            assert covering == (0 if stage.writes else nbytes)
    stripes = Stripes(STRIPE_BYTES, [1.0] * paths)
    pieces = [piece for at, nbytes in writes for piece in stripes.pieces(at, nbytes)]
    assert sum(nbytes for _, _, nbytes in pieces) == patterns.BYTES_WRITTEN * elements
    per_path = sorted(pieces)
    assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in itertools.pairwise(per_path))


def test_the_patterns_of_the_other_modes() -> None:
    assert list(itertools.islice(patterns.sequential("read", 10, 4), 4)) == [
        ("read", 0, 4), ("read", 4, 4), ("read", 8, 2), ("read", 0, 4),
    ]  # fmt: skip
    mixed = list(itertools.islice(patterns.mixed(1000, 1), 100))
    assert [piece.operation for piece in mixed].count("read") == 70
    assert [piece.offset for piece in mixed if piece.operation == "write"] == list(range(30))
    tensors = [
        piece.offset
        for piece in itertools.islice(patterns.many_tensors("write", 10 * 8192, 5000), 20)
    ]
    assert sorted(tensors[:10]) == sorted(tensors[10:]) == [number * 8192 for number in range(10)]
    assert tensors[:10] != sorted(tensors[:10])
    with pytest.raises(ValueError, match="does not fit"):
        next(patterns.many_tensors("write", 4096, 5000))


def test_sustained_speed_is_told_from_the_burst_at_first() -> None:
    samples = [
        (float(second), (min(second, 2) * 3 + max(second - 2, 0)) * 10**9) for second in range(21)
    ]
    facts = sustained_facts(samples, 100)
    assert (facts["first_tenth_gb_per_second"], facts["last_half_gb_per_second"]) == (3.0, 1.0)
    assert facts["kept_ratio"] == pytest.approx(1 / 3)
    assert facts["written_bytes"] == 24 * 10**9
    assert facts["whole_gb_per_second"] == pytest.approx(1.2)


def test_wear_and_the_log_page_of_a_drive() -> None:
    log = bytearray(512)
    log[5], log[48:64] = 7, (123456).to_bytes(16, "little")
    assert wear.parse_smart(bytes(log)) == (wear.Smart(7, 123456 * 512_000))
    assert ctypes.sizeof(wear._AdminCommand) == 72  # what the ioctl's number says
    assert wear.read_smart("vda") is None
    assert wear.read_smart("nvme-not-there") is None
    assert wear.wear_percent(6 * 10**12, 600 * 10**12) == 1.0
    assert wear.wear_percent(6 * 10**12, 600 * 10**12, times=5) == 5.0


# On a real file, small


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[list[Drive]]:
    """Two files of 16 MiB, written, each with 32 MiB of memory."""
    made = []
    for name in ("a", "b"):
        file = native.aio().File(str(tmp_path / name), create=True)
        file.allocate(16 * MIB)
        (tmp_path / name).write_bytes(os.urandom(16 * MIB))
        made.append(Drive(file, 16 * MIB, HostMemory(32 * MIB)))
    yield made
    for drive in made:
        drive.file.close()
        drive.memory.close()


def counted(rig: Rig) -> tuple[int, int]:
    """(read, written) bytes by the native engines' own counters."""
    counters = [engine.counters() for engine in rig.engines]
    return sum(c["bytes_read"] for c in counters), sum(c["bytes_written"] for c in counters)


@pytest.mark.parametrize("engine", IO_ENGINES)
def test_bytes_are_those_that_the_native_engine_counted(engine: str, drives: list[Drive]) -> None:
    setting = Setting(engine, 4, 256 << 10, 4)
    with Rig(drives, setting) as rig:
        whole = rig.stream(
            lambda size: itertools.islice(patterns.sequential("read", size, 3 * MIB), 6), 3 * MIB
        )
        assert (whole.bytes_read, whole.bytes_written) == (32 * MIB, 0) == counted(rig)
        timed = rig.stream(
            lambda size: patterns.mixed(size, 256 << 10), 256 << 10, seconds=0.02, only=1
        )
        tensors = rig.stream(
            lambda size: itertools.islice(patterns.many_tensors("write", size, 5001), 40), 5001
        )
        assert tensors.bytes_written == 2 * 40 * 5001
        batches = rig.stream(
            lambda size: itertools.islice(patterns.many_tensors("read", size, 5001), 41),
            5001,
            batch=8,
        )
        assert batches.bytes_read == 2 * 41 * 5001
        stages = list(
            patterns.training_step(8 * patterns.CHUNK_ELEMENTS, 10**9, patterns.CHUNK_ELEMENTS)
        )
        step = rig.replay(stages)
        assert step.bytes_read == 14 * 8 * patterns.CHUNK_ELEMENTS
        assert step.bytes_written == 12 * 8 * patterns.CHUNK_ELEMENTS
        polled = rig.latencies(
            lambda size: itertools.islice(patterns.sequential("read", size, 4096), 100),
            4096,
            60,
            only=0,
        )
        assert len(polled) == 100
        assert polled == sorted(polled)
        assert polled[0] > 0
        runs = [whole, timed, tensors, batches, step]
        assert counted(rig) == (
            sum(r.bytes_read for r in runs) + 100 * 4096,
            sum(r.bytes_written for r in runs),
        )
        assert (rig.moved["read"], rig.moved["write"]) == counted(rig)


@pytest.mark.parametrize("engine", IO_ENGINES)
def test_a_failing_request_ends_the_run_with_its_place(engine: str, drives: list[Drive]) -> None:
    with Rig(drives, Setting(engine, 4, 256 << 10, 4)) as rig:
        rig.engines[1].set_faults(fail_read_at=6)
        with pytest.raises(NvmeError, match="Input/output error") as caught:
            rig.stream(
                lambda size: itertools.islice(patterns.sequential("read", size, 256 << 10), 8),
                256 << 10,
                batch=4,
            )
        assert caught.value.offset == 6 * (256 << 10)  # of the piece in its batch
        for each in rig.engines:
            each.set_faults()
        for way, start in (
            (
                "stream",
                lambda: rig.stream(lambda size: patterns.sequential("read", size, MIB), MIB, 60),
            ),
            (
                "replay",
                lambda: rig.replay(
                    patterns.training_step(
                        8 * patterns.CHUNK_ELEMENTS, 10**9, patterns.CHUNK_ELEMENTS
                    )
                ),
            ),
            (
                "latencies",
                lambda: rig.latencies(
                    lambda size: patterns.sequential("read", size, MIB), MIB, 60, only=1
                ),
            ),
        ):
            rig.engines[1].set_faults(fail_read_at=2)
            if way == "replay":
                rig.engines[0].set_faults(fail_read_at=2)
            with pytest.raises(NvmeError, match="Input/output error"):
                start()
            for each in rig.engines:
                each.set_faults()
                each.drain()


def test_nothing_has_been_changed_by_reading_and_everything_by_writing(drives: list[Drive]) -> None:
    before = [Path(drive.file.path).read_bytes() for drive in drives]
    with Rig(drives, Setting("posix", 4, 256 << 10, 4)) as rig:
        rig.stream(lambda size: patterns.sequential("read", size, MIB), MIB, 0.02)
        assert [Path(drive.file.path).read_bytes() for drive in drives] == before
        for drive in drives:
            drive.memory.tensor.fill_(7)
        rig.stream(lambda size: itertools.islice(patterns.sequential("write", size, MIB), 16), MIB)
    assert all(Path(drive.file.path).read_bytes() == b"\7" * (16 * MIB) for drive in drives)


# Files: only ours, and none left


def test_the_folder_is_ours_alone_and_gone_afterwards(tmp_path: Path) -> None:
    with workspace.workspace([tmp_path], 16 * MIB, 0) as (file,):
        assert file.size() == 16 * MIB
        assert {path.name for path in tmp_path.iterdir()} == {workspace.FOLDER, LOCK_NAME}
        with (
            pytest.raises(PathInUseError, match=f"process {os.getpid()}"),
            workspace.workspace([tmp_path], 16 * MIB, 0),
        ):
            pass
        with pytest.raises(PathInUseError):
            gc.collect(tmp_path)
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(RuntimeError, match="on the way"),
        workspace.workspace([tmp_path], 16 * MIB, 0),
    ):
        raise RuntimeError("on the way")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "case", ["no marker", "another file", "a file", "a link", "data is a link", "lock is a link"]
)
def test_files_of_others_are_refused_and_kept(tmp_path: Path, case: str) -> None:
    folder, precious = tmp_path / workspace.FOLDER, tmp_path / "precious"
    precious.mkdir()
    (precious / workspace.DATA).write_text("mine")
    (precious / workspace.MARKER).write_text("")
    if case == "a file":
        folder.write_text("mine")
    elif case == "a link":
        folder.symlink_to(precious)
    elif case == "lock is a link":
        (tmp_path / LOCK_NAME).symlink_to(precious / workspace.DATA)
    else:
        folder.mkdir()
        (folder / {"another file": "thesis.tex"}.get(case, workspace.DATA)).write_text("mine")
        if case != "no marker":
            (folder / workspace.MARKER).touch()
        if case == "data is a link":
            (folder / workspace.DATA).unlink()
            (folder / workspace.DATA).symlink_to(precious / workspace.DATA)
    before = {str(path): path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    sentence = refusal("--nvme", tmp_path, *SMALL)
    assert re.search("was not made by infinity|did not write|is a link", sentence)
    assert {
        str(path): path.is_file() and path.read_text() for path in tmp_path.rglob("*")
    } == before


def test_a_live_training_is_not_disturbed(tmp_path: Path) -> None:
    with lock_directory(tmp_path, "nvme directory"):
        result = run("--nvme", tmp_path, *SMALL)
        assert result.exit_code == 1
        assert f"in use by process {os.getpid()}" in result.stderr.splitlines()[-1]
        assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME}


def test_a_disk_is_never_filled(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    for size, reserve, paths in ((free, 0, 2), (16 * MIB, free, 1), (free // 2 + 64 * MIB, 0, 2)):
        places = [tmp_path / str(number) for number in range(paths)]
        for place in places:
            place.mkdir(exist_ok=True)
        result = run(
            *(item for place in places for item in ("--nvme", place)),
            "--size",
            size,
            "--reserve",
            reserve,
        )
        assert result.exit_code == 1
        sentence = result.stderr.splitlines()[-1]
        for part in (
            " free, but the benchmark needs ",
            "have to stay free (--reserve); ",
            str(places[0]),
        ):
            assert part in sentence
        assert all(not list(place.iterdir()) for place in places)
    largest = re.search(r"the largest --size that works is (\d+)MiB", sentence)
    assert largest is not None
    # Others write to this disk meanwhile.
    workspace.check_space(places, int(largest[1]) * MIB - 64 * MIB, 0)


def test_what_is_written_is_said_before(tmp_path: Path) -> None:
    result = run(tmp_path, *SMALL, "--mode", "write", "--engine", "posix")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("this writes ") and "at 3 GB/s " in lines[0]
    assert any(line.startswith("writing ") for line in lines[1:])


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"modes": ("read",)}, 0.0),
        ({"modes": ("write",)}, 30 + 3 + 1),
        ({"modes": ("read", "write")}, 15 + 3 + 1),
        ({"modes": ("write",), "load": True}, 30 + 2 * 3 + 2),
        ({"modes": ("write",), "compare_fio": True}, 30 + 2 * 3 + 1),
        ({"modes": ("mixed",), "sustained": 60.0}, 15 + 0.3 * 4 + 60),
        ({"modes": ("write",), "paths": (Path("a"), Path("b"))}, 30 + 2 * 4),
    ],
)
def test_the_seconds_of_writes(changes: dict[str, Any], seconds: float) -> None:
    usual: dict[str, Any] = {
        "paths": (Path("a"),), "size": 2 << 30, "reserve": 0, "engine": "auto", "depth": None,
        "request_bytes": None, "threads": None, "search_seconds": 30.0, "rounds": 3,
        "round_seconds": 1.0, "tensor_bytes": 1 << 20, "model_parameters": 7, "load": False,
        "compare_fio": False, "sustained": None, "write_set": None, "endurance": None, "runs": 1,
    }  # fmt: skip
    plan = Plan(**usual | changes)
    assert plan.writing_seconds == pytest.approx(seconds)
    assert ("at 3 GB/s" in plan.wear()) == (seconds > 0)


def test_what_makes_no_sense_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert refusal() == "no directory is given: infinity bench io DIR, on the drive to measure"
    missing = tmp_path / "no"
    assert refusal("--nvme", missing) == (
        f"directory {missing} does not exist; create it on the drive to be measured: mkdir -p "
        f"{missing}"
    )
    assert (
        refusal("--nvme", tmp_path, "--nvme", tmp_path)
        == f"the directories must differ: {tmp_path}, {tmp_path}"
    )
    assert "the least is 16 MiB" in refusal("--nvme", tmp_path, "--size", "1MiB")
    assert "multiple of 4096" in refusal("--nvme", tmp_path, "--request-bytes", 1000)
    assert "--write-set is what --sustained seconds write;" in refusal(
        "--nvme", tmp_path, "--write-set", "1GiB"
    )
    assert "--tensor-bytes has to be between" in refusal(
        "--nvme", tmp_path, "--size", "16MiB", "--tensor-bytes", "1GiB"
    )
    assert "nothing is left to measure: --mode is empty" in refusal(
        "--nvme", tmp_path, "--mode", "read", "--no-read"
    )
    for option in ("--json", "--report", "--block"):
        assert f"{option} {tmp_path}/no/file cannot be written" in refusal(
            "--nvme", tmp_path, option, tmp_path / "no/file"
        )
    wide = refusal(
        "--nvme", tmp_path, "--engine", "posix", "--threads", 64, "--request-bytes", "64MiB"
    )
    assert wide.startswith(
        "posix: at least 4 GiB would be in flight, of 96 MiB that there is memory for"
    )
    assert not list(tmp_path.iterdir())


def test_without_fio_a_comparison_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal("--nvme", tmp_path, "--compare-fio") == (
        "--compare-fio needs fio, which is not installed; install it with: apt-get install fio"
    )


def started(path: Path) -> subprocess.Popen[str]:
    """A benchmark as a process of its own that is writing for minutes."""
    command = [
        sys.executable,
        "-m",
        "infinity",
        "bench",
        "io",
        "--nvme",
        str(path),
        *SMALL,
        "--mode",
        "write",
    ]
    process = subprocess.Popen(
        [*command, "--sustained", "600", "--write-set", "16MiB"], stderr=subprocess.PIPE, **CHILD
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("writing for"):
            return process
    raise AssertionError(f"the benchmark ended with {process.wait()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with started(tmp_path) as process:
        assert (tmp_path / workspace.FOLDER / workspace.DATA).stat().st_size == 16 * MIB
        process.send_signal(number)
        _, stderr = process.communicate()
    assert process.returncode == 128 + number
    by = " by SIGTERM" if number == signal.SIGTERM else ""
    assert stderr.splitlines()[-1] == f"infinity: interrupted{by}"
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_goes_with_the_next_or_with_gc(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        process.kill()
        process.communicate()
    left = tmp_path / workspace.FOLDER / workspace.DATA
    assert left.stat().st_size == 16 * MIB
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(tmp_path / workspace.FOLDER, copy / workspace.FOLDER)
    assert set(gc.collect(copy)) == {
        str(copy / workspace.FOLDER / name) for name in (workspace.DATA, workspace.MARKER)
    } | {str(copy / workspace.FOLDER)}
    assert not list(copy.iterdir())
    copy.rmdir()
    result = run(tmp_path, *SMALL, "--mode", "read", "--engine", "posix", "--json")
    assert result.exit_code == 0, result.stderr
    assert not list(tmp_path.iterdir())


def test_the_second_signal_does_not_cut_off_the_clean_up() -> None:
    cleaned = []
    with pytest.raises(KeyboardInterrupt) as raised, interrupted_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
    assert raised.value.args == (signal.SIGTERM,)
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# Whole runs

UNITS = re.compile(
    r"_(bytes|seconds|gb_per_second|seconds_per_gb|ratio|count|percent|requests|per_second)$|^seconds$"
)


def numbers_without_unit(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [
            found for name, inner in value.items() for found in numbers_without_unit(inner, name)
        ]
    if isinstance(value, list):
        return [found for inner in value for found in numbers_without_unit(inner, key)]
    return (
        [key]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not UNITS.search(key)
        else []
    )


class Page(HTMLParser):
    """The text of a page, and which tags and references it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.references = "", set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        self.references += [
            value for name, value in attributes if name in ("src", "href", "xlink:href")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_whole_run_on_two_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    out = {name: tmp_path / name for name in ("result.json", "page.html", "block.json")}
    result = run(
        *(word for path in paths for word in ("--nvme", path)),
        *SMALL,
        "--count",
        "50M",
        "--load",
        "--endurance",
        "600TB",
        "--runs",
        3,
        "--sustained",
        0.3,
        "--json",
        out["result.json"],
        "--report",
        out["page.html"],
        "--block",
        out["block.json"],
    )
    assert result.exit_code == 0, result.stderr
    assert all(not list(path.iterdir()) for path in paths)
    facts = json.loads(out["result.json"].read_text())
    assert (
        numbers_without_unit({key: value for key, value in facts.items() if key != "config"}) == []
    )
    rows = {(row["mode"], len(row["paths"]), row["load"]): row for row in facts["rows"]}
    everywhere = ["read", "write", "mixed", "many-tensor write", "many-tensor read", "replay"]
    assert set(rows) == (
        {(mode, 2, load) for mode in everywhere for load in (None, "CPU Adam")}
        | {("read", 1, None), ("write", 1, None)}
    )
    assert len(facts["rows"]) == len(rows) + 2  # each path alone
    for (mode, _, load), row in rows.items():
        assert (
            row["lowest_gb_per_second"]
            <= row["median_gb_per_second"]
            <= row["highest_gb_per_second"]
        )
        assert row["rounds_count"] == 2
        assert (
            (row["cpu_seconds_per_gb"] is None)
            == (load is not None)
            != (row["of_quiet_ratio"] is None)
        )
        assert (row["read_bytes"] > 0) == ("write" not in mode)
        assert (row["written_bytes"] > 0) == ("read" not in mode)
        if mode != "replay":
            assert (
                0
                < row["latency_p50_seconds"]
                <= row["latency_p99_seconds"]
                <= row["latency_p99_9_seconds"]
            )
    replay = rows["replay", 2, None]
    assert replay["read_bytes"] == 2 * 14 * replay["replayed_parameters_count"]
    assert replay["written_bytes"] == 2 * 12 * replay["replayed_parameters_count"]
    assert replay["io_per_training_step_seconds"] == pytest.approx(
        26 * 50e6 / (replay["median_gb_per_second"] * 1e9)
    )
    # Everything that was written is in the wear, and more: the files' first writing, the search and
    # the latencies.
    written = (
        sum(row["written_bytes"] for row in facts["rows"]) + facts["sustained"]["written_bytes"]
    )
    assert facts["wear"]["written_bytes"] > written + 2 * 16 * MIB
    assert facts["wear"]["endurance_used_percent"] == pytest.approx(
        100 * 3 * facts["wear"]["written_bytes"] / 2 / 600e12
    )
    for sentence, begin in zip(
        facts["limits"], ("Reads are limited by", "Writes are limited by", "Writes "), strict=True
    ):
        assert sentence.startswith(begin)
    assert facts["load"]["adam_gigaparameters_per_second"] > 0
    assert json.loads(out["block.json"].read_text()) == facts["config"]
    alone = {
        path: statistics.harmonic_mean(
            [row["median_gb_per_second"] for row in facts["rows"] if row["paths"] == [str(path)]]
        )
        for path in paths
    }
    assert facts["config"]["infinity"]["tuning"]["nvme_shares"] == [
        float(f"{speed:.3g}") for speed in levelled(list(alone.values()))
    ]
    for shown in (
        "GB/s",
        "p99.9",
        "many-tensor read",
        "beside CPU Adam",
        "Reads are limited by",
        '"aio"',
        "sustained",
    ):
        assert shown in result.stdout
    page = Page(out["page.html"].read_text())
    assert not page.tags & {"script", "link", "iframe"}
    assert all(reference.startswith("#") for reference in page.references)
    for shown in (
        "infinity bench io",
        "Sustained writing",
        "Reads are limited by",
        '"intra_op_parallelism"',
        "many-tensor read",
    ):
        assert shown in page.text


def test_json_on_stdout_is_all_there_is(tmp_path: Path) -> None:
    result = run(
        "--nvme",
        tmp_path,
        *SMALL,
        "--mode",
        "write",
        "--engine",
        "posix",
        "--threads",
        2,
        "--request-bytes",
        "64K",
        "--json",
        "-",
    )
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["best"] == {
        "engine": "posix",
        "depth_requests": 2,
        "request_bytes": 65536,
        "threads_count": 2,
    }
    assert (
        facts["config"]["aio"] | {"block_size": 65536, "queue_depth": 1, "intra_op_parallelism": 2}
        == facts["config"]["aio"]
    )
    assert [row["mode"] for row in facts["rows"]] == ["write"]
    assert sum(row["read_bytes"] for row in facts["rows"]) == 0


# fio


@pytest.mark.parametrize("mode, word", [("read", "read"), ("write", "write"), ("mixed", "rw")])
def test_fio_gets_equal_parameters(mode: str, word: str) -> None:
    setting = Setting("io_uring", 32, MIB, 1)
    files = [("/n/a", 100 * MIB), ("/n/b:c", 64 * MIB)]
    common, *jobs = " ".join(
        fio.arguments(mode, setting, files, 1.5, True, ring=True, registered=True)
    ).split(" --name=path")
    given_options = dict(option.removeprefix("--").split("=", 1) for option in common.split())
    assert (
        given_options
        | {
            "name": "global",
            "rw": word,
            "bs": "1048576",
            "iodepth": "32",
            "ioengine": "io_uring",
            "direct": "1",
            "runtime": "1500ms",
            "time_based": "1",
            "allow_file_create": "0",
            "fixedbufs": "1",
            "scramble_buffers": "0",
        }
        == given_options
    )
    assert given_options.get("rwmixread") == ("70" if mode == "mixed" else None)
    assert jobs == ["0 --filename=/n/a --size=104857600", r"1 --filename=/n/b\:c --size=67108864"]
    assert "--fixedbufs=1" not in fio.arguments(
        mode, setting, files, 1.5, True, ring=True, registered=False
    )
    threads = fio.arguments(
        mode, Setting("posix", 3, 8 * MIB, 3), files[:1], 1, False, ring=False, registered=True
    )
    assert {"--ioengine=libaio", "--iodepth=3", "--direct=0", f"--size={96 * MIB}"} <= set(threads)
    assert fio.ENVIRONMENT == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_fios_report_is_read() -> None:
    job = {
        "read": {"io_bytes": 7 * 10**9, "runtime": 2000},
        "write": {"io_bytes": 3 * 10**9, "runtime": 1990},
        "usr_cpu": 10.0,
        "sys_cpu": 15.0,
        "job_runtime": 2000,
    }
    measured = fio.parse({"jobs": [job]})
    assert measured == Measured(7 * 10**9, 3 * 10**9, 2.0, 0.5)
    assert measured.gb_per_second == 5.0
    assert measured.cpu_seconds_per_gb == 0.05


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_a_comparison_with_fio_on_two_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b:c"]
    for path in paths:
        path.mkdir()
    for engine in IO_ENGINES:
        result = run(
            *(f"--nvme={path}" for path in paths),
            *SMALL,
            "--mode",
            "write",
            "--engine",
            engine,
            "--compare-fio",
            "--json",
            "-",
        )
        assert result.exit_code == 0, result.stderr
        for row in json.loads(result.stdout)["rows"]:
            assert row["fio_lowest_ratio"] <= row["fio_median_ratio"] <= row["fio_highest_ratio"]
            assert row["fio_median_gb_per_second"] > 0
    assert all(not list(path.iterdir()) for path in paths)


def test_what_fio_says_reaches_the_user(tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho 'fio: cannot do that' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(infinity.InfinityError, match="fio failed: fio: cannot do that"):
        fio.run(str(program), [])


# The block of configuration

SETTINGS = [Setting("io_uring", 32, 2 * MIB, 1), Setting("posix", 8, MIB, 8)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_infinity_parses_the_block(setting: Setting, tmp_path: Path) -> None:
    block = json.loads(json.dumps(config_block([tmp_path], setting)))
    config = infinity.Config(**block["infinity"], gpu_memory="1GiB", cpu_memory="1GiB")
    assert config.nvme == (tmp_path,)
    assert config.tuning.io_engine == setting.engine
    assert config.tuning.nvme_shares == "measured", "with one path there is nothing to share"


def test_the_block_says_how_fast_each_path_is(tmp_path: Path) -> None:
    """Speeds that two measurements would not tell apart are equal there."""
    paths = [tmp_path / name for name in "abc"]
    block = config_block(paths, SETTINGS[0], [3.2104, 1.0, 2.9])
    config = infinity.Config(
        **json.loads(json.dumps(block))["infinity"], gpu_memory="1GiB", cpu_memory="1GiB"
    )
    assert config.nvme == tuple(paths)
    assert config.tuning.nvme_shares == (3.06, 1.0, 3.06)


DEEPSPEED = {
    "block_size": int,
    "queue_depth": int,
    "intra_op_parallelism": int,
    "single_submit": bool,
    "overlap_events": bool,
}
"""The keys of DeepSpeed's `aio` section that its parser reads
(deepspeed/runtime/swap_tensor/constants.py), and their types."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_deepspeed_parses_the_block(setting: Setting, tmp_path: Path) -> None:
    block = json.loads(json.dumps(config_block([tmp_path], setting)))
    assert {key: type(value) for key, value in block["aio"].items()} == DEEPSPEED
    aio = block["aio"]
    assert aio["block_size"] == setting.request_bytes
    # As many requests in flight.
    assert aio["queue_depth"] * aio["intra_op_parallelism"] == setting.depth


@pytest.mark.parametrize("setting", SETTINGS)
def test_deepspeeds_own_parser_reads_every_key(setting: Setting, tmp_path: Path) -> None:
    parser = pytest.importorskip("deepspeed.runtime.swap_tensor.aio_config")
    block = config_block([tmp_path], setting)
    parsed = parser.get_aio_config(json.loads(json.dumps(block)))
    assert {key: parsed[key] for key in block["aio"]} == block["aio"]


class Stopped(Exception):
    pass


def plan_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Plan:
    plans: list[Plan] = []

    def stop(self: Any, plan: Plan, say: Any) -> None:
        plans.append(plan)
        raise Stopped

    monkeypatch.setattr(benchmark.Benchmark, "__init__", stop)
    result = run(*arguments, "--debug")
    assert isinstance(result.exception, Stopped), result.output
    return plans[0]


def test_what_is_measured_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = plan_of(monkeypatch, "--nvme", tmp_path, "--no-read", "--count", "1.5B")
    assert found.modes == tuple(mode for mode in MODES if mode != "read")
    assert found.model_parameters == 1_500_000_000


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--path", "DIR"),
        ("--nvme_dir", "DIR"),
        ("--folder=x", "DIR"),
        ("--io_size", "--size"),
        ("--block_size", "--request-bytes"),
        ("--queue_depth", "--depth"),
        ("--io_parallel", "--threads"),
        ("--loops", "--rounds"),
        ("--read", "--mode read"),
        ("--no_read", "--no-read"),
    ],
)
def test_an_option_that_has_another_name_is_answered_with_it(
    option: str, name: str, tmp_path: Path
) -> None:
    sentence = refusal("--nvme", tmp_path, option, "x", code=2)
    assert sentence == f"{option.partition('=')[0]} is called {name} here"


@pytest.mark.parametrize(
    "option",
    [
        "--gds",
        "--use_gds",
        "--gpu",
        "--single_submit",
        "--sequential_requests",
        "--log_dir",
        "--sweep_config=x.json",
        "--folder_to_device_mapping",
        "--flush_page_cache",
        "--multi_process",
        "--validate",
    ],
)
def test_options_of_deepspeed_without_a_meaning_are_answered(option: str, tmp_path: Path) -> None:
    sentence = refusal("--nvme", tmp_path, option, "x", code=2)
    assert sentence.startswith(
        f"{option.partition('=')[0]} is an option of DeepSpeed that does not apply: "
    )
    assert not list(tmp_path.iterdir())


# Preflight and verdict


def fake_sys(root: Path, number: int) -> Path:
    """A /sys in which the device `number` is a partition, under an encrypted volume, of an NVMe
    drive on PCIe."""
    controller = root / "devices/pci0000:00/0000:01:00.0"
    disk = controller / "nvme/nvme0/nvme0n1"
    part = controller / "nvme/nvme0/nvme0n1/nvme0n1p2"
    crypt = root / "devices/virtual/dm-0"
    for folder in (disk / "queue", part, crypt / "slaves", crypt / "queue", root / "dev/block"):
        folder.mkdir(parents=True)
    (disk / "device").symlink_to(controller / "nvme/nvme0")
    (crypt / "slaves/nvme0n1p2").symlink_to(part)
    (root / "dev/block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(crypt)
    for path, text in {
        controller / "current_link_speed": "16.0 GT/s PCIe",
        controller / "current_link_width": "4",
        controller / "numa_node": "1",
        controller / "nvme/nvme0/model": "Fast Drive 2TB   ",
        disk / "queue/rotational": "0",
        part / "partition": "2",
    }.items():
        path.write_text(text + "\n")
    return root


def test_preflight_finds_drive_link_and_node_below_a_volume(tmp_path: Path) -> None:
    place = examine(tmp_path, fake_sys(tmp_path / "sys", tmp_path.stat().st_dev))
    assert (place.device, place.model, place.rotational, place.numa_node) == (
        "nvme0n1",
        "Fast Drive 2TB",
        False,
        1,
    )
    assert place.link == Link(16.0, 4)
    assert place.link.bytes_per_second == pytest.approx(7.877e9, rel=1e-3)
    assert Link(5.0, 4).bytes_per_second == 2e9
    assert place.file_system is not None
    assert place.free_bytes > 0
    nothing = examine(tmp_path, tmp_path / "no-sys")
    assert (nothing.device, nothing.link, nothing.numa_node, nothing.rotational) == (
        None,
        None,
        None,
        None,
    )


PLACE = DirectoryFacts(
    Path("/n"), "ext4", "nvme0n1", None, False, False, False, None, Link(16.0, 4), 1 << 40, None
)


def evidence(**changes: Any) -> Evidence:
    common = {
        "operation": "read",
        "together": 3.0,
        "alone": [],
        "cpu_share": 0.1,
        "setting": SETTINGS[0],
        "at_setting": 3.0,
    }
    return Evidence(**(common | {"wider": 3.05, "fio_ratio": None} | changes))


@pytest.mark.parametrize(
    "places, changes, words",
    [
        ([PLACE], {"together": 7.0}, "the PCIe link: 7.00 GB/s is 89% of its 7.88 GB/s"),
        (
            [PLACE],
            {},
            (
                "the device itself (nvme0n1): twice as much in flight is not faster than 3.00 "
                "GB/s, 38% of the PCIe link"
            ),
        ),
        ([PLACE], {"cpu_share": 0.95}, "the CPU: each engine takes 95% of a core for 3.00 GB/s"),
        (
            [PLACE],
            {"wider": 4.0},
            "the bytes in flight: 3.00 GB/s, and the search saw 4.00 GB/s with more of it",
        ),
        (
            [PLACE],
            {"wider": None},
            "the bytes in flight (32 requests of 2048 KiB) or by the device: 3.00 GB/s",
        ),
        (
            [PLACE, PLACE],
            {"together": 4.0, "alone": [3.0, 3.0]},
            "what the paths share: together they reach 4.00 GB/s, alone 6.00",
        ),
        ([PLACE], {"fio_ratio": 0.98}, "(98% of what fio gets)"),
    ],
)
def test_the_verdict_names_the_strongest_reason(
    places: list[DirectoryFacts], changes: dict[str, Any], words: str
) -> None:
    sentence = verdict(places, evidence(**changes))
    assert words in sentence
    assert sentence.startswith("Reads are limited by ")
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_burst_is_not_taken_for_a_speed() -> None:
    assert lasting(0.0, 1.25, 10**9, 10**9).startswith("Nothing is said of long writes")
    fallen = lasting(5.0, 1.25, 80 * 10**9, 100 * 10**9)
    assert fallen.startswith("Writes fall from 5.00 to 1.25 GB/s as 80 GB are written: ")
    kept = "Writes keep 98% of their first speed over 80 GB"
    assert lasting(5.0, 4.9, 80 * 10**9, 80 * 10**9) == f"{kept}."
    assert (
        lasting(5.0, 4.9, 80 * 10**9, 2 * 10**9)
        == f"{kept}, but on the same 2 GB, which a cache may hold."
    )


def test_a_page_cache_is_not_taken_for_a_drive() -> None:
    cached = DirectoryFacts(
        Path("/t"),
        "tmpfs",
        None,
        None,
        None,
        False,
        True,
        None,
        None,
        1 << 30,
        "O_DIRECT refused: Invalid argument",
    )
    assert "memory and the page cache: /t has no drive" in verdict(
        [cached], evidence(operation="write")
    )


def test_the_load_is_adam_on_every_core() -> None:
    from infinity.bench.io.load import Load

    load = Load()
    with load:
        while load.updated == 0:
            pass
    before = load.updated
    assert load.seconds > 0
    assert torch.isfinite(load._adam.chunks[0].tensors[Kind.PARAM]).all()
    with load:
        while load.updated == before:
            pass
    load.close()


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 1 << 40), reserve=st.integers(0, 1 << 40))
def test_the_largest_size_named_is_one_that_works(size: int, reserve: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        status = os.statvfs_result((4096, 4096, 1 << 27, 1 << 26, 1 << 26, 0, 0, 0, 0, 255))
        patch.setattr(os, "statvfs", lambda path: status)
        try:
            workspace.check_space([Path("/"), Path("/")], size, reserve)
        except ConfigError as error:
            assert 2 * size + reserve > 1 << 38
            named = re.search(r"`size` that works is (\d+)MiB", str(error))
            if named:
                workspace.check_space([Path("/"), Path("/")], int(named[1]) * MIB, reserve)
                with pytest.raises(ConfigError):
                    workspace.check_space(
                        [Path("/"), Path("/")], (int(named[1]) + 8) * MIB, reserve
                    )
            else:
                assert reserve > (1 << 38) - 16 * MIB
        else:
            assert 2 * size + reserve <= 1 << 38
