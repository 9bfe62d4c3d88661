"""Facts about a directory before a byte is moved: file system, drive, link, limits."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.bench.machine import (
    direct_io_problem,
    huge_pages,
    io_engine_problem,
    lines,
    memlock_limit,
)
from infinity.directories.directory import Directory, overwrite_in_place
from infinity.errors import ConfigError

_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
    "virtiofs",
}
_MEMORY = {"ramfs", "tmpfs"}
_COPYING = {"bcachefs", "btrfs", "zfs"}
_CODING = {2.5: 0.8, 5.0: 0.8}  # 8b/10b up to PCIe 2; 128b/130b from then on
_LATER_CODING = 128 / 130


@dataclass(frozen=True)
class Link:
    """A negotiated PCIe link. `gt_per_second` is per lane, in 10^9 transfers."""

    gt_per_second: float
    lanes: int

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second and direction after line coding. Packet headers take about a tenth
        more."""
        return (
            self.gt_per_second
            * 1e9
            * self.lanes
            * _CODING.get(self.gt_per_second, _LATER_CODING)
            / 8
        )


@dataclass(frozen=True)
class DirectoryFacts:
    """Facts about one directory. None: not known, or no problem."""

    path: Path
    file_system: str | None
    device: str | None
    model: str | None
    rotational: bool | None
    network: bool
    in_memory: bool
    numa_node: int | None
    link: Link | None
    free_bytes: int
    direct_problem: str | None

    def facts(self) -> dict[str, Any]:
        """The facts ready for JSON, with units."""
        return {
            "path": str(self.path),
            "file_system": self.file_system,
            "device": self.device,
            "model": self.model,
            "rotational": self.rotational,
            "network": self.network,
            "in_memory": self.in_memory,
            "numa_node": None if self.numa_node is None else str(self.numa_node),
            "pcie_link": f"{self.link.gt_per_second:g} GT/s x{self.link.lanes}"
            if self.link
            else None,
            "pcie_link_gb_per_second": self.link.bytes_per_second / 1e9 if self.link else None,
            "free_bytes": self.free_bytes,
            "direct_io_problem": self.direct_problem,
        }


def examine(directory: Path, sys_root: Path = Path("/sys")) -> DirectoryFacts:
    """Examine an existing `directory`. Writes and removes one small file there, to see whether
    O_DIRECT works."""
    status = os.statvfs(directory)
    number = directory.stat().st_dev
    kind, source = _mount(directory)
    block = _block_device(sys_root, number, source)
    return DirectoryFacts(
        path=directory,
        file_system=kind,
        device=block.name if block else None,
        model=_text(block / "device" / "model") if block else None,
        rotational={"0": False, "1": True}.get(_text(block / "queue" / "rotational") or "")
        if block
        else None,
        network=kind in _NETWORK or (kind or "").startswith("fuse."),
        in_memory=kind in _MEMORY,
        numa_node=_numa_node(block) if block else None,
        link=_link(block) if block else None,
        free_bytes=status.f_bavail * status.f_frsize,
        direct_problem=direct_io_problem(directory),
    )


def copying(directory: Path) -> tuple[bool, str] | None:
    """Whether states files in `directory` escape copy-on-write, and a sentence about it. None if
    the file system does not copy on write. Creates a file without a name."""
    try:
        with Directory(directory) as place:
            descriptor = place.unnamed()
    except (OSError, ConfigError):
        return None
    try:
        in_place = overwrite_in_place(descriptor)
    finally:
        os.close(descriptor)
    kind, _ = _mount(directory)
    if in_place:
        return True, (
            f"copy-on-write file system ({kind}): states files are made no-copy-on-write; make no "
            "snapshot or reflink of them, which brings copying back"
        )
    if kind not in _COPYING:
        return None
    return False, (
        f"copy-on-write file system ({kind}): states files take new space whenever they are "
        "written; let nothing else fill this drive"
    )


def machine_facts() -> dict[str, Any]:
    """Facts about the whole machine, ready for JSON."""
    pages = huge_pages()
    return {
        "kernel": platform.release(),
        "cpus_count": len(os.sched_getaffinity(0)),
        "io_uring_problem": io_engine_problem(),
        "memlock_bytes": memlock_limit(),
        "transparent_huge_pages": pages["transparent"],
        "reserved_huge_pages_count": pages["reserved"],
    }


def _text(path: Path) -> str | None:
    found = lines(path)
    return found[0].strip() or None if found else None


def _mount(directory: Path) -> tuple[str | None, str | None]:
    """File system type and source of the mount of `directory`: the deepest one, and of several
    there the last."""
    real = directory.resolve()
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for line in lines("/proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= best[0]:
            kind, source = rest.split()[:2]
            best = (len(point.parts), kind, source)
    return best[1], best[2]


def _block_device(sys_root: Path, number: int, source: str | None) -> Path | None:
    """The whole disk under a device number: past partitions, and past device mapper or RAID while
    there is one disk below."""
    node = sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    # btrfs has device numbers of its own; the mount names the device
    if not node.exists() and source is not None:
        node = sys_root / "class" / "block" / Path(source).name
    if not node.exists():
        return None
    node = node.resolve()
    while True:
        if (node / "partition").exists():
            node = node.parent
        below = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
        if len(below) != 1:
            return node
        node = below[0].resolve()


def _upwards(block: Path) -> Iterator[Path]:
    """The directories of `block`, of its device, of the bus of that device, and so on."""
    device = (block / "device").resolve() if (block / "device").exists() else block
    yield from (block, device, *device.parents)


def _numa_node(block: Path) -> int | None:
    for path in _upwards(block):
        node = _text(path / "numa_node")
        if node is not None:
            # -1: one node, or not known
            return int(node) if int(node) >= 0 else None
    return None


def _link(block: Path) -> Link | None:
    for path in _upwards(block):
        speed, lanes = _text(path / "current_link_speed"), _text(path / "current_link_width")
        match = re.match(r"([\d.]+) GT/s", speed or "")
        if match and lanes is not None and int(lanes) > 0:
            return Link(float(match[1]), int(lanes))
    return None


def notes(places: Sequence[DirectoryFacts], machine: dict[str, Any]) -> list[str]:
    """Facts that a person should know before believing the figures, one sentence each."""
    said = []
    if machine["io_uring_problem"]:
        said.append(
            f"io_uring cannot be had: {machine['io_uring_problem']}; POSIX threads are used."
        )
    for place in places:
        if place.direct_problem:
            said.append(
                f"{place.path}: {place.direct_problem}; these figures are of the page "
                "cache, not of a drive."
            )
        if place.in_memory:
            said.append(f"{place.path} is in memory ({place.file_system}): no drive is measured.")
        if place.network:
            said.append(
                f"{place.path} is on a network or shared file system ({place.file_system})."
            )
        if place.rotational:
            said.append(
                f"{place.path}: the kernel takes {place.device} for a rotating disk (of a "
                "virtual one it often does)."
            )
    if machine["transparent_huge_pages"] not in ("always", "madvise"):
        said.append("Transparent huge pages are off: more CPU time per byte; set them to madvise.")
    return said
