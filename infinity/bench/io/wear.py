"""The share of the life of a drive that writing takes."""

from __future__ import annotations

import ctypes
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD: _IOWR('N', 0x41, 72 bytes)
_GET_LOG_PAGE, _SMART_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_LOG_BYTES = 512
_DATA_UNIT = 512_000  # bytes


@dataclass(frozen=True)
class Smart:
    """The report of an NVMe drive: the used share of its life (may exceed 100), and bytes written
    by hosts."""

    used_percent: int
    written_bytes: int


class _AdminCommand(ctypes.Structure):
    _fields_ = [
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("rsvd1", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32),
        ("data_len", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32),
        ("cdw11", ctypes.c_uint32),
        ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32),
        ("cdw14", ctypes.c_uint32),
        ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    ]


def parse_smart(log: bytes) -> Smart:
    """The SMART / Health log page (NVMe base specification): byte 5, and the 16 bytes from 48, in
    units of 512,000 bytes."""
    return Smart(log[5], int.from_bytes(log[48:64], "little") * _DATA_UNIT)


def read_smart(device: str | None) -> Smart | None:
    """The SMART log of an NVMe drive such as "nvme0n1". None for another drive, or without the
    permission (root)."""
    if device is None or not device.startswith("nvme"):
        return None
    log = ctypes.create_string_buffer(_LOG_BYTES)
    command = _AdminCommand(
        opcode=_GET_LOG_PAGE,
        nsid=_ALL_NAMESPACES,
        addr=ctypes.addressof(log),
        data_len=_LOG_BYTES,
        cdw10=_SMART_LOG | (_LOG_BYTES // 4 - 1) << 16,
    )
    try:
        descriptor = os.open(Path("/dev") / device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.ioctl(descriptor, _ADMIN_COMMAND, command)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return parse_smart(log.raw)


def wear_percent(written: float, endurance: int, times: int = 1) -> float:
    """The percentage of an endurance (bytes that the maker warrants) that writing `written` bytes
    `times` times takes."""
    return 100 * written * times / endurance
