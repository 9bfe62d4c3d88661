"""A flush that fails may drop what was written, and the next one succeeds: that is not trusted."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infinity.directories.commits import COMMIT_NAMES, CommitLog, DurableFiles
from infinity.directories.directory import Directory
from infinity.observe import Recorder
from infinity.tiers.drives import NvmeTier
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import Places
from simulation.chance import Chance
from simulation.disk import Folder
from simulation.machine import Blow, Machine, Operation, Place
from simulation.system import SimulatedSystem, simulated


@pytest.fixture(name="system")
def _system() -> Iterator[SimulatedSystem]:
    with simulated() as system:
        yield system


def failing(kind: str, name: str, number: int = 0) -> Blow:
    """What is done there for the time `number` fails."""
    return Blow(Operation(Place(kind, f"0/{name}"), number), "fails", errno.EIO)


def boot(
    system: SimulatedSystem, path: Path, folders: Sequence[Folder], blow: Blow | None = None
) -> Machine:
    machine = Machine(folders, Chance("quiet"), blow)
    system.boot({None: machine}, [path], (path / "saved", Folder()))
    return machine


def kept(path: Path) -> list[int]:
    with Directory(path) as place:
        return [each.sequence for each in CommitLog(DurableFiles(place)).kept()]


def test_a_record_that_a_failed_flush_left_in_memory_is_written_again(
    system: SimulatedSystem, tmp_path: Path
) -> None:
    """The next process reads it there, and gives up the one before it; then the power is cut."""
    machine = boot(system, tmp_path, [Folder()], failing("sync", COMMIT_NAMES[0], 1))
    with Directory(tmp_path) as place:
        log = CommitLog(DurableFiles(place))
        for content in (b"first", b"second"):
            log.write(content)
            log.settle()
        with pytest.raises(OSError, match="Input/output error"):
            log.write(b"third")
    machine = boot(system, tmp_path, machine.left(False, Chance("kill")))
    assert kept(tmp_path) == [3, 2]
    with Directory(tmp_path) as place:
        log = CommitLog(DurableFiles(place))
        log.kept()
        log.settle()
    boot(system, tmp_path, machine.left(True, Chance("power cut")))
    assert kept(tmp_path) == [3]


def test_a_flush_after_one_that_failed_fails(system: SimulatedSystem, tmp_path: Path) -> None:
    boot(system, tmp_path, [Folder()], failing("flush", STATES_NAME))
    tier = NvmeTier(Places([tmp_path]), "posix", None, Recorder())
    tier.extents.reserve(4096)
    tier.open()
    with pytest.raises(OSError, match="Input/output error"):
        tier.flush()
    for _ in range(2):
        with pytest.raises(OSError, match="an earlier flush failed, and what was written there"):
            tier.flush()
    tier.close()
