"""The header of a safetensors file: names, dtypes, shapes and places of tensors. Opens no file and
touches no tensor.

The file is 8 bytes with the header's length (little-endian), the header (JSON, may end in spaces),
and the data: the tensors one after another, in any order, without gaps.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from infinity.errors import WeightsError
from infinity.quantities import round_up

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
BLOCK = 4096  # our files begin their data at a multiple, so that O_DIRECT can move it
METADATA = "__metadata__"
_DIGITS = 100  # a longer number is refused; a size has at most 19
_DIMENSIONS = 64  # as in NumPy
_SHOWN = 120  # characters of a file's content in an error text
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor, and its bytes [begin, end) in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def pack(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[Entry]]:
    """Return the length and header of a file with `tensors` (dtype and shape by name), padded to a
    multiple of 4096 bytes, and the entries in file order.

    Tensors of whole blocks come first, so that each begins at a block. The others follow, with the
    largest elements first. Raises `ValueError` for a name, dtype or metadata that the format does
    not have, and for a header of more than `HEADER_LIMIT` bytes.
    """
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata must map strings to strings; {key!r}: {value!r} does not")
    sizes = {}
    for name, (dtype, shape) in tensors.items():
        check_tensor(name, dtype)
        sizes[name] = math.prod(shape) * dtype.itemsize
    order = sorted(
        tensors, key=lambda name: (sizes[name] % BLOCK != 0, -tensors[name][0].itemsize, name)
    )
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    places, position = [], 0
    for name in order:
        dtype, shape = tensors[name]
        end = position + sizes[name]
        header[name] = _fields(dtype, shape, position, end)
        places.append((name, dtype, tuple(shape), position, end))
        position = end
    text = _json(header)
    start = round_up(LENGTH_BYTES + len(text), BLOCK)
    if start > HEADER_LIMIT:
        raise ValueError(
            f"the header of {len(tensors)} tensors takes {start} bytes, and readers accept "
            f"{HEADER_LIMIT}"
        )
    return _head(text, start), [
        Entry(name, dtype, shape, start + begin, start + end)
        for name, dtype, shape, begin, end in places
    ]


class Growing:
    """The header of a file that grows by one tensor at a time, when the later tensors are not known
    yet.

    The first `reserve` bytes are kept free for the header. The caller writes each tensor at the
    `Entry.begin` that `add` returns, and `head()` at byte 0 last.
    """

    def __init__(self, metadata: Mapping[str, str], reserve: int = 64 << 10) -> None:
        self._header: dict[str, Any] = {METADATA: dict(metadata)}
        self._room = reserve - LENGTH_BYTES - len(_json(self._header))
        self._reserve = reserve
        self.end = reserve
        """Length of the file so far, in bytes."""

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry | None:
        """Return the place of the next tensor. Returns None if it needs another file, because the
        header is full or the tensor would not be aligned.

        Raises `ValueError` for a name or dtype that the format does not have, and for a name that
        was added before.
        """
        check_tensor(name, dtype)
        if name in self._header:
            raise ValueError(f"tensor {name!r} is given twice")
        if (self.end - self._reserve) % dtype.itemsize:
            return None
        end = self.end + math.prod(shape) * dtype.itemsize
        fields = _fields(dtype, shape, self.end - self._reserve, end - self._reserve)
        self._room -= len(_json({name: fields}))
        if self._room < 0:
            return None
        self._header[name] = fields
        entry = Entry(name, dtype, tuple(shape), self.end, end)
        self.end = end
        return entry

    def head(self) -> bytes:
        """The first `reserve` bytes of the file: length, header and spaces."""
        return _head(_json(self._header), self._reserve)


def header_bytes(name: str) -> int:
    """A `reserve` for `Growing` that certainly fits a tensor of this name. Most files need much
    less."""
    return round_up(max(64 << 10, 2 * len(_json(name)) + 4096), BLOCK)


def check_tensor(name: object, dtype: torch.dtype) -> None:
    """Raise `ValueError` for a name or dtype that the format does not have."""
    if not isinstance(name, str) or name == METADATA:
        raise ValueError(f"a tensor's name must be a string other than {METADATA!r}, not {name!r}")
    if dtype not in _NAMES:
        raise ValueError(
            f"tensor {name!r} is {dtype}, which a safetensors file cannot hold; one of "
            f"{', '.join(DTYPES)} can be"
        )


def _fields(dtype: torch.dtype, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _head(text: bytes, start: int) -> bytes:
    return (start - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(
        start - LENGTH_BYTES
    )


def data_start(length: bytes, size: int, path: str) -> int:
    """Return the offset of the data, from the first 8 bytes of a file of `size` bytes. Raises
    `WeightsError` if they are no length of a header that fits the file."""
    if len(length) < LENGTH_BYTES:
        raise WeightsError(
            f"{path} is no safetensors file: it ends after {size} bytes, inside the header's length"
        )
    header = int.from_bytes(length, "little")
    if header > HEADER_LIMIT:
        raise WeightsError(
            f"{path} is no safetensors file: its header would be {header} bytes, and "
            f"{HEADER_LIMIT} are allowed"
        )
    if LENGTH_BYTES + header > size:
        raise WeightsError(
            f"{path} is cut off or damaged: it ends after {size} bytes, inside its header "
            f"of {header}"
        )
    return LENGTH_BYTES + header


def parse(header: bytes, size: int, path: str) -> list[Entry]:
    """Return the entries of a file of `size` bytes, in file order, from its JSON `header`.

    Raises `WeightsError`, with the tensor's name if there is one, unless the entries are valid and
    cover the data without gap or overlap. Takes O(n log n) time for any header of n bytes.
    """
    try:
        table = json.loads(
            header.decode(),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_fraction,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} is no safetensors file: its header is not JSON ({_short(error)})"
        ) from None
    if not isinstance(table, dict) or header[:1] != b"{":
        raise WeightsError(f"{path} is no safetensors file: its header is not a JSON object")
    metadata = table.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise WeightsError(f"{path} is damaged: {METADATA} is not an object of strings")
    start = LENGTH_BYTES + len(header)
    entries = sorted(
        (_entry(name, fields, start, path) for name, fields in table.items()),
        key=lambda entry: entry[3:],
    )
    position = start
    for entry in entries:
        if entry.begin != position:
            wrong = (
                "overlaps with the one before it"
                if entry.begin < position
                else "leaves a gap before it"
            )
            raise WeightsError(
                f"{path} is damaged: tensor {_short(entry.name)} {wrong} (bytes "
                f"{entry.begin} and {position})"
            )
        position = entry.end
        if position > size:
            raise WeightsError(
                f"{path} is cut off: tensor {_short(entry.name)} ends at byte {position}, "
                f"the file at {size}"
            )
    if position != size:
        raise WeightsError(
            f"{path} is damaged: its tensors end at byte {position}, the file at {size}"
        )
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name is there twice")
    return table


def _integer(digits: str) -> int:
    """A size. Refuses a long number before it is converted, because that time grows with the square
    of its length."""
    if digits == "-0" or len(digits) > _DIGITS:
        raise ValueError(f"{_short(digits)} is no size")
    return int(digits)


def _fraction(digits: str) -> float:
    """A number with a fraction or exponent, which is never a size: a later check refuses it with
    the tensor's name. A long number, which is slow to convert, is refused here."""
    return float(digits) if len(digits) <= _DIGITS else _no_number(digits)


