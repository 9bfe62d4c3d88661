"""This machine as a plan sees it: every rate is measured, and directories are checked."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity import native
from infinity.cli.main import app
from infinity.config import Config
from infinity.errors import ConfigError, NvmeError
from infinity.measure import speed
from infinity.plan import measure
from infinity.plan.memory import Training
from infinity.plan.model import Dimensions, find_source, of_dimensions, of_source

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = Training(16, 1, 1, recomputes=False)


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROBE_BYTES", 4 << 20), ("PROBE_PARAMETERS", 1 << 18), ("ROUNDS", 1)):
        monkeypatch.setattr(measure, name, value)


def test_every_rate_is_measured(tmp_path: Path) -> None:
    config = Config(nvme=[tmp_path], precision="fp32")
    source = find_source("llama-tiny", "fp32")
    said: list[str] = []
    model = of_source(source, config)
    found = measure.measured(model, source, TRAINING, config, [tmp_path], said.append)
    assert found.unified and found.ranks == 1
    assert found.head_flops is not None and 1e6 < found.head_flops < 1e14
    assert 1e6 < found.flops < 1e14
    assert found.link > 1e6 and found.memory_bandwidth > 1e6
    (drive,) = found.drives
    assert min(drive.read, drive.write, drive.both or 0) > 1e5 and drive.capacity > 0
    assert 0 < found.together <= 1
    assert said == ["measuring copies and updates", "measuring compute", "measuring the drives"]
    assert not any(tmp_path.iterdir())


def test_blocks_that_do_not_fit_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.rates, "multiplications", lambda *_: [1e12])
    config = Config(precision="bf16")
    large = Dimensions(128, 25600, 256)
    model = of_dimensions(large, config)
    found = measure.measured(model, large, TRAINING, config, [], lambda _: None)
    assert (found.flops, found.head_flops, found.drives) == (1e12, None, ())


def test_no_block_is_faster_than_a_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long one block and several take on a machine that is busy with other things."""
    monkeypatch.setattr(measure.rates, "multiplications", lambda *_: [1e9])
    monkeypatch.setattr(measure.bare_compute, "in_turns", lambda *_: [[1.0, 3.0], [1.0, 2.0]])
    config = Config(precision="fp32")
    source = find_source("llama-tiny", "fp32")
    found = measure.measured(
        of_source(source, config), source, TRAINING, config, [], lambda _: None
    )
    assert (found.flops, found.together) == (pytest.approx(1e9), 1.0)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    config = Config(precision="fp32")
    tiny = Dimensions(1, 64, 1, vocabulary=64)
    model = of_dimensions(tiny, config)
    (tmp_path / "file").touch()
    said: list[str] = []
    for name, kind in (("no", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(ConfigError, match=f"{kind}; create it on the drive"):
            measure.measured(model, tiny, TRAINING, config, [tmp_path / name], said.append)
    assert not said, "nothing is measured before"


def test_a_drive_that_fails_is_named_and_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = native.make_engine

    def failing(kind: str, **options: Any) -> Any:
        engine = make(kind, **options)
        engine.set_faults(fail_write_at=1, fail_errno=errno.EIO)
        return engine

    monkeypatch.setattr(native, "make_engine", failing)
    with pytest.raises(NvmeError, match=r"probe\.bin"), speed.DriveProbe([tmp_path], "posix", 1):
        pass
    assert not any(tmp_path.iterdir())


def test_the_command_measures_this_machine() -> None:
    dimensions = ("--layers", "2", "--hidden", "64", "--heads", "1", "--vocabulary", "64")
    arguments = ["plan", *dimensions, "--sequence-length", "16", "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["machine"] == "this machine"
    assert found["memory"]["states_total_bytes"]["nvme"] == 0
    assert found["step"]["updates"] == "plain"
