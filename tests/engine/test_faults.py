"""A drive that fails: short transfers change nothing, a failed read can be tried again, a failed
update closes the engine.

Faults are injected in the native engine (`engine.io.set_faults`), below everything that is tested
here.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.observe import Recorder
from infinity.tiers import drives, extents
from infinity.tiers.access import Mover
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import Places
from infinity.tiers.states_files import ExtentTransfer
from support.faults import Run, fail_from_the_update_on
from support.machine import IO_ENGINES
from support.probe import Probe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60, method="thread")]

each_engine = pytest.mark.parametrize("io_engine", IO_ENGINES)
STEPS = 3


Start = Callable[..., Run]


@pytest.fixture
def start(
    tmp_path: Path, smallest: Callable[..., dict[str, int]], request: pytest.FixtureRequest
) -> Start:
    """`start(**config)`: a `Run` in a directory of its own, closed at the end of the test."""

    def make(**config: Any) -> Run:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        run = Run(directory, smallest, **config)
        request.addfinalizer(run.engine.close)
        return run

    return make


Outcome = tuple[list[float], dict[tuple[str, str], torch.Tensor]]
_without_faults: dict[str, Outcome] = {}


def without_faults(start: Start, **config: Any) -> Outcome:
    """The losses and states of `STEPS` steps on a drive that works, computed once."""
    if str(config) not in _without_faults:
        run = start(**config)
        losses = [run.step(number) for number in range(STEPS)]
        run.engine.drain()
        _without_faults[str(config)] = losses, run.states()
        run.engine.close()
    return _without_faults[str(config)]


def left_by_runs(tmp_path: Path) -> list[Path]:
    return [path for directory in tmp_path.iterdir() for path in directory.iterdir()]


def same(
    mine: dict[tuple[str, str], torch.Tensor], theirs: dict[tuple[str, str], torch.Tensor]
) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@each_engine
@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_short_transfers_change_nothing(
    io_engine: str, fraction: float, gradients: str, start: Start
) -> None:
    losses, states = without_faults(start, gradients=gradients)
    run = start(io_engine=io_engine, gradients=gradients)
    run.engine.io.set_faults(seed=7, short_fraction=fraction)
    assert [run.step(number) for number in range(STEPS)] == losses
    run.engine.drain()
    assert same(run.states(), states)
    assert run.engine.io.counters()["continued"] > 50


@each_engine
def test_a_slow_drive_changes_nothing(io_engine: str, start: Start) -> None:
    losses, states = without_faults(start)
    run = start(io_engine=io_engine)
    run.engine.io.set_faults(bytes_per_second=40e6)
    assert [run.step(number) for number in range(STEPS)] == losses
    run.engine.drain()
    assert same(run.states(), states)


@each_engine
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("during", ["forward", "backward"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA])
def test_a_read_that_fails_in_the_model(
    io_engine: str,
    gradients: str,
    during: str,
    code: int,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for the unit gets the error; once the drive reads again, so does training, with
    the same bits."""
    # The model's thread is the one that meets the failure.
    monkeypatch.setattr(Mover, "post", lambda self, fetch: None)
    losses, states = without_faults(start, gradients=gradients)
    run = start(io_engine=io_engine, gradients=gradients)
    assert [run.step(number) for number in range(STEPS - 1)] == losses[:-1]
    run.engine.drain()
    for nth in range(3):
        run.forward(90)  # what is resident now is what a forward leaves
        before = run.engine.memory()
        loss = run.forward(91) if during == "backward" else None
        run.engine.io.set_faults(fail_read_at=nth, fail_errno=code)
        with pytest.raises(infinity.NvmeError) as caught:
            run.forward(91) if loss is None else loss.backward()
        error = caught.value
        assert (error.errno, error.operation, error.done) == (code, "read", 0)
        assert Path(error.filename).name == STATES_NAME == Path(error.path).name
        assert error.asked > 0 and error.offset % 4096 == 0
        assert f"read of {error.asked} bytes at offset {error.offset} stopped after 0: " in str(
            error
        )
        run.engine.io.set_faults()
        run.optimizer.zero_grad()
        run.forward(90)
        assert run.engine.memory() == before
        assert run.pins() == 0
    assert run.step(STEPS - 1) == losses[-1]
    run.engine.drain()
    assert same(run.states(), states)


@each_engine
def test_a_prefetch_that_fails_once_is_fetched_again(io_engine: str, start: Start) -> None:
    """With the mover at work a read that fails ahead of its use may pass unnoticed; if not, the
    error is the user's to see."""
    losses, states = without_faults(start)
    run = start(io_engine=io_engine)
    assert run.step(0) == losses[0]
    run.engine.drain()
    for nth in range(8):
        run.engine.io.set_faults(fail_read_at=nth)
        try:
            run.forward(91).backward()
        except infinity.NvmeError as error:
            assert error.errno == errno.EIO
        run.engine.io.set_faults()
        run.optimizer.zero_grad()
    assert [run.step(number) for number in range(1, STEPS)] == losses[1:]
    run.engine.drain()
    assert same(run.states(), states)


def test_a_read_that_meets_the_end_of_the_file(start: Start, tmp_path: Path) -> None:
    run = start()
    run.step(0)
    run.engine.drain()
    with next(tmp_path.glob(f"*/{STATES_NAME}")).open("r+b") as file:
        file.truncate(0)
    with pytest.raises(infinity.NvmeError, match="the file ends before the asked bytes") as caught:
        run.forward(1)
    assert (caught.value.errno, caught.value.done) == (0, 0)
    assert run.pins() == 0
    run.engine.close()