def _no_number(text: str) -> float:
    raise ValueError(f"{_short(text)} is no size")


def _short(value: object) -> str:
    """`value` in an error text, cut off so that a hostile file cannot flood the message."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _nbytes(shape: Sequence[int], itemsize: int) -> int | None:
    """Bytes of a tensor. None if the extents other than 0 alone give 2**63 bytes or more."""
    result = itemsize
    for extent in shape:
        result *= max(extent, 1)
        if result >= 1 << 63:
            return None
    return 0 if 0 in shape else result


def _entry(name: str, fields: Any, start: int, path: str) -> Entry:
    shown = _short(name)
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise WeightsError(f"{path} is damaged: the name {shown} is no text")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(
            f"{path} is damaged: tensor {shown} is not described by dtype, shape and data_offsets"
        )
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise WeightsError(
            f"{path}: tensor {shown} has dtype {_short(fields['dtype'])}; known are "
            f"{', '.join(DTYPES)}"
        )
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise WeightsError(f"{path} is damaged: tensor {shown} has shape {_short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise WeightsError(f"{path} is damaged: tensor {shown} has data_offsets {_short(offsets)}")
    begin, end = offsets
    if len(shape) > _DIMENSIONS:
        raise WeightsError(
            f"{path}: tensor {shown} has {len(shape)} dimensions; at most {_DIMENSIONS} are read"
        )
    nbytes = _nbytes(shape, dtype.itemsize)
    if nbytes is None:
        given = f"and is given {end - begin} bytes"
        raise WeightsError(
            f"{path} is damaged: tensor {shown} of shape {_short(shape)} is larger than "
            f"any file, {given}"
        )
    if end - begin != nbytes:
        raise WeightsError(
            f"{path} is damaged: tensor {shown} of shape {_short(shape)} and dtype "
            f"{fields['dtype']} is given {end - begin} bytes"
        )
    return Entry(name, dtype, tuple(shape), start + begin, start + end)
