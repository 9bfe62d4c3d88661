"""The bytes that torch.save puts around the elements of a tensor, made without torch.save.

[Note: a tensor in a data file]
The readers of torch.distributed.checkpoint (DCP) give each item to torch.load. So an item is an
archive of torch.save: a zip file of uncompressed records. Dtype, shape and the place in the data
file decide every byte of an item except the elements. A save writes `Frame.head`, the elements and
`Frame.tail` at the speed of the drive. A load compares head and tail, and uses the bytes between
them.

The elements begin at a multiple of 64 bytes of the data file. Elements of `BLOCK_ALIGNED` bytes or
more begin at a multiple of 4096. The zip checksum of the elements is 0, as with
`set_crc32_options(False)` of torch.save. torch.load ignores it, and `infinity.json` has a better
digest.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity.checkpoint.pickles import DTYPES

BLOCK_ALIGNED = 256 << 10
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DATA = "data/0"
_LOCAL, _CENTRAL = 0x04034B50, 0x02014B50
_END, _END_64, _LOCATOR_64 = 0x06054B50, 0x06064B50, 0x07064B50
_VERSION = 45  # of the zip format, with 64-bit sizes
_DATE = 0x21  # 1980-01-01
_ZIP64, _PADDING = 0x0001, 0x4246  # ids of extra fields; the second one is torch's "FB"
_LONG = 0xFFFFFFFF  # the size is in the extra field


class Frame(NamedTuple):
    """The bytes before and behind `nbytes` bytes of elements."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole item."""
        return len(self.head) + self.nbytes + len(self.tail)


def frame(at: int, dtype: torch.dtype, sizes: Sequence[int]) -> Frame:
    """The frame of a contiguous tensor of shape `sizes`. Its item begins at byte `at` of its
    file."""
    nbytes = math.prod(sizes) * dtype.itemsize
    records = {"data.pkl": _pickle(dtype, sizes), "byteorder": b"little", "version": b"3\n"}
    head, directory = bytearray(), bytearray()
    for name, content in records.items():
        directory += _entry(name, len(head), len(content), zlib.crc32(content))
        head += _local(name, len(content), zlib.crc32(content)) + content
    directory += _entry(_DATA, len(head), nbytes, 0)
    alignment = 4096 if nbytes >= BLOCK_ALIGNED else 64
    missing = -(at + len(head) + len(_local(_DATA, nbytes, 0, 0))) % alignment
    head += _local(_DATA, nbytes, 0, missing)
    end = _end(len(records) + 1, len(head) + nbytes, len(directory))
    return Frame(bytes(head), nbytes, bytes(directory) + end)


def _named(name: str) -> bytes:
    return b"archive/" + name.encode()


def _local(name: str, nbytes: int, checksum: int, padding: int | None = None) -> bytes:
    """The local header of a record. With `padding`, its sizes have 64 bits and `padding` bytes
    follow it."""
    extra, short = b"", nbytes
    if padding is not None:
        extra = struct.pack("<HHQQ", _ZIP64, 16, nbytes, nbytes)
        extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
        short = _LONG
    called = _named(name)
    fields = (_LOCAL, _VERSION, 0, 0, 0, _DATE, checksum, short, short, len(called), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + called + extra


def _entry(name: str, offset: int, nbytes: int, checksum: int) -> bytes:
    """The entry of a record in the central directory."""
    called = _named(name)
    extra = struct.pack("<HHQQ", _ZIP64, 16, nbytes, nbytes) if name == _DATA else b""
    short = _LONG if extra else nbytes
    versions = (_VERSION, _VERSION, 0, 0, 0, _DATE)
    lengths = (len(called), len(extra), 0, 0, 0, 0)
    fields = (_CENTRAL, *versions, checksum, short, short, *lengths, offset)
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields) + called + extra


def _end(count: int, offset: int, size: int) -> bytes:
    """The 64-bit records behind the central directory, which has `size` bytes from `offset` on."""
    return (
        struct.pack(
            "<IQHHIIQQQQ", _END_64, 44, _VERSION, _VERSION, 0, 0, count, count, size, offset
        )
        + struct.pack("<IIQI", _LOCATOR_64, 0, offset + size, 1)
        + struct.pack("<IHHHHIIH", _END, 0, 0, count, count, size, _LONG, 0)
    )


def _pickle(dtype: torch.dtype, sizes: Sequence[int]) -> bytes:
    """A call of `_rebuild_tensor_v3`, which takes any dtype, in opcodes of pickle protocol 2."""
    strides = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
    storage = b"(%b%b%b%b%bt" % (
        _text("storage"),
        _global("torch.storage", "UntypedStorage"),
        _text("0"),
        _text("cpu"),
        _integer(math.prod(sizes) * dtype.itemsize),
    )
    arguments = b"(%bQ%b%b%b\x89%b)R%bt" % (
        storage,
        _integer(0),
        _integers(sizes),
        _integers(strides),
        _global("collections", "OrderedDict"),
        _global("torch", _NAMES[dtype]),
    )
    return b"\x80\x02" + _global("torch._utils", "_rebuild_tensor_v3") + arguments + b"R."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _integer(value: int) -> bytes:
    """Encode as LONG1, which has any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _integers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