@each_engine
@pytest.mark.parametrize(
    ("fault", "finished"),
    [
        ({"fail_write_at": 0}, 0),
        ({"fail_write_at": 9, "fail_errno": errno.ENOSPC}, 2),
        ({"fail_read_at": 0}, 0),
    ],
    ids=["first write", "a later write", "read"],
)
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_an_update_that_fails(
    io_engine: str,
    fault: dict[str, int],
    finished: int,
    gradients: str,
    start: Start,
    tmp_path: Path,
    footprint: Callable[[], object],
) -> None:
    """The user's next call raises, from the cause; every unit reads as of this step or the one
    before, never as a mixture."""
    _, after = without_faults(start, gradients=gradients)
    held = footprint()
    run = start(io_engine=io_engine, gradients=gradients)
    for number in range(STEPS - 1):
        run.step(number)
    run.forward(STEPS - 1).backward()
    run.engine.drain()
    before = run.states()
    fail_from_the_update_on(run, **fault)
    run.optimizer.step()

    text = (
        r"^an update failed and the engine cannot go on: .* of \d+ bytes at offset \d+ "
        r"stopped after \d+: "
    )
    uses = [
        functools.partial(run.forward, STEPS),
        run.engine.drain,
        run.optimizer.step,
        run.engine.state_dict,
    ]
    for use in uses:
        with pytest.raises(infinity.EngineClosedError, match=text) as caught:
            use()
        cause = caught.value.__cause__
        assert isinstance(cause, infinity.NvmeError)
        assert cause.operation == ("write" if "fail_write_at" in fault else "read")
        assert cause.errno == fault.get("fail_errno", errno.EIO)
        assert Path(cause.filename).name == STATES_NAME
        del cause, caught

    assert run.pins() == 0
    assert Probe(run.engine).staging_left() == 0  # every slot of the broken pipeline came back (I3)
    now, updated = run.states(), []
    for unit in run.engine.units:
        kinds = [kind for name, kind in now if name == unit.name]
        old = all(torch.equal(now[unit.name, kind], before[unit.name, kind]) for kind in kinds)
        new = all(torch.equal(now[unit.name, kind], after[unit.name, kind]) for kind in kinds)
        assert old != new, unit.name
        updated += [unit.name] if new else []
    assert len(updated) == finished

    run.engine.close()
    run.engine.close()
    assert left_by_runs(tmp_path) == []
    del run, use, uses
    assert footprint() == held


def test_closing_while_the_drive_fails(
    start: Start, tmp_path: Path, footprint: Callable[[], object]
) -> None:
    """Nobody makes a next call: close ends everything all the same."""
    without_faults(start)
    held = footprint()
    run = start()
    run.step(0)
    fail_from_the_update_on(run, fail_write_at=3)
    run.forward(1).backward()
    run.optimizer.step()
    run.engine.close()
    assert left_by_runs(tmp_path) == []
    assert footprint() == held


@pytest.mark.parametrize("gradients", ["nvme", "cpu"])
def test_closing_after_a_backward_that_failed(
    gradients: str,
    start: Start,
    tmp_path: Path,
    footprint: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mover, "post", lambda self, fetch: None)
    without_faults(start)
    held = footprint()
    run = start(gradients=gradients)
    run.step(0)
    run.engine.drain()  # else a write of this step may fail first
    loss = run.forward(1)
    run.engine.io.set_faults(fail_read_at=2, fail_write_at=0)
    with pytest.raises(infinity.NvmeError):
        loss.backward()
    run.engine.close()
    assert left_by_runs(tmp_path) == []
    del loss
    assert footprint() == held


@pytest.mark.parametrize("during", ["norm", "reduce"])
def test_a_gradient_on_nvme_that_cannot_be_moved(during: str, start: Start) -> None:
    """Nothing is updated yet, so the step can be made again."""
    losses, states = without_faults(start, gradients="nvme")
    run = start(gradients="nvme")
    assert [run.step(number) for number in range(STEPS - 1)] == losses[:-1]
    run.engine.drain()
    loss = run.forward(STEPS - 1)
    if during == "norm":
        loss.backward()
        run.engine.drain()
        run.engine.io.drain()
        run.engine.io.set_faults(fail_read_at=0)
        with pytest.raises(infinity.NvmeError, match="read of"):
            run.optimizer.step()
    else:
        run.engine.io.set_faults(fail_write_at=0)
        with pytest.raises(infinity.NvmeError, match="write of"):
            loss.backward()
    run.engine.io.set_faults()
    run.optimizer.zero_grad()
    assert run.step(STEPS - 1) == losses[-1]
    run.engine.drain()
    assert same(run.states(), states)


@each_engine
def test_a_failure_on_one_drive_is_told_when_the_others_are_done(
    io_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that the memory is somebody else's."""
    monkeypatch.setattr(extents, "STRIPE_BYTES", 4 * drives.ALIGNMENT)
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    tier = drives.NvmeTier(Places(directories), io_engine, None, Recorder())
    extent = tier.extents.reserve(64 * drives.ALIGNMENT)
    tier.open()
    memory = torch.zeros(extent.nbytes + drives.ALIGNMENT, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % drives.ALIGNMENT
    tier.write(ExtentTransfer(extent, 0, extent.nbytes, address, "")).wait()
    tier.engines[0].set_faults(bytes_per_second=1e6)
    tier.engines[1].set_faults(fail_read_at=0, bytes_per_second=1e6)
    transfer = tier.read(ExtentTransfer(extent, 0, extent.nbytes, address, ""))
    for _ in range(2):
        with pytest.raises(infinity.NvmeError) as caught:
            transfer.wait()
        assert (Path(caught.value.path).parent, caught.value.offset) == (directories[1], 0)
        assert (
            sum(io.counters()["bytes_read"] for io in tier.engines)
            == extent.nbytes - extents.STRIPE_BYTES
        )
    tier.close()
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
