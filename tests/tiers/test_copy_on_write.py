"""On a file system that copies on write, states files are overwritten in place."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity import native
from infinity.bench.io import preflight
from infinity.cli.main import app
from infinity.directories.directory import Directory, overwrite_in_place
from infinity.observe import Recorder
from infinity.tiers.drives import ALIGNMENT, NvmeTier
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import Places
from support.children import CHILD

NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
EXTENTS = 0x00080000  # FS_EXTENT_FL, which ext4 gives to every file


class FlagFiles:
    """`fcntl.ioctl` of a file system that knows the flag; `events` also has what is allocated."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._flags: dict[int, int] = {}  # by the number of a file

    def ioctl(self, descriptor: int, request: int, argument: bytes) -> bytes:
        status = os.fstat(descriptor)
        flags = self._flags.setdefault(status.st_ino, EXTENTS)
        if request == 0x80086601:  # FS_IOC_GETFLAGS
            return struct.pack("I", flags)
        assert request == 0x40086602  # FS_IOC_SETFLAGS
        (self._flags[status.st_ino],) = struct.unpack("I", argument)
        self.events.append(("flags", status.st_ino, self._flags[status.st_ino], status.st_size))
        return argument

    def allocate(self, real: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        def allocating(file: Any, nbytes: int) -> None:
            descriptor = file.duplicate()
            self.events.append(("allocate", os.fstat(descriptor).st_ino))
            os.close(descriptor)
            real(file, nbytes)

        return allocating


@pytest.fixture
def flag_files(monkeypatch: pytest.MonkeyPatch) -> FlagFiles:
    files = FlagFiles()
    monkeypatch.setattr(fcntl, "ioctl", files.ioctl)
    file = native.aio().File
    monkeypatch.setattr(file, "allocate", files.allocate(file.allocate))
    return files


def opened(directories: list[Path]) -> NvmeTier:
    tier = NvmeTier(Places(directories), "posix", None, Recorder(), "equal")
    tier.extents.reserve(len(directories) * (8 << 20))
    tier.open()
    return tier


def test_every_states_file_is_marked_while_it_is_empty(
    tmp_path: Path, flag_files: FlagFiles
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    tier = opened(directories)
    for directory in directories:
        number = (directory / STATES_NAME).stat().st_ino
        of_file = [event for event in flag_files.events if event[1] == number]
        marked = ("flags", number, EXTENTS | NO_COPY_ON_WRITE, 0)
        assert of_file == [marked, ("allocate", number)]
    tier.close()


def test_files_that_measure_a_drive_are_as_the_states_file(
    tmp_path: Path, flag_files: FlagFiles
) -> None:
    tier = NvmeTier(Places([tmp_path]), "posix", None, Recorder())
    tier.measure()
    tier.close()
    assert [event[2:] for event in flag_files.events if event[0] == "flags"] == [
        (EXTENTS | NO_COPY_ON_WRITE, 0)
    ] * 2


@pytest.mark.parametrize(
    "code", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM]
)
def test_a_file_system_without_the_flag_is_used_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    tier = opened([tmp_path])
    assert (tmp_path / STATES_NAME).stat().st_size == 8 << 20
    tier.close()


def test_the_real_call_leaves_an_ordinary_file(tmp_path: Path) -> None:
    with Directory(tmp_path) as directory:
        descriptor = directory.create("file")
    marked = overwrite_in_place(descriptor)
    file = native.file_at(descriptor, str(tmp_path / "file"))
    file.allocate(ALIGNMENT)
    assert file.size() == ALIGNMENT
    file.close()
    assert not marked or preflight.copying(tmp_path) is not None


# What the doctor says


def test_the_doctor_says_what_is_done(tmp_path: Path, flag_files: FlagFiles) -> None:
    spared, sentence = preflight.copying(tmp_path) or (False, "")
    assert spared
    assert "states files are made no-copy-on-write; make no snapshot or reflink" in sentence
    table = CliRunner().invoke(app, ["doctor", "--nvme", str(tmp_path)], env={"COLUMNS": "400"})
    assert sentence in table.stdout


@pytest.mark.parametrize("kind, said", [("zfs", True), ("ext4", False)])
def test_the_doctor_says_where_files_always_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(preflight, "lines", lambda _: [f"1 0 0:1 / / rw - {kind} /dev/x rw"])
    found = preflight.copying(tmp_path)
    assert found == (
        (
            False,
            "copy-on-write file system (zfs): states files take new space whenever they are "
            "written; let nothing else fill this drive",
        )
        if said
        else None
    )


# A real one

FILLING = """
import errno, os, sys
from pathlib import Path
import torch
from infinity.bench.io.preflight import copying
from infinity.observe import Recorder
from infinity.tiers.drives import NvmeTier
from infinity.tiers.places import Places
from infinity.tiers.states_files import ExtentTransfer

place, nbytes = Path(sys.argv[1]), 48 << 20
tier = NvmeTier(Places([place]), "auto", None, Recorder())
extent = tier.extents.reserve(nbytes)
tier.open()

def write(seed):
    data = torch.randint(1 << 60, (nbytes // 8,), generator=torch.Generator().manual_seed(seed))
    tier.write(ExtentTransfer(extent, 0, nbytes, data.data_ptr(), "test")).wait()
    tier.flush()
    back = torch.empty_like(data)
    tier.read(ExtentTransfer(extent, 0, nbytes, back.data_ptr(), "test")).wait()
    assert torch.equal(back, data)

write(0)
with open(place / "other", "wb", buffering=0) as other:
    try:
        while other.write(os.urandom(1 << 20)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
for seed in (1, 2):
    write(seed)
assert copying(place) is None or copying(place)[0]
tier.close()
"""


def test_updates_go_on_where_somebody_else_fills_a_btrfs(tmp_path: Path) -> None:
    """In a mount namespace of its own, which takes the mount with it."""
    make = shutil.which("mkfs.btrfs")
    if make is None or os.geteuid() != 0:
        pytest.skip("needs root and mkfs.btrfs")
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
    mounting = 'mount -o loop "$1" "$2" || exit 77; shift 2; exec "$@"'
    program = [sys.executable, "-c", FILLING, place]
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounting, "sh", image, place, *program],
        capture_output=True,
        **CHILD,
    )
    if result.returncode == 77:
        pytest.skip(f"no btrfs can be mounted: {result.stderr}")
    assert result.returncode == 0, result.stderr
